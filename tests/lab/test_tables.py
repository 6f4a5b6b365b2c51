import pytest

from labkit.lab.tables import Table


def test_cells_are_escaped_in_html():
    assert "&lt;b&gt;" in Table(["a"], [["<b>"]])._repr_html_()


def test_columns_line_up_in_text():
    assert repr(Table(["name", "n"], [["a", 10], ["long name", 2]])).split("\n") == [
        "name       n",
        "a          10",
        "long name  2",
    ]


def test_a_ragged_row_is_named():
    with pytest.raises(ValueError, match="row 1 has 1 cells, the table 2 headers"):
        Table(["a", "b"], [[1, 2], [3]])


def test_what_is_not_there_is_null_and_zero_is_zero():
    table = Table(["a", "b"], [[None, 0]])
    assert repr(table).split("\n")[1].split() == ["null", "0"]
    assert "<td style='text-align:left'>null</td>" in table._repr_html_()

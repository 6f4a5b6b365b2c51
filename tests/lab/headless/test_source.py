import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.lab.headless.source import promises

TOP = new_code_cell("PRESET = 'tiny'", metadata={"tags": ["parameters"]})


def read(*sources):
    return promises(new_notebook(cells=[TOP, *map(new_code_cell, sources)]))


def test_claims_are_listed_in_order_with_whether_they_name_a_need():
    found = read(
        "claim('one', measured=1, equals=1)",
        "%matplotlib inline\nif True:\n    lab.claim('two', measured=1, equals=1, needs=Timing(2))",
        "%%time\nclaim('three', measured=1, equals=1)",
    )
    assert found.claims == {"one": False, "two": True, "three": False}
    assert found.problems == []


def test_text_that_only_looks_like_a_claim_is_none():
    prose = new_markdown_cell("claim('in prose')")
    cells = [TOP, prose, new_code_cell("# claim('comment')\ntext = \"claim('string')\"")]
    cells.append(new_code_cell("%%html\n<b>claim('no python')</b>"))
    found = promises(new_notebook(cells=cells))
    assert found.claims == {} and found.problems == []


@pytest.mark.parametrize(
    "source, problem",
    [
        ("claim(f'm = {m}', measured=1, equals=1)", "cell 2: a claim's id must be a literal"),
        ("claim(sentence='x', measured=1, equals=1)", "cell 2: a claim's id must be a literal"),
        ("%%ranks --only 0\nclaim('x', measured=1, equals=1)", "cell 2: claim.'x'. runs on the"),
        ("claim('x', measured=1)\nclaim('x', measured=2)", "cell 2: claim id 'x' is used twice"),
        ("!false", "cell 2: !false: the exit status"),
        ("names = !ls", "cell 2: !ls: the exit status"),
        ("!!ls", "cell 2: !ls|cell 2: !sx"),
        ("%sx ls", "cell 2: !sx"),
        ("%%ranks\n!nvidia-smi", "cell 2: !nvidia-smi"),
        ("for m in (1, 2):\n    !echo {m}", "cell 2: !echo {m}"),
    ],
)
def test_what_a_headless_run_cannot_check_is_named_with_its_cell(source, problem):
    found = read(source)
    assert len(found.problems) == 1
    assert re.search(problem, found.problems[0])


def test_time_limits_are_read_and_those_that_are_no_time_are_named():
    timed = [TOP, new_code_cell("1", metadata={"tags": ["timeout=2.5"]})]
    found = promises(new_notebook(cells=timed, metadata={"labkit": {"timeout_s": 90}}))
    assert (found.timeout_s, found.problems) == (90.0, [])
    wrong = [TOP, new_code_cell("1", metadata={"tags": ["timeout=soon"]})]
    found = promises(new_notebook(cells=wrong, metadata={"labkit": {"timeout_s": -1}}))
    assert found.problems == [
        "code cell 2: tag 'timeout=soon' must be a number of seconds above 0",
        "metadata labkit.timeout_s=-1 must be a number of seconds above 0",
    ]


def test_a_notebook_without_a_parameters_cell_is_named():
    assert "no cell is tagged 'parameters'" in promises(new_notebook()).problems[0]


def test_a_cell_that_is_no_python_is_left_to_the_run():
    found = read("def (:", "%%bash\nfalse", "await thing()", "x?", "a = r'\\d' '\\d'")
    assert found.claims == {} and found.problems == []

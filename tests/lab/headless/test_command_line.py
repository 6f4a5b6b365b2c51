"""``python -m labkit`` as make calls it: options, and errors in one sentence."""

import pytest

from labkit.lab import command_line


def test_a_folder_that_cannot_be_written_is_one_sentence_and_status_2(series, capsys):
    series.add("01_first", "1")
    series.build.write_text("a file stands where the folder would be")
    assert command_line.main(arguments(series)) == 2
    error = capsys.readouterr().err
    assert error.startswith("labkit: ") and str(series.build) in error and "Traceback" not in error


def test_a_name_that_is_no_notebook_is_status_2(series, capsys):
    series.add("01_first", "1")
    assert command_line.main([*arguments(series), "--only", "01 99"]) == 2
    assert "no notebook 99; there are: 01_first" in capsys.readouterr().err


def test_a_folder_without_notebooks_is_status_2(series, capsys):
    assert command_line.main(arguments(series)) == 2
    assert "no notebook [0-9]*.ipynb in" in capsys.readouterr().err


def test_a_time_limit_below_zero_is_refused(series, capsys):
    series.add("01_first", "1")
    assert command_line.main([*arguments(series), "--cell-timeout", "-1"]) == 2
    assert "cell_timeout_s=-1.0 must be above 0" in capsys.readouterr().err


def test_a_report_without_results_says_what_to_run(series, capsys):
    assert command_line.main(["report", "--build", str(series.build)]) == 2
    assert "run make execute-notebooks first" in capsys.readouterr().err


def test_only_takes_its_names_together_or_apart(monkeypatch, series):
    seen = []
    monkeypatch.setattr("labkit.lab.headless.runner.execute", lambda s: seen.append(s.only) or 0)
    for words in (["12 13"], ["12", "13"], ["12,13"], ["12, 13"], ["12,", "13"]):
        assert command_line.main([*arguments(series), "--only", *words]) == 0
    assert seen == [("12", "13")] * 5


def test_an_option_that_means_nothing_is_refused(series):
    with pytest.raises(SystemExit) as error:
        command_line.main([*arguments(series), "--unknown"])
    assert error.value.code == 2


def test_an_unknown_preset_is_one_sentence_with_the_choices_and_no_usage(series, capsys):
    series.add("01_first", "1")
    assert command_line.main([*arguments(series), "--preset", "big"]) == 2
    error = capsys.readouterr().err
    assert "PRESET='big' is unknown: choose one of tiny, workshop, workstation" in error
    assert "usage" not in error and error.count("\n") == 1 and not series.build.exists()


def arguments(series):
    return ["execute", "--notebooks", str(series.notebooks), "--build", str(series.build)]


def test_a_kind_of_devices_that_is_not_there_is_refused_before_any_notebook(series, capsys):
    series.add("01_first", "1")
    assert command_line.main([*arguments(series), "--devices", "banana"]) == 2
    assert "'banana' is unknown" in capsys.readouterr().err and not series.build.exists()

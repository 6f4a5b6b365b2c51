"""What is run again and what is kept."""

import json

import nbformat
import pytest

from labkit.lab import results
from labkit.lab.headless import truth
from labkit.lab.headless.execution import Execution

CLAIMING = (
    "from labkit.lab.claims import claim\nfrom labkit.lab.session import start\n"
    "lab = start('02_claims', preset=PRESET, devices='cpu', run=RUN)"
)


def started(printed):
    return [line.split()[1].rstrip(":") for line in printed.splitlines() if ": start," in line]


@pytest.fixture
def instant(series, monkeypatch):
    """The series with a stand-in for the kernel: a cell fails where it divides by zero."""

    def execute(self, notebook, outcome, progress, stop):
        for number, cell in enumerate(notebook.cells, start=1):
            cell.execution_count = number
            cell.metadata["papermill"] = {"status": "completed"}
            if "1 / 0" in cell.source:
                truth.record_failure(notebook, "ZeroDivisionError", "division by zero")
                break
        nbformat.write(notebook, self.target)

    monkeypatch.setattr(Execution, "_execute", execute)
    return series


def test_a_run_with_failures_goes_on_a_green_one_starts_anew_and_a_named_one_always_runs(instant):
    instant.add("01_good", "1")
    instant.add("02_bad", "1 / 0")
    instant.add("03_other", "1")
    status, printed = instant.execute(keep_going=False)
    assert status == 1 and started(printed) == ["01_good", "02_bad"]
    assert "03_other  not run" in printed

    instant.add("02_bad", "print('repaired')")
    status, printed = instant.execute()
    assert status == 0 and started(printed) == ["02_bad", "03_other"]
    assert "of about" not in printed.split("03_other: start")[0]  # neither had passed before

    status, printed = instant.execute(only=("01", "03_other"))
    assert status == 0 and started(printed) == ["01_good", "03_other"]
    assert "of about 0:0" in printed

    assert started(instant.execute()[1]) == ["01_good", "02_bad", "03_other"]


def test_what_passed_is_run_again_when_its_source_parameters_or_saved_notebook_changed(instant):
    instant.add("01_first", "1")
    instant.add("02_bad", "1 / 0")
    instant.execute()
    assert started(instant.execute()[1]) == ["02_bad"]
    instant.add("01_first", "2")
    assert started(instant.execute()[1]) == ["01_first", "02_bad"]
    (instant.root / "labkit" / "new.py").write_text("")
    assert started(instant.execute()[1]) == ["01_first", "02_bad"]
    (instant.root / "labkit" / "new.py").unlink()
    assert started(instant.execute(devices="cpu")[1]) == ["01_first", "02_bad"]
    assert started(instant.execute()[1]) == ["01_first", "02_bad"]
    (instant.run_folder / "01_first.ipynb").unlink()
    assert started(instant.execute()[1]) == ["01_first", "02_bad"]
    state = json.loads((instant.run_folder / "state.json").read_text())
    assert state["finished"]["02_bad"]["verdict"] == "failed"


def test_a_notebook_that_is_gone_leaves_no_results(instant):
    instant.add("01_first", "1")
    path = instant.run_folder / results.FILE_NAME
    for notebook in ("01_first", "09_gone"):
        results.append(path, results.Record(notebook, "x", "measurement", 1.0))
    instant.execute(only=("01",))
    assert [record.notebook for record in results.read(path)] == ["09_gone"]  # not its business
    instant.execute()
    assert results.read(path) == []


def test_records_of_a_notebook_that_runs_again_are_replaced_and_the_gate_reads_only_them(series):
    series.add("02_claims", CLAIMING, "claim('two is two', measured=2, equals=2)")
    status, printed = series.execute(only=("02",))
    assert status == 0 and "claims: 1 passed, 0 refused, 0 failed, 0 missing" in printed
    series.execute(only=("02",))
    records = (series.run_folder / "results.jsonl").read_text().splitlines()
    assert len(records) == 1
    series.add("02_claims", CLAIMING, "if False:\n    claim('two is two', measured=2, equals=2)")
    status, printed = series.execute(only=("02",))
    assert status == 1
    assert (
        "failed  02_claims: claim 'two is two' is in the source and not in the results" in printed
    )


def test_a_failed_claim_and_a_refusal_are_counted_and_their_reasons_are_listed(series):
    series.add(
        "02_claims",
        CLAIMING + "\nfrom labkit.devices.needs import Accelerators",
        "claim('needs a GPU', measured=2, equals=2, needs=Accelerators(1))",
        "claim('two is three', measured=2, equals=3)",
        "claim('after', measured=2, equals=2)",
    )
    status, printed = series.execute()
    assert status == 1
    assert "claims: 0 passed, 1 refused, 1 failed, 1 missing" in printed
    assert "refused  02_claims: needs a GPU: needs 1 accelerators" in printed


def test_an_unknown_name_is_an_error_that_lists_what_exists(instant):
    instant.add("01_first", "1")
    instant.add("11_second", "1")
    with pytest.raises(ValueError, match="no notebook 12; there are: 01_first, 11_second"):
        instant.execute(only=("01", "12"))

import pytest

from labkit.devices.inventory import Device, DeviceSet
from labkit.lab.headless.gate import check
from labkit.lab.results import Record

TWO_ON_ONE_CORE = DeviceSet((Device("cpu", 0, "c"), Device("cpu", 1, "c")), physical_cores=1)
TWO_ON_TWO_CORES = DeviceSet((Device("cpu", 0, "c"), Device("cpu", 1, "c")), physical_cores=2)
TIMING = {"type": "Timing", "devices": 2}


def record(status, name="x", devices=TWO_ON_ONE_CORE, needs=None, kind="claim"):
    return Record(
        "01_a",
        name,
        kind,
        1.5,
        expected=2,
        tolerance={"at_least": 2},
        status=status,
        reason="because" if status != "passed" else None,
        devices=devices.to_json(),
        needs=needs,
    )


def test_a_claim_that_passed_opens_the_gate():
    gate = check({"x": False}, [record("passed")])
    assert gate.problem is None and gate.passed == ["x"]


def test_a_claim_without_a_record_is_missing():
    gate = check({"x": False, "y": False}, [record("passed")])
    assert gate.missing == ["y"] and "'y' is in the source and not in the results" in gate.problem


def test_a_prediction_of_the_same_name_is_no_record_of_the_claim():
    assert check({"x": False}, [record(None, kind="prediction")]).missing == ["x"]


def test_a_failed_record_shuts_the_gate_under_any_name_and_after_any_pass():
    later = check({"x": False}, [record("passed"), record("failed")])
    assert "claim 'x' failed: 1.5 for 2, {'at_least': 2} (because)" == later.problem
    assert "claim 'other' failed" in check({}, [record("failed", "other")]).problem


def test_a_refusal_by_a_need_that_the_devices_do_not_meet_is_permitted():
    gate = check({"x": True}, [record("refused", needs=TIMING)])
    assert gate.problem is None and gate.refused == {"x": "because"}


@pytest.mark.parametrize(
    "source_has_needs, needs, devices, reason",
    [
        (True, TIMING, TWO_ON_TWO_CORES, "refused, though its devices support"),
        (False, TIMING, TWO_ON_ONE_CORE, "refused, and names no need"),
        (True, None, TWO_ON_ONE_CORE, "refused, and names no need"),
    ],
    ids=["devices support it", "the source names no need", "the record names no need"],
)
def test_any_other_refusal_shuts_the_gate(source_has_needs, needs, devices, reason):
    gate = check({"x": source_has_needs}, [record("refused", devices=devices, needs=needs)])
    assert reason in gate.problem and not gate.refused


def test_a_record_without_a_status_shuts_the_gate():
    assert check({"x": False}, [record(None)]).problem

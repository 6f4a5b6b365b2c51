import math

import pytest
import torch

from labkit.devices.needs import Timing
from labkit.lab import claims, results, session
from labkit.lab.claims import ClaimFailed, claim, measurement, predict


@pytest.fixture
def lab(tmp_path):
    return session.start("99_test", devices="cpu", count=2, run=str(tmp_path))


def records(lab):
    return results.read(lab.folder / results.FILE_NAME)


@pytest.mark.parametrize(
    "measured, bound, status",
    [
        (0.28, dict(predicted=0.27, rel=0.05), "passed"),
        (0.29, dict(predicted=0.27, rel=0.05), "failed"),
        (1e-7, dict(at_most=1e-6), "passed"),
        (2e-6, dict(at_most=1e-6), "failed"),
        (1.5, dict(at_least=1.5), "passed"),
        (1.4, dict(at_least=1.5), "failed"),
        (262_144, dict(equals=262_144), "passed"),
        (262_143, dict(equals=262_144), "failed"),
        (math.nan, dict(at_most=1.0), "failed"),
        (math.nan, dict(predicted=1.0, rel=0.5), "failed"),
        (math.inf, dict(at_most=1.0), "failed"),
        (torch.tensor(0.5), dict(at_most=1.0), "passed"),
        (0.0, dict(predicted=0.0, rel=0.05), "passed"),
    ],
)
def test_a_claim_holds_exactly_when_its_bound_is_kept(lab, measured, bound, status):
    if status == "failed":
        with pytest.raises(ClaimFailed):
            claim("the sentence", measured=measured, **bound)
    else:
        claim("the sentence", measured=measured, **bound)
    [record] = records(lab)
    assert (record.id, record.kind, record.status) == ("the sentence", "claim", status)


def test_a_failed_claim_says_both_numbers_the_tolerance_the_provenance_and_the_likely_reason(lab):
    with pytest.raises(ClaimFailed) as failure:
        claim("the bubble", measured=0.4, predicted=0.25, rel=0.1, hint="a stage is slower")
    for part in ("0.4", "0.25", "within 10 %", "measured:cpu", "a stage is slower"):
        assert part in str(failure.value)
    assert records(lab)[0].reason == "a stage is slower"


def test_a_claim_that_the_hardware_cannot_support_is_refused_even_if_its_number_is_right(lab):
    claim("four beat one", measured=3.9, at_least=3.0, needs=Timing(devices=4))
    [record] = records(lab)
    assert record.status == "refused" and "needs 4 devices" in record.reason
    assert record.needs == {"type": "Timing", "devices": 4}


def test_a_record_carries_everything_that_is_needed_to_judge_it_later(lab):
    claim("x", measured=1, equals=1, unit="B")
    [record] = records(lab)
    assert record.schema == 1 and record.notebook == "99_test" and record.unit == "B"
    assert record.provenance == "measured:cpu" and record.devices["count"] == 2
    assert record.preset == "tiny" and record.versions["torch"].startswith("2.")
    assert record.started > 1.7e9 and record.seconds >= 0
    assert record.tolerance == {"equals": 1} and record.expected == 1


def test_a_prediction_is_stored_before_and_scored_by_the_claim_of_its_name(lab):
    predict("the bubble", 0.27)
    claim("the bubble", measured=0.28, rel=0.05)
    first, second = records(lab)
    assert (first.kind, first.value, first.provenance) == ("prediction", 0.27, "predicted")
    assert (second.kind, second.expected, second.status) == ("claim", 0.27, "passed")


def test_a_prediction_cannot_be_changed_after_the_run(lab):
    predict("the bubble", 0.27)
    with pytest.raises(ValueError, match="0.4.*0.27"):
        claim("the bubble", measured=0.4, predicted=0.4, rel=0.05)


@pytest.mark.parametrize(
    "bound, message",
    [
        ({}, "got none"),
        (dict(at_most=1, at_least=0), "got at_most, at_least"),
        (dict(at_most=1, rel=0.1), "got at_most and rel"),
        (dict(predicted=1), "got predicted"),
        (dict(predicted=1, rel=-1), "rel=-1"),
    ],
)
def test_a_claim_without_one_clear_bound_is_refused_as_a_mistake(lab, bound, message):
    with pytest.raises(ValueError, match=message):
        claim("x", measured=1, **bound)


def test_a_measurement_is_recorded_and_judges_nothing(lab):
    measurement("tokens/s", 1234.5, "tokens/s", predicted=1200)
    measurement("power", None, "W")
    assert [(r.kind, r.value, r.expected, r.status) for r in records(lab)] == [
        ("measurement", 1234.5, 1200, None),
        ("measurement", None, None, None),
    ]


def test_claiming_without_a_lab_says_what_to_run(monkeypatch):
    monkeypatch.setattr(session, "_current", None)
    with pytest.raises(RuntimeError, match="start"):
        claims.claim("x", measured=1, equals=1)


def test_every_verdict_of_a_cell_is_shown_not_only_the_last(lab, monkeypatch):
    shown = []
    monkeypatch.setattr(claims, "display", shown.append)
    predict("x", 1.0)
    claim("x", measured=1.0, rel=0.1)
    claim("y", measured=1, at_least=9, needs=Timing(devices=4))
    assert [v.status for v in shown] == ["predicted", "passed", "refused"]
    assert "1 (measured:cpu)" in shown[1]._repr_html_() and "needs 4" in repr(shown[2])

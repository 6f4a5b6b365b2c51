"""Energy and power by region, on samples small enough to check by hand."""

from __future__ import annotations

from labkit.devices.inventory import choose_devices
from labkit.measure.telemetry.metrics import Metered, Reading
from labkit.measure.telemetry.sampler import Sample
from labkit.measure.telemetry.telemetry import Telemetry, telemetry
from labkit.measure.telemetry.telemetry_regions import WAITING, by_region
from labkit.measure.timeline import Span
from labkit.models.config import ModelConfig
from labkit.models.decoder import LabDecoder
from labkit.models.transformer import Transformer
from labkit.parallel.generation.generate import generate
from labkit.parallel.generation.runners import OneDevice


def seen(*spans: Span) -> Telemetry:
    """One GPU with 0, 10 and 30 J on its counter at 0, 1 and 2 s; 10, 20 and 30 W."""
    values = [(0.0, 0.0, 10.0), (1.0, 10.0, 20.0), (2.0, 30.0, 30.0)]
    samples = [
        Sample(at, 0, Reading({"energy_j": joules, "power_w": watts}))
        for at, joules, watts in values
    ]
    return Telemetry((Metered("GPU 0", "measured:cuda"),), samples, list(spans))


def test_energy_is_read_off_the_counter_between_two_looks():
    spans = Span(0, 0.5, 1.25, "F0", "forward"), Span(0, 1.5, 2.0, "B0", "backward")
    forward, backward, waiting = by_region(seen(*spans))
    assert forward.energy_j == 5 + 5  # half of 10 J, a quarter of 20 J
    assert backward.energy_j == 10
    assert waiting.region == WAITING and waiting.energy_j == 5
    assert forward.power_w == 20 and forward.samples == 1
    assert waiting.power_w is None and waiting.samples == 0


def test_two_pieces_of_one_region_are_added_and_overlaps_count_once():
    (forward,) = by_region(
        seen(Span(0, 0.0, 1.0, "F0", "forward"), Span(0, 0.5, 2.0, "F1", "forward"))
    )
    assert forward.seconds == 2 and forward.energy_j == 30 and forward.power_w == 20


def test_a_region_that_ends_after_the_last_look_has_no_energy():
    (forward,) = by_region(seen(Span(0, 1.0, 2.5, "F0", "forward")))
    assert forward.energy_j is None and forward.power_w == 25


def test_plain_regions_go_by_their_labels_and_ranks_without_a_device_are_left_out():
    found = by_region(seen(Span(0, 0, 1, "prefill"), Span(0, 1, 2, "decode"), Span(1, 0, 2, "F")))
    assert [reading.region for reading in found] == ["prefill", "decode"]


def test_a_generation_shows_its_prefills_apart_from_its_decode_steps():
    runner = OneDevice(LabDecoder(Transformer(ModelConfig(2, 32, 4, 32))))
    with telemetry(choose_devices("cpu")) as t:
        generate(runner, [[1, 2, 3, 4], [5, 6]], new_tokens=11, groups=2)
    readings = {reading.region: reading for reading in by_region(t)}
    assert set(readings) - {WAITING} == {"prefill", "decode"}
    first = [span.duration_s for span in t.spans if span.label in ("P0", "P1")]
    assert len(first) == 2 and abs(readings["prefill"].seconds - sum(first)) < 1e-9


def test_a_region_of_a_schedule_or_of_ones_own_is_no_step_of_a_generation():
    spans = [Span(0, i, i + 1, name, "forward") for i, name in enumerate(("F0", "Dense", "P"))]
    assert {r.region for r in by_region(seen(*spans))} == {"forward"}

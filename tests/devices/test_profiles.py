from dataclasses import replace

import pytest

from labkit.devices.machines import CARDS, machine, machine_names
from labkit.devices.profiles import Link, Machine, Profile, uniform_machine

TOY = Profile("toy", {"float32": 1e9}, 1e9, 1 << 30, 0.001, 0.0, "made up")
WIRE = Link("wire", 1e6, 0.5, "made up")


def test_an_operator_takes_launch_plus_the_longer_of_flops_and_bytes():
    assert TOY.operator_s(flops=5_000_000, num_bytes=2_000_000) == 0.001 + 0.005
    assert TOY.operator_s(flops=1_000_000, num_bytes=2_000_000) == 0.001 + 0.002
    assert TOY.operator_s(flops=0, num_bytes=0) == 0.001


def test_twice_the_peak_halves_the_compute_time_when_nothing_else_limits():
    bare = replace(TOY, launch_overhead_s=0.0)
    double = replace(bare, peak_flops={"float32": 2e9})
    assert double.operator_s(4_000_000, 8) == bare.operator_s(4_000_000, 8) / 2


def test_an_unknown_dtype_is_refused_with_what_is_known():
    with pytest.raises(ValueError, match="no peak FLOP/s for float64.*it has float32"):
        TOY.operator_s(1, 1, "float64")


def test_a_dtype_does_not_matter_to_an_operator_without_flops():
    assert TOY.operator_s(0, 1_000_000, "int64") == 0.002


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": {"bfloat16": 1e9}}, "lacks float32"),
        ({"peak_flops": {"float32": 0}}, "must be above 0"),
        ({"memory_bandwidth_bytes_per_s": -1}, "memory_bandwidth_bytes_per_s=-1 must be above 0"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"launch_overhead_s": -1e-6}, "must not be negative"),
        ({"source": " "}, "source is empty"),
    ],
)
def test_a_profile_refuses_figures_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TOY, **change)


def test_a_link_takes_latency_plus_bytes_over_bandwidth():
    assert WIRE.transfer_s(0) == 0.5
    assert WIRE.transfer_s(1_000_000) == 1.5
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s=0"):
        replace(WIRE, bandwidth_bytes_per_s=0)


def test_a_machine_needs_a_link_for_every_pair():
    with pytest.raises(ValueError, match=r"needs links \[\(0, 1\), \(0, 2\), \(1, 2\)\]"):
        Machine("gap", (TOY,) * 3, {(0, 1): WIRE, (0, 2): WIRE})
    three = uniform_machine("three", TOY, WIRE, 3)
    assert three.link(2, 0) is WIRE
    with pytest.raises(ValueError, match="no link 1->1"):
        three.link(1, 1)
    with pytest.raises(ValueError, match="at least one profile"):
        uniform_machine("none", TOY, WIRE, 0)


def test_every_named_machine_states_its_sources():
    for name in machine_names():
        four = machine(name, 4)
        assert four.count == 4
        assert all("data sheet" in p.source or "white paper" in p.source for p in four.profiles)
        assert all(link.source for link in four.links.values())
        assert four.provenance == f"virtual:{four.name}"


def test_bridges_join_the_a6000_pairs_and_pcie_the_rest():
    bridged = machine("a6000-nvlink", 4)
    fast = {pair for pair, link in bridged.links.items() if "NVLink" in link.name}
    assert fast == {(0, 1), (2, 3)}
    assert bridged.link(1, 0).bandwidth_bytes_per_s == 56.25e9


def test_an_unknown_machine_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="'a5000' is unknown; choose one of a6000-pcie"):
        machine("a5000", 2)
    with pytest.raises(ValueError, match="count=0"):
        machine("lab", 0)


def test_tf32_takes_the_place_of_float32_only_on_request():
    card = CARDS["a6000"]
    assert card.peak_flops["float32"] == 38.7e12
    assert card.using_tf32().peak_flops["float32"] == 77.4e12
    with pytest.raises(ValueError, match="states no tf32"):
        TOY.using_tf32()


def test_a_scaled_machine_gives_a_narrow_product_the_wide_ones_time():
    wide, narrow = machine("a6000-pcie", 2), machine("a6000-pcie", 2).scaled(32)
    tokens, d = 1024, 128  # a (tokens, d) x (d, d) product and the one with 32 d
    flops = [2 * tokens * width * width for width in (d, 32 * d)]
    assert narrow.profiles[0].operator_s(flops[0], 8) == pytest.approx(
        wide.profiles[0].operator_s(flops[1], 8)
    )
    message = [4 * tokens * width for width in (d, 32 * d)]
    assert narrow.link(0, 1).transfer_s(message[0]) == pytest.approx(
        wide.link(0, 1).transfer_s(message[1])
    )
    assert "modelled" in narrow.profiles[0].source and "narrow32" in narrow.name
    with pytest.raises(ValueError, match="width=0"):
        wide.scaled(0)


def test_the_lab_machine_says_that_it_is_no_card():
    assert machine("lab", 4).provenance == "virtual:lab-4x-a6000-pcie-narrow32"

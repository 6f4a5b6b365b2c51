import pytest

from labkit.devices.machines import machine
from labkit.measure.virtual.operator_rates import learn_rates
from labkit.measure.virtual.recording import NO_REGION, Event, Recording
from labkit.measure.virtual.virtual_clock import modelled_cost

LAB = machine("lab", 1).profiles[0]


def recording(*events):
    return Recording(0, events, (NO_REGION,), 0, {})


def copies(*bytes_and_seconds):
    return recording(*(Event("compute", "copy", 0, b, own_s=s) for b, s in bytes_and_seconds))


def test_a_line_through_two_sizes_times_a_third():
    rates = learn_rates([copies((100, 3.0), (200, 5.0))])
    assert rates.cost(Event("compute", "copy", 0, 300), LAB) == pytest.approx(7.0)


def test_flops_count_where_there_are_any():
    products = recording(*(Event("compute", "mm", f, 7, own_s=f / 10) for f in (10, 30)))
    assert learn_rates([products]).cost(Event("compute", "mm", 20, 999), LAB) == pytest.approx(2.0)


def test_a_single_size_keeps_its_median_cost():
    rates = learn_rates([copies((100, 1.0), (100, 2.0), (100, 9.0))])
    assert rates.cost(Event("compute", "copy", 0, 100), LAB) == 2.0


def test_neither_part_of_a_line_is_negative():
    falling = learn_rates([copies((100, 5.0), (200, 3.0))]).lines["copy"]
    steep = learn_rates([copies((100, 0.1), (200, 5.0))]).lines["copy"]
    assert falling == (4.0, 0.0)
    assert steep[0] >= 0 and steep[1] > 0


def test_what_was_not_learnt_costs_what_the_profile_says():
    rates = learn_rates([copies((100, 1.0))])
    for event in (Event("compute", "other", 0, 100), Event("send", "copy", 0, 100, ranks=(1,))):
        assert rates.cost(event, LAB) == modelled_cost(event, LAB)
    with pytest.raises(ValueError, match="no measured seconds"):
        learn_rates([recording(Event("compute", "copy"))])

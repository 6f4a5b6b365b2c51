import math

import pytest

from labkit.devices.links.link_fit import (
    LinkFit,
    Sample,
    bandwidth_matrix,
    fit_link,
    measured_machine,
    slowest_pair,
)
from labkit.devices.machines import CARDS

SIZES = [4096, 65536, 1 << 20, 1 << 24]


def samples(latency_s=1e-4, bandwidth=1e9):
    return [Sample(n, latency_s + n / bandwidth) for n in SIZES]


def test_a_fit_finds_latency_and_bandwidth_and_predicts_a_size_not_measured():
    fit = fit_link(samples())
    assert fit.latency_s == pytest.approx(1e-4) and fit.worst_rel_error < 1e-9
    assert fit.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert fit.predict_s(1 << 22) == pytest.approx(1e-4 + (1 << 22) / 1e9)
    assert fit.knee_bytes == pytest.approx(1e5)


def test_one_disturbed_size_does_not_bend_the_line():
    times = [Sample(n, 1e-4 + n / 1e9) for n in [4096 * 4**k for k in range(7)]]
    times[2] = times[2]._replace(seconds=5 * times[2].seconds)
    fit = fit_link(times)
    assert fit.predict_s(1 << 23) == pytest.approx(1e-4 + (1 << 23) / 1e9, rel=0.05)


def test_latency_is_never_negative():
    fit = fit_link([(1000, 0.001), (2000, 0.0025), (4000, 0.006)])
    assert fit.latency_s == 0 and fit.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize(
    "times, message",
    [
        ([(8, 0.1)], "at least two sizes, got \\[8\\]"),
        ([(8, 0.1), (8, 0.2)], "at least two sizes"),
        ([(8, 0.1), (16, 0.0)], "above 0 s"),
        ([(8, 0.2), (16, 0.1), (32, 0.05)], "do not grow"),
    ],
)
def test_times_that_make_no_line_are_refused(times, message):
    with pytest.raises(ValueError, match=message):
        fit_link(times)


def test_the_matrix_is_symmetric_and_the_slowest_pair_depends_on_the_size():
    near, far = LinkFit(1e-5, 1e9, 0.0), LinkFit(1e-3, 5e9, 0.0)
    fits = {(0, 1): near, (0, 2): far, (1, 2): near}
    matrix = bandwidth_matrix(fits, 3)
    assert matrix[0][2] == matrix[2][0] == 5e9 and math.isnan(matrix[1][1])
    assert slowest_pair(fits, 4) == (0, 2) and slowest_pair(fits, 1 << 24) == (0, 1)


def test_measured_links_make_a_machine_for_virtual_gpus():
    fits = {(0, 1): LinkFit(1e-4, 1e9, 0.0)}
    machine = measured_machine("mine", [CARDS["a6000"]] * 2, fits, "measured here", rendezvous=True)
    assert machine.link(1, 0).transfer_s(1000) == pytest.approx(1e-4 + 1e-6)
    assert machine.link(0, 1).rendezvous and machine.link(0, 1).source == "measured here"

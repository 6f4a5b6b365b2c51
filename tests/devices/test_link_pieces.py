import pytest

from labkit.devices.links.link_fit import fit_link
from labkit.devices.links.link_pieces import fit_pieces

SIZES = [5 << exponent for exponent in range(10, 21)]
STEP = 80 << 10


def two_lines(n):
    return 60e-6 + n / 4e9 if n < STEP else 90e-6 + n / 2e9


def test_two_lines_are_found_and_predict_sizes_that_were_not_measured():
    fit = fit_pieces([(n, two_lines(n)) for n in SIZES])
    assert fit.step_bytes == STEP
    for n in (7 << exponent for exponent in range(10, 20)):
        assert fit.predict_s(n) == pytest.approx(two_lines(n), rel=1e-6), n
    for n in (STEP - 4, STEP):  # the first line up to the step itself, and not beyond
        assert fit.predict_s(n) == pytest.approx(two_lines(n), rel=1e-6)
    one = fit_link([(n, two_lines(n)) for n in SIZES])
    assert abs(one.predict_s(56 << 10) / two_lines(56 << 10) - 1) > 0.15  # what one line is worth


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_line_stays_one_also_when_its_times_are_noisy(noise):
    times = [(n, (60e-6 + n / 2e9) * (1 + noise * (-1) ** place)) for place, n in enumerate(SIZES)]
    fit = fit_pieces(times)
    assert fit.step_bytes is None and fit.long == fit.short
    assert fit.predict_s(1 << 20) == pytest.approx(60e-6 + (1 << 20) / 2e9, rel=2 * noise + 1e-9)


def test_too_few_sizes_for_two_lines_make_one():
    assert fit_pieces([(n, two_lines(n)) for n in SIZES[3:8]]).step_bytes is None
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_pieces([(8, 0.1)])


def test_small_sizes_whose_times_fall_do_not_stop_the_fit():
    times = [(1, 1.02), (2, 1.01), (4, 1.0), (64, 9.0), (128, 17.0), (256, 33.0)]
    assert fit_pieces(times).predict_s(192) == pytest.approx(25.0, rel=0.05)

"""A link that one line does not describe: one line up to a size, and another from there on.

Between processes of one host a message that no longer fits a packet, or a cache, takes another way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.devices.links.link_fit import LinkFit, Sample, fit_link

SHORTEST = 3  # sizes in a piece: any two make a line
LEAST_GAIN = 1.6  # a second line must make the errors so many times smaller
EXACT = 0.01  # mean relative error of a line that needs no second one


@dataclass(frozen=True)
class PiecewiseFit:
    """Time of a message or collective as one line, or two.

    Attributes:
        short: holds below ``step_bytes``.
        long: holds from there on; the same as ``short`` where one line is enough.
        step_bytes: the smallest measured size on the second line; None without one. Where between
            this and the size measured before it the step lies is not known: systems step at round
            sizes, so the first line is taken up to it.
    """

    short: LinkFit
    long: LinkFit
    step_bytes: int | None = None

    def predict_s(self, num_bytes: int) -> float:
        """Seconds for a size, measured or not."""
        beyond = self.step_bytes is not None and num_bytes >= self.step_bytes
        return (self.long if beyond else self.short).predict_s(num_bytes)


def fit_pieces(samples: Iterable[Sample | tuple[int, float]]) -> PiecewiseFit:
    """One line through (bytes, seconds), or two where they fit much better.

    Raises:
        ValueError: as in ``fit_link``.

    >>> fit = fit_pieces([(n, 1.0 + n) for n in (1, 2, 4)] + [(n, 9.0 + n) for n in (8, 16, 32)])
    >>> fit.step_bytes, round(fit.predict_s(3), 6), round(fit.predict_s(24), 6)
    (8, 4.0, 33.0)
    """
    pairs = sorted((int(n), float(s)) for n, s in samples)
    line = fit_link(pairs)
    best, least = PiecewiseFit(line, line), _error(line, pairs)
    if least < EXACT * len(pairs):
        return best
    for cut in range(SHORTEST, len(pairs) - SHORTEST + 1):
        try:
            short, long = fit_link(pairs[:cut]), fit_link(pairs[cut:])
        except ValueError:  # noise: the times of so few sizes do not grow
            continue
        error = LEAST_GAIN * (_error(short, pairs[:cut]) + _error(long, pairs[cut:]))
        if error < least:
            best, least = PiecewiseFit(short, long, pairs[cut][0]), error
    return best


def _error(line: LinkFit, pairs: list[tuple[int, float]]) -> float:
    """The relative errors added up."""
    return sum(abs(line.predict_s(n) / s - 1) for n, s in pairs)

"""What each kind of operator costs on this machine, learnt from recordings with measured seconds.

One roofline does not fit a CPU: a GELU, a softmax and a copy of as many bytes differ tenfold. So
each operator name gets a line of its own, seconds = fixed + work / rate, where work is FLOPs if it
has any and bytes otherwise. Learnt on a few programs, it times others that were never measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from labkit.devices.profiles import Profile
from labkit.measure.virtual.recording import Event, Recording
from labkit.measure.virtual.virtual_clock import modelled_cost


@dataclass(frozen=True)
class OperatorRates:
    """Fixed seconds and seconds per FLOP or byte, by operator name.

    ``cost`` is for ``play``; an operator that was not learnt, and every message, costs what the
    profile says.
    """

    lines: Mapping[str, tuple[float, float]]

    def cost(self, event: Event, profile: Profile) -> float:
        """Seconds of an event on the machine that the rates were learnt on."""
        line = self.lines.get(event.name) if event.kind == "compute" else None
        if line is None:
            return modelled_cost(event, profile)
        return line[0] + line[1] * _work(event)


def learn_rates(recordings: Iterable[Recording]) -> OperatorRates:
    """Fit the rates to recordings that went through ``calibration.with_measured_costs``.

    Raises:
        ValueError: no operator of them has measured seconds.
    """
    seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for recording in recordings:
        for event in recording.events:
            if event.kind == "compute" and event.own_s > 0:
                seen[event.name][_work(event)].append(event.own_s)
    if not seen:
        raise ValueError("no measured seconds to learn from; use record_step(..., timed=5)")
    return OperatorRates({name: _fitted_line(by_work) for name, by_work in seen.items()})


def _work(event: Event) -> int:
    return event.flops or event.num_bytes


def _fitted_line(seconds_by_work: Mapping[int, list[float]]) -> tuple[float, float]:
    """Fixed part and slope that keep the sum of all seconds; neither negative."""
    points = [(work, median(s), len(s)) for work, s in seconds_by_work.items()]
    total = sum(n for _, _, n in points)
    mean_work = sum(w * n for w, _, n in points) / total
    mean_s = sum(s * n for _, s, n in points) / total
    spread = sum(n * (w - mean_work) ** 2 for w, _, n in points)
    if not spread:
        return mean_s, 0.0
    slope = sum(n * (w - mean_work) * (s - mean_s) for w, s, n in points) / spread
    slope = min(max(slope, 0.0), mean_s / mean_work)
    return mean_s - slope * mean_work, slope

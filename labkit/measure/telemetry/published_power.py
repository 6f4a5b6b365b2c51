"""What others measured: training on one A40 under power caps, the chip of the RTX A6000.

Computed from the profiles in the tests of the Zeus project (https://github.com/ml-energy/zeus; You
et al., NSDI 2023), against the card's 300 W. Single runs: they have no interval.
"""

from __future__ import annotations

from labkit.measure.telemetry.power_sweep import SweepPoint

SOURCE = "published: one A40, Zeus project, single runs"
# cap in W -> (time, energy) over those at 300 W
_A40 = {
    "ResNet-50": {300: (1.0, 1.0), 250: (1.006, 0.95), 200: (1.05, 0.81), 100: (2.89, 1.29)},
    "BERT": {300: (1.0, 1.0), 250: (1.07, 0.95), 200: (1.19, 0.85), 100: (4.28, 1.54)},
}
PUBLISHED_MODELS = tuple(_A40)


def published_sweep(model: str = "BERT") -> list[SweepPoint]:
    """The published curve of one model, its default first.

    Raises:
        ValueError: no curve is published for ``model``.
    """
    if model not in _A40:
        raise ValueError(f"model={model!r} has no published curve; one of {PUBLISHED_MODELS}")
    return [
        SweepPoint("default" if cap == 300 else f"{cap} W", time, None, energy, SOURCE)
        for cap, (time, energy) in _A40[model].items()
    ]

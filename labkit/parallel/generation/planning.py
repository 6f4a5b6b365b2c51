"""Which way of spreading a model over devices generates best: every one predicted, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape

from labkit.devices.inventory import DeviceSet
from labkit.devices.profiles import Machine
from labkit.models.config import ModelConfig
from labkit.parallel.generation.prediction import GenerationPrediction, predict_generation
from labkit.parallel.planning.planner import MARGIN, Rejected, machine_of

GOALS: dict[str, Callable[[GenerationPrediction], float]] = {
    "tokens per second": lambda p: -p.tokens_per_s,
    "first token": lambda p: max(p.first_token_s),
    "time per token": lambda p: max(p.per_token_s),
    "largest batch": lambda p: -p.largest_batch,
}
COLUMNS = ("way", "first token", "per token", "tokens/s", "largest batch")


@dataclass(frozen=True)
class GenerationWay:
    """A way, and what is predicted of it."""

    layers_over: int
    tensor: int
    groups: int
    predicted: GenerationPrediction

    def __str__(self) -> str:
        ways = [f"layers over {self.layers_over}"] if self.layers_over > 1 else []
        ways += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        ways += [f"{self.groups} groups"] if self.groups > 1 else []
        return ", ".join(ways) or "one device"


@dataclass(frozen=True)
class GenerationPlan:
    """All ways that fit, the best for the goal first; shows itself as a table."""

    ranked: tuple[GenerationWay, ...]
    rejected: tuple[Rejected, ...]
    provenance: str

    def ranked_by(self, goal: str) -> GenerationPlan:
        """The same ways, the best for another goal first.

        Raises:
            ValueError: the goal is unknown.
        """
        key = _goal(goal)
        ranked = sorted(self.ranked, key=lambda way: key(way.predicted))
        return replace(self, ranked=tuple(ranked))

    @property
    def best(self) -> GenerationWay:
        """The first of those that fit.

        Raises:
            ValueError: none fits.
        """
        if not self.ranked:
            raise ValueError(f"nothing fits: {self.rejected[0].reason}")
        return self.ranked[0]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """A row of text for each way, under `COLUMNS`."""
        return [
            (
                str(way),
                f"{max(way.predicted.first_token_s) * 1e3:.2f} ms",
                f"{max(way.predicted.per_token_s) * 1e3:.2f} ms",
                f"{way.predicted.tokens_per_s:,.0f}",
                str(way.predicted.largest_batch),
            )
            for way in self.ranked
        ]

    def __str__(self) -> str:
        lines = ["  ".join(row) for row in (COLUMNS, *self.cells)]
        lines += [f"not {r.what}: {r.reason}" for r in self.rejected]
        return "\n".join([self.provenance, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in (COLUMNS, *self.cells)
        )
        why = "".join(f"<li>{escape(f'{r.what}: {r.reason}')}</li>" for r in self.rejected)
        return f"<p>{escape(self.provenance)}</p><table>{rows}</table><ul>{why}</ul>"


def plan_generation(
    config: ModelConfig,
    devices: DeviceSet | Machine,
    *,
    rows: int,
    prompt: int,
    new_tokens: int,
    goal: str = "tokens per second",
    decode_width: float = 1.0,
) -> GenerationPlan:
    """Rank layer splits, with one and more groups in flight, and tensor parallelism.

    Args:
        rows, prompt, new_tokens, decode_width: as for ``predict_generation``.
        goal: one of ``GOALS``.

    Raises:
        ValueError: the goal is unknown, or nothing is known of what the devices cost.
    """
    _goal(goal)  # before the work
    machine = machine_of(devices)
    found, rejected = [], []
    sizes = {"rows": rows, "prompt": prompt, "new_tokens": new_tokens}
    for layers_over, tensor, groups in _ways(machine.count):
        spread = {"layers_over": layers_over, "tensor": tensor, "groups": groups}
        words = ", ".join(f"{name} {n}" for name, n in spread.items() if n > 1)
        try:
            its = predict_generation(config, machine, **sizes, **spread, decode_width=decode_width)
        except ValueError as error:
            rejected.append(Rejected(words, str(error)))
            continue
        if rows > (1 - MARGIN) * its.largest_batch:
            reason = f"{rows} sequences, {MARGIN:.0%} left free: at most {its.largest_batch} fit"
            rejected.append(Rejected(words or "one device", reason))
            continue
        found.append(GenerationWay(layers_over, tensor, groups, its))
    unsorted = GenerationPlan(tuple(found), tuple(rejected), f"predicted:{machine.name}")
    return unsorted.ranked_by(goal)


def _goal(name: str) -> Callable[[GenerationPrediction], float]:
    if name not in GOALS:
        raise ValueError(f"goal={name!r} is unknown; choose one of {', '.join(GOALS)}")
    return GOALS[name]


def _ways(count: int) -> Iterator[tuple[int, int, int]]:
    """Devices that share the layers, devices that share each layer, groups in flight."""
    yield 1, 1, 1
    for n in (n for n in range(2, count + 1) if count % n == 0):
        yield n, 1, 1
        yield n, 1, n
        yield 1, n, 1

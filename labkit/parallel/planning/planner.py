"""Which layout trains a model fastest on given devices: every legal one predicted, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from labkit.devices.inventory import DeviceSet
from labkit.devices.machines import machine as named_machine
from labkit.devices.profiles import Machine
from labkit.measure.virtual.virtual_clock import modelled_cost
from labkit.measure.virtual.virtual_program import OperatorCost
from labkit.models.config import ModelConfig
from labkit.parallel.placing.placement_view import readable_bytes
from labkit.parallel.planning import plan_view
from labkit.parallel.planning.candidates import candidates, in_words
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.layer_chains import LabChain, LayerChain
from labkit.parallel.planning.levers import Levers
from labkit.parallel.planning.optimizer_rehearsal import adamw
from labkit.parallel.planning.predictor import Prediction, check_choice, predicted
from labkit.parallel.planning.rank_groups import all_ranks
from labkit.parallel.planning.training_step import TrainingStep
from labkit.parallel.sharding.layouts import Layout

MARGIN = 0.05  # of a device's memory is left free: the promised accuracy of a predicted peak
MOST_DEVICES = 64
GOALS: dict[str, Callable[[Prediction], tuple[float, ...]]] = {
    "fastest": lambda p: (p.step_time_s, p.peak_bytes),
    "leanest": lambda p: (p.peak_bytes, p.step_time_s),
    "fewest devices": lambda p: (p.choice.layout.ranks, p.step_time_s),
}
DEFAULT_LEVERS = (Levers(), Levers(checkpointing=True))


@dataclass(frozen=True)
class Rejected:
    """A layout that is not among the ranked ones, and why.

    Attributes:
        excess: times the memory that there is, where that is what lacks.
    """

    what: str
    reason: str
    excess: float | None = None


@dataclass(frozen=True)
class Plan:
    """What `plan` found; shows itself as a table.

    Attributes:
        model: what was planned, in words.
        machine: the devices.
        batch: rows of a step.
        tokens: of a row; 1 where a row is one example.
        ranked: layouts that fit, the best for the goal first.
        rejected: all others.
        is_lab: the model is the lab's, given by its configuration.
    """

    model: str
    machine: Machine
    batch: int
    tokens: int
    ranked: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]
    is_lab: bool

    @property
    def best(self) -> Prediction:
        """The first of those that fit.

        Raises:
            ValueError: none fits; the message says what would do.
        """
        if not self.ranked:
            raise ValueError(f"{self.model} fits nowhere on {self.machine.name}: {self.advice}")
        return self.ranked[0]

    @property
    def advice(self) -> str:
        """What lacks where nothing fits."""
        too_large = [r for r in self.rejected if r.excess is not None]
        nearest = min(too_large, key=lambda r: r.excess, default=None)
        if nearest is None:
            return self.rejected[0].reason if self.rejected else "no layout is legal"
        return (
            f"nearest is {nearest.what}: {nearest.reason}; fewer rows in the batch, more devices, "
            "checkpointing or autocast need less"
        )

    @property
    def cells(self) -> tuple[str, str]:
        """Two notebook cells that train a step by the best one: the notebook's, and the ranks'.

        They take ``config``, ``inputs`` and ``targets``; for your own model ``chain``, which
        `own_model` made.
        """
        return plan_view.as_cells(self)

    def fastest_on(self, ranks: int) -> Prediction | None:
        """The best that uses exactly so many devices; None where none fits."""
        return next((p for p in self.ranked if p.choice.layout.ranks == ranks), None)

    def __str__(self) -> str:
        return plan_view.as_text(self)

    def _repr_html_(self) -> str:
        return plan_view.as_html(self)


def plan(
    model: ModelConfig | LayerChain,
    devices: DeviceSet | Machine,
    *,
    goal: str = "fastest",
    batch: int,
    context: int | None = None,
    levers: Sequence[Levers] = DEFAULT_LEVERS,
    cost: OperatorCost = modelled_cost,
) -> Plan:
    """Rank all layouts for training with AdamW on some or all of the devices.

    Args:
        model: the lab's configuration, or a chain such as ``own_model`` makes.
        devices: virtual ones, or a machine: a named one, also of cards that one does not own, or
            what ``calibrate`` measured here.
        goal: what comes first: ``fastest``, ``leanest`` or ``fewest devices``.
        batch: rows of a step, shared out over copies and microbatches.
        context: tokens of a row; None for the configuration's.
        levers: tried in this order for each layout until it fits. Autocast changes numbers, so it
            is tried only where it is asked for.
        cost: seconds of an operator; ``OperatorRates.cost`` for the machine at hand.

    Raises:
        ValueError: the goal is unknown, there are more devices than 64, or nothing is known of what
            they cost.
    """
    if goal not in GOALS:
        raise ValueError(f"goal={goal!r} is unknown; choose one of {', '.join(GOALS)}")
    chain = LabChain(model, context) if isinstance(model, ModelConfig) else model
    machine = machine_of(devices)
    search = _Search(chain, machine, batch, tuple(levers), cost)
    for layout, schedule in candidates(machine.count, batch):
        search.look_at(layout, schedule)
    ranked = sorted(search.found, key=GOALS[goal])
    is_lab = isinstance(chain, LabChain)
    tokens = chain.tokens if is_lab else 1
    name = f"{len(chain.names)} layers"
    return Plan(name, machine, batch, tokens, tuple(ranked), tuple(search.rejected), is_lab)


def machine_of(devices: DeviceSet | Machine) -> Machine:
    """The machine by whose figures devices are predicted.

    Raises:
        ValueError: real devices, of which a calibration is needed; or too many.
    """
    if isinstance(devices, DeviceSet):
        if devices.machine is None:
            raise ValueError(
                f"nothing is known of what operators and links cost on {devices.kind} devices; "
                "pass what labkit.measure.virtual.calibration.calibrate() measured, or a named "
                "machine"
            )
        devices = named_machine(devices.machine, devices.count)
    if devices.count > MOST_DEVICES:
        raise ValueError(f"{devices.count} devices are more than {MOST_DEVICES}, the range here")
    return devices


class _Search:
    """Predicts candidates, and sorts them into found and rejected."""

    def __init__(
        self,
        chain: LayerChain,
        machine: Machine,
        batch: int,
        levers: tuple[Levers, ...],
        cost: OperatorCost,
    ) -> None:
        self.chain, self.machine, self.batch = chain, machine, batch
        self.levers, self.cost = levers, cost
        self.found: list[Prediction] = []
        self.rejected: list[Rejected] = []

    def look_at(self, settings: dict, schedule: str) -> None:
        try:
            choice = Choice(Layout(**settings), schedule)
            check_choice(self.chain, choice, self.batch)
        except ValueError as error:
            self.rejected.append(Rejected(in_words(settings, schedule), str(error)))
            return
        nearest, reasons = None, []
        for its_layout, lever in self._from_lightest(choice):
            try:
                tried = Choice(its_layout, schedule, lever)
                check_choice(self.chain, tried, self.batch)
            except ValueError as error:
                reasons.append(str(error))
                continue
            step = TrainingStep(self.chain, tried, self.machine, self.batch, self.cost, adamw)
            if (excess := self._excess(step)) <= 1:
                self.found.append(predicted(step))
                return
            if nearest is None or excess < nearest[0]:
                nearest = excess, step
        if nearest is None:
            self.rejected.append(Rejected(str(choice), reasons[0]))
            return
        self.rejected.append(self._too_large(*nearest))

    def _from_lightest(self, choice: Choice) -> Iterator[tuple[Layout, Levers]]:
        """Each lever; without a pipeline also in more and more microbatches."""
        yield from ((choice.layout, lever) for lever in self.levers)
        layout, m = choice.layout, 2
        if layout.pipeline > 1 or layout.tensor > 1 or choice.is_sharded:
            return
        while self.batch % (layout.data * m) == 0:
            yield from ((layout.with_(microbatches=m), lever) for lever in self.levers)
            m *= 2

    def _excess(self, step: TrainingStep) -> float:
        """Largest share of a device's usable memory that is needed; above 1 it does not fit."""
        return max(
            memory.peak_bytes / ((1 - MARGIN) * self.machine.profiles[rank].memory_bytes)
            for memory, replicas in zip(step.memory, step.grid, strict=True)
            for rank in all_ranks(replicas)
        )

    def _too_large(self, excess: float, step: TrainingStep) -> Rejected:
        capacity = self.machine.profiles[0].memory_bytes
        largest = max(memory.peak_bytes for memory in step.memory)
        reason = (
            f"needs {readable_bytes(largest)} on a device of "
            f"{readable_bytes(capacity)}, {MARGIN:.0%} of it left free ({excess:.3g} times what "
            "there is)"
        )
        return Rejected(str(step.choice), reason, excess)

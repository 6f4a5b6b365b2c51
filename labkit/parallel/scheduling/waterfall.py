"""Where a step's time goes: ideal, bubble, imbalance, transfer, overhead, one after the other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from labkit.parallel.scheduling.replay import StepCosts
from labkit.parallel.scheduling.replay import replay as run
from labkit.parallel.scheduling.schedules import Schedule


@dataclass(frozen=True)
class Waterfall:
    """Seconds of one step by cause; each is what the step gains when that cause is let in.

    Attributes:
        ideal_s: all work shared out evenly over the ranks, nobody ever waiting.
        bubble_s: waiting that the schedule's order forces on equal ranks.
        imbalance_s: more because stages and actions do not cost the same. Can be slightly negative
            where the schedule happens to suit the uneven costs.
        transfer_s: more because messages take time.
        overhead_s: more because of the constants per action and per step.
    """

    ideal_s: float
    bubble_s: float
    imbalance_s: float
    transfer_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """The step time of the replay with everything in it."""
        return sum(seconds for _, seconds in self.rows)

    @property
    def rows(self) -> tuple[tuple[str, float], ...]:
        """(cause, seconds) from the ideal down."""
        return (
            ("ideal", self.ideal_s),
            ("bubble", self.bubble_s),
            ("imbalance", self.imbalance_s),
            ("transfer", self.transfer_s),
            ("overhead", self.overhead_s),
        )

    def __str__(self) -> str:
        rows = [*self.rows, ("total", self.total_s)]
        return "\n".join(f"{name:<9} {s:12.6g} s {s / self.total_s:7.1%}" for name, s in rows)


def waterfall(schedule: Schedule, costs: StepCosts) -> Waterfall:
    """Split the replayed step time by letting one cause in after another.

    Four replays: equal costs and free messages; then the real costs; then with messages; then with
    overhead. The differences of successive step times sum up to the last one by construction. The
    order of the causes is a convention: another one would share the same total out differently.

    >>> from labkit.parallel.scheduling.schedules import one_f_one_b
    >>> uneven = {(0, "F"): 1, (0, "B"): 2, (1, "F"): 2, (1, "B"): 4}
    >>> print(waterfall(one_f_one_b(2, 4), StepCosts(uneven, transfer_s=0.5)))
    ideal               18 s   64.3%
    bubble             4.5 s   16.1%
    imbalance          4.5 s   16.1%
    transfer             1 s    3.6%
    overhead             0 s    0.0%
    total               28 s  100.0%
    """
    uneven = replace(costs, transfer_s=0.0, overhead_per_action_s=0.0, overhead_per_step_s=0.0)
    sending = replace(uneven, transfer_s=costs.transfer_s)
    even = _balanced(schedule, uneven)
    work_s = sum(map(uneven.of_action, schedule))
    work_s += sum(map(uneven.of_optimizer, range(schedule.num_ranks)))
    levels = [run(schedule, c).step_time_s for c in (even, uneven, sending, costs)]
    ideal_s = work_s / schedule.num_ranks
    gains = [after - before for before, after in zip([ideal_s, *levels], levels, strict=False)]
    return Waterfall(ideal_s, *gains)


def _balanced(schedule: Schedule, costs: StepCosts) -> StepCosts:
    """The same work in all, with every action at the mean cost of its kind."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for action in schedule:
        seconds[action.kind].append(costs.of_action(action))
    mean = {kind: sum(values) / len(values) for kind, values in seconds.items()}
    optimizer = sum(map(costs.of_optimizer, range(schedule.num_ranks))) / schedule.num_ranks
    return replace(costs, action_s=mean, optimizer_s=optimizer)

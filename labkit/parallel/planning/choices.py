"""One way to train a model on some devices: a layout, a schedule and levers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from labkit.parallel.planning.levers import Levers
from labkit.parallel.scheduling.every_schedule import BUILDERS
from labkit.parallel.scheduling.schedules import Schedule
from labkit.parallel.sharding.layouts import Layout


@dataclass(frozen=True)
class Choice:
    """What the planner ranks.

    Args:
        layout: ranks along the axes, and microbatches. Without a pipeline the microbatches are
            passed one after the other (gradient accumulation).
        schedule: of the pipeline, a name in ``BUILDERS``.
        levers: checkpointing and autocast.

    Raises:
        ValueError: the schedule is unknown, or does not go with the layout.
    """

    layout: Layout
    schedule: str = "1F1B"
    levers: Levers = Levers()

    def __post_init__(self) -> None:
        if self.schedule not in BUILDERS:
            raise ValueError(
                f"schedule={self.schedule!r} is unknown; choose one of {', '.join(BUILDERS)}"
            )
        if self.splits_backward and self.levers.checkpointing:
            raise ValueError(
                f"schedule={self.schedule!r} with checkpointing: W would run a layer's forward "
                "again for each group of its weights; use 1F1B, or no checkpointing"
            )
        divided = self.layout.tensor > 1 or self.is_sharded
        if self.schedule != "1F1B" and divided:
            raise ValueError(
                f"schedule={self.schedule!r} with {self.layout}: a pipeline whose stages are "
                "divided runs 1F1B"
            )
        if self.layout.pipeline == 1 and self.layout.microbatches > 1 and divided:
            raise ValueError(
                f"microbatches={self.layout.microbatches} with {self.layout}: without a pipeline "
                "a divided model takes its batch in one piece"
            )

    @property
    def is_sharded(self) -> bool:
        """By FSDP2."""
        return self.layout.data > 1 and self.layout.data_style == "fsdp"

    @property
    def splits_backward(self) -> bool:
        """The schedule runs I and W in place of B."""
        return any(action.kind == "I" for action in self.built_schedule())

    @property
    def in_one_piece(self) -> bool:
        """No microbatches: a forward and a backward of the whole batch."""
        return self.layout.pipeline == 1 and self.layout.microbatches == 1

    def built_schedule(self) -> Schedule:
        return BUILDERS[self.schedule](self.layout.pipeline, self.layout.microbatches)

    def with_levers(self, levers: Levers) -> Choice:
        return replace(self, levers=levers)

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.layout.pipeline > 1:
            parts.append(f"{self.schedule} m={self.layout.microbatches}")
        elif self.layout.microbatches > 1:
            parts.append(f"m={self.layout.microbatches}")
        return ", ".join([*parts, *([str(self.levers)] if str(self.levers) else [])])

"""Predictions held against what ran: each layout, and what the first choice is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.measure.step_trace import StepReading
from labkit.parallel.planning.choices import Choice
from labkit.parallel.planning.planner import Plan
from labkit.parallel.planning.predictor import Prediction


@dataclass(frozen=True)
class Comparison:
    """One layout, predicted and run."""

    predicted: Prediction
    ran: StepReading

    @property
    def time_error(self) -> float:
        """Predicted over run, less 1."""
        return self.predicted.step_time_s / self.ran.step_time_s - 1

    @property
    def memory_error(self) -> float | None:
        """Of the rank where it is largest in size, predicted over counted, less 1.

        None where nobody counted.
        """
        errors = [
            self.predicted.memory_of(rank).peak_bytes / peak - 1
            for rank, peak in enumerate(self.ran.peak_bytes)
            if peak is not None
        ]
        return max(errors, key=abs, default=None)


@dataclass(frozen=True)
class BackTest:
    """All layouts that ran.

    Attributes:
        rows: in the plan's order.
    """

    rows: tuple[Comparison, ...]

    @property
    def worst_time_error(self) -> float:
        """Without its sign."""
        return max(abs(row.time_error) for row in self.rows)

    @property
    def worst_memory_error(self) -> float | None:
        """Without its sign; None where nobody counted."""
        errors = [abs(row.memory_error) for row in self.rows if row.memory_error is not None]
        return max(errors, default=None)

    @property
    def first_choice_loss(self) -> float:
        """By how much the planner's first of these is slower than the best of them: 0 if it is."""
        best_s = min(row.ran.step_time_s for row in self.rows)
        return self.rows[0].ran.step_time_s / best_s - 1

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """A row of text each: layout, predicted ms, run ms, error, and the memory's error."""
        return [
            (
                str(row.predicted.choice),
                f"{row.predicted.step_time_s * 1e3:.2f}",
                f"{row.ran.step_time_s * 1e3:.2f}",
                f"{row.time_error:+.1%}",
                "?" if row.memory_error is None else f"{row.memory_error:+.1%}",
            )
            for row in self.rows
        ]


def back_test(plan: Plan, readings: Mapping[Choice, StepReading]) -> BackTest:
    """Join a plan with what ran of it.

    Args:
        readings: by choice, of any of the plan's ranked ones.

    Raises:
        ValueError: nothing ran, or something that the plan did not rank.
    """
    ranked = {prediction.choice: prediction for prediction in plan.ranked}
    foreign = [str(choice) for choice in readings if choice not in ranked]
    if foreign or not readings:
        raise ValueError(f"ran {foreign or 'nothing'}; give readings of choices that were ranked")
    rows = [Comparison(p, readings[choice]) for choice, p in ranked.items() if choice in readings]
    return BackTest(tuple(rows))

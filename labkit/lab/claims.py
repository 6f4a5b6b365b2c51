"""Turn a sentence of a notebook into a check that fails when it stops being true."""

from __future__ import annotations

import math
from dataclasses import dataclass

from IPython.display import display

from labkit.devices.needs import Need, need_to_json
from labkit.lab.results import Record
from labkit.lab.session import Lab, current_lab


class ClaimFailed(AssertionError):
    """A sentence of the notebook does not hold for this run."""

    def _render_traceback_(self) -> list[str]:
        return [f"ClaimFailed: {self}"]


@dataclass(frozen=True)
class Verdict:
    """What a claim says: shown in the notebook, green, grey or red."""

    status: str
    text: str

    def __repr__(self) -> str:
        return f"{self.status}: {self.text}"

    def _repr_html_(self) -> str:
        colour = {"passed": "#1a7f37", "refused": "#6e7781", "predicted": "#0969da"}[self.status]
        return f'<span style="color:{colour}"><b>{self.status}</b> {self.text}</span>'


@dataclass(frozen=True)
class Bound:
    """What is asked of a measured number: one field is set, ``rel`` beside ``predicted``."""

    predicted: float | None = None
    rel: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    equals: float | str | bool | None = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("predicted", "at_most", "at_least", "equals")
            if getattr(self, name) is not None
        ]
        if len(given) != 1 or (self.rel is None) != (self.predicted is None):
            raise ValueError(
                f"a claim needs exactly one of predicted (with rel), at_most, at_least, equals; "
                f"got {', '.join(given) or 'none'}{' and rel' if self.rel is not None else ''}"
            )
        if self.rel is not None and not self.rel >= 0:
            raise ValueError(f"rel={self.rel} must not be below 0")

    @property
    def expected(self) -> float | str | bool:
        return next(
            value
            for value in (self.predicted, self.at_most, self.at_least, self.equals)
            if value is not None
        )

    @property
    def tolerance(self) -> dict[str, float]:
        """The rule by its name: ``{"rel": 0.05}``, ``{"at_most": 1e-6}`` or ``{"equals": 3}``."""
        if self.rel is not None:
            return {"rel": self.rel}
        rules = ("at_most", "at_least", "equals")
        return {name: self.expected for name in rules if getattr(self, name) is not None}

    def holds(self, measured: float | str | bool) -> bool:
        """Whether ``measured`` keeps the bound; NaN keeps none."""
        if self.equals is not None:
            return measured == self.equals
        if self.predicted is not None:
            return abs(measured - self.predicted) <= self.rel * abs(self.predicted)
        return measured <= self.at_most if self.at_most is not None else measured >= self.at_least

    def words(self, unit: str) -> str:
        if self.rel is not None:
            return f"predicted {shown(self.predicted, unit)} within {100 * self.rel:.3g} %"
        rule = next(iter(self.tolerance)).replace("_", " ")
        return f"must be {rule.replace('equals', 'equal to')} {shown(self.expected, unit)}"


def claim(
    sentence: str,
    *,
    measured: float | str | bool,
    predicted: float | None = None,
    rel: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
    equals: float | str | bool | None = None,
    unit: str = "",
    needs: Need | None = None,
    provenance: str = "",
    hint: str = "",
) -> None:
    """Check a sentence against a number, record it either way, and show the verdict.

    Args:
        sentence: the claim's id, a literal, as the prose states it.
        measured: the number, in ``unit``.
        predicted, rel: holds when |measured - predicted| <= rel * |predicted|; ``predicted`` may
            be left out where ``predict`` wrote it down.
        at_most, at_least, equals: holds when ``measured`` keeps this bound.
        needs: what the hardware must support; without it the claim is refused, not passed.
        provenance: where the number comes from, if not the notebook's own devices.
        hint: the likely reason when it fails, for the reader.

    Raises:
        ClaimFailed: it does not hold; the message has both numbers, the tolerance, the provenance
            and the likely reason.
        ValueError: no bound or more than one, or ``predicted`` differs from what ``predict`` wrote.
    """
    lab = current_lab()
    if rel is not None and predicted is None:
        predicted = lab.predictions.get(sentence)
    bound = Bound(predicted, rel, at_most, at_least, equals)
    _check_prediction(lab, sentence, bound)
    origin = provenance or lab.provenance
    measured = plain(measured)
    text = f"{sentence}: {shown(measured, unit)} ({origin}), {bound.words(unit)}"
    reason = needs.refusal(lab.devices) if needs else None
    status = "refused" if reason else "passed" if bound.holds(measured) else "failed"
    lab.record(
        Record(
            lab.notebook,
            sentence,
            "claim",
            measured,
            unit,
            bound.expected,
            bound.tolerance,
            status,
            reason or (hint or None if status == "failed" else None),
            origin,
            needs=need_to_json(needs) if needs else None,
        )
    )
    if status == "failed":
        raise ClaimFailed(text + (f"\n  likely reason: {hint}" if hint else ""))
    display(Verdict(status, f"{sentence}: {reason}" if reason else text))


def predict(sentence: str, value: float, unit: str = "") -> None:
    """Write a prediction down before the run; the claim of the same sentence scores it.

    Args:
        sentence: id of the claim that will score it.
        value: the predicted number, in ``unit``.
    """
    lab = current_lab()
    value = plain(value)
    lab.predictions[sentence] = value
    lab.record(Record(lab.notebook, sentence, "prediction", value, unit, provenance="predicted"))
    display(Verdict("predicted", f"{sentence}: {shown(value, unit)}"))


def measurement(
    name: str,
    value: float | None,
    unit: str = "",
    *,
    predicted: float | None = None,
    provenance: str = "",
) -> None:
    """Record a number that the report compares over notebooks, such as tokens/s.

    Args:
        name: such as ``training tokens/s, pipeline on 4 devices``.
        value: in ``unit``; None where the device cannot report it.
        predicted: what was computed for it without it, in ``unit``: before the run, or from other
            runs.
    """
    lab = current_lab()
    lab.record(
        Record(
            lab.notebook,
            name,
            "measurement",
            None if value is None else plain(value),
            unit,
            expected=None if predicted is None else plain(predicted),
            provenance=provenance,
        )
    )


def plain(value):
    """The Python number in a 0-d tensor or NumPy scalar; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def shown(value: float | str | bool, unit: str = "") -> str:
    """A number as the notebook prints it.

    >>> shown(1234567, "B"), shown(0.27272727), shown(True)
    ('1,234,567 B', '0.2727', 'yes')
    """
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, str):
        text = value
    elif isinstance(value, int):
        text = f"{value:,}"
    else:
        text = f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def _check_prediction(lab: Lab, sentence: str, bound: Bound) -> None:
    written = lab.predictions.get(sentence)
    if written is None or bound.predicted is None or math.isclose(written, bound.predicted):
        return
    raise ValueError(
        f"claim {sentence!r} has predicted={bound.predicted}, but predict() wrote {written} down "
        "before the run; score what was written"
    )

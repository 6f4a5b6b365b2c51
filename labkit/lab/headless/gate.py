"""The gate: every claim in the source must be in the results, passed or rightly refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from labkit.lab.results import Record


@dataclass
class Gate:
    """Ids by outcome; ``refused`` and ``failed`` carry the reason."""

    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """The first thing that keeps the gate shut, in words; None when it is open."""
        for name, reason in self.failed.items():
            return f"claim {name!r} failed: {reason}"
        for name in self.missing:
            return f"claim {name!r} is in the source and not in the results"
        return None


def check(claims: dict[str, bool], records: Iterable[Record]) -> Gate:
    """Compare what the source claims with what the run recorded.

    Args:
        claims: id -> whether the source names ``needs=``, as ``source.promises`` finds them.
        records: this notebook's, of this run. A failed record shuts the gate under any id; of
            several with one id the worst counts.
    """
    gate = Gate()
    by_id: dict[str, list[Record]] = {name: [] for name in claims}
    for record in records:
        if record.kind == "claim":
            by_id.setdefault(record.id, []).append(record)
    for name, its in by_id.items():
        _judge(gate, name, its, claims.get(name, False))
    return gate


def _judge(gate: Gate, name: str, records: list[Record], source_has_needs: bool) -> None:
    if not records:
        gate.missing.append(name)
        return
    problems = [problem for r in records if (problem := _problem(r, source_has_needs))]
    refusals = [record.reason for record in records if record.status == "refused"]
    if problems:
        gate.failed[name] = problems[0]
    elif refusals:
        gate.refused[name] = refusals[0] or "no reason given"
    else:
        gate.passed.append(name)


def _problem(record: Record, source_has_needs: bool) -> str | None:
    """Why the record keeps the gate shut; None for a pass and for a permitted refusal."""
    if record.status == "passed":
        return None
    if record.status != "refused":
        numbers = f"{record.value} for {record.expected}, {record.tolerance}"
        return numbers + (f" ({record.reason})" if record.reason else "")
    if not source_has_needs or record.needs is None or record.devices is None:
        return "refused, and names no need that could refuse it"
    from labkit.devices.inventory import DeviceSet  # brings torch, seconds that few runs need
    from labkit.devices.needs import need_from_json

    if need_from_json(record.needs).refusal(DeviceSet.from_json(record.devices)) is None:
        return f"refused, though its devices support {record.needs}"
    return None

"""The doctor's findings as a table, and in words for those that need attention."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.devices.doctor.doctor_checks import FAILURE, OK, UNKNOWN, WARNING, Finding
from labkit.lab.tables import Table

_ORDER = (FAILURE, WARNING, UNKNOWN, OK)


def doctor_table(findings: Sequence[Finding]) -> Table:
    """The worst first, and one row for devices that are alike; advice where something is wrong."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        alike.setdefault((finding.level, finding.check, finding.found), []).append(finding)
    rows = [
        [level, check, "; ".join(f.device for f in group), found, _advice(group[0])]
        for (level, check, found), group in alike.items()
    ]
    return Table(["", "check", "device", "found", "what to do"], rows)


def _advice(finding: Finding) -> str:
    return finding.about.advice if finding.level in (WARNING, FAILURE) else ""


def doctor_reasons(findings: Sequence[Finding]) -> str:
    """Why each warning and failure matters, with its reference; one line for each check."""
    checks = dict.fromkeys(f.check for f in findings if f.level in (WARNING, FAILURE))
    about = {finding.check: finding.about for finding in findings}
    lines = [f"{name}: {about[name].why}\n  {about[name].reference}" for name in checks]
    return "\n".join(lines) or "nothing needs attention"

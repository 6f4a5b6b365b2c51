"""Run the series: each notebook in a process of its own, within its deadline, leaving nothing."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from labkit.lab import results
from labkit.lab.headless.execution import Execution
from labkit.lab.headless.outcome import Outcome, table
from labkit.lab.headless.progress import Progress
from labkit.lab.headless.state import RunState, only_run
from labkit.models.config import PRESETS


@dataclass(frozen=True)
class Settings:
    """What to run and for how long.

    Args:
        notebooks: folder of the ``[0-9]*.ipynb``.
        build: the run's folder ``<preset>-<devices>`` is made in it.
        only: numbers (``"01"``) or stems; empty for all.
        cell_timeout_s: for each cell; a cell's tag ``timeout=NN`` overrides it.
        notebook_timeout_s: the notebook's metadata ``labkit.timeout_s`` overrides it.
        grace_s: how long processes may take to end after their notebook.
        margin_s: how long past its deadline the executing process itself may take.
    """

    notebooks: Path
    build: Path
    preset: str = "tiny"
    devices: str = "auto"
    only: tuple[str, ...] = ()
    keep_going: bool = True
    cell_timeout_s: float = 300.0
    notebook_timeout_s: float = 600.0
    grace_s: float = 3.0
    margin_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("cell_timeout_s", "notebook_timeout_s", "grace_s", "margin_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.preset not in PRESETS:
            raise ValueError(
                f"PRESET={self.preset!r} is unknown: choose one of {', '.join(PRESETS)}, "
                "such as PRESET=tiny"
            )

    @property
    def run(self) -> Path:
        return self.build.resolve() / f"{self.preset}-{self.devices}"

    def series(self) -> list[Path]:
        """All notebooks, in order."""
        return sorted(self.notebooks.resolve().glob("[0-9]*.ipynb"))

    def chosen(self) -> list[Path]:
        """The notebooks to run, in order.

        Raises:
            ValueError: there are none, or ``only`` names one that does not exist.
        """
        there = self.series()
        if not there:
            raise ValueError(f"no notebook [0-9]*.ipynb in {self.notebooks}")
        unknown = [name for name in self.only if not any(_named(p, name) for p in there)]
        if unknown:
            names = ", ".join(path.stem for path in there)
            raise ValueError(f"no notebook {', '.join(unknown)}; there are: {names}")
        return [p for p in there if not self.only or any(_named(p, name) for name in self.only)]


def _named(path: Path, name: str) -> bool:
    return name in (path.stem, path.name) or name == path.stem.split("_")[0]


class Stop:
    """While it is entered, notes the signal that asks the run to stop; the run looks at it."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> Stop:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup asks to ignore it
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


def execute(settings: Settings, out: TextIO = sys.stdout) -> int:
    """Run, gate, print the table.

    Returns:
        0 when all passed, 1 when any did not, 128 + the number of the signal that stopped it.

    Raises:
        ValueError: nothing to run as asked, or another command runs in the run folder.
        OSError: the run folder cannot be written.
    """
    chosen = settings.chosen()
    from labkit.devices.inventory import choose_devices  # brings torch: after the cheap checks

    choose_devices(settings.devices, 1)  # a kind that is not here fails now, not in each notebook
    settings.run.mkdir(parents=True, exist_ok=True)
    with Stop() as stop, only_run(settings.run):
        outcomes = _run_all(settings, chosen, stop, out)
    print(table(outcomes, of_series=len(settings.series())), file=out, flush=True)
    print(f"executed notebooks, pages and results: {settings.run}", file=out, flush=True)
    if stop.signal:
        again = "runs them again" if settings.only else "resumes"
        print(f"stopped by {signal.Signals(stop.signal).name}; the same command {again}", file=out)
        return 128 + stop.signal
    return 0 if all(outcome.verdict == "passed" for outcome in outcomes) else 1


def _run_all(settings: Settings, chosen: list[Path], stop: Stop, out: TextIO) -> list[Outcome]:
    state = RunState(settings.run)
    if not settings.only:
        _begin_series(settings.run, state, {path.stem for path in chosen})
    executions = [Execution(path, settings, state) for path in chosen]
    kept = set() if settings.only else {e.stem for e in executions if e.can_be_kept()}
    expected = {e.stem: state.seconds(e.stem) for e in executions if e.stem not in kept}
    progress = Progress(out, expected)
    outcomes: list[Outcome] = []
    for execution in executions:
        if stop.signal or (not settings.keep_going and _any_failed(outcomes)):
            outcomes.append(Outcome(execution.stem, "not run"))
        elif execution.stem in kept:
            outcomes.append(execution.kept())
        else:
            outcomes.append(execution.run(progress, stop))
    if not settings.only:
        state.complete = not _any_failed(outcomes)
    state.save()
    return outcomes


def _begin_series(run: Path, state: RunState, stems: set[str]) -> None:
    """Start anew after a green run; notebooks that are gone leave no results behind."""
    if state.complete:
        state.forget()
    state.complete = False
    state.finished = {stem: entry for stem, entry in state.finished.items() if stem in stems}
    path = run / results.FILE_NAME
    results.replace_all(path, [r for r in results.read(path) if r.notebook in stems])


def _any_failed(outcomes: list[Outcome]) -> bool:
    return any(outcome.verdict != "passed" for outcome in outcomes)

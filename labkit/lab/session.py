"""The notebook that is running: its devices, its preset, and where its results go."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from labkit.devices.backends import backend
from labkit.devices.inventory import DeviceSet, choose_devices
from labkit.lab import results
from labkit.lab.results import Record
from labkit.models.config import Preset, preset


@dataclass(repr=False)
class Lab:
    """One run of one notebook; ``start`` makes it.

    Attributes:
        notebook: its stem, such as ``11_two_gpu_layer_split``.
        preset_name, devices: what it runs with.
        folder: the run's folder; ``results.jsonl`` lies in it.
        predictions: id -> value, as written down before the run.
    """

    notebook: str
    preset_name: str
    devices: DeviceSet
    folder: Path
    predictions: dict[str, float] = field(default_factory=dict)
    last_record_s: float = field(default_factory=time.monotonic)

    @property
    def preset(self) -> Preset:
        return preset(self.preset_name)

    @property
    def provenance(self) -> str:
        return self.devices.provenance

    def bind(self, index: int = 0) -> torch.device:
        """Use device ``index`` in this process, and return it.

        On the CPU one device is one core, so that one, two and four of them can be compared:
        torch gets one thread.
        """
        its = backend(self.devices.kind)
        if not its.is_accelerator:
            torch.set_num_threads(1)
        return its.bind(self.devices.devices[index].index)

    def record(self, record: Record) -> None:
        """Complete ``record`` with what the run knows, and append it to the results file.

        ``seconds`` is the time since the previous record: what this one took to come about.
        """
        elapsed_s = time.monotonic() - self.last_record_s
        self.last_record_s = time.monotonic()
        results.append(
            self.folder / results.FILE_NAME,
            replace(
                record,
                provenance=record.provenance or self.provenance,
                devices=self.devices.to_json(),
                preset=self.preset_name,
                versions=results.versions(),
                git=results.git_state(),
                started=results.now_s(),
                seconds=round(elapsed_s, 3),
            ),
        )

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(device.name for device in self.devices.devices))
        return (
            f"{self.notebook} on {self.devices.count} × {names}; preset {self.preset_name}; "
            f"numbers are {self.provenance}"
        )


_current: Lab | None = None  # a notebook's claims need no argument: one kernel runs one notebook


def start(
    notebook: str,
    *,
    preset: str = "tiny",
    devices: str = "auto",
    count: int = 1,
    run: str = "",
    wall_clock: bool = False,
) -> Lab:
    """Open the lab of a notebook; its claims and predictions then go to its results file.

    Args:
        notebook: the notebook's stem.
        preset: tiny, workshop or workstation.
        devices: what ``choose_devices`` takes: auto, cpu, cuda, virtual, virtual:<machine>.
        count: how many devices the notebook is about.
        run: folder of the run; empty when a person runs it, then ``build/interactive``.
        wall_clock: the notebook is about measured time, so that where it would get virtual GPUs it
            takes CPU processes, and says so in every number's provenance.

    Raises:
        ValueError: unknown preset, or devices that are not there.
    """
    global _current
    folder = Path(run) if run else repository_root() / "build" / "interactive"
    chosen = choose_devices(devices, count)
    if wall_clock and chosen.kind == "virtual":
        chosen = choose_devices("cpu", count)
    lab = Lab(notebook, preset, chosen, folder)
    _check_preset(lab)
    path = folder / results.FILE_NAME
    if not run:  # by hand a notebook is run again and again: keep the latest run's records
        results.replace_all(path, [r for r in results.read(path) if r.notebook != notebook])
    _current = lab
    return lab


def _check_preset(lab: Lab) -> None:
    lab.preset  # noqa: B018  raises the ValueError that lists the presets


def current_lab() -> Lab:
    """The lab that ``start`` opened in this kernel.

    Raises:
        RuntimeError: there is none yet.
    """
    if _current is None:
        raise RuntimeError("no lab is open in this kernel; run the cell with start(...) first")
    return _current


def repository_root() -> Path:
    """Folder that holds ``labkit/`` and ``notebooks/``."""
    return Path(__file__).resolve().parents[2]

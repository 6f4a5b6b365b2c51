"""A picture of every device that follows it while cells run.

The figure is drawn off-screen and put into an image widget: 28 ms a frame, where an output widget
with pyplot takes three times as long. Beside the widget stands a plain PNG of the last frame, for
whoever reads the saved notebook without widgets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import ipywidgets
from IPython.display import DisplayHandle, Pretty, display

from labkit.devices.inventory import DeviceSet
from labkit.lab.plots import Picture
from labkit.lab.telemetry_views import draw_telemetry
from labkit.measure.telemetry.cpu_source import ProcessSource
from labkit.measure.telemetry.metrics import Source
from labkit.measure.telemetry.sampler import DEFAULT_HZ, Sampler
from labkit.measure.telemetry.telemetry import Telemetry, sources_for

FRAMES_PER_S = 2.0


class LiveView:
    """Shows devices from ``show`` to ``stop``, the button, or the end of a ``with`` block.

    Can be shown again after it was stopped. Its thread prints nothing; what went wrong while it
    drew stands in the widget.

    Args:
        devices: None for the NVIDIA GPUs that this process may use, and for itself. Of virtual
            ones the processes that execute them are shown: their own clock stands still meanwhile.
        pids: of the ranks, where they run on the CPU.
        seconds: how far back the picture reaches, > 0.
        hz: looks per second.
        headless: nobody watches: no widget and no thread, one plain picture when it stops.
        sources: what to read instead of what ``devices`` says.
    """

    def __init__(
        self,
        devices: DeviceSet | None = None,
        *,
        pids: Sequence[int] = (),
        seconds: float = 30.0,
        hz: float = DEFAULT_HZ,
        headless: bool = False,
        sources: Sequence[Source] | None = None,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds={seconds} must be above 0; try 30")
        executed = devices is not None and devices.kind == "virtual"
        if sources is None:
            sources = [ProcessSource(pids)] if executed else sources_for(devices, pids)
        self._title = "processes that execute the virtual GPUs" if executed else "devices"
        num_devices = sum(len(source.devices) for source in sources)
        keep = max(2, int(seconds * hz)) * max(1, num_devices)
        self._sampler = Sampler(sources, hz, keep)
        self._headless, self._seconds = headless, seconds
        self._image = ipywidgets.Image(format="png")
        self._button = ipywidgets.Button(description="Stop", icon="stop")
        self._button.on_click(lambda _: self.stop())
        self._state = ipywidgets.Label()
        self._plain: DisplayHandle | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()  # the button may be clicked while the block ends

    def show(self) -> None:
        """Begin; does nothing while it is shown."""
        if self._sampler.running:
            return
        self._sampler.start()
        if self._headless:
            return
        self._stopped.clear()
        self._button.disabled, self._state.value = False, f"the last {self._seconds:g} s"
        self._image.layout.display = ""
        self._frame()
        display(ipywidgets.VBox([ipywidgets.HBox([self._button, self._state]), self._image]))
        self._plain = display(
            Pretty("(the last picture stays here when the view stops)"), display_id=True
        )
        _hear_while_a_cell_runs(self._button)
        self._thread = threading.Thread(target=self._loop, name="labkit-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and leave the last frame as a plain picture. Safe to call twice."""
        with self._ending:
            if not self._sampler.running:
                return
            self._stopped.set()
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._sampler.stop()
            if self._headless:
                display(self.picture())
                return
            self._image.layout.display = "none"  # the plain picture takes its place
            self._plain.update(self.picture())
            self._button.disabled, self._state.value = True, "stopped"

    def __enter__(self) -> LiveView:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def telemetry(self) -> Telemetry:
        """What is in the picture now: the last seconds, without what was before a pause."""
        while True:
            try:
                kept = list(self._sampler.samples)
                break
            except RuntimeError:  # the sampler added one meanwhile
                time.sleep(0.001)
        since_s = max((s.time_s for s in kept), default=0.0) - self._seconds
        return Telemetry(self._sampler.devices, [s for s in kept if s.time_s >= since_s])

    def picture(self) -> Picture:
        """The picture now, as a notebook shows it."""
        return draw_telemetry(self.telemetry, self._title, window_s=self._seconds)

    def _loop(self) -> None:
        while not self._stopped.wait(1 / FRAMES_PER_S):
            self._frame()

    def _frame(self) -> None:
        try:
            self._image.value = self.picture()._repr_png_()
        except Exception as error:  # a thread has nobody to raise to, and must not print
            self._state.value = f"{type(error).__name__}: {error}"


def _hear_while_a_cell_runs(button: ipywidgets.Button) -> None:
    """Let clicks come on the subshell that JupyterLab has for widgets, not behind the running cell.

    ipykernel 7 sends what comes for a widget to the shell that last wrote to it, here the one that
    runs cells; without that note JupyterLab's own choice holds. Older ones have no subshells.
    """
    vars(button.comm).pop("_reply_subshell_id", None)

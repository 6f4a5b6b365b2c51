"""The live view: it follows, it stops, it leaves a plain picture, and its threads are silent."""

from __future__ import annotations

import os
import threading
import time

import pytest

from labkit.devices.inventory import choose_devices
from labkit.lab import live_view
from labkit.lab.live_view import LiveView
from labkit.measure.telemetry.metrics import Metered, Reading


class Growing:
    """A device whose activity grows by one percent a look."""

    devices = (Metered("rank 0", "measured:cpu"),)

    def __init__(self):
        self.looks = 0

    def read(self, index):
        self.looks += 1
        return Reading({"cpu_percent": self.looks, "memory_used_bytes": 1 << 30})


class Shown(list):
    """Stands in for ``display``: keeps what was shown, and later in its place."""

    def __call__(self, shown, display_id=False):
        self.append(shown)
        return self

    def update(self, shown):
        self.append(shown)


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(live_view, "display", shown)
    return shown


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("labkit-")]


def view(**options):
    return LiveView(sources=[Growing()], hz=20, seconds=5, **options)


def test_the_image_follows_and_the_last_frame_stays_as_a_plain_picture(shown, capfd):
    with view() as live:
        first = bytes(live._image.value)
        until = time.monotonic() + 20
        while (later := bytes(live._image.value)) == first and time.monotonic() < until:
            time.sleep(0.05)
    assert first.startswith(b"\x89PNG") and later != first
    widget, note, last = shown
    assert last._repr_png_().startswith(b"\x89PNG") and live._image.layout.display == "none"
    assert threads() == [] and capfd.readouterr() == ("", "")


def test_the_button_stops_it_and_it_can_be_shown_again(shown):
    live = view()
    live.show()
    live._button.click()
    assert threads() == [] and live._button.disabled and live._state.value == "stopped"
    looks = live._sampler.sources[0].looks
    time.sleep(0.1)
    assert live._sampler.sources[0].looks == looks
    live.show()
    assert "labkit-sampler" in threads() and not live._button.disabled
    live.stop()
    live.stop()
    assert threads() == []


def test_headless_it_draws_once_and_shows_no_widget(shown):
    with view(headless=True):
        time.sleep(0.1)
    assert len(shown) == 1 and shown[0]._repr_png_().startswith(b"\x89PNG")


def test_an_exception_in_the_block_stops_it(shown):
    with pytest.raises(ZeroDivisionError), view():
        1 / 0  # noqa: B018
    assert threads() == []


def test_a_frame_that_fails_is_said_in_the_widget_and_not_printed(shown, monkeypatch, capfd):
    live = view()
    monkeypatch.setattr(live, "picture", lambda: 1 / 0)
    live._frame()
    assert live._state.value.startswith("ZeroDivisionError") and capfd.readouterr() == ("", "")


def test_only_the_last_seconds_are_kept(shown):
    live = LiveView(sources=[Growing()], hz=20, seconds=0.2)
    live.show()
    time.sleep(0.6)
    live.stop()
    assert 2 <= len(live.telemetry.samples) <= 4 and live.telemetry.seconds <= 0.2


def test_what_was_before_a_pause_is_not_drawn_into_the_window(shown):
    live = LiveView(sources=[Growing()], hz=20, seconds=1.0)
    live.show()
    live.stop()
    time.sleep(1.2)
    began_s = time.perf_counter()
    live.show()
    live.stop()
    assert live.telemetry.samples and live.telemetry.start_s >= began_s
    axes = live.picture().figure.axes
    assert axes[-1].get_xlim() == (0, 1) and "time in s" in axes[-1].get_xlabel()


def test_of_virtual_devices_the_processes_that_execute_them_are_shown(shown):
    live = LiveView(choose_devices("virtual", 2), pids=[os.getpid()] * 2, headless=True)
    with live:
        pass
    assert "execute the virtual GPUs" in shown[0].figure.axes[0].get_title()
    assert [device.name for device in live.telemetry.devices] == ["rank 0", "rank 1"]


def test_without_a_device_there_is_an_empty_picture(shown):
    with LiveView(sources=[], headless=True):
        pass
    assert len(shown) == 1


def test_a_view_of_no_time_is_refused():
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        LiveView(seconds=0, sources=[])

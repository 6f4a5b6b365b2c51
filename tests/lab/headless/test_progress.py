import io

import pytest

from labkit.lab.headless import progress
from labkit.lab.headless.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_at_start_at_least_every_15_seconds_and_at_the_end(clock):
    stream = io.StringIO()
    shown = Progress(stream, {"01_a": 40.0, "02_b": 20.0})
    shown.start("01_a")
    for _ in range(256):  # 32 s in polls of 0.125 s
        clock[0] += 0.125
        shown.update("7/23")
    shown.finish("passed", None)
    assert stream.getvalue().splitlines() == [
        "[1/2] 01_a: start, 0:00 of about 0:40, in all 0:00 of about 1:00",
        "[1/2] 01_a: cell 7/23, 0:15 of about 0:40, in all 0:15 of about 1:00",
        "[1/2] 01_a: cell 7/23, 0:30 of about 0:40, in all 0:30 of about 1:00",
        "[1/2] 01_a: passed, 0:32 of about 0:40, in all 0:32 of about 1:00",
    ]


def test_a_terminal_gets_one_line_that_is_written_over(clock):
    stream = Terminal()
    shown = Progress(stream, {"01_a": None})
    shown.start("01_a")
    for cell in ("", "1/9", "2/9"):
        clock[0] += 1
        shown.update(cell)
    shown.finish("failed", "ValueError: no")
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.count("\r") == 4
    assert "starting the kernel" in text and "cell 2/9, 0:03, in all" in text
    assert text.endswith(": ValueError: no\033[K\n")

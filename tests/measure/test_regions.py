from contextlib import contextmanager

import pytest

from labkit.measure.regions import listening, region


def listener(heard):
    @contextmanager
    def listen(label, kind):
        heard.append(("open", label, kind))
        try:
            yield
        finally:
            heard.append(("close", label, kind))

    return listen


def test_a_region_is_heard_by_every_listener_and_by_none_afterwards():
    first, second = [], []
    with listening(listener(first)), listening(listener(second)), region("F0", "forward"):
        pass
    with region("F1"):
        pass
    assert first == second == [("open", "F0", "forward"), ("close", "F0", "forward")]


def test_a_region_that_raises_is_closed_and_the_listener_removed():
    heard = []
    with pytest.raises(RuntimeError), listening(listener(heard)), region("F0"):
        raise RuntimeError
    with region("F1"):
        pass
    assert [word for word, *_ in heard] == ["open", "close"]

"""Records one steady step of a program: the part that runs on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from labkit.measure.recorder import Recorder
from labkit.measure.recording import CpuSeconds, Recording
from labkit.measure.regions import region


def record_step(
    step: Callable[[], Any],
    *,
    hold: tuple | list = (),
    capacity_bytes: int | None = None,
    warm_up: int = 1,
    timed: int = 0,
) -> Recording:
    """Run ``step`` unrecorded, then once recorded, and return the recording.

    The first call of a step allocates gradients and optimizer state and, in a pipeline, negotiates
    shapes; the recorded one is what all later ones look like.

    Args:
        step: no arguments; on every rank the same program, as it runs together.
        hold: modules, optimizers and tensors that are alive all the time.
        capacity_bytes: memory of the virtual device, None for no limit.
        warm_up: unrecorded calls before, >= 0.
        timed: so many further unrecorded calls and recorded ones, alternating, give the medians of
            each operator's and the whole step's CPU seconds, which ``recorded_cost`` needs; 0
            records once and measures nothing.

    Raises:
        VirtualOutOfMemoryError: the recorded step needs more than ``capacity_bytes``.
        ValueError: ``timed`` is not 0 and the step is not the same program each time.
    """
    for _ in range(warm_up):
        step()
    recorder = Recorder(capacity_bytes=capacity_bytes)
    recorder.hold(*hold)
    recordings, seconds = [], []
    for _ in range(max(1, timed)):
        if timed:
            seconds.append(_cpu_seconds(step))
        with recorder:
            step()
        recordings.append(recorder.take())
    return median_recording(recordings, seconds) if timed else recordings[0]


def _cpu_seconds(step: Callable[[], Any]) -> CpuSeconds:
    main_s, all_s = time.thread_time(), time.process_time()
    step()
    main_s, all_s = time.thread_time() - main_s, time.process_time() - all_s
    return CpuSeconds(main_s, max(0.0, all_s - main_s))


def median_recording(
    recordings: Sequence[Recording], seconds: Sequence[CpuSeconds]
) -> Recording:
    """The last of several recordings of one program, with the medians of the measured seconds.

    Raises:
        ValueError: the recordings are not of one program.
    """
    last = recordings[-1]
    for other in recordings:
        if [e.name for e in other.events] != [e.name for e in last.events]:
            raise ValueError(
                f"rank {last.rank}: a step of {len(other.events)} events and one of "
                f"{len(last.events)} are not the same program; record a steady step"
            )
    own = [median(same) for same in zip(*([e.own_s for e in r.events] for r in recordings),
                                        strict=True)]
    events = tuple(e._replace(own_s=s) for e, s in zip(last.events, own, strict=True))
    cpu_s = CpuSeconds(median(s.main for s in seconds), median(s.others for s in seconds))
    return replace(last, events=events, cpu_s=cpu_s)


@contextmanager
def stage_regions(*stages: Any) -> Iterator[None]:
    """Name what torch's pipeline stages run: F3, B3, I3, W3 ("1F3" where a rank has several).

    torch labels the actions of some of its schedules for the profiler and of others (1F1B) not;
    this wraps the stage's own methods, so it holds for every schedule.

    Args:
        stages: ``torch.distributed.pipelining.PipelineStage`` objects of this rank.
    """
    with ExitStack() as stack:
        for stage in stages:
            prefix = str(stage.stage_index) if len(stages) > 1 else ""
            for method, named in _STAGE_METHODS.items():
                stack.enter_context(_wrapped(stage, method, named, prefix))
        yield


def _backward(chunk: int, *_: Any, full_backward: bool = True, **__: Any) -> tuple[str, str]:
    return (f"B{chunk}" if full_backward else f"I{chunk}"), "backward"


_STAGE_METHODS = {
    "forward_one_chunk": lambda chunk, *_, **__: (f"F{chunk}", "forward"),
    "backward_one_chunk": _backward,
    "backward_weight_one_chunk": lambda chunk, *_, **__: (f"W{chunk}", "weight"),
}


@contextmanager
def _wrapped(stage: Any, method: str, named: Callable, prefix: str) -> Iterator[None]:
    inner = getattr(stage, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        label, kind = named(*args, **kwargs)
        with region(prefix + label, kind):
            return inner(*args, **kwargs)

    setattr(stage, method, wrapper)
    try:
        yield
    finally:
        delattr(stage, method)

"""Records one steady step of a program: the part that runs on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

from labkit.measure.regions import region
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Recording, Unrecorded


def record_step(
    step: Callable[[], Any],
    *,
    hold: tuple | list = (),
    capacity_bytes: int | None = None,
    warm_up: int = 1,
    timed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Recording:
    """Run ``step`` unrecorded, then once recorded, and return the recording.

    The first call of a step allocates gradients and optimizer state and, in a pipeline, negotiates
    shapes; the recorded one is what all later ones look like.

    Args:
        step: no arguments; on every rank the same program, as it runs together.
        hold: modules, optimizers and tensors that are alive all the time.
        capacity_bytes: memory of the virtual device, None for no limit.
        warm_up: unrecorded calls before, >= 0.
        timed: so many further unrecorded calls and recorded ones, alternating, measure the step's
            and each operator's seconds, which ``recorded_cost`` needs; 0 records once.
        group: the ranks that start each timed call together; None for a rank alone.

    Raises:
        VirtualOutOfMemoryError: the recorded step needs more than ``capacity_bytes``.
        ValueError: ``timed`` is not 0 and the step is not the same program each time.
    """
    for _ in range(warm_up):
        step()
    recorder = Recorder(capacity_bytes=capacity_bytes)
    recorder.hold(*hold)
    if not timed:
        return _recorded(recorder, step)
    calls, recordings = [], []
    for _ in range(timed):
        calls.append(_timed(step, group))
        recordings.append(_recorded(recorder, step))
    return joined_recording(recordings, calls)


def _recorded(recorder: Recorder, step: Callable[[], Any]) -> Recording:
    with recorder:
        step()
    return recorder.take()


def _timed(step: Callable[[], Any], group: dist.ProcessGroup | None) -> Unrecorded:
    if group is not None:
        dist.barrier(group)
    wall_s, main_s, all_s = time.perf_counter(), time.thread_time(), time.process_time()
    step()
    main_s, all_s = time.thread_time() - main_s, time.process_time() - all_s
    return Unrecorded(main_s, max(0.0, all_s - main_s), (time.perf_counter() - wall_s,))


def joined_recording(recordings: Sequence[Recording], calls: Sequence[Unrecorded]) -> Recording:
    """The last of several recordings of one program, with each operator's median seconds.

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
    of_each_event = zip(*([e.own_s for e in r.events] for r in recordings), strict=True)
    events = tuple(
        event._replace(own_s=median(own_s))
        for event, own_s in zip(last.events, of_each_event, strict=True)
    )
    fastest = min(calls, key=lambda call: call.main_s + call.others_s)
    walls_s = tuple(call.walls_s[0] for call in calls)
    return replace(last, events=events, unrecorded=fastest._replace(walls_s=walls_s))


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

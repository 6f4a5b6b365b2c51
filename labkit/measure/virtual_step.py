"""Records one steady step of a program: the part that runs on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from labkit.measure.recorder import Recorder, region
from labkit.measure.recording import Recording


def record_step(
    step: Callable[[], Any],
    *,
    hold: tuple | list = (),
    capacity_bytes: int | None = None,
    warm_up: int = 1,
) -> Recording:
    """Run ``step`` unrecorded, then once recorded, and return the recording.

    The first call of a step allocates gradients and optimizer state and, in a pipeline, negotiates
    shapes; the recorded one is what all later ones look like.

    Args:
        step: no arguments; on every rank the same program, as it runs together.
        hold: modules, optimizers and tensors that are alive all the time.
        capacity_bytes: memory of the virtual device, None for no limit.
        warm_up: unrecorded calls before, >= 0.

    Raises:
        VirtualOutOfMemoryError: the recorded step needs more than ``capacity_bytes``.
    """
    for _ in range(warm_up):
        step()
    recorder = Recorder(capacity_bytes=capacity_bytes)
    recorder.hold(*hold)
    with recorder:
        step()
    return recorder.take()


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

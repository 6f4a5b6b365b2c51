"""What others say of a model's memory: PyTorch's memory tracker, and Accelerate's estimate."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.parallel.planning.own_chain import fake_copy


def tracked_peak_bytes(model: nn.Module, step: Callable[[nn.Module], object]) -> int:
    """Peak of a step by ``torch.distributed._tools.mem_tracker.MemTracker`` on fake tensors.

    It leaves the optimizer's step out here, and counts what autograd keeps by its own hooks.

    Args:
        model: any; a fake copy runs, nothing is held.
        step: forward and backward of the model that it is given, made of fake tensors.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode() as mode:
        copied = fake_copy(model, mode)
        tracker = MemTracker()
        tracker.track_external(copied)
        with tracker:
            step(copied)
        peak = tracker.get_tracker_snapshot("peak")
    return sum(by_kind["Total"] for by_kind in peak.values())


def accelerate_training_bytes(model: nn.Module) -> dict[str, int] | None:
    """What ``accelerate estimate-memory`` says for a model; None where accelerate is not installed.

    It counts weights alone, and four times as much for training with Adam; it knows neither the
    batch nor the activations.

    Returns:
        ``weights`` and ``training``, in bytes, in float32.
    """
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    weights, _ = calculate_maximum_sizes(model)
    stages = estimate_training_usage(weights, "float32")
    return {"weights": int(weights), "training": int(max(stages.values()))}

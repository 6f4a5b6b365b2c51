"""A layer's backward in two halves, rehearsed on fake tensors as zero-bubble schedules run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from labkit.measure.virtual.recorder import Recorder
from labkit.parallel.planning.layer_rehearsal import Exit, MakeInput, Pass, trained_weights


@dataclass(frozen=True)
class SplitBackward:
    """A layer's backward in two halves, as zero-bubble schedules run it.

    Attributes:
        inputs: I, the gradient of x alone; its peak is beside weights, what the forward keeps and
            the gradient that came in.
        first_weights, weights: W that makes the gradients of the weights, or adds to them; the peak
            is beside what lay there before.
        waiting_bytes: alive between I and W, beside what the forward keeps and x.
    """

    inputs: Pass
    first_weights: Pass
    weights: Pass
    waiting_bytes: int


def rehearse_split(
    layer: nn.Module, make_input: MakeInput, loss: Callable[[Tensor], Tensor] | None = None
) -> SplitBackward:
    """Rehearse I and W of a layer that is not in the first stage; as `rehearse_layer`."""
    recorder = Recorder(rank=0)
    recorder.hold(layer)
    inputs, first_weights, waiting_bytes = _split(recorder, layer, make_input, loss)
    _, weights, _ = _split(recorder, layer, make_input, loss)
    return SplitBackward(inputs, first_weights, weights, waiting_bytes)


def _split(recorder: Recorder, layer: nn.Module, make_input: MakeInput, loss):
    x = make_input().requires_grad_()
    recorder.hold(x)
    with recorder:
        y = layer(x) if loss is None else loss(layer(x))
    root = Exit.apply(y) if loss is None else y
    del y
    recorder.take()
    before = recorder.storages.bytes
    with recorder:
        begin = None if loss is not None else [torch.empty(())]
        unfinished = stage_backward_input([root], begin, [x], iter(trained_weights(layer)))[1]
    inputs = recorder.take()
    x.grad = None  # sent to the stage before
    between = recorder.storages.bytes
    with recorder:
        stage_backward_weight(iter(trained_weights(layer)), unfinished)
    weights = recorder.take()
    return (
        Pass(inputs.events, inputs.peak_bytes - before),
        Pass(weights.events, weights.peak_bytes - between),
        between - before,
    )

"""What one layer costs in time and memory, found by a rehearsal: its operators run on fake tensors.

torch's fake tensors have shapes and no numbers, so a layer of any size is rehearsed in
milliseconds and holds no memory; the recorder sees the same operators, bytes, storages and
collectives as in a real run. The operators are those of the CPU, which virtual GPUs execute.

    forward    x ──> layer ──> y          kept: what autograd holds of x, y and everything between
    backward   gradient of x <── layer <── gradient of y
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.measure.memory import storage_bytes
from labkit.measure.virtual.recorder import Recorder
from labkit.measure.virtual.recording import Event

MakeInput = Callable[[], Tensor]


@dataclass(frozen=True)
class Pass:
    """One direction of a layer.

    Attributes:
        events: its operators, in order.
        peak_bytes: most alive at once; forward: beside weights and input; backward: beside weights
            and the gradients that were there before, what the layer has kept counted.
    """

    events: tuple[Event, ...]
    peak_bytes: int


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one microbatch.

    Attributes:
        forward: the forward.
        first_backward: a backward that makes the gradients of the weights.
        backward: one that adds to them.
        parameter_bytes: weights and buffers.
        gradient_bytes: of the trained weights.
        trained_sizes: elements of each trained weight, of a divided one those held here.
        partial_sizes: elements of each gradient that is left as this rank's share of a sum.
        input_bytes, output_bytes: of the storages of x and y; 0 for a y that is a view of x.
        message_bytes: of the elements of y, which cross a cut behind this layer.
        passes_input: y is a view of x.
        kept_bytes: from the forward for the backward, without x and y.
        keeps_input, keeps_output: whether the backward needs x, or y, too.
        left_bytes: alive behind the backward, too, beside the gradients of the weights.
    """

    forward: Pass
    first_backward: Pass
    backward: Pass
    parameter_bytes: int
    gradient_bytes: int
    trained_sizes: tuple[int, ...]
    partial_sizes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    message_bytes: int
    passes_input: bool
    kept_bytes: int
    keeps_input: bool
    keeps_output: bool
    left_bytes: int


class _Entry(torch.autograd.Function):
    """Makes x as the layer before would, and drops its gradient where that layer would take it."""

    @staticmethod
    def forward(ctx, leaf: Tensor, make: MakeInput) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        return None, None


class Exit(torch.autograd.Function):
    """Stands for the layers behind: keeps nothing of y, and hands back a gradient of its own."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def rehearse_layer(
    layer: nn.Module,
    make_input: MakeInput,
    loss: Callable[[Tensor], Tensor] | None = None,
    *,
    takes_data: bool = False,
) -> LayerProfile:
    """Rehearse a layer; call inside a ``FakeTensorMode`` that the layer was made in.

    Args:
        make_input: a new x.
        loss: behind the last layer, output -> scalar; its backward then begins there.
        takes_data: x comes from no layer, so nobody wants its gradient.
    """
    make = make_input if takes_data else partial(_made, make_input)
    parameters, trained = list(layer.parameters()), trained_weights(layer)
    if any(isinstance(p, DTensor) for p in parameters):
        # a DTensor's first call of an operator works out how to divide it, in further operators
        _Rehearsal(Recorder(rank=0), layer, make, loss)
        layer.zero_grad()
    recorder = Recorder(rank=0)
    recorder.hold(layer)
    first = _Rehearsal(recorder, layer, make, loss)
    again = _Rehearsal(recorder, layer, make, loss)
    return LayerProfile(
        first.forward,
        first.backward,
        again.backward,
        storage_bytes([*parameters, *layer.buffers()]),
        storage_bytes(trained),
        tuple(_local(p).numel() for p in trained),
        tuple(_local(p).numel() for p in trained if _is_partial(p.grad)),
        first.input_bytes,
        first.output_bytes,
        first.message_bytes,
        first.passes_input,
        first.kept_bytes,
        first.keeps_input,
        first.keeps_output,
        again.left_bytes,
    )


class _Rehearsal:
    """One forward and one backward."""

    def __init__(self, recorder: Recorder, layer: nn.Module, make_input: MakeInput, loss) -> None:
        self.storages, self._recorder = recorder.storages, recorder
        before = self.storages.bytes
        root = self._forward(layer, make_input, loss)
        if root.requires_grad:
            begin = torch.empty(()) if loss is None else None  # a loss makes its own 1
            with recorder:
                torch.autograd.backward(root, begin)
        recording = recorder.take()
        self.backward = Pass(recording.events, recording.peak_bytes - before)
        self.left_bytes = self.storages.bytes - before

    def _forward(self, layer: nn.Module, make_input: MakeInput, loss) -> Tensor:
        without_x = self.storages.bytes
        x = make_input()
        self._recorder.hold(x)
        before = self.storages.bytes
        with self._recorder:
            y = layer(x)
            if loss is not None:
                y = loss(y)
        recording = self._recorder.take()
        self.forward = Pass(recording.events, recording.peak_bytes - before)
        self.passes_input = y.untyped_storage()._cdata == x.untyped_storage()._cdata
        self.message_bytes = y.nbytes
        self.output_bytes = 0 if self.passes_input else y.untyped_storage().nbytes()
        self.input_bytes = before - without_x
        root = y if loss is not None else Exit.apply(y)
        with_both = self.storages.bytes
        del x
        without_input = self.storages.bytes
        del y
        kept = self.storages.bytes
        self.keeps_input = self.input_bytes > 0 and (
            self.passes_input and kept == with_both or without_input == with_both
        )
        self.keeps_output = loss is None and not self.passes_input and kept == without_input
        self.kept_bytes = kept - without_x
        self.kept_bytes -= self.input_bytes * self.keeps_input
        self.kept_bytes -= self.output_bytes * self.keeps_output
        self._recorder.take()
        return root


def _made(make_input: MakeInput) -> Tensor:
    """x as the layer before makes it: with a gradient to give back, if it can have one."""
    x = make_input()
    if not x.is_floating_point():
        return x
    return _Entry.apply(torch.empty((), requires_grad=True), make_input)


def trained_weights(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)

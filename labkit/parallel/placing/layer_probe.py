"""Run every layer once and count what it costs: FLOPs, and the bytes that autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from labkit.models.transformer import Transformer
from labkit.parallel.placing.costs import ADAMW_BYTES_PER_PARAMETER, LayerCost


def named_layers(model: Transformer) -> dict[str, nn.Module]:
    """The layers between which `model` can be cut, in order, by the names of its parameters."""
    layers = {f"layers.{name}": block for name, block in model.layers.items()}
    first = {} if model.embed is None else {"embed": model.embed}
    last = {} if model.head is None else {"head": model.head}
    return first | layers | last


def measure_layer_costs(
    layers: Mapping[str, nn.Module],
    example_input: Tensor,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    optimizer_bytes_per_parameter: int = ADAMW_BYTES_PER_PARAMETER,
) -> list[LayerCost]:
    """Run every layer once, forward and backward, and count what it does.

    FLOPs come from PyTorch's FLOP counter, activations from what autograd saves (each storage
    once; parameters and buffers are not counted). Gradients and buffers are left as they were.

    Args:
        layers: name -> layer, in order; each takes one tensor, the output of the one before.
        example_input: one microbatch for the first layer.
        loss: applied behind the last layer and counted with it, output -> scalar.
        optimizer_bytes_per_parameter: as in `predict_layer_costs`.

    Raises:
        ValueError: `layers` is empty.
    """
    if not layers:
        raise ValueError("layers is empty; give at least one named layer")
    costs, x, last = [], example_input, list(layers)[-1]
    for name, layer in layers.items():
        run = _run_once(layer, x, loss if name == last else None)
        costs.append(_cost_of(name, layer, run, optimizer_bytes_per_parameter))
        x = run.output.requires_grad_(run.output.is_floating_point())
    return costs


@dataclass(frozen=True)
class _Run:
    output: Tensor
    forward_flops: int
    backward_flops: int
    activation_bytes: int


def _cost_of(name: str, layer: nn.Module, run: _Run, bytes_per_parameter: int) -> LayerCost:
    trained = [p for p in layer.parameters() if p.requires_grad]
    return LayerCost(
        name=name,
        forward_flops=run.forward_flops,
        backward_flops=run.backward_flops,
        parameter_bytes=sum(p.numel() * p.element_size() for p in layer.parameters()),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        optimizer_bytes=sum(p.numel() for p in trained) * bytes_per_parameter,
        activation_bytes=run.activation_bytes,
        output_bytes=run.output.numel() * run.output.element_size(),
    )


def _run_once(layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] | None) -> _Run:
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    held = (*layer.parameters(), *buffers.values())
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with flop_counter() as forward:
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            output = torch.func.functional_call(layer, buffers, (x,))
            end = output if loss is None else loss(output)
    inputs = [tensor for tensor in (*layer.parameters(), x) if tensor.requires_grad]
    with flop_counter() as backward:
        if inputs:
            torch.autograd.grad(end, inputs, torch.ones_like(end), allow_unused=True)
    return _Run(
        output.detach(), forward.get_total_flops(), backward.get_total_flops(), sum(kept.values())
    )


def flop_counter() -> FlopCounterMode:
    """PyTorch's FLOP counter, taught the CPU's fused attention, for which it has no formula.

    The formulas are those that it has for the same operator on a GPU.
    """
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        },
    )


def _attention_flops(query: tuple, key: tuple, value: tuple, *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(
    grad_out: tuple, query: tuple, key: tuple, value: tuple, *_: object, **__: object
) -> int:
    return sdpa_backward_flop_count(grad_out, query, key, value)

"""The oracle: what a split model computes must equal what one device computes, name by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parity:
    """How far two sets of named tensors are apart.

    Attributes:
        max_abs_error: largest |candidate - reference| over all elements.
        max_rel_error: largest error of a tensor over that reference tensor's largest element; for
            the tensors in ``noise``, over the largest element of all.
        worst: name of the tensor with the largest relative error.
        compared: number of tensors.
        noise: names of those that differ, but are so small in both sets that their dtype cannot
            tell them from 0. A wrong one of that size would not be seen; float64 shows it.
    """

    max_abs_error: float
    max_rel_error: float
    worst: str
    compared: int
    noise: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.compared} tensors, worst {self.worst}: "
            f"{self.max_abs_error:.2g} absolute, {self.max_rel_error:.2g} relative"
        )
        if self.noise:
            text += f"; {len(self.noise)} of them 0 but for rounding, as {self.noise[0]}"
        return text


def compare(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> Parity:
    """Compare two sets of tensors that must be equal by name and shape.

    A gradient can be exactly 0, as a key bias's is, for softmax cancels it: what rounding leaves
    of it differs with every order of summing. So two tensors whose elements are at most the
    (coarser) dtype's spacing at the largest element of all count as noise.

    Returns:
        The errors in float64. NaN or infinity in either makes both errors infinite.

    Raises:
        ValueError: a name is missing or extra, or a shape differs; the message names it.
    """
    _check_names(reference, candidate)
    absolute, relative, worst, noise = 0.0, -1.0, "", []
    largest = max(_size(tensor) for tensor in reference.values())
    for name, expected in reference.items():
        found = candidate[name].detach().double().cpu()
        error = (found - expected.detach().double().cpu()).abs().max().item()
        spacing = max(_spacing(expected), _spacing(candidate[name])) * largest
        size = _size(expected)
        if error and max(size, _size(found)) <= spacing:
            noise.append(name)
            size = largest
        scaled = error / max(size, 1e-30)
        if not scaled < float("inf"):  # NaN compares false with everything
            error = scaled = float("inf")
        absolute = max(absolute, error)
        if scaled > relative:
            relative, worst = scaled, name
    return Parity(absolute, relative, worst, len(reference), tuple(noise))


def _size(tensor: Tensor) -> float:
    """The largest element."""
    return tensor.detach().abs().max().item()


def _spacing(tensor: Tensor) -> float:
    """Of the numbers next to 1; integers are exact."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _check_names(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> None:
    if not reference:
        raise ValueError("the reference holds no tensor; take it after backward()")
    missing, extra = reference.keys() - candidate.keys(), candidate.keys() - reference.keys()
    if missing or extra:
        raise ValueError(
            f"names differ: missing {sorted(missing)[:3]} ({len(missing)}), "
            f"extra {sorted(extra)[:3]} ({len(extra)}); compare whole models, every stage joined"
        )
    for name, expected in reference.items():
        if expected.shape != candidate[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(candidate[name].shape)}, the reference "
                f"{tuple(expected.shape)}"
            )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient, by the parameter's full name.

    Raises:
        ValueError: a parameter that needs a gradient has none; a lost gradient is the commonest
            silent fault of a split model.
    """
    without = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        raise ValueError(f"{len(without)} parameters have no gradient, the first is {without[0]}")
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def training_snapshot(
    modules: Iterable[nn.Module],
    loss_and_backward: Callable[[], Tensor | float],
    learning_rate: float = 0.1,
) -> dict[str, Tensor]:
    """What one step of plain SGD makes of the modules, by name.

    SGD, because Adam divides a wrong scale of the gradients away again.

    Args:
        modules: the whole model, or the stages of one rank.
        loss_and_backward: makes the gradients and returns the loss.

    Returns:
        `loss`, `gradient of <name>`, and after the step `parameter <name>` and `buffer <name>`.
        The modules are left changed, their gradients in place.

    Raises:
        ValueError: a parameter that needs a gradient has none.
    """
    modules = list(modules)
    for module in modules:
        module.zero_grad()
    snapshot = {"loss": torch.as_tensor(loss_and_backward()).detach().clone()}
    for module in modules:
        named = gradients(module)
        snapshot.update({f"gradient of {name}": value for name, value in named.items()})
    torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=learning_rate).step()
    for module in modules:
        for kind, named in [
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        ]:
            snapshot.update({f"{kind} {n}": value.detach().clone() for n, value in named})
    return snapshot


def joined(parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all ranks as one whole model's; the `loss` of a snapshot is every rank's.

    Raises:
        ValueError: two ranks hold the same name, or different losses.
    """
    whole: dict[str, Tensor] = {}
    for rank, tensors in parts.items():
        for name in sorted(whole.keys() & tensors.keys()):
            if name != "loss":
                raise ValueError(f"rank {rank} holds {name}, which another rank holds too")
            if not torch.equal(whole[name], tensors[name]):
                raise ValueError(f"loss is {tensors[name]} on rank {rank}, {whole[name]} before")
        whole.update(tensors)
    return whole

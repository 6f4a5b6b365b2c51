"""A tensor on a simulated device: real values and gradients, computed by the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from labkit.devices.simulated.simulated_memory import LEDGER, SIMULATED, simulated_index

HOST = torch.device("cpu")

aten = torch.ops.aten
ASSIGN_DATA = torch.Tensor.data.__set__

# these take indices from the host, as on a real accelerator
TAKES_HOST_INDICES = {"aten::index", "aten::index_put", "aten::index_put_"}


class SimulatedTensor(torch.Tensor):
    """Wrapper around a CPU tensor ``host`` that torch takes for a tensor on ``lazy:<index>``."""

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int) -> SimulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(SIMULATED, index),
        )
        tensor._host = host
        tensor._block = LEDGER.block(host, index)
        return tensor

    def __init__(self, host: torch.Tensor, index: int) -> None:
        pass  # Tensor.__init__ takes no arguments

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func == ASSIGN_DATA:  # torch replaced its own half of the tensor only
            args[0]._host, args[0]._block = args[1]._host, args[1]._block
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return SPECIAL.get(func, _run_on_host)(func, args, dict(kwargs or {}))

    # torch.nn.Module.to exchanges the contents of a Parameter that can be flattened, so that the
    # Parameter stays the same object and an optimizer made before the move still has it
    def __tensor_flatten__(self):
        return ["_host"], self.device.index

    @staticmethod
    def __tensor_unflatten__(inner, index, outer_size, outer_stride):
        return SimulatedTensor(inner["_host"], index)

    def __repr__(self, *, tensor_contents=None) -> str:
        notes = f", device='{self.device}'"
        if self.grad_fn is not None:
            notes += f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            notes += ", requires_grad=True"
        prefix = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{prefix}{repr(self._host)[:-1]}{notes})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict) -> SimulatedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment; try x.detach()"
            )
        twin = SimulatedTensor(self._host.clone(), self.device.index)
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        twin.requires_grad_(self.requires_grad)
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"a tensor on {self.device} cannot be pickled; save x.cpu() instead")

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )


# An operator's arguments and results are values or flat lists of them.


def _host_of(value):
    if isinstance(value, list | tuple):
        return [_host_of(item) for item in value]
    return value._host if isinstance(value, SimulatedTensor) else value


def _tensors_of(value) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _run_on_host(func, args: tuple, kwargs: dict):
    """Run an operator on the CPU tensors inside; its results live where its inputs do."""
    inputs = _named_tensors(func, args, kwargs)
    index = _common_index(func, inputs)
    wanted = kwargs.get("device")  # of new_zeros, empty_like and their kin
    if wanted is not None:
        index = simulated_index(wanted)
        kwargs["device"] = wanted if index is None else HOST
    result = func(*_host_of(args), **{name: _host_of(value) for name, value in kwargs.items()})
    if index is None:
        return result
    given = {id(t._host): t for _, t in inputs if isinstance(t, SimulatedTensor)}
    return _wrap(result, given, index)


def _wrap(value, given: dict[int, SimulatedTensor], index: int):
    if isinstance(value, list | tuple):
        return type(value)(_wrap(item, given, index) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    tensor = given.get(id(value))  # an in-place operator returns its argument
    if tensor is None:
        # conj() sets a bit on the host's tensor, which torch would look for on the wrapper
        return SimulatedTensor(value.resolve_conj().resolve_neg(), index)
    _follow_host(tensor)
    return tensor


def _follow_host(tensor: SimulatedTensor) -> None:
    """Take over the shape and the storage that an operator such as ``squeeze_`` gave the host."""
    host = tensor._host
    tensor._block = LEDGER.block(host, tensor.device.index)
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (
        host.shape, host.stride(), host.storage_offset()
    ):  # fmt: skip
        tensor.data = SimulatedTensor(host, tensor.device.index)


def _named_tensors(func, args: tuple, kwargs: dict) -> list[tuple[str, torch.Tensor]]:
    names = (argument.name for argument in func._schema.arguments)
    named = (*zip(names, args, strict=False), *kwargs.items())
    return [(name, tensor) for name, value in named for tensor in _tensors_of(value)]


def _common_index(func, inputs: list[tuple[str, torch.Tensor]]) -> int:
    """Index of the one device of all inputs; a CPU tensor without dimensions may join anywhere.

    Raises:
        RuntimeError: the inputs lie on several devices.
    """
    first = None
    for name, tensor in inputs:
        device = tensor.device
        if device == HOST and (
            tensor.dim() == 0 or (name == "indices" and func._schema.name in TAKES_HOST_INDICES)
        ):
            continue
        first = first or device
        if device != first:
            raise _mismatch(func, name, device, first)
    return first.index


def _mismatch(func, name: str, device: torch.device, first: torch.device) -> RuntimeError:
    """The error in torch's words: of its elementwise loop, or of the check before other kernels."""
    if torch.Tag.pointwise in func.tags:
        found = f"found at least two devices, {first} and {device}!"
    else:
        found = (
            f"got {name} is on {device}, different from other tensors on {first} "
            f"(when checking argument in method {func._schema.name})"
        )
    return RuntimeError(f"Expected all tensors to be on the same device, but {found}")


def _move(func, args: tuple, kwargs: dict) -> torch.Tensor:
    """``aten::_to_copy``: another device, dtype or both."""
    (tensor,) = args
    target = kwargs.pop("device", None) or tensor.device
    kwargs.pop("non_blocking", None)  # nothing overlaps here
    index = simulated_index(target)
    host = func(tensor._host, **kwargs, device=target if index is None else None)
    moved = host if index is None else SimulatedTensor(host, index)
    LEDGER.record_transfer(tensor.device, moved.device, host.nbytes)
    return moved


def copy_into(func, args: tuple, kwargs: dict) -> torch.Tensor:
    """``aten::copy_``: the one operator whose tensors may lie on two devices."""
    target, source, *_ = args
    _host_of(target).copy_(_host_of(source))
    LEDGER.record_transfer(source.device, target.device, target.nbytes)
    return target


def _read_scalar(func, args: tuple, kwargs: dict):
    """``aten::_local_scalar_dense``: ``x.item()`` brings one element to the host."""
    (tensor,) = args
    LEDGER.record_transfer(tensor.device, HOST, tensor.element_size())
    return func(tensor._host)


SPECIAL: dict[torch._ops.OpOverload, Callable] = {
    aten._to_copy.default: _move,
    aten.copy_.default: copy_into,
    aten._local_scalar_dense.default: _read_scalar,
}


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """Attention by the kernel the CPU would choose; torch decides by device type, before us."""
    operands = (query, key, value, attn_mask)
    choice = torch._fused_sdp_choice(*map(_host_of, operands), dropout_p, is_causal, **options)
    with torch._C.DisableTorchFunctionSubclass():
        if choice != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
            return F.scaled_dot_product_attention(*operands, dropout_p, is_causal, **options)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            blocked = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = blocked.masked_fill(~attn_mask, float("-inf"))
        output, _ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale")
        )
    return output

"""Reads sends, receives and collectives off the operators that torch dispatches for them.

Two families reach the dispatcher: ``c10d::*``, on which ``torch.distributed`` and FSDP2 run, and
``_c10d_functional::*``, on which DTensor runs. ``Work.wait()`` reaches it in neither; a functional
collective's ``wait_tensor`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.measure.virtual.operator_costs import moved_bytes
from labkit.measure.virtual.recording import Event

NAMESPACES = frozenset({"c10d", "_c10d_functional"})

# operator -> (collective, argument that it reads, argument that it writes or "" for its result)
_COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", "tensors", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "c10d::broadcast_": ("broadcast", "tensors", "tensors"),
    "c10d::reduce_": ("reduce", "tensors", "tensors"),
    "c10d::allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "c10d::allgather_coalesced_": ("all_gather", "input_list", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs"),
    "c10d::gather_": ("gather", "input_tensors", "output_tensors"),
    "c10d::scatter_": ("scatter", "input_tensors", "output_tensors"),
    "c10d::alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input", "output"),
    "c10d::barrier": ("barrier", "tensor", "tensor"),
    "_c10d_functional::all_reduce": ("all_reduce", "input", ""),
    "_c10d_functional::all_reduce_": ("all_reduce", "input", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs", ""),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input", ""),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input", "out"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs", ""),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input", ""),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input", "out"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", ""),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input", ""),
    "_c10d_functional::broadcast": ("broadcast", "input", ""),
    "_c10d_functional::broadcast_": ("broadcast", "input", "input"),
}
_NO_COMMUNICATION = frozenset({"c10d::check_for_nan", "_c10d_functional::_wrap_tensor_autograd"})


class Call(NamedTuple):
    """One dispatched operator with its arguments by name and its result."""

    name: str
    arguments: dict[str, Any]
    result: Any


def event_of(
    operator: Any, args: tuple, kwargs: dict, result: Any, number: Callable[[torch.Tensor], int]
) -> Event | None:
    """The event of a communication operator; None where it moves nothing.

    Args:
        number: gives the number of a tensor's storage.

    Raises:
        NotImplementedError: the operator is none that the clock can time; the message says what
            to use in its place.
    """
    call = Call(operator._schema.name, _named(operator, args, kwargs), result)
    if call.name in _NO_COMMUNICATION:
        return None
    if call.name in ("c10d::send", "c10d::recv_"):
        return _message(call, number)
    if call.name == "_c10d_functional::wait_tensor":
        return Event("wait", "wait", reads=(number(call.arguments["tensor"]),))
    if call.name in _COLLECTIVES:
        return _collective(call, number)
    raise NotImplementedError(
        f"{call.name} cannot be timed: its peers or its payload are not known when it is called; "
        "use isend, irecv with a source, or a plain collective"
    )


def _named(operator: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name; those at their default are not passed to a dispatch mode."""
    schema = operator._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), args, strict=False))
    named.update(kwargs)
    return named


def _message(call: Call, number: Callable[[torch.Tensor], int]) -> Event:
    """Send or receive; torch passes the peer's rank within the group."""
    tensors = list(_tensors(call.arguments["tensors"]))
    storages = tuple(number(tensor) for tensor in tensors)
    group = _members(call.arguments["process_group"])
    sends = call.name == "c10d::send"
    peer = group[call.arguments["dst" if sends else "src"]]
    return Event(
        "send" if sends else "recv",
        f"{'send to' if sends else 'receive from'} {peer}",
        num_bytes=sum(map(moved_bytes, tensors)),
        reads=storages if sends else (),
        writes=() if sends else storages,
        ranks=(peer,),
        tag=call.arguments["tag"],
    )


def _collective(call: Call, number: Callable[[torch.Tensor], int]) -> Event:
    kind, source, target = _COLLECTIVES[call.name]
    inputs = list(_tensors(call.arguments[source]))
    outputs = list(_tensors(call.arguments[target] if target else call.result))
    members = _members(call.arguments.get("process_group", call.arguments.get("group_name")))
    return Event(
        "collective",
        kind,
        num_bytes=_payload(kind, inputs, outputs, len(members)),
        reads=tuple(map(number, inputs)),
        writes=tuple(map(number, outputs)),
        ranks=members,
        # a collective that is called without async_op waits before it returns; the functional ones
        # wait in wait_tensor
        blocking=not call.arguments.get("async_op", True),
    )


def _payload(kind: str, inputs: list, outputs: list, num_members: int) -> int:
    """Bytes of the whole collective: of the tensor that is reduced, gathered or spread."""
    read, written = sum(map(moved_bytes, inputs)), sum(map(moved_bytes, outputs))
    payload = {
        "barrier": 0,
        "all_gather": written,
        "gather": read * num_members,
        "scatter": written * num_members,
    }
    return payload.get(kind, read)


def _members(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, given as torch's boxed group, as its name, or itself."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _tensors(part)

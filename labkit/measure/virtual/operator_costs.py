"""What one operator costs, read off its arguments: FLOPs by torch's formulas, bytes moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import flop_counter

aten = torch.ops.aten

# torch.utils.flop_counter has formulas for the CUDA attention kernels and none for the CPU's; the
# work is the same: two matrix products forward, five backward, the causal half not discounted.
_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        flop_counter.sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}

# Only move or combine numbers: their bytes are their cost, and no FLOP formula is missing.
_MEMORY_BOUND = frozenset(
    """_cdist_forward _fused_adam_ _fused_adamw_ _fused_sgd_ _local_scalar_dense _log_softmax
    _log_softmax_backward_data _pack_padded_sequence _reshape_copy _safe_softmax _softmax
    _softmax_backward_data _to_copy _unsafe_index _unsafe_view all amax amin aminmax any arange
    argmax argmin argsort as_strided_copy avg_pool2d bernoulli bernoulli_ bincount cat clone
    col2im complex constant_pad_nd copy copy_ count_nonzero cummax cumprod cumsum embedding
    embedding_dense_backward equal exponential_ eye fill fill_ flip full full_like gather glu
    glu_backward histc im2col index index_add index_add_ index_copy index_copy_ index_fill
    index_fill_ index_put index_put_ index_select isin isnan linalg_vector_norm linspace
    log_sigmoid_forward logsumexp masked_fill masked_fill_ masked_scatter masked_select max
    max_pool2d_with_indices max_pool2d_with_indices_backward mean median min mse_loss
    mse_loss_backward multinomial native_batch_norm native_batch_norm_backward native_dropout
    native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward nonzero norm normal_ ones ones_like prod rand rand_like randint randn
    randn_like randperm repeat roll scalar_tensor scatter scatter_ scatter_add scatter_add_
    scatter_reduce select_backward select_scatter slice_backward slice_scatter sort stack std
    std_mean sum tile topk trace tril tril_ triu triu_ unfold_backward uniform_ unique_dim var
    var_mean where zero_ zeros zeros_like _fused_rms_norm _fused_rms_norm_backward
    _foreach_norm""".split()
)
_ALLOCATE_ONLY = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided resize_ set_ lift_fresh".split()
)
_READ_AS_MUCH_AS_WRITTEN = frozenset("embedding gather index index_select".split())
_OVERWRITE = frozenset("bernoulli_ copy_ exponential_ fill_ normal_ uniform_ zero_".split())
_WRITE_WHAT_THEY_ARE_GIVEN = frozenset("index_copy_ index_put_ scatter_".split())
_IGNORED_NAMESPACES = frozenset({"profiler", "prim", "inductor", "debugprims"})


class OperatorClass(NamedTuple):
    """How one operator is counted, decided once per operator.

    Attributes:
        name: the schema's name.
        free: a view, an allocation or bookkeeping: no kernel runs.
        flops: formula, or None.
        known: has a formula, or is known to be bound by memory.
        reads: "all" its arguments, only those it does not change ("others": a copy), or as many
            bytes as it writes ("gather"). "scatter" writes as many bytes as it is given.
        written_args: positions of arguments that it changes in place.
        written_kwargs: names of those that are passed by keyword.
    """

    name: str
    free: bool
    flops: Callable[..., int] | None
    known: bool
    reads: str
    written_args: tuple[int, ...]
    written_kwargs: tuple[str, ...]


def classify(operator: Any) -> OperatorClass:
    """The class of a torch operator overload.

    >>> classify(torch.ops.aten.t.default).free, classify(torch.ops.aten.mm.default).free
    (True, False)
    >>> classify(torch.ops.aten.linalg_svd.default).known
    False
    """
    schema = operator._schema
    base = schema.name.split("::")[1]
    formula = _formula(operator.overloadpacket)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    free = (
        operator.is_view
        or operator.namespace in _IGNORED_NAMESPACES
        or (operator.namespace == "aten" and base in _ALLOCATE_ONLY)
    )
    return OperatorClass(
        schema.name,
        free,
        formula,
        free or formula is not None or _is_memory_bound(operator, base),
        _what_it_reads(operator, base),
        tuple(written),
        tuple(schema.arguments[i].name for i in written),
    )


def _what_it_reads(operator: Any, base: str) -> str:
    if base in _READ_AS_MUCH_AS_WRITTEN:
        return "gather"
    if base in _WRITE_WHAT_THEY_ARE_GIVEN:
        return "scatter"
    writes_out = operator.namespace == "fsdp" or "out" in operator._overloadname
    overwrites = writes_out or base in _OVERWRITE
    return "others" if overwrites else "all"


def _formula(packet: Any) -> Callable[..., int] | None:
    """A function of the operator's arguments and its result ``out_val``."""
    return _CPU_ATTENTION.get(packet) or flop_counter.flop_registry.get(packet)


def _is_memory_bound(operator: Any, base: str) -> bool:
    if operator.namespace == "fsdp":  # FSDP2's copies into and out of flat buffers
        return True
    tags = operator.tags
    return operator.namespace == "aten" and (
        base in _MEMORY_BOUND
        or torch.Tag.pointwise in tags
        or torch.Tag.reduction in tags
        or base.startswith("_foreach_")
    )


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; those of an expanded one count once.

    >>> moved_bytes(torch.zeros(2, 3)), moved_bytes(torch.zeros(1, 3).expand(5, 3))
    (24, 12)
    """
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def flat_tensors(thing: Any) -> list[torch.Tensor]:
    """The tensors in an argument or result: itself, or those in lists and tuples."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    found: list[torch.Tensor] = []
    if isinstance(thing, (list, tuple)):
        for part in thing:
            if isinstance(part, torch.Tensor):
                found.append(part)
            elif isinstance(part, (list, tuple)):
                found += flat_tensors(part)
    return found


def written_tensors(its: OperatorClass, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments that the operator changes in place."""
    written = [args[i] for i in its.written_args if i < len(args)]
    written += [kwargs[name] for name in its.written_kwargs if name in kwargs]
    return flat_tensors(written)


def bytes_of_call(
    its: OperatorClass, inputs: list[torch.Tensor], written: list[torch.Tensor]
) -> int:
    """Bytes that one call reads and writes, each tensor's elements once per direction."""
    out = sum([moved_bytes(tensor) for tensor in written])
    if its.reads == "gather":
        return 2 * out
    if its.reads in ("others", "scatter"):
        changed = {id(tensor) for tensor in written}
        inputs = [tensor for tensor in inputs if id(tensor) not in changed]
    read = sum([moved_bytes(tensor) for tensor in inputs])
    return 2 * read if its.reads == "scatter" else out + read

"""Tensor and sequence parallelism of the lab's transformer over one mesh axis.

Two ways with equal results: layers made by hand (``tensor_layers``), which are faster on a CPU
(``benchmarks/tensor_parallel.py``), and PyTorch's own plan of DTensors. Sequence parallelism
(Korthikanti et al. 2022, section 4.2.2) is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from labkit.measure.regions import region
from labkit.models.transformer import Transformer, next_token_loss
from labkit.parallel.sharding.shards import settle_gradients
from labkit.parallel.sharding.tensor_checks import (
    check_plan,
    check_same_on_every_rank,
    check_tensor_sizes,
    sharded_sizes,
)
from labkit.parallel.sharding.tensor_layers import (
    ColumnLinear,
    RowLinear,
    copied,
    split_vocabulary_loss,
)

STYLES = ("hand", "dtensor")
_COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up")
_ROWS = ("attention.out", "mlp.down")


def tensor_parallel(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    style: str = "hand",
    sequence: bool = False,
    split_vocabulary: bool = False,
) -> Transformer:
    """Divide every block's matrices over the ranks of ``mesh``, in place; make the optimizer after.

    Args:
        model: the whole model or a pipeline's part, equal on all ranks of the mesh.
        mesh: one-dimensional; its t ranks share each layer.
        style: ``hand`` or ``dtensor``; ``sequence`` needs the latter.
        sequence: keep only T / t tokens on each rank between the layers: all-gather and
            reduce-scatter in place of each all-reduce, and activations t times smaller there.
        split_vocabulary: divide the head, too; the loss is then ``loss_of(model)``'s.

    Returns:
        ``model``. Input and output stay whole, but for logits of a divided vocabulary.

    Raises:
        ValueError: a size is no multiple of t, the ranks were given different models, the style is
            unknown, or ``sequence`` is asked of a part or of layers by hand.
    """
    _check(model, mesh, style, sequence, split_vocabulary)
    if style == "hand":
        _by_hand(model, mesh, split_vocabulary)
    else:
        _by_plan(model, mesh, sequence, split_vocabulary)
    return model


def _check(
    model: Transformer, mesh: DeviceMesh, style: str, sequence: bool, split_vocabulary: bool
) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"mesh has the axes {mesh.mesh_dim_names}; give one, as mesh['tensor']")
    if style not in STYLES:
        raise ValueError(f"style={style!r} is unknown; choose one of {', '.join(STYLES)}")
    if sequence and style == "hand":
        raise ValueError("sequence=True with style='hand' is not made; use style='dtensor'")
    if sequence and (model.embed is None or model.head is None):
        raise ValueError("sequence=True needs the whole model, not a pipeline's part of it")
    sizes = sharded_sizes(model.config, sequence=sequence, split_vocabulary=split_vocabulary)
    check_tensor_sizes(mesh.size(), sizes)
    settings = (model.config, list(model.layers), style, sequence, split_vocabulary)
    check_same_on_every_rank(mesh, settings)


def _by_hand(model: Transformer, mesh: DeviceMesh, split_vocabulary: bool) -> None:
    group = mesh.get_group()

    def copy_input(module: nn.Module, args: tuple) -> tuple:
        return (copied(args[0], group), *args[1:])

    for block in model.layers.values():
        for name in _COLUMNS:
            block.set_submodule(name, ColumnLinear(block.get_submodule(name), mesh))
        for name in _ROWS:
            block.set_submodule(name, RowLinear(block.get_submodule(name), mesh))
        block.attention.register_forward_pre_hook(copy_input)
        block.mlp.register_forward_pre_hook(copy_input)
    if split_vocabulary and model.head is not None:
        model.head.logits = ColumnLinear(model.head.logits, mesh)
        model.head.logits.register_forward_pre_hook(copy_input)


def block_plan(*, sequence: bool = False) -> dict[str, ParallelStyle]:
    """PyTorch's plan for one block. Its inputs and outputs are plain tensors, whole or T / t.

    The attention's input is prepared once for query, key and value together: prepared by each of
    them, its gradient would be reduced three times.
    """
    between = Shard(1) if sequence else Replicate()
    whole = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {"attention": whole, "mlp": whole}
    plan |= {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in _ROWS}
    if sequence:
        norm = SequenceParallel(use_local_output=True)
        plan |= {"attention_norm": norm, "mlp_norm": norm}
    return plan


def _by_plan(model: Transformer, mesh: DeviceMesh, sequence: bool, split_vocabulary: bool) -> None:
    for block in model.layers.values():
        _parallelize(block, mesh, block_plan(sequence=sequence))
    between = Shard(1) if sequence else Replicate()
    if sequence:
        model.register_forward_pre_hook(partial(_check_tokens, mesh.size()))
        model.embed = parallelize_module(
            model.embed,
            mesh,
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        )
    if model.head is None:
        return
    plan: dict[str, ParallelStyle] = {}
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    if split_vocabulary:
        plan["logits"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
        parallelize_module(model.head, mesh, plan)  # nothing follows that could meet the DTensor
    elif sequence:
        plan["logits"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        _parallelize(model.head, mesh, plan)


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    check_plan(module, plan, mesh.size())
    parallelize_module(module, mesh, plan)


def _check_tokens(t: int, module: nn.Module, args: tuple) -> None:
    check_tensor_sizes(t, {"tokens": args[0].shape[1]})


def loss_of(model: Transformer) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean next-token loss that fits the model's logits, whole or divided by hand."""
    logits = None if model.head is None else model.head.logits
    if isinstance(logits, ColumnLinear):
        return partial(split_vocabulary_loss, group=logits.group)
    return next_token_loss


def loss_and_backward(model: Transformer, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Forward and backward of a whole model, however it is divided; the loss is detached.

    Logits that are DTensors need torch's ``loss_parallel`` around loss and backward.
    """
    with region("forward", "forward"):
        logits = model(ids_BT)
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        with region("forward", "forward"):
            loss = loss_of(model)(logits, targets_BT)
        with region("backward", "backward"):
            loss.backward()
    settle_gradients(model)
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss

"""Column- and row-parallel linear layers by hand, and the loss over a divided vocabulary.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3. Each rank of a group of t holds 1/t of every
matrix; x and y are whole on all ranks:

    x (.., D) -> copied -> ColumnLinear -> (.., H / t) -> RowLinear: summed, + bias -> y (.., D)

``copied`` does nothing forward and adds up the ranks' gradients backward; ``summed`` adds up
forward and does nothing backward: two all-reduces of x's size for a pair, in each direction one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from labkit.measure.regions import region


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        # in place: what the linear layers behind hand back is a tensor of its own
        gradient = gradient.contiguous()
        with region("all-reduce", "collective"):
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        with region("all-reduce", "collective"):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand ``x``, equal on all ranks, to column-parallel layers; its gradient is all-reduced."""
    return _Copied.apply(x, group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce the ranks' partial results ``x`` in place; contiguous, as ``F.linear`` gives."""
    return _Summed.apply(x, group)


def own_part(whole: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's equal part of ``whole`` along ``dim``, as a parameter of its own."""
    part = whole.detach().chunk(group.size(), dim)[group.rank()]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))


class ColumnLinear(nn.Module):
    """1/t of a linear layer's outputs: (.., D) -> (.., D_out / t); communicates nothing.

    Args:
        whole: the layer, equal on all ranks.
        mesh: one-dimensional, the t ranks; D_out must be a multiple of t.
    """

    placements = {"weight": Shard(0), "bias": Shard(0)}

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.group = mesh, mesh.get_group()
        self.weight = own_part(whole.weight, 0, self.group)
        self.bias = None if whole.bias is None else own_part(whole.bias, 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """1/t of a linear layer's inputs: (.., D_in / t) -> (.., D), one all-reduce.

    Every rank holds the whole bias and adds it after the sum, hence once.

    Args:
        whole: the layer, equal on all ranks.
        mesh: one-dimensional, the t ranks; D_in must be a multiple of t.
    """

    placements = {"weight": Shard(1), "bias": Replicate()}

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.group = mesh, mesh.get_group()
        self.weight = own_part(whole.weight, 1, self.group)
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = summed(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class _SplitVocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, targets_N, group):
        local_N = targets_N - group.rank() * logits_NV.shape[1]
        mine_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
        local_N = local_N.where(mine_N, 0)
        largest_N = logits_NV.amax(1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        exponent_NV = (logits_NV - largest_N[:, None]).exp_()
        target_N = logits_NV.gather(1, local_N[:, None])[:, 0] - largest_N
        sums_2N = torch.stack([exponent_NV.sum(1), target_N.where(mine_N, 0.0)])
        dist.all_reduce(sums_2N, group=group)
        probability_NV = exponent_NV.div_(sums_2N[0, :, None])
        ctx.save_for_backward(probability_NV, local_N, mine_N)
        return (sums_2N[0].log() - sums_2N[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        probability_NV, local_N, mine_N = ctx.saved_tensors
        target_NV = torch.zeros_like(probability_NV)
        target_NV.scatter_(1, local_N[:, None], mine_N[:, None].to(probability_NV.dtype))
        return (probability_NV - target_NV) * (gradient / len(local_N)), None, None


def split_vocabulary_loss(
    logits_BTV: Tensor, targets_BT: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Mean cross-entropy of logits whose vocabulary is divided over the ranks, without a gather.

    Args:
        logits_BTV: (B, T, V / t): this rank's part of the vocabulary, in rank order.
        targets_BT: (B, T) ids of the whole vocabulary.

    Returns:
        The same scalar on every rank; two all-reduces of B T and 2 B T values.
    """
    return _SplitVocabularyLoss.apply(logits_BTV.flatten(0, 1), targets_BT.flatten(), group)

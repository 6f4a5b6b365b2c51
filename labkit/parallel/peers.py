"""The ranks of one process group: what each has to say before the step, and one error for all.

An error that only one rank raises leaves the others waiting for it in a receive. So whatever can be
wrong is told to all first, and then every rank raises the same message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Peers:
    """The members of `group`; without `torch.distributed`, this process alone.

    Args:
        group: None for all ranks.
        device: where the tensors of a collective lie; may be set before the first one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None
    ) -> None:
        self.group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self.device = device
        self.size = 1 if self.group is None else self.group.size()
        self.rank = 0 if self.group is None else self.group.rank()

    def global_rank(self, rank: int) -> int:
        """The number of the member `rank` among all processes."""
        return dist.get_global_rank(self.group, rank)

    def gather_number(self, number: int) -> tuple[int, ...]:
        """One int64 of every rank, in the order of ranks."""
        if self.size == 1:
            return (number,)
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        every = torch.empty(self.size, dtype=torch.int64, device=self.device)
        dist.all_gather_single(every, own, group=self.group)
        return tuple(every.tolist())

    def gather(self, thing: Any) -> list[Any]:
        """Any picklable thing of every rank, in the order of ranks."""
        if self.size == 1:
            return [thing]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, thing, group=self.group)
        return every

    def tell(self, thing: Any, *, source: int) -> Any:
        """The thing that the rank `source` passes, on every rank."""
        if self.size == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, group_src=source, group=self.group, device=self.device)
        return box[0]

    def raise_together(self, fault: str | None) -> None:
        """Raise on every rank if any rank found a fault.

        Raises:
            ValueError: the first faulty rank's words, with its number.
        """
        for rank, found in enumerate(self.gather(fault)):
            if found is not None:
                raise ValueError(found if self.size == 1 else f"rank {rank}: {found}")

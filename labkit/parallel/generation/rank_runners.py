"""Runs a decoder whose parts lie on the ranks of a process group, one part on each.

One rank draws the tokens and tells the others: ranks that drew for themselves could differ in a
rounding, and from then on generate different texts. Whether a sequence has ended follows from the
tokens, so every rank knows it and no flag of its own is needed.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.measure.regions import region
from labkit.models.decoder import Decoder
from labkit.models.kv_cache import KVCache, Step
from labkit.parallel.generation.runners import Draw, Result, check_cover, need_whole
from labkit.parallel.generation.tensor_shards import shard_decoder
from labkit.parallel.peers import Peers
from labkit.parallel.pipelining.links import open_links


class LayersOnRanks:
    """This rank's layers; activations go from rank to rank, tokens from the last to all.

    With one group of sequences in flight this is a layer split, with more a pipeline.

    Args:
        part: this rank's; rank i + 1 continues where rank i ends. A whole model alone on its rank.
        group: None for all ranks.

    Raises:
        ValueError: (on every rank) the ranks' parts do not make up the model in order.
    """

    def __init__(self, part: Decoder, group: dist.ProcessGroup | None = None) -> None:
        self.part, self.device = part, part.device
        self.peers = Peers(group, part.device)
        held = [
            range(first, last + 1)
            for first, last in self.peers.gather((part.held[0], part.held[-1]))
        ]
        check_cover(held, part.shape.layers, self.peers.size)
        size = self.peers.size
        pairs = {(i, i + 1) for i in range(size - 1)} | {(size - 1, i) for i in range(size - 1)}
        self._links = open_links(self.peers, pairs)
        self._on_their_way: deque[tuple[dist.Work, Tensor]] = deque()

    def new_cache(self, rows: int, columns: int) -> KVCache:
        return self.part.new_cache(rows, columns)

    def start(
        self, ids_BT: Tensor, step: Step, cache: KVCache, draw: Draw, label: str = ""
    ) -> Result:
        rank, last = self.peers.rank, self.peers.size - 1
        x = ids_BT
        if rank > 0:
            shape = (*ids_BT.shape, self.part.shape.width)
            x = torch.empty(shape, dtype=self.part.dtype, device=self.device)
            self._receive(x, rank - 1).wait()
        with region(label, "forward"):
            x = self.part(x, cache, step)
            if rank == last:
                x = draw(x)
            for other in [rank + 1] if rank < last else range(last):
                self._send(x, other)
        if rank == last:
            return lambda: x
        tokens_B = torch.empty(len(ids_BT), dtype=torch.int64, device=self.device)
        arrival = self._receive(tokens_B, last)

        def wait() -> Tensor:
            arrival.wait()
            return tokens_B

        return wait

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._on_their_way:
            self._on_their_way.popleft()[0].wait()

    def _receive(self, buffer: Tensor, source: int) -> dist.Work:
        return self._links[source, self.peers.rank].receive(buffer)

    def _send(self, tensor: Tensor, target: int) -> None:
        """Send without waiting; the tensor is kept until it has left."""
        while self._on_their_way and self._on_their_way[0][0].is_completed():
            self._on_their_way.popleft()[0].wait()
        tensor = tensor.contiguous()
        work = self._links[self.peers.rank, target].send(tensor)
        self._on_their_way.append((work, tensor))


class TensorOnRanks:
    """This rank's shard of every layer; all take each step together, rank 0 draws.

    Args:
        decoder: the whole model, equal on all ranks; it is divided in place.
        group: the t ranks; None for all.

    Raises:
        ValueError: the model is only a part, its family cannot be divided, or its heads,
            key-value heads or hidden width are no multiple of t; the message says which t would do.
    """

    def __init__(self, decoder: Decoder, group: dist.ProcessGroup | None = None) -> None:
        need_whole(decoder)
        self.peers = Peers(group, decoder.device)
        self.decoder = shard_decoder(decoder, self.peers.group) if self.peers.group else decoder
        self.device = decoder.device

    def new_cache(self, rows: int, columns: int) -> KVCache:
        return self.decoder.new_cache(rows, columns)

    def start(
        self, ids_BT: Tensor, step: Step, cache: KVCache, draw: Draw, label: str = ""
    ) -> Result:
        with region(label, "forward"):
            logits_BV = self.decoder(ids_BT, cache, step)
            if self.peers.rank == 0:
                tokens_B = draw(logits_BV)
            else:
                tokens_B = torch.empty(len(ids_BT), dtype=torch.int64, device=self.device)
            if self.peers.size > 1:
                dist.broadcast(tokens_B, group_src=0, group=self.peers.group)
        return lambda: tokens_B

    def finish(self) -> None:
        pass

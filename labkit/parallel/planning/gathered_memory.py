"""What FSDP2 holds of a stage beside a rank's own shards, layer by layer.

U is a unit's whole weights: a block's, or "rest", those of embedding and head together. A gather
fills a flat buffer of U and copies it out into U; a scatter copies gradients of U into a flat
buffer, which lives until the next scatter.

    without a pipeline     forward    rest, U of the block, its flat buffer
                           backward   rest, U of the block, the next block's flat buffer that
                                      comes, and the flat buffer of gradients that leaves
    in a pipeline          a forward leaves all U gathered, a backward gives them up one by one
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatheredMemory:
    """Bytes beside the layers' own, by place of the layer in its stage.

    Args:
        whole: bytes of each layer's undivided weights.
        is_end: which layers are embedding or head, one unit together.
        shards: ranks that they are divided over, >= 2.
        kept: from a forward to the backward, as in a pipeline.
    """

    whole: tuple[int, ...]
    is_end: tuple[bool, ...]
    shards: int
    kept: bool

    @property
    def rest(self) -> int:
        return sum(size for size, end in zip(self.whole, self.is_end, strict=True) if end)

    def _block(self, place: int) -> int:
        """U of the block there; 0 where none is."""
        there = 0 <= place < len(self.whole) and not self.is_end[place]
        return self.whole[place] if there else 0

    def _blocks(self, places: range) -> int:
        return sum(map(self._block, places))

    def forward(self, place: int, *, gathered: bool) -> int:
        """While a layer computes.

        Args:
            gathered: all was, before the action.
        """
        if gathered:
            return self.rest + self._blocks(range(len(self.whole)))
        if self.is_end[place]:
            before = self._blocks(range(place)) if self.kept else 0
            return self.rest + before + (self.rest if place == 0 else 0)
        held = self._blocks(range(place + 1)) if self.kept else self._block(place)
        return self.rest + held + self._block(place)

    def backward(self, place: int, *, gathered: bool) -> int:
        """While a layer's gradients are computed; its own are counted with the layer."""
        return self._waiting(place, gathered) + self._block(place) + self._block(place + 1)

    def scatter(self, place: int, *, gathered: bool) -> int:
        """While a block's gradients leave: they, their flat buffer, and what comes of it."""
        size = self._block(place)
        return self._waiting(place, gathered) + 2 * size + size // self.shards

    def _waiting(self, place: int, gathered: bool) -> int:
        """Of the blocks that come after this one in a backward."""
        if self.kept:
            return self.rest + (self._blocks(range(place)) if gathered else 0)
        return self.rest + (self._block(place - 1) if self._block(place) else 0)

    def scatter_of_rest(self) -> int:
        """The flat buffer of its gradients, and what comes of it."""
        return self.rest + self.rest // self.shards

"""How the memory of one stage rises and falls, from the profiles of its layers.

What a microbatch holds between its forward and its backward is summed layer by layer. What one
layer hands to the next counts once, and only while somebody keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.parallel.planning.layer_rehearsal import LayerProfile


@dataclass(frozen=True)
class StageMemory:
    """A stage's bytes for one microbatch, beside weights, gradients and the stage's input.

    Args:
        layers: their profiles, in order.
        shards: of FSDP2; a rank keeps one of so many parts of each weight and gradient.
    """

    layers: tuple[LayerProfile, ...]
    shards: int = 1

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers) // self.shards

    @property
    def gradient_bytes(self) -> int:
        return sum(layer.gradient_bytes for layer in self.layers) // self.shards

    @property
    def trained_sizes(self) -> tuple[int, ...]:
        sizes = sum((layer.trained_sizes for layer in self.layers), ())
        return tuple(-(-size // self.shards) for size in sizes)

    def gathered_bytes(self, is_end: Sequence[bool], *, kept: bool) -> int:
        """Whole weights that FSDP2 holds beside its parts.

        Args:
            is_end: which layers make up the unit that stays gathered.
            kept: all stay gathered, and a block's gradients are on their way: half a block, as
                seen in runs of two to six blocks; else a block is at work while the next is
                gathered or its gradients leave.
        """
        if self.shards == 1:
            return 0
        pairs = list(zip(self.layers, is_end, strict=True))
        block = max((layer.parameter_bytes for layer, end in pairs if not end), default=0)
        if kept:
            return self.parameter_bytes * self.shards + block // 2
        return sum(layer.parameter_bytes for layer, end in pairs if end) + 2 * block

    @property
    def input_bytes(self) -> int:
        return self.layers[0].input_bytes

    @property
    def message_bytes(self) -> int:
        """Of what goes to the next stage, and of the gradient that comes back."""
        return self.layers[-1].message_bytes

    @property
    def output_is_kept(self) -> bool:
        """Its own backward needs the output, which so counts as held."""
        return self._walk[2]

    @property
    def held_bytes(self) -> int:
        """From the end of a forward to the start of its backward."""
        return self._walk[1][-1]

    @property
    def forward_peak_bytes(self) -> int:
        """Most during a forward."""
        return self._walk[0]

    def backward_peak_bytes(self, *, first: bool) -> int:
        """Most during a backward, what is held of its microbatch counted.

        Args:
            first: the backward makes the gradients of the weights, else it adds to them.
        """
        peak, made = 0, 0
        for place in reversed(range(len(self.layers))):
            layer = self.layers[place]
            its = layer.first_backward if first else layer.backward
            now = self._beside[place] + its.peak_bytes + made
            if place + 1 < len(self.layers):
                now += self.message_bytes  # the incoming gradient has a name until the end
            peak = max(peak, now)
            made += layer.left_bytes + (layer.gradient_bytes // self.shards if first else 0)
        return peak

    @cached_property
    def _walk(self) -> tuple[int, list[int], bool]:
        """Forward peak; what is held before each layer, and at the end; whether y is kept."""
        peak, below, before = 0, 0, []
        x_bytes, x_kept = 0, False  # the stage's input counts elsewhere
        for layer in self.layers:
            before.append(below)
            peak = max(peak, below + x_bytes + layer.forward.peak_bytes)
            x_kept = x_kept or layer.keeps_input
            below += layer.kept_bytes
            if not layer.passes_input:
                below += x_bytes if x_kept else 0
                x_bytes, x_kept = layer.output_bytes, layer.keeps_output
        before.append(below + (x_bytes if x_kept else 0))
        return peak, before, x_kept

    @cached_property
    def _beside(self) -> list[int]:
        """By layer, what is alive in its backward and does not count in the layer's own peak."""
        beside = self._walk[1][:-1]
        first = self.layers[0]
        beside[0] -= first.input_bytes if first.keeps_input else 0
        for place, (layer, previous) in enumerate(zip(self.layers[1:], self.layers, strict=False)):
            if previous.keeps_output and not layer.keeps_input:
                beside[place + 1] += previous.output_bytes
        return beside

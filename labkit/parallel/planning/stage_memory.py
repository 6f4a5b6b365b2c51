"""How the memory of one stage rises and falls, from the profiles of its layers.

What a microbatch holds between its forward and its backward is summed layer by layer. What one
layer hands to the next counts once, and only while somebody keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from labkit.parallel.planning.gathered_memory import GatheredMemory
from labkit.parallel.planning.layer_rehearsal import LayerProfile, Pass
from labkit.parallel.planning.split_rehearsal import SplitBackward
from labkit.parallel.scheduling.schedules import Kind


@dataclass(frozen=True)
class StageMemory:
    """A stage's bytes for one microbatch, beside weights, gradients and the stage's input.

    Args:
        layers: their profiles, in order.
        gathered: what FSDP2 holds beside the rank's shards; None where the stage is not sharded.
        split: the layers' backwards in halves; () where the stage runs none: W of the first stage
            is a whole backward, since nobody waits for its I.
        keeps_root: the schedule splits backwards, also where the stage has nothing to split.
    """

    layers: tuple[LayerProfile, ...]
    gathered: GatheredMemory | None = None
    split: tuple[SplitBackward, ...] = ()
    keeps_root: bool = False

    def passes(self, kind: Kind, *, makes_gradients: bool) -> list[Pass]:
        """What the layers run in an action.

        Args:
            makes_gradients: those of the weights, else adds to them.
        """
        if kind == "F":
            return [layer.forward for layer in self.layers]
        if kind == "I":
            return [half.inputs for half in self.split]
        if kind == "W" and self.split:
            return [h.first_weights if makes_gradients else h.weights for h in self.split]
        return [
            layer.first_backward if makes_gradients else layer.backward for layer in self.layers
        ]

    @property
    def shards(self) -> int:
        return 1 if self.gathered is None else self.gathered.shards

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

    def forward_peak_bytes(self, *, gathered: bool) -> int:
        """Most during a forward.

        Args:
            gathered: the stage's weights are whole already.
        """
        its = self.gathered
        return max(
            peak + (0 if its is None else its.forward(place, gathered=gathered))
            for place, peak in enumerate(self._forward_peaks)
        )

    def backward_peak_bytes(self, *, first: bool, gathered: bool) -> int:
        """Most during a backward, what is held of its microbatch counted.

        Args:
            first: the backward makes the gradients of the weights, else it adds to them.
            gathered: the stage's weights are whole already.
        """
        peak, made, its = 0, 0, self.gathered
        for place in reversed(range(len(self.layers))):
            layer = self.layers[place]
            computed = layer.first_backward if first or its else layer.backward
            beside = self._beside[place] + made
            if place + 1 < len(self.layers):
                beside += self.message_bytes  # the incoming gradient has a name until the end
            made += layer.left_bytes
            if its is None:
                peak = max(peak, beside + computed.peak_bytes)
                made += layer.gradient_bytes if first else 0
                continue
            now = beside + computed.peak_bytes + its.backward(place, gathered=gathered)
            leaving = beside + layer.input_bytes + its.scatter(place, gathered=gathered)
            peak = max(peak, now, leaving)
            if its.is_end[place]:
                made += layer.gradient_bytes  # until the scatter that ends the backward
            elif first:
                made += layer.gradient_bytes // self.shards
        return peak if its is None else max(peak, made + its.scatter_of_rest())

    @property
    def root_bytes(self) -> int:
        """Of the output, from which a split backward starts and which so is held until then."""
        return self.message_bytes if self.keeps_root and not self.output_is_kept else 0

    @property
    def waiting_bytes(self) -> int:
        """Between I and W, beside what is held from the forward."""
        return sum(half.waiting_bytes for half in self.split)

    @property
    def input_peak_bytes(self) -> int:
        """Most during an I, beside what is held of its microbatch; 0 where I has nothing to do."""
        peak, waiting = 0, 0
        for half in reversed(self.split):
            peak = max(peak, waiting + half.inputs.peak_bytes)
            waiting += half.waiting_bytes
        return peak

    def weight_peak_bytes(self, *, first: bool) -> int:
        """Most during a W, beside what is held of its microbatch and waits since I, which goes
        group by group of weights as their gradients come."""
        peak, made = 0, 0
        for half, layer in zip(self.split, self.layers, strict=True):
            peak = max(peak, made + (half.first_weights if first else half.weights).peak_bytes)
            made += max(0, layer.gradient_bytes - half.waiting_bytes) if first else 0
        return peak

    @property
    def _forward_peaks(self) -> list[int]:
        return self._walk[0]

    @cached_property
    def _walk(self) -> tuple[list[int], list[int], bool]:
        """Peak in each layer's forward; what is held before each, and at the end; is y kept."""
        peaks, below, before = [], 0, []
        x_bytes, x_kept = 0, False  # the stage's input counts elsewhere
        for layer in self.layers:
            before.append(below)
            peaks.append(below + x_bytes + layer.forward.peak_bytes)
            x_kept = x_kept or layer.keeps_input
            below += layer.kept_bytes
            if not layer.passes_input:
                below += x_bytes if x_kept else 0
                x_bytes, x_kept = layer.output_bytes, layer.keeps_output
        before.append(below + (x_bytes if x_kept else 0))
        return peaks, before, x_kept

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

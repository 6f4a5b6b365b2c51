"""What a layer costs, as `place` needs to know it; `planning.layer_costs` finds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """One layer, for one microbatch.

    Attributes:
        name: as in the model, `layers.3`.
        forward_flops, backward_flops: of the matrix products in each direction.
        parameter_bytes, gradient_bytes, optimizer_bytes: held all the time.
        activation_bytes: kept from the forward for the backward, per microbatch in flight.
        output_bytes: what crosses the cut when the model is cut behind this layer.
    """

    name: str
    forward_flops: int
    backward_flops: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    output_bytes: int

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and value < 0:
                raise ValueError(f"{field}={value} of layer {self.name!r} must be >= 0")

    @property
    def flops(self) -> int:
        """Forward and backward of one microbatch."""
        return self.forward_flops + self.backward_flops

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def total(costs: Iterable[LayerCost]) -> LayerCost:
    """The whole model as one layer; its output is the last layer's."""
    costs = list(costs)
    summed = {
        field: sum(getattr(cost, field) for cost in costs)
        for field in LayerCost.__dataclass_fields__
        if field not in ("name", "output_bytes")
    }
    return LayerCost(name="total", output_bytes=costs[-1].output_bytes, **summed)

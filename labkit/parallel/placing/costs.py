"""What each layer of a model costs, predicted from its configuration (measured: `layer_probe`).

FLOPs are those of matrix products only, 2 m n k for (m, k) @ (k, n), as PyTorch's FLOP counter has
them. Symbols: B sequences in the microbatch, T tokens, D width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.models.config import ModelConfig

ADAMW_BYTES_PER_PARAMETER = 8  # two moments in float32
STATISTIC_BYTES = 4  # LayerNorm mean and deviation (CPU: own dtype), attention log-sum-exp
INDEX_BYTES = 8  # token ids, positions and targets are int64


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


def predict_layer_costs(
    config: ModelConfig,
    batch: int,
    *,
    tokens: int | None = None,
    bytes_per_value: int = 4,
    optimizer_bytes_per_parameter: int = ADAMW_BYTES_PER_PARAMETER,
) -> list[LayerCost]:
    """Costs of the lab's transformer: embedding, L blocks, head with its loss.

    A block's forward is 24 B T D^2 + 4 B T^2 D for an expansion of 4; its backward is twice that,
    plus one more Q K^T because fused attention computes it again instead of keeping it. Sources:
    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1 (FLOPs; attention scores
    counted in full, not halved for the causal mask, as PyTorch's counter does); Korthikanti et al.
    2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1 (the method
    of counting activations, here without dropout and with fused attention).

    Args:
        config: sizes of the model.
        batch: sequences B per microbatch, >= 1.
        tokens: T, at most `config.context`, which is the default.
        bytes_per_value: 4 for float32, 2 for bfloat16; weights, gradients and activations alike.
        optimizer_bytes_per_parameter: 8 for AdamW in float32, 4 for SGD with momentum, 0 for SGD.

    Returns:
        L + 2 costs in the order of the model; the head's activations include the loss's
        log-probabilities (B, T, V).

    Raises:
        ValueError: `batch` or `tokens` is out of range.
    """
    length = config.context if tokens is None else tokens
    if batch < 1 or not 1 <= length <= config.context:
        raise ValueError(
            f"batch={batch} must be >= 1 and tokens={length} within 1..context={config.context}"
        )
    sizes = _Sizes(config, batch, length, bytes_per_value, optimizer_bytes_per_parameter)
    blocks = [sizes.block(f"layers.{i}") for i in range(config.layers)]
    return [sizes.embed(), *blocks, sizes.head()]


@dataclass(frozen=True)
class _Sizes:
    """The formulas; one method per kind of layer."""

    config: ModelConfig
    B: int
    T: int
    value_bytes: int
    optimizer_bytes_per_parameter: int

    def embed(self) -> LayerCost:
        D, V = self.config.width, self.config.vocabulary
        indices = (self.B * self.T + self.T) * INDEX_BYTES  # ids and positions
        return self._cost("embed", (V + self.config.context) * D, 0, 0, indices, D)

    def block(self, name: str) -> LayerCost:
        D, H, f = self.config.width, self.config.heads, self.config.expansion
        BT = self.B * self.T
        parameters = (4 + 2 * f) * D * D + (9 + f) * D  # q k v out up down; their biases; 2 norms
        linear = 2 * BT * D * D * (4 + 2 * f)
        scores = 2 * BT * self.T * D  # Q K^T; the product with V costs the same
        # two norms' inputs and outputs, q k v, attention's output, both sides of the GELU
        values = BT * D * (8 + 2 * f)
        statistics = BT * (2 * 2 + H) * STATISTIC_BYTES
        kept = values * self.value_bytes + statistics
        return self._cost(name, parameters, linear + 2 * scores, 2 * linear + 5 * scores, kept, D)

    def head(self) -> LayerCost:
        D, V = self.config.width, self.config.vocabulary
        BT = self.B * self.T
        linear = 2 * BT * D * V
        values = BT * (2 * D + V)  # the norm's input and output, the loss's log-probabilities
        # with the norm's statistics, the targets, and the number of targets (one value)
        kept = values * self.value_bytes + BT * (2 * STATISTIC_BYTES + INDEX_BYTES)
        kept += self.value_bytes
        return self._cost("head", 2 * D + V * D, linear, 2 * linear, kept, V)

    def _cost(
        self, name: str, parameters: int, forward: int, backward: int, kept: int, channels: int
    ) -> LayerCost:
        return LayerCost(
            name=name,
            forward_flops=forward,
            backward_flops=backward,
            parameter_bytes=parameters * self.value_bytes,
            gradient_bytes=parameters * self.value_bytes,
            optimizer_bytes=parameters * self.optimizer_bytes_per_parameter,
            activation_bytes=kept,
            output_bytes=self.B * self.T * channels * self.value_bytes,
        )


def total(costs: Iterable[LayerCost]) -> LayerCost:
    """The whole model as one layer; its output is the last layer's."""
    costs = list(costs)
    summed = {
        field: sum(getattr(cost, field) for cost in costs)
        for field in LayerCost.__dataclass_fields__
        if field not in ("name", "output_bytes")
    }
    return LayerCost(name="total", output_bytes=costs[-1].output_bytes, **summed)

"""The lab's transformer, whole or any contiguous part of it, always with the same weights.

Shapes: B sequences in the batch, T tokens, D width, V vocabulary, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.config import ModelConfig
from labkit.models.seeds import named_generator


class Embed(nn.Module):
    """Token plus learned position embedding: ids (B, T) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        return self.token(ids_BT) + self.position(positions_T)


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # unflatten by the head's width, not by a stored count: a shard holds fewer heads
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, H, T, K)
            for project in (self.query, self.key, self.value)
        )
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.expansion * config.width)
        self.down = nn.Linear(config.expansion * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Head(nn.Module):
    """Final norm and projection to logits: (B, T, D) -> (B, T, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.logits(self.norm(x_BTD))


class Transformer(nn.Module):
    """The blocks ``layers`` of the model, with or without its embedding and head.

    Parameters keep the names they have in the whole model (``layers.5.mlp.up.weight``), and each
    is drawn from a generator seeded by that name: whatever the split, the weights are the same.

    Args:
        config: sizes of the whole model.
        layers: which blocks this part holds, ascending and contiguous; None for all of them.
        seed: one integer for the whole model.

    Input is ids (B, T) where the part has block 0, else activations (B, T, D); output is logits
    (B, T, V) where it has the last block, else activations (B, T, D).

    Raises:
        ValueError: ``layers`` is empty, out of range or not contiguous.
    """

    def __init__(
        self, config: ModelConfig, *, layers: Iterable[int] | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        held = list(range(config.layers) if layers is None else layers)
        _check_layers(held, config.layers)
        self.config = config
        self.embed = Embed(config) if held[0] == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in held})
        self.head = Head(config) if held[-1] == config.layers - 1 else None
        initialise_by_name(self, config.layers, seed)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def _check_layers(held: list[int], total: int) -> None:
    if not held or held != list(range(held[0], held[-1] + 1)) or held[0] < 0 or held[-1] >= total:
        raise ValueError(
            f"layers={held} must be a contiguous ascending run within 0..{total - 1}; "
            f"try range(0, {total})"
        )


@torch.no_grad()
def initialise_by_name(module: nn.Module, layers: int, seed: int = 0) -> None:
    """Give every parameter the values that its full name and ``seed`` determine.

    Two ranks that hold the same name hold the same values; equal layers under different names
    differ. Biases are 0, norms 1, matrices N(0, 1 / fan-in) (LeCun et al. 1998); those that add to
    the residual are divided by sqrt(2 * ``layers``) (GPT-2, Radford et al. 2019).
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32)
            values.normal_(
                0.0, _spread(name, parameter, layers), generator=named_generator(seed, name)
            )
            parameter.copy_(values)


def _spread(name: str, parameter: Tensor, layers: int) -> float:
    if "embed" in name:
        return 0.1
    fan_in_spread = parameter.shape[1] ** -0.5
    adds_to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return fan_in_spread / (2 * layers) ** 0.5 if adds_to_residual else fan_in_spread


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, over all B*T positions."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

"""A causal model as a chain of layers that read and extend a KV cache, whole or in part.

Shapes: B sequences, T new tokens each, D width, V vocabulary, H heads, S cached columns, K width of
a head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.kv_cache import KVCache, Step
from labkit.models.transformer import Transformer


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a whole causal model.

    Attributes:
        family: such as ``llama``.
        kv_heads: heads of keys and values; fewer than ``heads`` where query heads share them.
        hidden: width of the MLP's hidden layer.
        context: most tokens of one sequence.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    context: int


class Decoder(nn.Module):
    """Any contiguous run of a causal model's layers, with or without its embedding and head.

    A family of models is a subclass that says how its embedding, layer and head work.

    Args:
        shape: of the whole model.
        embed: None where the part does not hold the model's first layer.
        layers: number -> layer, ascending.
        head: None where the part does not hold the last layer.

    Attributes:
        column_layers, row_layers: names within a layer of the matrices that tensor parallelism
            divides by outputs and by inputs; empty where the family cannot be divided.
        logits_layer: name within the head of the projection to logits.
        kv_heads: those that this part's cache holds; fewer than the shape's in a tensor shard.
    """

    column_layers: tuple[str, ...] = ()
    row_layers: tuple[str, ...] = ()
    logits_layer = "logits"

    def __init__(
        self,
        shape: DecoderShape,
        embed: nn.Module | None,
        layers: Mapping[int, nn.Module],
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        self.shape, self.kv_heads = shape, shape.kv_heads
        self.embed = embed
        self.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.head = head

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of the layers that this part holds."""
        return tuple(map(int, self.layers))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights held here; a tied one counts once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def part(self, layers: range) -> Decoder:
        """The same weights cut down to some layers; the ends keep embedding and head.

        Raises:
            ValueError: this part does not hold them all, or there are none.
        """
        if not layers or any(i not in self.held for i in layers):
            raise ValueError(
                f"layers {list(layers)} are not all among those held, {list(self.held)}"
            )
        cut = copy.copy(self)
        cut._modules = dict(self._modules)
        cut.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        cut.embed = self.embed if layers[0] == 0 else None
        cut.head = self.head if layers[-1] == self.shape.layers - 1 else None
        return cut

    def on(self, device: torch.device) -> Decoder:
        """A copy on ``device``, or this part itself when it is there already.

        A copy because moving one end of a model would move the weights tied to it as well.
        """
        return self if self.device == device else copy.deepcopy(self).to(device)

    def new_cache(self, rows: int, columns: int) -> KVCache:
        """An empty cache for this part's layers, on its device.

        Raises:
            ValueError: ``columns`` is more than the model's context.
        """
        if columns > self.shape.context:
            raise ValueError(
                f"columns={columns} tokens are more than the model's context of "
                f"{self.shape.context}; shorten the prompts or ask for fewer new tokens"
            )
        return KVCache(
            self.held,
            rows=rows,
            columns=columns,
            heads=self.kv_heads,
            head_width=self.shape.head_width,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, x: Tensor, cache: KVCache, step: Step) -> Tensor:
        """Add the tokens of ``step``.

        Args:
            x: ids (B, T) where the part has the embedding, else activations (B, T, D).

        Returns:
            Logits (B, V) of each row's last real token where the part has the head, else
            activations (B, T, D).
        """
        if self.embed is not None:
            x = self.embed_tokens(x, step)
        shared = self.shared_by_layers(x, step)
        for name, layer in self.layers.items():
            x = self.run_layer(int(name), layer, x, shared, cache, step)
        if self.head is None:
            return x
        x_BD = x[:, -1] if step.last_B is None else x[torch.arange(len(x)), step.last_B]
        return self.head(x_BD)

    def embed_tokens(self, ids_BT: Tensor, step: Step) -> Tensor:
        raise NotImplementedError

    def shared_by_layers(self, x_BTD: Tensor, step: Step) -> object:
        """What is computed once for all layers, such as rotary angles."""
        return None

    def run_layer(
        self,
        number: int,
        layer: nn.Module,
        x_BTD: Tensor,
        shared: object,
        cache: KVCache,
        step: Step,
    ) -> Tensor:
        raise NotImplementedError


class LabDecoder(Decoder):
    """The lab's transformer with a KV cache; it shares the weights of ``model``.

    >>> from labkit.models.config import ModelConfig
    >>> model = Transformer(ModelConfig(layers=2, width=8, heads=2, context=16))
    >>> LabDecoder(model).part(range(1, 2)).held
    (1,)
    """

    column_layers = ("attention.query", "attention.key", "attention.value", "mlp.up")
    row_layers = ("attention.out", "mlp.down")

    def __init__(self, model: Transformer) -> None:
        config = model.config
        shape = DecoderShape(
            "lab",
            config.layers,
            config.width,
            config.heads,
            config.heads,
            config.head_width,
            config.expansion * config.width,
            config.vocabulary,
            config.context,
        )
        layers = {int(name): block for name, block in model.layers.items()}
        super().__init__(shape, model.embed, layers, model.head)

    def embed_tokens(self, ids_BT: Tensor, step: Step) -> Tensor:
        return self.embed.token(ids_BT) + self.embed.position(step.positions_BT)

    def run_layer(self, number, layer, x_BTD, shared, cache, step):
        attention, normed = layer.attention, layer.attention_norm(x_BTD)
        query, key, value = (
            heads(project(normed), self.shape.head_width)
            for project in (attention.query, attention.key, attention.value)
        )
        y_BTD = attend(query, *cache.update(number, key, value, step), step)
        x_BTD = x_BTD + attention.out(y_BTD)
        return x_BTD + layer.mlp(layer.mlp_norm(x_BTD))


def heads(x: Tensor, head_width: int) -> Tensor:
    """(B, T, H K) -> (B, H, T, K)."""
    return x.unflatten(-1, (-1, head_width)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, step: Step) -> Tensor:
    """Attention of the new tokens over the cached ones.

    Args:
        query: (B, H, T, K).
        key, value: (B, H / g, S, K): g query heads share each of them (grouped-query attention,
            Ainslie et al. 2023).

    Returns:
        (B, T, H K).
    """
    batch, _, tokens, width = query.shape
    shared_by = query.shape[1] // key.shape[1]
    if shared_by > 1 and tokens == 1:
        # the g heads that share a key stand in the place of tokens, so that no key is repeated
        query = query.reshape(batch, key.shape[1], shared_by, width)
    elif shared_by > 1:
        key, value = (t.repeat_interleave(shared_by, 1) for t in (key, value))
    causal = tokens > 1 and step.mask is None
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=step.mask, is_causal=causal)
    return y.reshape(batch, -1, tokens, width).transpose(1, 2).reshape(batch, tokens, -1)

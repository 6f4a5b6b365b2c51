"""Causal models of Hugging Face's ``transformers`` as a ``Decoder``; they keep their own weights.

Only the modules' weights, norms and rotary angles are used, not their forward, whose arguments
change between versions. What a family does besides, such as a scale or a norm of its own, would be
lost in silence: so families are listed, and settings that are not followed are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.models.decoder import Decoder, DecoderShape, attend, heads
from labkit.models.kv_cache import Step
from labkit.models.seeds import named_generator

LLAMA_FAMILY = ("llama", "mistral", "qwen2")
FAMILIES = (*LLAMA_FAMILY, "gpt2")


def huggingface_decoder(model: nn.Module) -> Decoder:
    """A ``transformers`` causal model, such as ``LlamaForCausalLM``, as a ``Decoder``.

    Raises:
        ValueError: its family, or a setting of it, is not supported; the message names it.
    """
    check_family(model.config)
    return GPT2Decoder(model) if model.config.model_type == "gpt2" else LlamaDecoder(model)


def check_family(config: object) -> None:
    """Refuse a configuration of ``transformers`` whose family is not supported."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={config.model_type!r} is not supported; those that are: "
            f"{', '.join(FAMILIES)}"
        )


def random_model(
    family: str,
    *,
    layers: int = 4,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 48,
    vocabulary: int = 50,
    context: int = 32,
    seed: int = 0,
    **settings: object,
) -> nn.Module:
    """An untrained causal model of ``transformers``, to try with what holds for trained ones.

    Its weights are large enough for every part of it, norms and biases too, to show in the logits.

    Args:
        family: a ``model_type``, such as one of ``FAMILIES``.
        kv_heads: means nothing to ``gpt2``, where each head has its own.
        settings: of the family's configuration.

    Raises:
        ValueError: ``transformers`` does not know the family.
    """
    import transformers

    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        **{"n_inner" if family == "gpt2" else "intermediate_size": hidden},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **settings,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = named_generator(family, seed)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        nn.init.normal_(parameter, mean, width**-0.5, generator=generator)
    return model


class LlamaDecoder(Decoder):
    """Llama, Mistral and Qwen2: RMS norms, rotary positions, shared key-value heads, SwiGLU.

    Sources: Touvron et al. 2023 (LLaMA); Su et al. 2021 (rotary positions); the modelling files of
    ``transformers``, whose logits it reproduces.
    """

    column_layers = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    row_layers = ("self_attn.o_proj", "mlp.down_proj")
    logits_layer = "1"

    def __init__(self, model: nn.Module) -> None:
        config, inner = model.config, model.model
        head_width = getattr(config, "head_dim", None)
        shape = DecoderShape(
            config.model_type,
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_width or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
            config.vocab_size,
            _context(config),
        )
        _need(config, "hidden_act", "silu")
        head = nn.Sequential(inner.norm, model.lm_head)
        super().__init__(shape, inner.embed_tokens, dict(enumerate(inner.layers)), head)
        self.rotary = inner.rotary_emb

    def embed_tokens(self, ids_BT: Tensor, step: Step) -> Tensor:
        return self.embed(ids_BT)

    def shared_by_layers(self, x_BTD: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Cosine and sine (B, 1, T, K) of the rotary angles; the sine's first half negative."""
        cosine, sine = self.rotary(x_BTD, step.positions_BT)
        half = sine.shape[-1] // 2
        signed = torch.cat([-sine[..., :half], sine[..., half:]], -1)
        return cosine[:, None], signed[:, None]

    def run_layer(self, number, layer, x_BTD, shared, cache, step):
        attention, mlp = layer.self_attn, layer.mlp
        normed = layer.input_layernorm(x_BTD)
        query, key, value = (
            heads(project(normed), self.shape.head_width)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = rotated(query, *shared), rotated(key, *shared)
        y_BTD = attend(query, *cache.update(number, key, value, step), step)
        x_BTD = x_BTD + attention.o_proj(y_BTD)
        normed = layer.post_attention_layernorm(x_BTD)
        gated = nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
        return x_BTD + mlp.down_proj(gated)


def rotated(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + K/2}) of (B, H, T, K) by its angle."""
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * signed_sine


class GPT2Decoder(Decoder):
    """GPT-2 (Radford et al. 2019), whose query, key and value are one fused matrix."""

    def __init__(self, model: nn.Module) -> None:
        config, inner = model.config, model.transformer
        shape = DecoderShape(
            config.model_type,
            config.n_layer,
            config.n_embd,
            config.n_head,
            config.n_head,
            config.n_embd // config.n_head,
            config.n_inner or 4 * config.n_embd,
            config.vocab_size,
            config.n_positions,
        )
        for name, value in {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        }.items():
            _need(config, name, value)
        embed = nn.ModuleDict({"token": inner.wte, "position": inner.wpe})
        head = nn.Sequential(inner.ln_f, model.lm_head)
        super().__init__(shape, embed, dict(enumerate(inner.h)), head)

    def embed_tokens(self, ids_BT: Tensor, step: Step) -> Tensor:
        return self.embed["token"](ids_BT) + self.embed["position"](step.positions_BT)

    def run_layer(self, number, layer, x_BTD, shared, cache, step):
        fused = layer.attn.c_attn(layer.ln_1(x_BTD)).chunk(3, -1)
        query, key, value = (heads(part, self.shape.head_width) for part in fused)
        y_BTD = attend(query, *cache.update(number, key, value, step), step)
        x_BTD = x_BTD + layer.attn.c_proj(y_BTD)
        mlp = layer.mlp
        return x_BTD + mlp.c_proj(mlp.act(mlp.c_fc(layer.ln_2(x_BTD))))


def _context(config: object) -> int:
    """Most tokens: a sliding window that would be left is not supported beyond its size."""
    window = getattr(config, "sliding_window", None)
    uses_window = window and getattr(config, "use_sliding_window", True)
    longest = config.max_position_embeddings
    return min(longest, window) if uses_window else longest


def _need(config: object, name: str, value: object) -> None:
    found = getattr(config, name, value)
    if found != value:
        raise ValueError(f"{name}={found!r} is not supported; only {name}={value!r} is")

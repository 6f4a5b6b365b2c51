"""Your own model for the planner: blocks in order, or a Hugging Face causal model by local path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from labkit.models.decoder import Decoder
from labkit.models.huggingface import huggingface_decoder
from labkit.models.kv_cache import KVCache, Step, prefill
from labkit.parallel.pipelining.losses import LossFunction, token_losses
from labkit.parallel.pipelining.pipeline_guards import batch_dependent_layers
from labkit.parallel.pipelining.stages import Chain, blocks_of, check_link
from labkit.parallel.planning.own_chain import OwnChain
from labkit.parallel.sharding.tensor_checks import legal_tensor_sizes

# of the families that `huggingface_decoder` takes
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
REGISTERED = ("_parameters", "_buffers", "_modules")
Given = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | str | Path


def own_model(
    model: Given, inputs: Tensor, targets: Tensor, loss_fn: LossFunction = token_losses
) -> OwnChain:
    """A chain that `plan` takes, and whose ``blocks`` `train_choice` runs.

    Args:
        model: an ``nn.Sequential``, a list of blocks, a mapping from full name to block, a causal
            model of ``transformers``, or the local folder of one. Blocks are not copied.
        inputs, targets: one batch, of any number of rows.
        loss_fn: (outputs, targets) -> one loss per target.

    Raises:
        ValueError: a block is no link of a chain, or has tensors that would be left behind; the
            message names it. Or a model of ``transformers`` would drop out.
    """
    if isinstance(model, str | Path):
        model = load_causal_model(model)
    cannot_divide = "nothing says how to divide the matrices of your own blocks"
    if isinstance(model, nn.Module) and hasattr(getattr(model, "config", None), "model_type"):
        check_no_dropout(model)
        decoder = huggingface_decoder(model)
        cannot_divide = _why_undivided(decoder)
        model = causal_blocks(decoder)
    blocks = blocks_of(model)
    for name, block in blocks.items():
        check_link(name, block)
        check_plain_tensors(name, block)
    whole = Chain(blocks)
    chain = OwnChain(blocks, inputs, targets, loss_fn, _shared_bytes(blocks, whole))
    chain.cannot_divide = cannot_divide
    chain.batch_dependent = tuple(
        name.replace(", stage 0", "") for name in batch_dependent_layers({0: whole})
    )
    return chain


def load_causal_model(folder: str | Path) -> nn.Module:
    """Load from disk; nothing is downloaded.

    Raises:
        ValueError: ``transformers`` is not installed, or the folder is not there.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError("a model by path needs transformers; pip install transformers") from error
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder; give the local folder of a causal model")
    logging.disable_progress_bar()  # of a file on disk: in a notebook only noise, on every rank
    return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def check_no_dropout(model: nn.Module) -> None:
    """Refuse a model of ``transformers`` that drops out in training, which its blocks would not.

    Raises:
        ValueError: names the setting.
    """
    for name in DROPOUTS if model.training else ():
        if p := getattr(model.config, name, 0.0):
            raise ValueError(
                f"{name}={p} of a model in train() mode: its blocks run without dropout, so they "
                f"would train another model; call model.eval(), or make it with {name}=0.0"
            )


class _Uncached:
    """Stands for a KV cache in training: all keys and values are new."""

    def update(self, layer: int, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        return key, value


class _Part(nn.Module):
    """A part of a decoder that takes whole sequences, without a cache."""

    def __init__(self, decoder: Decoder, layer: int | None, *, embed=False, head=False) -> None:
        super().__init__()
        part = decoder.part(range(decoder.shape.layers))
        part.embed = decoder.embed if embed else None
        part.head = decoder.head if head else None
        part.layers = nn.ModuleDict(
            {} if layer is None else {str(layer): decoder.layers[str(layer)]}
        )
        self.part = part


class CausalEmbedding(_Part):
    """Ids (B, T) -> (B, T, D)."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.part.embed_tokens(ids, _step(ids))


class CausalLayer(_Part):
    """(B, T, D) -> (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        step = _step(x)
        shared = self.part.shared_by_layers(x, step)
        [(name, layer)] = self.part.layers.items()
        cache: KVCache = _Uncached()
        return self.part.run_layer(int(name), layer, x, shared, cache, step)


class CausalHead(_Part):
    """(B, T, D) -> logits (B, T, V)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.part.head(x)


def _step(x: Tensor) -> Step:
    return prefill([x.shape[1]] * x.shape[0], x.device)


def causal_blocks(decoder: Decoder) -> dict[str, nn.Module]:
    """A decoder as blocks for training, in order; they share its weights, and drop nothing out."""
    layers = {f"layers.{i}": CausalLayer(decoder, i) for i in range(decoder.shape.layers)}
    first = CausalEmbedding(decoder, None, embed=True)
    return {"embed": first, **layers, "head": CausalHead(decoder, None, head=True)}


def _why_undivided(decoder: Decoder) -> str:
    shape = decoder.shape
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "hidden": shape.hidden}
    listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
    legal = ", ".join(map(str, legal_tensor_sizes(sizes)))
    return (
        f"family {shape.family!r} is trained whole (its heads, {listed}, would allow tensor sizes "
        f"{legal}; generation divides them)"
    )


def check_plain_tensors(name: str, block: nn.Module) -> None:
    """Refuse tensors that are no parameters or buffers: moving the block would leave them behind.

    Raises:
        ValueError: names the attribute.
    """
    known = {id(t) for t in [*block.parameters(), *block.buffers()]}
    for path, attribute, tensor in _plain_tensors(block):
        if id(tensor) not in known:
            full = ".".join(part for part in (name, path, attribute) if part)
            raise ValueError(
                f"{full} is a plain tensor {tuple(tensor.shape)}, which stays behind when the "
                "block moves to its device; make it a buffer with register_buffer, and a list of "
                "layers an nn.ModuleList"
            )


def _plain_tensors(block: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, module in block.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in REGISTERED:
                yield from ((path, *found) for found in _tensors_in(attribute, value))


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an attribute: itself, or what its lists, tuples and dicts hold."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):  # kept in a list, where torch does not see it
        yield from ((f"{name}.{its}", p) for its, p in value.state_dict(keep_vars=True).items())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors_in(f"{name}[{i}]", item)


def _shared_bytes(blocks: Mapping[str, nn.Module], whole: nn.Module) -> int:
    """Bytes of the weights that blocks count twice."""
    apart = sum(p.nbytes for block in blocks.values() for p in block.parameters())
    return apart - sum(p.nbytes for p in whole.parameters())

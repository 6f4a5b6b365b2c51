"""Real text as bytes, cut into deterministic batches of next-token prediction."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.models.seeds import named_generator


@dataclass(frozen=True)
class Text:
    """A corpus: where it came from, and its UTF-8 bytes as ids (N,), int64."""

    source: str
    ids_N: Tensor

    def batch(self, batch: int, context: int, step: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw the batch of training step ``step``: the same call gives the same batch anywhere.

        Args:
            batch: number of sequences B, >= 1.
            context: tokens per sequence T, >= 1.
            step: number of the training step; with ``seed`` it decides what is drawn.

        Returns:
            Inputs and targets, each (B, T) int64; a target is the byte after its input.

        Raises:
            ValueError: a size is below 1, or the text is too short for one sequence.
        """
        if batch < 1 or context < 1:
            raise ValueError(f"batch={batch} and context={context} must be at least 1")
        starts = len(self.ids_N) - context
        if starts < 1:
            raise ValueError(
                f"{self.source} has {len(self.ids_N)} bytes; context={context} needs at least "
                f"{context + 1}: name a longer file or a shorter context"
            )
        starts_B1 = torch.randint(
            starts, (batch, 1), generator=named_generator("batch", seed, step)
        )
        windows = self.ids_N[starts_B1 + torch.arange(context + 1)]  # (B, T + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_text(path: str | Path | None = None) -> Text:
    """Read a UTF-8 file, or the English reference of Python's standard library.

    The reference (``pydoc_data.topics``, about 465 kB) is part of every Python; its wording
    differs a little between Python versions.

    Raises:
        ValueError: no such file, not a file, empty, or not UTF-8; the message says which byte.
    """
    if path is None:
        spec = importlib.util.find_spec("pydoc_data.topics")
        if spec is None or spec.origin is None:
            raise ValueError("this Python has no pydoc_data.topics; name a UTF-8 file instead")
        topics = importlib.import_module("pydoc_data.topics").topics
        return text_from_bytes(
            "\n\n".join(topics[key] for key in sorted(topics)).encode(), "pydoc_data.topics"
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"text file {str(path)!r} is not there or no file; name a UTF-8 file")
    return text_from_bytes(file.read_bytes(), file.name)


def text_from_bytes(data: bytes, source: str) -> Text:
    """Check that ``data`` is UTF-8 and not empty, and hold it as byte ids.

    >>> text_from_bytes("né".encode(), "two letters").ids_N.tolist()
    [110, 195, 169]
    """
    if not data:
        raise ValueError(f"{source} is empty; name a file with at least a few thousand bytes")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 at byte {error.start} (0x{data[error.start]:02x}); "
            "save it as UTF-8 first"
        ) from error
    return Text(source, torch.frombuffer(bytearray(data), dtype=torch.uint8).long())

"""Continue a text with the model, one byte at a time."""

from __future__ import annotations

import torch
from torch import nn

from labkit.models.seeds import named_generator


@torch.no_grad()
def sample_text(
    model: nn.Module, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0
) -> str:
    """Continue ``prompt`` by ``length`` bytes, recomputing the whole window for each.

    Args:
        model: ids (1, T) -> logits (1, T, V), with ``model.config.context``.
        temperature: above 0; lower is more cautious.
        seed: the same seed gives the same text on the same back end.

    Returns:
        Prompt and continuation; bytes that are no UTF-8 show as U+FFFD.

    Raises:
        ValueError: the prompt is empty, or ``temperature`` or ``length`` is not above 0.
    """
    if not prompt or length < 1 or not temperature > 0:
        raise ValueError(
            f"prompt={prompt!r}, length={length}, temperature={temperature}: the prompt must not "
            "be empty, length and temperature must be above 0"
        )
    device = next(model.parameters()).device
    generator = named_generator("sample", seed)
    ids = list(prompt.encode())
    for _ in range(length):
        window = torch.tensor([ids[-model.config.context :]], device=device)
        logits_V = model(window)[0, -1].float().cpu()
        chances_V = torch.softmax(logits_V / temperature, dim=-1)
        ids.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return bytes(ids).decode(errors="replace")

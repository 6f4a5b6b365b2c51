"""Size of the lab's transformer: one frozen, validated record and three presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

BYTE_VALUES = 256  # the vocabulary is the 256 byte values of UTF-8 text


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-style decoder: ``layers`` equal blocks of ``width`` channels.

    Args:
        layers: number of blocks L, >= 1.
        width: channels D of the residual stream; a multiple of ``heads``.
        heads: attention heads H, >= 1.
        context: longest sequence T in tokens, >= 1.
        vocabulary: number of token ids V; 256 for bytes.
        expansion: width of the MLP's hidden layer over ``width``.

    Raises:
        ValueError: a size is below 1, or ``width`` is no multiple of ``heads``.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = BYTE_VALUES
    expansion: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.width % self.heads:
            lower = self.width - self.width % self.heads or self.heads
            raise ValueError(
                f"width={self.width} must be divisible by heads={self.heads}; "
                f"try width={lower} or width={self.width - self.width % self.heads + self.heads}"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Exact number of weights and biases, embedding and head counted.

        >>> ModelConfig(layers=1, width=4, heads=1, context=8, vocabulary=10).num_parameters
        364
        """
        d, hidden = self.width, self.expansion * self.width
        embed = (self.vocabulary + self.context) * d
        norms = 4 * d
        attention = 4 * (d * d + d)
        mlp = d * hidden + hidden + hidden * d + d
        head = 2 * d + self.vocabulary * d
        return embed + self.layers * (norms + attention + mlp) + head

    def with_(self, **changes: int) -> ModelConfig:
        """The same configuration with some sizes changed, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True)
class TrainingSize:
    """How much of it to train: batch of sequences, steps, AdamW's learning rate."""

    batch: int
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Preset:
    """A model and a training size that fit a class of machine."""

    model: ModelConfig
    training: TrainingSize


PRESETS = {
    "tiny": Preset(  # a laptop without GPU: seconds
        ModelConfig(layers=8, width=128, heads=4, context=64), TrainingSize(16, 200, 3e-3)
    ),
    "workshop": Preset(  # a laptop for minutes, or one GPU for seconds
        ModelConfig(layers=8, width=256, heads=8, context=128), TrainingSize(16, 400, 1e-3)
    ),
    "workstation": Preset(  # one to four 24 to 48 GB cards
        ModelConfig(layers=24, width=1024, heads=16, context=1024), TrainingSize(16, 1000, 3e-4)
    ),
}


def preset(name: str) -> Preset:
    """Look a preset up by name.

    Raises:
        ValueError: there is no such preset; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]

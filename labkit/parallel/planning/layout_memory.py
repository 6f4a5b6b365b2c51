"""Bytes of training state that each rank holds in a layout, predicted from sizes."""

from __future__ import annotations

from labkit.measure.memory import HeldBytes
from labkit.models.config import ModelConfig
from labkit.parallel.sharding.layouts import Layout
from labkit.parallel.sharding.traffic import VALUE_BYTES, unit_sizes


def predict_state_bytes(config: ModelConfig, layout: Layout, *, stage: int = 0) -> HeldBytes:
    """Weights, gradients and AdamW's state of one rank of a pipeline stage, in float32.

    FSDP2's padding of sizes that do not divide is left out, and so are the gathered weights of the
    block at work.

    Args:
        stage: of the rank; 0 without a pipeline.
    """
    ranks = layout.data if layout.data_style == "fsdp" else 1
    sizes = [size for unit in unit_sizes(config, layout, stage) for size in unit]
    weights = sum(sizes) * VALUE_BYTES // ranks
    counters = len(sizes) * VALUE_BYTES  # each parameter counts its own steps
    return HeldBytes(weights, weights, 2 * weights + counters)

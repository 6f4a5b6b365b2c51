"""What crosses each cut: found by one forward of each stage, before anything is sent for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from labkit.parallel.peers import Peers

OutputCheck = Callable[[Tensor], None]


class Form(NamedTuple):
    """Shape and dtype of what a stage returns for one microbatch."""

    shape: torch.Size
    dtype: torch.dtype


def probe(
    stages: Mapping[int, nn.Module],
    first_input: Tensor | None,
    check_last: OutputCheck | None,
    rank_of_stage: tuple[int, ...],
    peers: Peers,
) -> tuple[Form, ...]:
    """What every stage returns, known on every rank. All ranks must call.

    Args:
        stages: those of this rank.
        first_input: one microbatch, on the rank of stage 0.
        check_last: called with the last stage's output; raises ValueError if it does not fit.

    Raises:
        ValueError: (on every rank) a stage fails, or returns what the next one cannot be sent.
    """
    forms: list[Form] = []
    for stage, rank in enumerate(rank_of_stage):
        answer: Form | str | None = None
        if stage in stages:
            entered = first_input if stage == 0 else _zeros(forms[-1], peers.device)
            last = stage + 1 == len(rank_of_stage)
            answer = _form_or_fault(stages[stage], entered, check_last if last else None, last)
        answer = peers.tell(answer, source=rank)
        if isinstance(answer, str):
            raise ValueError(f"stage {stage} on rank {rank} {answer}")
        forms.append(answer)
    return tuple(forms)


def _form_or_fault(
    module: nn.Module, entered: Tensor, check: OutputCheck | None, is_last: bool
) -> Form | str:
    """Errors become text, so that the ranks that wait for the answer can raise them too."""
    try:
        out = run_without_trace(module, entered)
        if not isinstance(out, Tensor):
            return (
                f"returns a {type(out).__name__}; a stage hands exactly one tensor to the next: "
                "keep what exchanges more within one stage"
            )
        if not is_last and not out.is_floating_point():
            return f"returns {out.dtype}, through which no gradient flows back; cut elsewhere"
        if check is not None:
            check(out)
    except Exception as error:
        given = f"{tuple(entered.shape)} {str(entered.dtype)[6:]}"
        return f"fails on an input of {given}: {type(error).__name__}: {error}"
    return Form(out.shape, out.dtype)


def _zeros(form: Form, device: torch.device) -> Tensor:
    return torch.zeros(form.shape, dtype=form.dtype, device=device)


@torch.no_grad()
def run_without_trace(module: nn.Module, entered: Tensor) -> object:
    """The module's output, its buffers, random numbers and recorders left as they were.

    torch's own shape inference runs the module itself: BatchNorm then counts batches that were
    never there.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    accelerators = [] if entered.device.type == "cpu" else [entered.device]
    kind = entered.device.type if accelerators else "cuda"
    with _disable_current_modes(), torch.random.fork_rng(accelerators, device_type=kind):
        return functional_call(module, buffers, (entered,))

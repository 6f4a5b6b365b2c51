"""What the labels mean that torch itself sets with ``record_function`` around its own actions."""

from __future__ import annotations

import re

from labkit.measure.virtual.recording import Region

_LETTER_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
_PIPELINE_ACTION = re.compile(r"PP:(\d+([FBIW])\d+)$")
_GPIPE_ACTION = re.compile(r"(F|B)(?:orward|ackward) (\d+)$")
_FSDP_COMMUNICATION = re.compile(r"FSDP::(all_gather|post_backward_reduce)( |$)")


def region_of_label(label: str) -> Region | None:
    """The region that a label of torch's pipelines or optimizers opens; None for any other.

    >>> region_of_label("PP:2F0"), region_of_label("Optimizer.step#SGD.step").kind
    (Region(label='2F0', kind='forward'), 'optimizer')
    """
    if label.startswith("Optimizer."):
        return Region("optimizer" if ".step" in label else "zero grad", "optimizer")
    if found := _PIPELINE_ACTION.match(label):
        return Region(found[1], _LETTER_KINDS[found[2]])
    if found := _GPIPE_ACTION.match(label):
        return Region(found[1] + found[2], _LETTER_KINDS[found[1]])
    return None


def runs_on_own_stream(label: str) -> bool:
    """Whether FSDP2 puts what it does under this label on a stream beside the compute stream.

    On the CPU there are no streams and everything runs in order; on a GPU FSDP2 gathers the next
    layer while this one computes, and the clock should let it.

    >>> runs_on_own_stream("FSDP::all_gather (0)"), runs_on_own_stream("FSDP::all_gather_copy_out")
    (True, False)
    """
    return _FSDP_COMMUNICATION.match(label) is not None

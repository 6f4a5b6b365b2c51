"""What a notebook is told when something goes wrong on a rank: who began it, and what it broke."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from labkit.devices.ranks.rank_cell import RankResult

# How a collective fails on a rank that did nothing wrong: its peer went away or never came.
PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|Timed out waiting"
    r"|Application timeout|[Ss]ocket (closed|[Tt]imeout)|NCCL communicator was aborted"
)
# gloo aborts the process that receives more bytes than it expects.
SIZE_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\.? (\d+) vs (\d+)")


class RankError(RuntimeError):
    """Code failed on a rank. Shown as a report, not as the stack of the code that noticed it.

    Attributes:
        results: what became of the code, by rank.
        causes: the ranks that failed by themselves, the first one first.
        consequences: the ranks that were stuck, or lost their peer, because of them.
    """

    def __init__(self, report: str, results: Mapping[int, RankResult] | None = None) -> None:
        super().__init__(report)
        self.results = dict(results or {})
        self.causes, self.consequences = split_failures(self.results.values())

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".splitlines()


class RanksUseError(ValueError):
    """A wrong argument, or ranks that are no more; shown without the stack that found it."""

    def _render_traceback_(self) -> list[str]:
        return f"ValueError: {self}".splitlines()


class RanksInterrupted(KeyboardInterrupt):
    """The reader pressed stop while code ran on the ranks."""

    def _render_traceback_(self) -> list[str]:
        return f"KeyboardInterrupt: {self}".splitlines()


def split_failures(results: Iterable[RankResult]) -> tuple[list[int], list[int]]:
    """Ranks that failed by themselves, in order of time, and ranks that failed because of them.

    A death is always a cause unless this layer killed the rank. An error is one unless the rank
    had been interrupted, or only says that its peer was lost.
    """
    failed = [result for result in results if result.failed]
    causes = [result for result in failed if _is_cause(result)]
    causes.sort(key=lambda result: result.ended_s)
    first = [result.rank for result in causes]
    return first, [result.rank for result in failed if result.rank not in first]


def _is_cause(result: RankResult) -> bool:
    if result.interrupted:
        return False
    return result.death is not None or not PEER_LOST.search(result.evalue)


def failure_report(results: Mapping[int, RankResult]) -> str:
    """Who failed first, with its own traceback; then who suffered from it, and where."""
    causes, consequences = split_failures(results.values())
    if not causes:
        return _nobody_failed_first(results, consequences)
    first = results[causes[0]]
    lines = [f"rank {first.rank} failed first: {_what(first)}", *_details(first)]
    for rank in causes[1:]:
        lines += _also_failed(results[rank], first)
    lines += [_consequence(results[rank]) for rank in consequences]
    return "\n".join(lines)


def stop_report(results: Mapping[int, RankResult]) -> str:
    """Where the stop button found each rank, and what had failed before."""
    stopped = [result for result in results.values() if result.interrupted]
    lines = ["stopped", *(f"rank {result.rank} was interrupted{_at(result)}" for result in stopped)]
    if split_failures(results.values())[0]:
        lines.append(failure_report(results))
    return "\n".join(lines)


def call_report(what: str, failed: Iterable[RankResult]) -> str:
    """Why a call such as ``pull('x')`` failed, rank by rank."""
    return "\n".join([f"{what} failed", *(f"rank {r.rank}: {_what(r)}" for r in failed)])


def _nobody_failed_first(results: Mapping[int, RankResult], lost: list[int]) -> str:
    lines = ["no rank failed by itself: ranks waited for messages that never came"]
    for rank in lost:
        result = results[rank]
        lines.append(f"rank {rank}: {_what(result)}{_at(result)}")
        if not result.interrupted:
            lines += _details(result)
    return "\n".join(lines)


def _what(result: RankResult) -> str:
    if result.death is None:
        return f"{result.ename}: {result.evalue}"
    return f"it died, {result.death.cause}{_at(result)}"


def _details(result: RankResult) -> list[str]:
    if result.death is None:
        return [
            *"\n".join(result.traceback).splitlines(),
            f"--- end of rank {result.rank}'s traceback",
        ]
    lines = []
    if mismatch := SIZE_MISMATCH.search(result.death.last_words):
        lines.append(
            f"it was sent {mismatch[1]} bytes where it expected {mismatch[2]}: the ranks must give "
            "tensors of the same shape and dtype"
        )
    if result.death.last_words:
        lines += ["its last words:", result.death.last_words]
    return lines


def _consequence(result: RankResult) -> str:
    how = "was interrupted" if result.interrupted else "lost its connection"
    return f"because of that, rank {result.rank} {how}{_at(result)}"


def _also_failed(result: RankResult, first: RankResult) -> list[str]:
    if (result.ename, result.evalue) == (first.ename, first.evalue) and result.death is None:
        return [f"rank {result.rank} failed with the same error"]
    return [f"rank {result.rank} failed too: {_what(result)}", *_details(result)]


def _at(result: RankResult) -> str:
    hung = f"; then {result.death.cause}" if result.death and result.death.by_us else ""
    return f", while in {result.operation}{hung}" if result.operation else hung

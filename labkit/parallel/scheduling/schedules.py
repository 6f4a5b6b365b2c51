"""Pipeline schedules as plain data: which rank runs which microbatch of which stage, in what order.

Nothing here imports torch or knows about time. A schedule lists, for every rank, its actions in
execution order; sends and receives follow from it. Actions use PyTorch's letters
(`torch.distributed.pipelining`): F forward, B full backward, I backward for the input only,
W backward for the weights only. Stage numbers are global, as PyTorch's are: with p ranks, rank r
holds stage r, or stages r, r + p, r + 2p ... ("loop"), or stages r and 2p - 1 - r ("V").

`str(action)` is PyTorch's spelling, `2F0` for the forward of microbatch 0 on stage 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, order=True)
class Action:
    """One unit of work: run `kind` for `microbatch` on `stage`.

    >>> str(Action(stage=2, kind="F", microbatch=0))
    '2F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not an action; use one of {', '.join(KINDS)}")
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(
                f"stage={self.stage} and microbatch={self.microbatch} must be >= 0: both "
                "count from 0"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Who runs what in which order during one step.

    Attributes:
        name: what the schedule is called in tables and figures.
        num_microbatches: m, the pieces that one batch is cut into.
        rank_of_stage: one rank per stage, stage 0 (which sees the input) first.
        actions: one tuple per rank, in execution order.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for rank, order in enumerate(self.actions):
            for position, action in enumerate(order):
                if fault := self._misplacement(rank, action):
                    raise ValueError(f"rank {rank}, position {position}: action {action} {fault}")

    def _misplacement(self, rank: int, action: Action) -> str | None:
        if action.stage >= self.num_stages:
            return f"names stage {action.stage}, but there are {self.num_stages}"
        if action.microbatch >= self.num_microbatches:
            return f"names microbatch {action.microbatch}, but there are {self.num_microbatches}"
        owner = self.rank_of_stage[action.stage]
        if owner != rank:
            return f"belongs to rank {owner}, which holds stage {action.stage}; move it there"
        return None

    @property
    def num_ranks(self) -> int:
        """Number of ranks p."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages: p, or v * p when every rank holds v of them."""
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, lowest first."""
        return tuple(s for s, owner in enumerate(self.rank_of_stage) if owner == rank)

    def __iter__(self) -> Iterator[Action]:
        return (action for order in self.actions for action in order)

    def label(self, action: Action) -> str:
        """How tables and timelines call `action`: F0, or 2F0 where a rank holds several stages."""
        if self.num_stages > self.num_ranks:
            return str(action)
        return f"{action.kind}{action.microbatch}"

    def __str__(self) -> str:
        """One line per rank."""
        return "\n".join(" ".join(map(self.label, order)) for order in self.actions)


def naive(num_ranks: int) -> Schedule:
    """The whole batch walks through the stages and back; one device works at a time.

    >>> print(naive(num_ranks=3))
    F0 B0
    F0 B0
    F0 B0
    """
    return Schedule("naive", 1, tuple(range(num_ranks)), gpipe(num_ranks, 1).actions)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, oldest first as in PyTorch's `ScheduleGPipe`.

    Every stage holds the activations of all m microbatches. Source: Huang et al. 2019, "GPipe".

    Args:
        num_ranks: pipeline depth p, >= 1, one stage per rank.
        num_microbatches: m, >= 1; m < p is legal.

    Raises:
        ValueError: a size is below 1.

    >>> print(gpipe(num_ranks=2, num_microbatches=3))
    F0 F1 F2 B0 B1 B2
    F0 F1 F2 B0 B1 B2
    """
    check_sizes(num_ranks, num_microbatches)
    orders = (
        tuple(Action(s, kind, i) for kind in ("F", "B") for i in range(num_microbatches))
        for s in range(num_ranks)
    )
    return Schedule("GPipe", num_microbatches, tuple(range(num_ranks)), tuple(orders))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up, alternate one forward with one backward, then drain (1F1B).

    The same bubble as GPipe; its gain is memory: stage s holds min(m, p - s) microbatches where
    GPipe holds m. Source: Narayanan et al. 2019, "PipeDream"; the order is that of PyTorch's
    `Schedule1F1B`, which refuses m < p; here m < p is legal.

    Args:
        num_ranks: pipeline depth p, >= 1, one stage per rank.
        num_microbatches: m, >= 1.

    Raises:
        ValueError: a size is below 1.

    >>> print(one_f_one_b(num_ranks=3, num_microbatches=4))
    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3
    """
    check_sizes(num_ranks, num_microbatches)
    orders = []
    for s in range(num_ranks):
        forwards = [Action(s, "F", i) for i in range(num_microbatches)]
        backwards = [Action(s, "B", i) for i in range(num_microbatches)]
        warmup = min(num_ranks - 1 - s, num_microbatches)
        orders.append(alternate(forwards, backwards, warmup))
    return Schedule("1F1B", num_microbatches, tuple(range(num_ranks)), tuple(orders))


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with v = `chunks` stages per rank: rank r holds stages r, r + p, r + 2p ...

    The bubble shrinks v times, the number of messages grows v times. Microbatches go in rounds of
    about p: a rank runs one round on its first stage, then the same round on its next stage.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2, which wants m divisible by p; PyTorch's
    `ScheduleInterleaved1F1B`, whose order this is, only wants m divisible by its number of rounds
    max(1, m // p).

    Raises:
        ValueError: a size is below 1, or m does not divide into rounds; legal values are named.

    >>> print(interleaved_one_f_one_b(num_ranks=2, num_microbatches=4, chunks=2))
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    check_sizes(num_ranks, num_microbatches, chunks)
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards, backwards = looped_orders(rank, num_ranks, num_microbatches, chunks, per_round)
        warmup = (chunks - 1) * per_round + 2 * (num_ranks - 1 - rank)
        orders.append(alternate(forwards, backwards, min(warmup, len(forwards))))
    return Schedule("interleaved 1F1B", num_microbatches, loop(num_ranks, chunks), tuple(orders))


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return tuple(order + backwards[len(forwards) - warmup :])


def looped_orders(
    rank: int, num_ranks: int, num_microbatches: int, chunks: int, per_round: int
) -> tuple[list[Action], list[Action]]:
    """The forwards of `rank` in order, and its backwards: round by round, chunk by chunk."""
    rounds = [range(i, i + per_round) for i in range(0, num_microbatches, per_round)]
    stages = [rank + chunk * num_ranks for chunk in range(chunks)]
    forwards = [Action(s, "F", i) for group in rounds for s in stages for i in group]
    backwards = [Action(s, "B", i) for group in rounds for s in reversed(stages) for i in group]
    return forwards, backwards


def loop(num_ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * chunks


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int:
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        lower = _legal_near(num_ranks, num_microbatches, step=-1)
        upper = _legal_near(num_ranks, num_microbatches, step=1)
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide into {rounds} equal rounds of about "
            f"num_ranks={num_ranks}; try num_microbatches={lower} or {upper}"
        )
    return num_microbatches // rounds


def _legal_near(num_ranks: int, num_microbatches: int, step: int) -> int:
    while num_microbatches % max(1, num_microbatches // num_ranks):
        num_microbatches += step
    return num_microbatches


def check_sizes(num_ranks: int, num_microbatches: int, chunks: int = 1) -> None:
    if num_ranks < 1 or num_microbatches < 1 or chunks < 1:
        raise ValueError(
            f"num_ranks={num_ranks}, num_microbatches={num_microbatches} and chunks={chunks} must "
            "all be >= 1"
        )

"""Serve requests from slots of one KV cache: admit as slots free up, or batch by batch.

slot   static                      continuous (Yu et al. 2022, "Orca", iteration-level)
0      A A A A A A  D D D          A A A A A A E E
1      B B . . . .  E E .          B B D D D F F F
2      C C C . . .  F F F          C C C G G G
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

import torch

from labkit.models.kv_cache import Step, decode, prefill
from labkit.parallel.generation.requests import Answer, Request, Served
from labkit.parallel.generation.runners import Runner
from labkit.parallel.generation.sampling import GREEDY, Sampling
from labkit.parallel.generation.sequences import Growing, next_tokens, padded
from labkit.parallel.generation.step_clocks import StepClock


@torch.no_grad()
def serve(
    runner: Runner,
    requests: Sequence[Request],
    *,
    slots: int,
    clock: StepClock,
    continuous: bool = True,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
) -> Served:
    """Answer every request; each gets the tokens that it would get alone.

    Whoever has arrived when a slot is free is prefilled before the next decode step. With
    ``continuous=False`` slots count as free only when all are: the next batch starts when the
    longest answer of this one has ended.

    Args:
        requests: on ranks the same everywhere.
        slots: requests in the cache at once; on ranks all call with the same.
        clock: what has arrived is decided by it.

    Raises:
        ValueError: there is no request or no slot, or one exceeds the model's context.
    """
    if not requests or slots < 1:
        raise ValueError(f"{len(requests)} requests and slots={slots}: both must be at least 1")
    server = _Server(runner, requests, slots, clock, sampling, stop)
    while server.waiting or server.running:
        free = server.free_slots() if continuous or not server.running else []
        if admitted := server.arrived(len(free)):
            server.admit(dict(zip(free, admitted, strict=False)))
        elif server.running:
            server.decode()
        else:
            clock.wait_until(server.waiting[0].arrival_s)
    runner.finish()
    answers = sorted(server.answers, key=lambda answer: answer.request.number)
    return Served(tuple(answers), slots, clock.provenance)


class _Server:
    """The slots, who waits, who is in which slot, and who is done."""

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[Request],
        slots: int,
        clock: StepClock,
        sampling: Sampling,
        stop: Collection[int],
    ) -> None:
        self.runner, self.clock, self.slots = runner, clock, slots
        self.waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
        columns = max(len(request.prompt) + request.new_tokens - 1 for request in requests)
        self.cache = runner.new_cache(slots, columns)
        self.running: dict[int, Growing] = {}  # by slot
        self.answers: list[Answer] = []
        self._new = partial(Growing, sampling=sampling, stop=stop)
        self._moments: dict[int, list[float]] = {}  # by slot: admitted, first token
        self._requests: dict[int, Request] = {}  # by slot

    def free_slots(self) -> list[int]:
        return [slot for slot in range(self.slots) if slot not in self.running]

    def arrived(self, most: int) -> list[Request]:
        """Take up to ``most`` of those that have arrived."""
        now_s, taken = self.clock.now_s(), []
        while self.waiting and len(taken) < most and self.waiting[0].arrival_s <= now_s:
            taken.append(self.waiting.popleft())
        return taken

    def admit(self, requests: dict[int, Request]) -> None:
        """Prefill requests into their slots; each gets its first token."""
        now_s, device = self.clock.now_s(), self.runner.device
        new = {
            slot: self._new(request.number, request.prompt, request.new_tokens)
            for slot, request in requests.items()
        }
        self.running |= new
        self._requests |= requests
        self._moments |= {slot: [now_s] for slot in requests}
        prompts = [sequence.prompt for sequence in new.values()]
        step = prefill([len(prompt) for prompt in prompts], device, rows=list(new))
        self._take(padded(prompts, device), step, new, "P")

    def decode(self) -> None:
        """One token for every running sequence; idle slots below the last one run along."""
        rows = {slot: self.running.get(slot) for slot in range(max(self.running) + 1)}
        lengths = [0 if row is None else row.cached for row in rows.values()]
        newest = [[0 if row is None else row.tokens[-1]] for row in rows.values()]
        device = self.runner.device
        self._take(torch.tensor(newest, device=device), decode(lengths, device), rows, "D")

    def _take(
        self, ids_BT: torch.Tensor, step: Step, rows: dict[int, Growing | None], label: str
    ) -> None:
        draw = partial(next_tokens, rows=list(rows.values()))
        result = self.clock.run(
            lambda: self.runner.start(ids_BT, step, self.cache, draw, label)().tolist()
        )
        now_s = self.clock.now_s()
        for (slot, sequence), token in zip(rows.items(), result, strict=True):
            if sequence is not None:
                sequence.tokens.append(token)
                if len(sequence.tokens) == 1:
                    self._moments[slot].append(now_s)
                if sequence.done:
                    self._retire(slot, now_s)

    def _retire(self, slot: int, now_s: float) -> None:
        sequence = self.running.pop(slot)
        admitted_s, first_s = self._moments.pop(slot)
        self.answers.append(
            Answer(
                self._requests.pop(slot), slot, admitted_s, first_s, now_s, tuple(sequence.tokens)
            )
        )

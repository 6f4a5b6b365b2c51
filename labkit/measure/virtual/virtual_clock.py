"""Runs the recorded programs of all ranks on the clock of a modelled machine.

The rules:

- a device runs its operators in program order, each for the time its profile gives it (or for the
  time that was measured, see ``calibration``);
- sending, receiving and joining a collective cost the device the profile's message overhead;
- a message leaves when its data is ready and its direction of the link is free, and holds the link
  for latency + bytes / bandwidth; on a rendezvous link its receiver must have posted, too;
- an operator that touches a storage with received data in it waits until they have arrived; one
  that overwrites a storage still being sent waits until it has left;
- a collective starts when its last member arrives and the links of its ring are free, and takes
  ``collective_s``; a member goes on at once, unless it called it without ``async_op``;
- a recording ends when all that it sent, received and joined has ended.

``Work.wait()`` is invisible to the recorder: a wait for data that nobody reads costs nothing here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from labkit.devices.profiles import Machine, Profile
from labkit.measure.timeline import Timeline
from labkit.measure.virtual.recording import Event, Recording
from labkit.measure.virtual.virtual_network import Network, ProgramMismatchError
from labkit.measure.virtual.virtual_program import OperatorCost, Program


def modelled_cost(event: Event, profile: Profile) -> float:
    """Seconds that an event keeps its device busy, by the profile.

    An operator: launch + max(FLOPs / peak, bytes / bandwidth); a message or collective: the
    message overhead; a wait: nothing.
    """
    if event.kind != "compute":
        return 0.0 if event.kind == "wait" else profile.message_overhead_s
    return profile.operator_s(event.flops, event.num_bytes, event.dtype)


def play(
    recordings: Sequence[Recording], machine: Machine, cost: OperatorCost = modelled_cost
) -> Timeline:
    """Time one recording per rank on a machine, from 0 s.

    Args:
        recordings: one per rank, in any order.
        machine: its device i runs rank i.
        cost: seconds that an event keeps a device of a profile busy.

    Raises:
        ValueError: the machine has fewer devices than ranks, or a rank comes twice.
        ProgramMismatchError: the programs do not fit together; names ranks and operations.
    """
    return VirtualClock(machine, cost).advance(recordings)


class VirtualClock:
    """The clocks of a machine's devices, which go on from one ``advance`` to the next.

    For programs that decide by the clock: record a piece, ``advance``, look at ``now_s``, go on.

    Args:
        machine: its device i runs rank i.
        cost: seconds that an event keeps a device of a profile busy.
    """

    def __init__(self, machine: Machine, cost: OperatorCost = modelled_cost) -> None:
        self.machine = machine
        self.now_s = [0.0] * machine.count
        self._cost = cost
        self._network = Network(machine)

    def advance(self, recordings: Sequence[Recording]) -> Timeline:
        """Time the next piece of every given rank's program, from where its clock stands.

        Raises:
            ValueError: the machine has fewer devices than ranks, or a rank comes twice.
            ProgramMismatchError: the programs do not fit together; names ranks and operations.
        """
        self._check_ranks([recording.rank for recording in recordings])
        programs = [
            Program(r, self.machine.profiles[r.rank], self.now_s[r.rank]) for r in recordings
        ]
        self._run(programs)
        _check_ended(programs)
        for program in programs:
            self.now_s[program.rank] = program.now_s
        spans = [span for program in programs for span in program.spans]
        spans += self._network.take_spans()
        return Timeline(tuple(spans), len(recordings), self.machine.provenance)

    def _check_ranks(self, ranks: list[int]) -> None:
        if not ranks or len(set(ranks)) != len(ranks) or max(ranks) >= self.machine.count:
            raise ValueError(
                f"recordings of ranks {ranks} on {self.machine.name!r} with {self.machine.count} "
                "devices: give each rank once, and a machine with a device for each"
            )

    def _run(self, programs: list[Program]) -> None:
        """Always advance the rank whose clock is behind, so that links are taken in time order."""
        runnable = [(program.now_s, place) for place, program in enumerate(programs)]
        heapq.heapify(runnable)
        blocked: list[int] = []
        while runnable:
            _, place = heapq.heappop(runnable)
            if not self._run_to_communication(programs[place]):
                blocked.append(place)
                continue
            for other in (place, *blocked):
                heapq.heappush(runnable, (programs[other].now_s, other))
            blocked.clear()

    def _run_to_communication(self, program: Program) -> bool:
        """Run operators and the communication after them; False if the rank got to none."""
        while program.event is not None and program.blocker() is None:
            event = program.begin()
            program.occupy(event, self._cost(event, program.profile))
            if event.kind in ("send", "recv", "collective"):
                self._network.communicate(program, event)
                return True
        return False


def _check_ended(programs: list[Program]) -> None:
    stuck = [
        f"rank {program.rank} waits at {program.event.name} for {program.blocker().what}"
        for program in programs
        if program.event is not None
    ]
    stuck += [
        f"rank {program.rank} ended and still waits for {missing.what}"
        for program in programs
        if program.event is None and (missing := program.close()) is not None
    ]
    if stuck:
        raise ProgramMismatchError("deadlock: " + "; ".join(stuck))

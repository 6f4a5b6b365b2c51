"""Interprets one rank's program of one step: wait for the input, compute, send the result on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from labkit.measure.regions import region
from labkit.parallel.pipelining.losses import BatchLoss
from labkit.parallel.pipelining.mail import Mail
from labkit.parallel.pipelining.stage_worker import StageWorker
from labkit.parallel.scheduling.rank_program import Instruction, RankProgram


class StepExecution:
    """One step of one rank.

    Args:
        program: what to run.
        workers: the stages of this rank.
        mail: made for this step.
        microbatches: inputs of stage 0; empty on other ranks.
        batch_loss: turns the last stage's outputs into losses; None on other ranks and without.
    """

    def __init__(
        self,
        program: RankProgram,
        workers: Mapping[int, StageWorker],
        mail: Mail,
        microbatches: Sequence[Tensor],
        batch_loss: BatchLoss | None,
    ) -> None:
        self._program, self._workers, self._mail = program, workers, mail
        self._microbatches, self._batch_loss = microbatches, batch_loss
        self._received_loss: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def run(self) -> None:
        """Run all instructions, then wait until everything sent has arrived."""
        for instruction in self._program.instructions:
            entered = None
            if instruction.needs is not None:
                with region(instruction.needs_label, "wait"):
                    entered = self._receive(instruction)
            with region(instruction.label, instruction.kind):
                result = self._compute(instruction, entered)
            if instruction.makes is not None:
                with region(instruction.makes_label, "transfer"):
                    self._send(instruction, result)
        with region("wait for sends", "wait"):
            self._mail.wait_for_sends()

    @property
    def loss(self) -> Tensor:
        """The batch's loss: computed here, or come with a gradient."""
        return self._received_loss if self._batch_loss is None else self._batch_loss.total

    def _compute(self, instruction: Instruction, entered: Tensor | None) -> Tensor | None:
        action = instruction.action
        worker, i = self._workers[action.stage], action.microbatch
        if action.kind == "F":
            return self._forward(action.stage, i, entered)
        if action.kind == "B":
            return worker.backward(i, entered)
        if action.kind == "I":
            return worker.backward_input(i, entered)
        return worker.backward_weight(i)

    def _forward(self, stage: int, i: int, entered: Tensor | None) -> Tensor:
        worker = self._workers[stage]
        if stage == 0:
            entered = self._microbatches[i]
        if stage < self._program.last_stage:
            return worker.forward(i, entered)
        if self._batch_loss is not None:
            return worker.forward(i, entered, self._batch_loss.of(i))
        self.outputs[i] = worker.forward(i, entered)
        return self.outputs[i]

    def _receive(self, instruction: Instruction) -> Tensor:
        entered = self._mail.receive(instruction.needs)
        if instruction.brings_loss:
            self._received_loss = self._mail.receive(instruction.needs._replace(kind="loss"))
        return entered

    def _send(self, instruction: Instruction, result: Tensor) -> None:
        self._mail.send(instruction.makes, instruction.to, result)
        if instruction.passes_loss:
            self._mail.send(instruction.makes._replace(kind="loss"), instruction.to, self.loss)

"""Interprets one rank's actions of one step: wait for the input, compute, send the result on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from labkit.measure.regions import region
from labkit.parallel.losses import BatchLoss
from labkit.parallel.mail import Mail
from labkit.parallel.messages import Message, last_backward, made_by, needed_by
from labkit.parallel.replay import SPAN_KINDS
from labkit.parallel.schedules import Action, Schedule
from labkit.parallel.stage_worker import StageWorker


class StepExecution:
    """One step of one rank.

    Args:
        schedule: what every rank runs.
        rank: whose actions to run.
        workers: the stages of this rank.
        mail: made for this step.
        microbatches: inputs of stage 0; empty on other ranks.
        batch_loss: turns the last stage's outputs into losses; None on other ranks and without.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        workers: Mapping[int, StageWorker],
        mail: Mail,
        microbatches: Sequence[Tensor],
        batch_loss: BatchLoss | None,
    ) -> None:
        self._schedule, self._rank, self._workers = schedule, rank, workers
        self._mail = mail
        self._microbatches, self._batch_loss = microbatches, batch_loss
        self._carries_loss = last_backward(schedule)
        self._received_loss: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def run(self) -> None:
        """Run all actions, then wait until everything sent has arrived."""
        for action in self._schedule.actions[self._rank]:
            entered = self._receive(action)
            with region(self._schedule.label(action), SPAN_KINDS[action.kind]):
                result = self._compute(action, entered)
            self._send(action, result)
        with region("wait for sends", "wait"):
            self._mail.release_all()

    @property
    def loss(self) -> Tensor:
        """The batch's loss: computed here, or come with a gradient."""
        return self._received_loss if self._batch_loss is None else self._batch_loss.total

    def _compute(self, action: Action, entered: Tensor | None) -> Tensor | None:
        worker, i = self._workers[action.stage], action.microbatch
        if action.kind == "F":
            return self._forward(action, entered)
        if action.kind == "B":
            return worker.backward(i, entered)
        if action.kind == "I":
            return worker.backward_input(i, entered)
        return worker.backward_weight(i)

    def _forward(self, action: Action, entered: Tensor | None) -> Tensor:
        worker, i = self._workers[action.stage], action.microbatch
        if action.stage == 0:
            entered = self._microbatches[i]
        if action.stage + 1 < self._schedule.num_stages:
            return worker.forward(i, entered)
        if self._batch_loss is not None:
            return worker.forward(i, entered, self._batch_loss.of(i))
        self.outputs[i] = worker.forward(i, entered)
        return self.outputs[i]

    def _receive(self, action: Action) -> Tensor | None:
        message = needed_by(action, self._schedule)
        if message is None:
            return None
        with region(f"wait for {self._name(message)}", "wait"):
            entered = self._mail.receive(message)
            if message.kind == "B":
                # it answers the activation sent before, which has therefore arrived
                self._mail.release(Message("F", action.stage, action.microbatch))
            if self._brings_loss(message):
                self._received_loss = self._mail.receive(message._replace(kind="loss"))
        return entered

    def _send(self, action: Action, result: Tensor | None) -> None:
        message = made_by(action, self._schedule)
        if message is None:
            return
        with region(f"send {self._name(message)}", "transfer"):
            self._mail.send(message, result)
            if self._brings_loss(message):
                self._mail.send(message._replace(kind="loss"), self.loss)

    def _brings_loss(self, message: Message) -> bool:
        return message.kind == "B" and message.microbatch == self._carries_loss

    def _name(self, message: Message) -> str:
        return self._schedule.label(Action(message.stage, message.kind, message.microbatch))

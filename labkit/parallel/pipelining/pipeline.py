"""Runs a schedule on the ranks of a process group: the plan that is drawn is the one that runs.

`Pipeline` is a small interpreter of the schedule's actions over `isend` and `irecv`, with the split
backward of `torch.distributed.pipelining`. It adds the checks whose lack shows there as wrong
numbers, or as an error on a rank that did nothing wrong. That package's own runtime takes the same
actions (`torch_runtime`) and computes the same; this one is used because a step holds less memory
and takes batches of any size. `benchmarks/pipeline.py` compares their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from labkit.parallel.peers import Peers
from labkit.parallel.pipelining import pipeline_guards as guards
from labkit.parallel.pipelining.clipping import clip_to_global_norm
from labkit.parallel.pipelining.links import open_links, pairs_of
from labkit.parallel.pipelining.losses import BatchLoss, LossFunction, Scale, token_losses
from labkit.parallel.pipelining.mail import Mail
from labkit.parallel.pipelining.microbatches import Batch
from labkit.parallel.pipelining.pipeline_plan import BatchPlan, Planner
from labkit.parallel.pipelining.pipeline_setup import agree_on_setup, device_of, stages_of
from labkit.parallel.pipelining.stage_worker import StageWorker
from labkit.parallel.pipelining.step_execution import StepExecution
from labkit.parallel.pipelining.tied import Names, TiedWeights
from labkit.parallel.scheduling.messages import forwards_only
from labkit.parallel.scheduling.rank_program import RankProgram, rank_program
from labkit.parallel.scheduling.schedule_checks import check_schedule
from labkit.parallel.scheduling.schedules import Schedule


class Pipeline:
    """One rank's part of a model that runs by a schedule. All ranks construct and call together.

    Args:
        stages: the stages that the schedule gives this rank, by number; or its one module.
        schedule: the same on every rank.
        loss_fn: (outputs, targets) -> one loss per target, not their mean.
        tied: groups of full parameter names that stand for one weight, beside those that `cut`
            has found.
        group: its ranks are the schedule's; None for all.

    Every action, wait and send is a `labkit.measure.regions.region`, such as ("F3", "forward"), so
    that an active `Recorder`, or a `SpanLog` inside `listening(log.span)`, hears of it.

    Raises:
        ValueError: (on every rank) ranks, stages, devices, schedule or tied names do not fit.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module] | nn.Module,
        schedule: Schedule,
        *,
        loss_fn: LossFunction = token_losses,
        tied: Sequence[Names] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_schedule(schedule)
        self.schedule, self._loss_fn = schedule, loss_fn
        peers = self._peers = Peers(group)
        self.stages = stages_of(stages, schedule, peers.rank)
        peers.device = self.device = device_of(self.stages)
        groups = agree_on_setup(self.stages, schedule, tied, peers)
        self._tied = TiedWeights(self.stages, groups, peers)
        mixing = sum(peers.gather(guards.batch_dependent_layers(self.stages)), ())
        guards.warn_of_batch_dependence(mixing, schedule.num_microbatches)
        self._planner = Planner(self.stages, schedule, peers, mixing)
        self._links = open_links(peers, pairs_of(schedule) | self._tied.pairs)
        self._tied.equalise(self._links)
        self._program = rank_program(schedule, peers.rank)
        self._forward_program = rank_program(forwards_only(schedule), peers.rank)
        splits = any(action.kind == "W" for action in schedule)
        self._workers = {
            stage: StageWorker(module, is_first=stage == 0, splits_backward=splits)
            for stage, module in self.stages.items()
        }

    def step(
        self,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        divide_by: int | None = None,
        scaler: GradScaler | None = None,
    ) -> float:
        """Forward and backward of one batch; adds to the gradients, and updates nothing.

        Args:
            inputs: the batch (B, ...); needed on the rank of the first stage. B must divide into
                the schedule's microbatches; a smaller last batch is padded and the padding masked.
            targets: (B, ...); needed on the rank of the last stage.
            valid: bool, which targets count, of the targets' shape or its first dims. Of integer
                targets, `IGNORED` ones never count.
            divide_by: what the sum of losses is divided by; None for the number of targets that
                count. When gradients accumulate over several calls, or over data-parallel
                replicas, pass the number that count in all of them.
            scaler: a `ShardedGradScaler` over this group, on every rank.

        Returns:
            The loss, on every rank: sum over the targets that count / `divide_by`.

        Raises:
            ValueError: (on every rank, before any data moves) the batch does not fit; or a
                parameter is left without a gradient.
        """
        batch = Batch(inputs, targets, valid, divide_by)
        given = batch.given(guards.scaler_fault(scaler, self._peers.size))
        plan, is_new = self._planner.plan(batch, given, self._loss_fn)
        scale = None if scaler is None else guards.scale_with(scaler, self.device)
        execution = self._execution(self._program, batch, plan, scale)
        self._tied.set_aside()
        with torch.enable_grad():
            execution.run()
        self._tied.sum_gradients(self._links)
        self._check_coverage(together=is_new)
        return execution.loss.item()

    @torch.no_grad()
    def outputs(self, inputs: Tensor | None = None) -> Tensor | None:
        """The last stage's outputs of a batch, without padding, on its rank; None on the others."""
        execution, plan = self._forward(Batch(inputs, needs_targets=False))
        parts = [execution.outputs[i] for i in sorted(execution.outputs)]
        return torch.cat(parts)[: plan.rows] if parts else None

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        valid: Tensor | None = None,
    ) -> float:
        """The loss of a batch, on every rank, without gradients; the arguments are `step`'s."""
        execution, _ = self._forward(Batch(inputs, targets, valid))
        last = self.schedule.rank_of_stage[-1]
        mean = execution.loss.item() if self._peers.rank == last else None
        return self._peers.tell(mean, source=last)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of all ranks by their common norm, tied weights counted once.

        Returns:
            The norm before clipping, on every rank.

        Raises:
            ValueError: `max_norm` is not above 0.
        """
        elsewhere = self._tied.counted_elsewhere()
        return clip_to_global_norm(self.parameters(), max_norm, self._peers, elsewhere)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages, each once; for its optimizer."""
        return nn.ModuleList(self.stages.values()).parameters()

    def _forward(self, batch: Batch) -> tuple[StepExecution, BatchPlan]:
        plan, _ = self._planner.plan(batch, batch.given(), self._loss_fn)
        execution = self._execution(self._forward_program, batch, plan)
        execution.run()
        return execution, plan

    def _execution(
        self, program: RankProgram, batch: Batch, plan: BatchPlan, scale: Scale | None = None
    ) -> StepExecution:
        microbatches, loss = (), None
        if 0 in self.stages:
            microbatches = batch.inputs_on(self.device, plan.rows_each, program.num_microbatches)
        if program.last_stage in self.stages and batch.needs_targets:
            targets = batch.targets_on(self.device, plan.rows_each, program.num_microbatches)
            loss = BatchLoss(self._loss_fn, targets, batch.divisor, scale)
        mail = Mail(program, self._links, plan.buffer)
        return StepExecution(program, self._workers, mail, microbatches, loss)

    def _check_coverage(self, *, together: bool) -> None:
        """Of a new shape of batch the ranks wait for each other here; later each checks its own."""
        fault = guards.parameters_without_gradient(self.stages)
        if together:
            self._peers.raise_together(fault)
        elif fault is not None:
            raise ValueError(fault)

"""Each fault that torch's pipelines let pass, on two real ranks: told to all, or put right."""

from __future__ import annotations

import copy
import warnings
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spawned import run_ranks
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from labkit.measure.regions import listening
from labkit.measure.spans import SpanLog
from labkit.measure.virtual.recorder import Recorder
from labkit.parallel.parity import compare, gradients, joined, training_snapshot
from labkit.parallel.pipelining import links
from labkit.parallel.pipelining.pipeline import Pipeline
from labkit.parallel.pipelining.pipeline_guards import (
    batch_dependent_layers,
    check_optimizer,
    scaler_fault,
)
from labkit.parallel.pipelining.stages import cut, even_ranges
from labkit.parallel.scheduling.schedules import gpipe, one_f_one_b
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

squared_errors = partial(F.mse_loss, reduction="none")
ROWS, WIDTH = 8, 4


def seeded(*blocks):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for block in blocks])


def linear():
    return nn.Linear(WIDTH, WIDTH)


def chain():
    return seeded(linear, nn.Tanh, linear, linear)


def tied_chain():
    """Stage 0 and the last stage share a weight, as embedding and head do."""
    model = seeded(linear, nn.Tanh, linear, linear)
    model[3].weight = model[0].weight
    return model


def normed_chain():
    return seeded(linear, partial(nn.BatchNorm1d, WIDTH), linear, linear)


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, rows, WIDTH, generator=generator).unbind()


def pipeline(model, schedule, rank, **options):
    ranges = even_ranges(len(model), schedule.num_stages)
    stages = cut(model, ranges, held=schedule.stages_of_rank(rank))
    return Pipeline(stages, schedule, loss_fn=squared_errors, **options)


def message(function, *args, **options):
    """The words of the ValueError that the call raises; None without."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return None


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Whole(nn.Module):
    def forward(self, x):
        return x.long()


class Forgetful(nn.Module):
    """Holds a weight that its output does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x):
        return self.used(x)


def _refusals(rank):
    """By case, what this rank was told. A rank that was told nothing would hang the other."""
    inputs, targets = batch()
    pipe = pipeline(chain(), gpipe(2, 4), rank)
    mine = {"inputs": inputs if rank == 0 else None, "targets": targets if rank == 1 else None}
    told = {
        "rows": message(pipe.step, *batch(6)),
        "no targets": message(pipe.step, inputs, None),
        "no inputs": message(pipe.step, None, targets),
        "other targets": message(pipe.step, inputs, targets[:4]),
        "width": message(pipe.step, inputs[:, :3], targets),
        "mask on one rank": message(pipe.step, inputs, targets, valid=targets[0] > 0),
        "plain scaler": message(pipe.step, **mine, scaler=torch.amp.GradScaler("cpu")),
    }
    with torch.no_grad():  # as a cell that evaluates may have left it
        after = message(pipe.step, **mine)
    pairs = pipeline(seeded(linear, Pair, linear, linear), gpipe(2, 4), rank)
    told["two outputs"] = message(pairs.step, inputs, targets)
    whole = pipeline(seeded(linear, Whole, linear, linear), gpipe(2, 4), rank)
    told["integers"] = message(whole.step, inputs, targets)
    mean = Pipeline(cut(chain(), even_ranges(4, 2), held=[rank]), gpipe(2, 4), loss_fn=F.mse_loss)
    told["mean loss"] = message(mean.step, inputs, targets)
    forgetful = pipeline(seeded(linear, Forgetful, linear, linear), gpipe(2, 4), rank)
    told["coverage"] = message(forgetful.step, inputs, targets)
    return told, after


def _setups(rank):
    """By case, what this rank was told when it built the pipeline."""
    stages = cut(chain(), even_ranges(4, 2), held=[rank])
    of_both = cut(chain(), even_ranges(4, 2))
    mixed = {rank: copy.deepcopy(stages[rank])}
    mixed[rank].get_submodule("2" if rank else "0").bias = nn.Parameter(
        torch.empty(WIDTH, device="meta")
    )
    return {
        "schedules": message(Pipeline, stages, gpipe(2, 4 if rank else 8)),
        "ranks": message(Pipeline, stages, gpipe(3, 4)),
        "stages": message(Pipeline, of_both if rank else stages, gpipe(2, 4)),
        "one module for two stages": message(Pipeline, stages[rank], zero_bubble_v(2, 4)),
        "tied name": message(Pipeline, stages, gpipe(2, 4), tied=[("0.weight", "9.weight")]),
        "tied shape": message(Pipeline, stages, gpipe(2, 4), tied=[("0.weight", "3.bias")]),
        "device": message(Pipeline, mixed, gpipe(2, 4)),
    }


def _clipping_and_ties(rank):
    """Three SGD steps with clipping, weights tied across ranks and within one."""
    found = {}
    for schedule in (one_f_one_b(2, 4), zero_bubble(2, 4), zero_bubble_v(2, 4)):
        pipe = pipeline(tied_chain(), schedule, rank)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        check_optimizer(optimizer, pipe.stages.values())
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):  # gradients accumulate over two calls
                pipe.step(*batch())
            norms.append(pipe.clip_grad_norm_(0.2))
            optimizer.step()
        weights = {n: p.detach() for m in pipe.stages.values() for n, p in m.named_parameters()}
        found[schedule.name] = (norms, weights)
    found["unequal ends"] = _ends_made_equal(rank)
    return found


def _ends_made_equal(rank):
    """Each rank builds its own end of a tied weight, with values of its own."""
    torch.manual_seed(rank)
    stage = nn.Sequential()
    stage.add_module(str(rank), linear())
    Pipeline(stage, gpipe(2, 1), loss_fn=squared_errors, tied=[("0.weight", "1.weight")])
    return stage.get_parameter(f"{rank}.weight").detach()


def _norms(rank):
    """BatchNorm: the warning, the buffers after one microbatch, and short batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = pipeline(normed_chain(), gpipe(2, 1), rank)
        silent = len([w for w in caught if "statistics" in str(w.message)])
        split = pipeline(normed_chain(), gpipe(2, 4), rank)
    modules = list(whole.stages.values())
    snapshot = training_snapshot(modules, lambda: whole.step(*batch()))
    split.step(*batch())
    counted = [int(b) for n, b in split.stages[rank].named_buffers() if n.endswith("tracked")]
    return {
        "silent": silent,
        "warnings": [str(w.message) for w in caught if "statistics" in str(w.message)],
        "snapshot": snapshot,
        "counted": counted,
        "short": message(split.step, *batch(5)),
    }


def viewing_chain():
    """In a V, stages 1 and 2 end in a view, which torch's split backward cannot detach."""
    return seeded(linear, partial(nn.Unflatten, 1, (2, 2)), nn.Flatten, linear)


def frozen_chain():
    """Stage 0 trains nothing, so no gradient starts from it."""
    model = chain()
    model[0].requires_grad_(False)
    return model


def _odd_stages(rank):
    """By model and schedule, the gradients."""
    found = {}
    for make in (viewing_chain, frozen_chain):
        for schedule in (one_f_one_b(2, 4), zero_bubble(2, 4), zero_bubble_v(2, 4)):
            pipe = pipeline(make(), schedule, rank)
            pipe.step(*batch())
            parts = {stage: gradients(module) for stage, module in pipe.stages.items()}
            found[make.__name__, schedule.name] = joined(parts)
    return found


def _scaled(rank):
    """An infinite gradient on one rank only; then one on none."""
    pipe = pipeline(chain(), gpipe(2, 4), rank)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    before = [p.detach().clone() for p in pipe.parameters()]
    loss = pipe.step(*batch(), scaler=scaler)
    gradient = next(pipe.parameters()).grad.clone()
    if rank == 1:
        next(pipe.parameters()).grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    moved = any(not torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
    optimizer.zero_grad()
    unscaled_loss = pipe.step(*batch())
    ratio = (gradient / next(pipe.parameters()).grad).mean().item()
    return {
        "moved": moved,
        "scale": scaler.get_scale(),
        "ratio": ratio,
        "losses": (loss, unscaled_loss),
    }


def _watched(rank):
    """What a stopwatch and a recorder hear of one step."""
    pipe = pipeline(chain(), one_f_one_b(2, 2), rank)
    pipe.step(*batch())
    log = SpanLog(rank, torch.device("cpu"))
    with listening(log.span):
        pipe.step(*batch())
    with Recorder() as recorder:
        pipe.step(*batch())
    recording = recorder.take()
    heard = {(region.label, region.kind) for region in recording.regions}
    return [(span.label, span.kind) for span in log.spans()], heard


def _links_of_their_own(rank):
    """As on NCCL: a process group for each link; and a pipeline that rank 1 runs alone."""
    links.open_links.__globals__["dist"] = _NoGloo()
    pipe = pipeline(chain(), zero_bubble_v(2, 4), rank)
    groups = {id(link.group) for link in pipe._links.values()}
    loss = pipe.step(*batch())
    links.open_links.__globals__["dist"] = dist
    alone = dist.new_group([1])
    if rank == 0:
        return loss, len(groups), None
    model = chain()
    return (
        loss,
        len(groups),
        Pipeline(model, gpipe(1, 4), loss_fn=squared_errors, group=alone).step(*batch()),
    )


class _NoGloo:
    """`torch.distributed` that says it is not gloo."""

    def __getattr__(self, name):
        return getattr(dist, name)

    @staticmethod
    def get_backend(group):
        return "other"


def _everything(rank):
    return {
        "refusals": _refusals(rank),
        "setups": _setups(rank),
        "ties": _clipping_and_ties(rank),
        "norms": _norms(rank),
        "odd": _odd_stages(rank),
        "scaled": _scaled(rank),
        "watched": _watched(rank),
        "links": _links_of_their_own(rank),
    }


@cache
def two_ranks():
    return run_ranks(_everything, 2)


def both(part):
    return [found[part] for found in two_ranks()]


@pytest.mark.parametrize(
    "case, words",
    [
        ("rows", "6 rows must divide into num_microbatches=4; try 4 or 8"),
        ("no targets", "rank 1 holds the last stage and got no targets"),
        ("no inputs", "rank 0 holds the first stage and got no inputs"),
        ("other targets", "inputs on rank 0 have 8 rows and targets on rank 1 have 4"),
        ("width", "stage 0 on rank 0 fails on an input of (2, 3) float32"),
        ("mask on one rank", "valid has shape (4,)"),
        ("plain scaler", "scaler is a GradScaler, which decides for its own rank alone"),
        ("two outputs", "stage 0 on rank 0 returns a tuple; a stage hands exactly one tensor"),
        ("integers", "stage 0 on rank 0 returns torch.int64"),
        ("mean loss", "must return one loss per target"),
        ("coverage", "2 parameters have no gradient after the step, the first is 1.unused.weight"),
    ],
)
def test_every_rank_is_told_the_same_before_data_moves(case, words):
    first, second = (told[case] for told, _ in both("refusals"))
    assert first == second
    assert words in first


def test_a_pipeline_works_on_after_it_has_refused_batches():
    assert [after for _, after in both("refusals")] == [None, None]


@pytest.mark.parametrize(
    "case, words",
    [
        ("schedules", "the ranks were given different schedules"),
        ("ranks", "is for 3 ranks and the group has 2"),
        ("stages", "rank 1: was given stages [0, 1], and the schedule gives it stages [1]"),
        ("one module for two stages", "rank 0: was given a single module"),
        ("device", "rank 0: 0.bias of stage 0 is on meta and the rank computes on cpu"),
        ("tied name", "tied weight 9.weight is held by 0 stages"),
        ("tied shape", "tied weights must have one shape"),
    ],
)
def test_every_rank_is_told_of_a_wrong_setup(case, words):
    for told in both("setups"):
        assert words in told[case]


def trained_on_one_device():
    model = tied_chain()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            inputs, targets = batch()
            F.mse_loss(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
        optimizer.step()
    return norms, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", ["1F1B", "zero bubble", "zero bubble V"])
def test_tied_weights_and_the_clipped_norm_are_those_of_one_device(name):
    norms, weights = trained_on_one_device()
    parts = [ties[name] for ties in both("ties")]
    for own_norms, _ in parts:
        assert own_norms == pytest.approx(norms, rel=1e-5)
    together = {n: w for _, own in parts for n, w in own.items()}
    assert together.keys() <= weights.keys()
    assert compare({n: weights[n] for n in together}, together).max_rel_error < 1e-5
    if name != "zero bubble V":  # there both ends are one parameter of rank 0
        assert torch.equal(parts[0][1]["0.weight"], parts[1][1]["3.weight"])


def test_tied_weights_that_start_apart_start_as_the_first_one():
    first, second = (ties["unequal ends"] for ties in both("ties"))
    assert torch.equal(first, second)


def test_batch_norm_is_warned_of_by_name_unless_there_is_one_microbatch():
    for found in both("norms"):
        assert found["silent"] == 0
        assert len(found["warnings"]) == 1
        assert "1 (BatchNorm1d, stage 0)" in found["warnings"][0]


def test_shapes_are_found_out_without_batch_norm_counting():
    model = normed_chain()

    def loss_and_backward():
        loss = F.mse_loss(model(batch()[0]), batch()[1])
        loss.backward()
        return loss

    expected = training_snapshot([model], loss_and_backward)
    parts = {rank: found["snapshot"] for rank, found in enumerate(both("norms"))}
    parity = compare(expected, joined(parts))
    assert parity.max_rel_error < 1e-5, str(parity)
    assert both("norms")[0]["counted"] == [4]  # one for each microbatch, none for the shapes


def test_a_short_batch_is_refused_where_batch_norm_would_count_the_padding():
    for found in both("norms"):
        assert "1 (BatchNorm1d, stage 0) would count the padding" in found["short"]


def test_an_infinite_gradient_on_one_rank_stops_the_optimizers_of_all():
    for found in both("scaled"):
        assert not found["moved"]
        assert found["scale"] == 4.0
        assert found["ratio"] == pytest.approx(8.0, rel=1e-4)
        assert found["losses"][0] == found["losses"][1]


@pytest.mark.parametrize("schedule", ["1F1B", "zero bubble", "zero bubble V"])
@pytest.mark.parametrize("make", [viewing_chain, frozen_chain])
def test_stages_that_end_in_a_view_or_train_nothing_pass_the_right_gradients(make, schedule):
    model = make()
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    parts = {r: odd[make.__name__, schedule] for r, odd in enumerate(both("odd"))}
    assert compare(gradients(model), joined(parts)).max_rel_error < 1e-5


def test_a_stopwatch_and_a_recorder_hear_every_action_wait_and_send():
    (first, heard), (last, _) = both("watched")
    assert [entry for entry in first if entry[1] in ("forward", "backward")] == [
        ("F0", "forward"),
        ("F1", "forward"),
        ("B0", "backward"),
        ("B1", "backward"),
    ]
    assert ("send F1", "transfer") in first and ("wait for B1", "wait") in first
    assert ("send B0", "transfer") in last and ("wait for F0", "wait") in last
    assert {("F0", "forward"), ("B1", "backward"), ("send F0", "transfer")} <= heard


def test_links_work_as_groups_of_their_own_and_some_ranks_can_run_a_pipeline_alone():
    expected = F.mse_loss(chain()(batch()[0]), batch()[1]).item()
    (loss, num_groups, _), (_, _, alone) = both("links")
    assert loss == pytest.approx(expected, rel=1e-6)
    assert num_groups == 2
    assert alone == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_of_other_parameters_is_refused_by_name():
    model, stale = chain(), chain()
    check_optimizer(torch.optim.SGD(model.parameters(), 0.1), [model])
    with pytest.raises(ValueError, match="6 of 6 parameters are not in the optimizer.*0.weight"):
        check_optimizer(torch.optim.SGD(stale.parameters(), 0.1), [model])
    both_models = [*model.parameters(), *stale.parameters()]
    with pytest.raises(ValueError, match="holds 6 parameters that no module trains"):
        check_optimizer(torch.optim.SGD(both_models, 0.1), [model])


def test_frozen_norms_and_norms_within_a_row_do_not_mix_rows():
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.LayerNorm(2))
    assert batch_dependent_layers({3: layers}) == ("0 (BatchNorm1d, stage 3)",)
    assert batch_dependent_layers({3: layers.eval()}) == ()


def test_one_rank_may_use_a_plain_scaler():
    assert scaler_fault(torch.amp.GradScaler("cpu"), num_ranks=1) is None

"""How true the virtual clock is here: its step time over the measured one, on this machine's cores.

The lab's model in one process and in two over gloo: naive (one microbatch), torch's GPipe and
1F1B, 1 to 16 microbatches. Every configuration is timed unrecorded and recorded in alternation;
the clock plays the recordings with each operator's own CPU seconds and the link that ping-pong
shows (for one process this only shows that nothing is lost). Beside it stand times that use no
measurement of the program at hand: by rates per operator, learnt on one process with 1, 4 and 16
microbatches, and by the fitted roofline. The fastest of the calls counts on both sides: what else
runs can only slow a call. Each configuration waits up to a minute for a quiet machine; one that
never was is marked, and left out of the summary: its measured side is too slow.
"""

from __future__ import annotations

import sys
from statistics import median
from time import monotonic

import psutil
import torch
import torch.distributed as dist
from _on_ranks import on_ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from labkit.measure.virtual.calibration import (
    calibrate,
    measure_link,
    measured_step_s,
    play_measured,
    with_measured_costs,
)
from labkit.measure.virtual.operator_rates import learn_rates
from labkit.measure.virtual.virtual_clock import play
from labkit.measure.virtual.virtual_step import record_step
from labkit.models.config import preset
from labkit.models.transformer import Transformer, next_token_loss

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CONFIGURATIONS = [("one process", m) for m in (1, 2, 4, 8, 16)]
CONFIGURATIONS += [("GPipe", m) for m in (1, 2, 4, 8, 16)] + [("1F1B", m) for m in (2, 4, 8, 16)]
CALLS = int(sys.argv[1]) if len(sys.argv) > 1 else 9


def main() -> None:
    found = on_ranks(2, rank_program)
    errors: list[float] = []
    alone = [found[0]["one process", m] for m in (1, 4, 16)]
    rates = learn_rates(map(with_measured_costs, alone))
    for name, m in CONFIGURATIONS:
        recordings = [ranks[name, m] for ranks in found if (name, m) in ranks]
        here = found[0]["machine", name, m]
        measured_s = measured_step_s(recordings)
        modelled_s = play_measured(recordings, here).step_time_s
        by_rates_s = play(recordings, here, rates.cost).step_time_s
        roofline_s = play(recordings, here).step_time_s
        error, quiet = modelled_s / measured_s - 1, found[0]["quiet"][name, m]
        errors += [abs(error)] if quiet else []
        print(
            f"{name:12} m={m:2}: measured {measured_s * 1e3:6.1f} ms, modelled "
            f"{modelled_s * 1e3:6.1f} ms ({error:+.1%}), by rates {by_rates_s * 1e3:6.1f} ms "
            f"({by_rates_s / measured_s - 1:+.1%}), by roofline {roofline_s * 1e3:6.1f} ms, "
            f"link {here.link(0, 1).latency_s * 1e6:4.0f} us"
            f"{'' if quiet else '  (busy machine)'}"
        )
    if errors:
        print(f"error of {len(errors)}: median {median(errors):.1%}, largest {max(errors):.1%}")


def rank_program(rank: int) -> dict:
    found: dict = {"quiet": {}}
    for name, m in CONFIGURATIONS:
        quiet_before = wait_for_quiet(rank)
        found["machine", name, m] = calibrate(measure_link(repeats=8), 2)
        if name in SCHEDULES:
            step, hold = pipeline(rank, SCHEDULES[name], m)
            found[name, m] = record_step(
                step, hold=hold, warm_up=2, timed=CALLS, group=dist.group.WORLD
            )
        elif rank == 0:
            step, hold = one_process(m)
            found[name, m] = record_step(step, hold=hold, warm_up=2, timed=CALLS)
        quiet_after = wait_for_quiet(rank, seconds=0.6)
        found["quiet"][name, m] = quiet_before and quiet_after
    return found


def wait_for_quiet(rank: int, seconds: float = 60.0) -> bool:
    """Hold both ranks until the cores are idle; False if they were not within ``seconds``."""
    until_s, quiet = monotonic() + seconds, False
    dist.barrier()
    while rank == 0 and not quiet and monotonic() < until_s:
        quiet = psutil.cpu_percent(interval=0.5) < 15
    dist.barrier()
    return quiet


def batch(config) -> torch.Tensor:
    return torch.randint(0, config.vocabulary, (16, config.context))


def one_process(m: int):
    config = preset("tiny").model
    model, ids = Transformer(config), batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        for part in ids.chunk(m):
            (next_token_loss(model(part), part) / m).backward()
        optimizer.step()

    return step, (model, optimizer)


def pipeline(rank: int, schedule_class, m: int):
    config = preset("tiny").model
    half = config.layers // 2
    part, ids = Transformer(config, layers=range(rank * half, (rank + 1) * half)), batch(config)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, m, loss_fn=next_token_loss, scale_grads=False)
    optimizer = torch.optim.AdamW(part.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids)
        optimizer.step()

    return step, (part, optimizer)


if __name__ == "__main__":
    main()

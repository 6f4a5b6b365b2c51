"""Schedules: tables by hand, laws over many sizes, PyTorch's own order, errors."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import pytest

from labkit.parallel import scheduling
from labkit.parallel.scheduling.schedule_checks import check_schedule, peak_per_rank, peak_per_stage
from labkit.parallel.scheduling.schedules import (
    Action,
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    naive,
    one_f_one_b,
)
from labkit.parallel.scheduling.zero_bubble import zero_bubble, zero_bubble_v

SIZES = list(product([1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 7, 8, 16]))
ONE_STAGE_PER_RANK = [gpipe, one_f_one_b, zero_bubble]
ROUNDS = [(p, m, v) for p, m in SIZES for v in (1, 2, 3) if m % max(1, m // p) == 0]


def rows(schedule):
    return str(schedule).splitlines()


def test_one_f_one_b_with_four_stages_is_the_table_drawn_by_hand():
    assert rows(one_f_one_b(4, 4)) == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_one_f_one_b_with_fewer_microbatches_than_stages_only_warms_up_and_drains():
    assert rows(one_f_one_b(4, 2)) == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_interleaving_with_three_ranks_is_the_table_drawn_by_hand():
    assert rows(interleaved_one_f_one_b(3, 3, chunks=2)) == [
        "0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 1B1 1B2",
        "2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2",
    ]


def test_zero_bubble_with_two_ranks_is_the_table_drawn_by_hand():
    assert rows(zero_bubble(2, 3)) == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_naive_is_one_microbatch_through_all_stages():
    assert rows(naive(2)) == ["F0 B0", "F0 B0"]
    assert naive(4).num_microbatches == 1


def test_one_chunk_of_interleaving_is_plain_one_f_one_b_but_for_a_longer_warm_up():
    """Megatron's interleaved warm-up is 2 (p - 1 - r) forwards, twice the plain one."""
    assert rows(interleaved_one_f_one_b(2, 4, chunks=1))[1] == rows(one_f_one_b(2, 4))[1]
    assert rows(interleaved_one_f_one_b(2, 4, chunks=1))[0] == "F0 F1 F2 B0 F3 B1 B2 B3"


def test_v_placement_holds_the_first_and_the_last_stage_on_rank_zero():
    assert zero_bubble_v(3, 4).rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert zero_bubble_v(3, 4).stages_of_rank(0) == (0, 5)


def test_loop_placement_deals_the_stages_out_in_turn():
    assert interleaved_one_f_one_b(2, 2, chunks=3).rank_of_stage == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("build", [*ONE_STAGE_PER_RANK, zero_bubble_v])
def test_every_built_schedule_is_legal(build, p, m):
    check_schedule(build(p, m))


@pytest.mark.parametrize("p, m, v", ROUNDS)
@pytest.mark.parametrize("build", [interleaved_one_f_one_b, zero_bubble])
def test_every_schedule_with_several_stages_per_rank_is_legal(build, p, m, v):
    check_schedule(build(p, m, chunks=v))


@pytest.mark.parametrize("p, m", SIZES)
def test_one_f_one_b_holds_at_most_p_minus_s_microbatches(p, m):
    assert peak_per_stage(one_f_one_b(p, m)) == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize("p, m", SIZES)
def test_gpipe_holds_every_microbatch(p, m):
    assert peak_per_stage(gpipe(p, m)) == (m,) * p


@pytest.mark.parametrize("p, m", SIZES)
def test_zero_bubble_holds_no_more_on_any_rank_than_one_f_one_b_on_its_first(p, m):
    assert max(peak_per_rank(zero_bubble(p, m))) == min(m, p)


@pytest.mark.parametrize("p, m", SIZES)
def test_zero_bubble_v_holds_at_most_two_p_half_stages(p, m):
    assert max(peak_per_rank(zero_bubble_v(p, m))) <= min(2 * p, 2 * m)


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, interleaved_one_f_one_b, zero_bubble])
def test_a_size_below_one_is_refused(build):
    with pytest.raises(ValueError, match="num_ranks=0, num_microbatches=4 .* must all be >= 1"):
        build(0, 4)


def test_microbatches_that_make_no_rounds_are_refused_with_the_nearest_legal_counts():
    with pytest.raises(ValueError, match="num_microbatches=11 .* 2 equal rounds .*=10 or 12"):
        interleaved_one_f_one_b(4, 11)
    with pytest.raises(ValueError, match="num_microbatches=13 .* 3 equal rounds .*=12 or 15"):
        interleaved_one_f_one_b(4, 13)


def test_an_action_on_the_wrong_rank_is_refused_by_name():
    with pytest.raises(ValueError, match="rank 0, position 0: action 1F0 belongs to rank 1"):
        Schedule("hand", 1, (0, 1), ((Action(1, "F", 0),), ()))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='X' is not an action; use one of F, B, I, W"):
        Action(0, "X", 0)


@pytest.mark.parametrize(
    "name",
    ["schedules", "zero_bubble", "schedule_checks", "replay", "bounds", "waterfall", "gaps"],
)
def test_schedules_and_their_clock_import_no_torch(name):
    tree = ast.parse((Path(scheduling.__file__).parent / f"{name}.py").read_text())
    imported = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert imported and not any(module.startswith("torch") for module in imported)

from __future__ import annotations

import pytest

from labkit.devices.ranks.rank_cell import RankResult
from labkit.devices.ranks.rank_errors import failure_report, split_failures
from labkit.devices.ranks.rank_kernels import Death

CLOSED = "[../gloo/transport/tcp/pair.cc:550] Connection closed by peer [127.0.0.1]:4242"
TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv"


def error(rank, evalue, at_s, **more):
    return RankResult(rank, "RuntimeError", evalue, ["line"], ended_s=at_s, **more)


@pytest.mark.parametrize(
    ("results", "causes", "consequences"),
    [
        ([error(0, "own", 2), error(1, "own", 1)], [1, 0], []),
        ([error(0, CLOSED, 1), error(1, "own", 2)], [1], [0]),
        ([error(0, "own", 2), error(1, "", 1, interrupted=True)], [0], [1]),
        ([error(0, TIMED_OUT, 1), RankResult(1)], [], [0]),
        ([error(0, CLOSED, 1), RankResult(1, death=Death(-6), ended_s=2)], [1], [0]),
        (
            [error(0, "own", 1), RankResult(1, death=Death(-9, by_us=True), interrupted=True)],
            [0],
            [1],
        ),
        ([RankResult(0), RankResult(1)], [], []),
    ],
    ids=["both", "closed", "interrupted", "timeout", "death", "killed by us", "none"],
)
def test_causes_come_first_in_time_and_consequences_are_never_causes(results, causes, consequences):
    assert split_failures(results) == (causes, consequences)


def test_the_report_says_an_equal_error_once():
    results = {0: error(0, "same", 1), 1: error(1, "same", 2), 2: error(2, "other", 3)}
    report = failure_report(results).splitlines()
    assert report[0] == "rank 0 failed first: RuntimeError: same"
    assert "rank 1 failed with the same error" in report
    assert "rank 2 failed too: RuntimeError: other" in report


def test_the_last_words_of_a_dead_rank_are_read():
    words = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 20 vs 12."
    death = Death(-6, words, "all_reduce, line 1 of its cell")
    report = failure_report({1: RankResult(1, death=death, operation=death.operation)})
    assert "it was sent 20 bytes where it expected 12" in report and words in report

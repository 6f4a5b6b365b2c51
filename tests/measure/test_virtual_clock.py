"""Hand-made recordings on a toy machine: a FLOP takes 1 s, a byte on the wire 1 s; latency 0.5."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.devices.profiles import Link, Profile, uniform_machine
from labkit.measure.virtual.collective_costs import collective_s
from labkit.measure.virtual.recording import NO_REGION, Event, Recording, Region
from labkit.measure.virtual.virtual_clock import VirtualClock, play
from labkit.measure.virtual.virtual_network import ProgramMismatchError

TOY = Profile("toy", {"float32": 1.0}, 1.0, 1 << 30, 0.0, 0.0, "made up")
WIRE = Link("wire", 1.0, 0.5, "made up")
PAIR = uniform_machine("pair", TOY, WIRE, 2)
FOUR = uniform_machine("four", TOY, WIRE, 4)


def operator(flops, reads=(), writes=(), region=0, **more):
    return Event("compute", "aten::mm", flops, 0, "float32", reads, writes, region, **more)


def send(to, storage, num_bytes=2, tag=0):
    return Event("send", f"send to {to}", 0, num_bytes, reads=(storage,), ranks=(to,), tag=tag)


def receive(source, storage, num_bytes=2, tag=0):
    name = f"receive from {source}"
    return Event("recv", name, 0, num_bytes, writes=(storage,), ranks=(source,), tag=tag)


def collective(name, members, storage, num_bytes=4, blocking=False):
    storages = (storage,)
    return Event("collective", name, 0, num_bytes, "", storages, storages, 0, members, 0, blocking)


def recording(rank, *events, regions=(NO_REGION,)):
    return Recording(rank, events, regions, 0, {})


def ends(timeline, **where):
    """End times of the spans that match, in order."""
    spans = [s for s in timeline.spans if all(getattr(s, k) == v for k, v in where.items())]
    return [span.end_s for span in sorted(spans, key=lambda span: span.start_s)]


def two_stages(*, num_bytes=2):
    """F on rank 0 (3 s), its activation over the wire, F and B on rank 1, the gradient back, B."""
    first = recording(
        0,
        operator(3, (1,), (2,), 1),
        send(1, 2, num_bytes),
        receive(1, 3, num_bytes),
        operator(6, (3,), (4,), 2),
        regions=(NO_REGION, Region("F0", "forward"), Region("B0", "backward")),
    )
    last = recording(
        1,
        receive(0, 7, num_bytes),
        operator(3, (7,), (8,), 1),
        operator(6, (8,), (9,), 2),
        send(0, 9, num_bytes),
        regions=(NO_REGION, Region("F0", "forward"), Region("B0", "backward")),
    )
    return first, last


def test_two_stages_computed_by_hand_match_to_the_digit():
    timeline = play(two_stages(), PAIR)
    found = {(s.rank, s.label, s.kind): (s.start_s, s.end_s) for s in timeline.spans}
    assert found == {
        (0, "F0", "forward"): (0.0, 3.0),
        (0, "to 1", "transfer"): (3.0, 5.5),
        (1, "F0", "forward"): (5.5, 8.5),
        (1, "B0", "backward"): (8.5, 14.5),
        (1, "to 0", "transfer"): (14.5, 17.0),
        (0, "B0", "backward"): (17.0, 23.0),
    }
    assert timeline.step_time_s == 23.0
    assert timeline.provenance == "virtual:pair"
    assert timeline.busy_s(0) == timeline.busy_s(1) == 9.0
    assert timeline.bubble == pytest.approx(1 - 9 / 23)


def test_the_order_of_the_recordings_does_not_matter_and_twice_is_the_same():
    first, last = two_stages()
    assert set(play([first, last], PAIR).spans) == set(play([last, first], PAIR).spans)
    assert play([first, last], PAIR) == play([first, last], PAIR)


def test_twice_the_peak_halves_the_step_when_nothing_else_limits():
    fast = uniform_machine("fast", replace(TOY, peak_flops={"float32": 2.0}), WIRE, 1)
    alone = [recording(0, operator(5), operator(7))]
    assert play(alone, fast).step_time_s == play(alone, PAIR).step_time_s / 2 == 6.0


def test_launch_and_message_overhead_occupy_the_device():
    slow = replace(TOY, launch_overhead_s=0.25, message_overhead_s=0.125)
    timeline = play(two_stages(), uniform_machine("slow", slow, WIRE, 2))
    assert timeline.busy_s(0) == 9 + 2 * 0.25 + 2 * 0.125
    # rank 0's F and send, the wire, rank 1's F, B and send, the wire, rank 0's B
    assert timeline.step_time_s == 3.375 + 2.5 + 3.25 + 6.25 + 0.125 + 2.5 + 6.25


def test_a_receive_only_posts_and_the_device_works_on():
    busy = recording(1, receive(0, 7), operator(4, (1,), (2,)), operator(1, (7,), (8,)))
    timeline = play([recording(0, operator(3, (), (2,)), send(1, 2)), busy], PAIR)
    assert ends(timeline, rank=1, kind="compute") == [4.0, 6.5]  # the message is there at 5.5


def test_messages_of_one_direction_share_the_link_and_directions_do_not():
    both = [
        recording(0, send(1, 1), send(1, 2), receive(1, 3)),
        recording(1, send(0, 1), receive(0, 3), receive(0, 4)),
    ]
    timeline = play(both, PAIR)
    assert ends(timeline, stream="link 0->1") == [2.5, 5.0]
    assert ends(timeline, stream="link 1->0") == [2.5]


def test_messages_meet_by_tag_and_in_order_within_a_tag():
    sender = recording(0, send(1, 1, 1, tag=5), send(1, 2, 3, tag=6))
    reader = recording(
        1, receive(0, 8, 3, tag=6), receive(0, 7, 1, tag=5), operator(1, (7,)), operator(1, (8,))
    )
    assert ends(play([sender, reader], PAIR), rank=1) == [2.5, 6.0]


def test_a_storage_still_being_sent_is_not_overwritten():
    overwrites = recording(0, send(1, 1), operator(1, (), (1,)))
    reads = recording(0, send(1, 1), operator(1, (1,), (2,)))
    other = recording(1, receive(0, 7))
    assert ends(play([overwrites, other], PAIR), rank=0, kind="compute") == [3.5]
    assert ends(play([reads, other], PAIR), rank=0, kind="compute") == [1.0]


def test_received_data_is_forwarded_when_it_arrives_and_not_before():
    chain = [
        recording(0, operator(3, (), (2,)), send(1, 2)),
        recording(1, receive(0, 7), send(2, 7)),
        recording(2, receive(1, 7), operator(1, (7,))),
    ]
    timeline = play(chain, FOUR)
    assert ends(timeline, stream="link 1->2") == [3 + 2.5 + 2.5]
    assert ends(timeline, rank=2) == [9.0]


def test_no_message_is_read_before_it_was_sent_and_no_operator_starts_before_its_input():
    timeline = play(two_stages(num_bytes=40), PAIR)
    sent = next(s for s in timeline.spans if s.label == "to 1")
    forward = {s.rank: s for s in timeline.spans if s.label == "F0"}
    assert forward[0].end_s <= sent.start_s < sent.end_s <= forward[1].start_s


def test_an_all_reduce_starts_with_its_last_member_and_takes_the_ring_time():
    members = (0, 1, 2, 3)
    ranks = [
        recording(
            r, operator(1 + r, (), (1,)), collective("all_reduce", members, 1), operator(1, (1,))
        )
        for r in members
    ]
    timeline = play(ranks, FOUR)
    assert collective_s("all_reduce", 4, members, FOUR) == 6 * 0.5 + 2 * 3 / 4 * 4
    assert ends(timeline, kind="collective") == [4 + 9.0] * 4
    assert ends(timeline, rank=0, kind="compute") == [1.0, 14.0]


def test_a_collective_overlaps_with_work_unless_the_call_blocks():
    def both(blocking):
        return [
            recording(r, collective("all_reduce", (0, 1), 1, 1, blocking), operator(2, (2,)))
            for r in (0, 1)
        ]

    assert ends(play(both(False), PAIR), rank=0, kind="compute") == [2.0]
    assert ends(play(both(True), PAIR), rank=0, kind="compute") == [2.0 + 2.0]  # 2*0.5 + 1


def test_a_wait_holds_the_device_until_the_collective_has_ended():
    wait = Event("wait", "wait", reads=(1,))
    ranks = [
        recording(r, collective("all_reduce", (0, 1), 1, 1), wait, operator(2, (2,)))
        for r in (0, 1)
    ]
    assert ends(play(ranks, PAIR), rank=0, kind="compute") == [4.0]


def test_a_collective_alone_takes_no_time():
    alone = [recording(0, collective("all_reduce", (0,), 1), operator(1, (1,)))]
    assert play(alone, PAIR).step_time_s == 1.0


def test_what_runs_on_the_communication_stream_overlaps_with_compute():
    def gathers(rank):
        side = {"stream": "communication"}
        gather = collective("all_gather", (0, 1), 5, 4, True)._replace(**side)
        return recording(
            rank,
            operator(4, (1,), (2,)),
            operator(1, (3,), (5,), **side),  # copies a shard in beside the operator above
            gather,
            operator(2, (5,), (6,)),
        )

    timeline = play([gathers(0), gathers(1)], PAIR)
    assert ends(timeline, rank=0, kind="collective") == [1 + 0.5 + 2.0]
    assert ends(timeline, rank=0, kind="compute") == [6.0]


def test_the_communication_stream_waits_for_what_compute_wrote():
    side = operator(1, (2,), (5,), stream="communication")
    program = recording(0, operator(4, (1,), (2,)), operator(3, (9,)), side, operator(1, (5,)))
    timeline = play([program], PAIR)
    assert ends(timeline, stream="communication") == [5.0]
    assert timeline.step_time_s == 8.0


def test_busy_and_idle_make_up_the_step_on_every_device():
    timeline = play(two_stages(), PAIR)
    for rank in (0, 1):
        idle = sorted(
            (s.start_s, s.end_s) for s in timeline.spans if s.rank == rank and s.stream == "compute"
        )
        edges = [0.0, *(edge for span in idle for edge in span), timeline.step_time_s]
        gaps = sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True))
        assert timeline.busy_s(rank) + gaps == timeline.step_time_s


def test_a_region_interrupted_by_a_wait_becomes_two_spans():
    regions = (NO_REGION, Region("F0", "forward"))
    program = recording(
        1, receive(0, 7), operator(1, (1,), (2,), 1), operator(1, (7,), (8,), 1), regions=regions
    )
    timeline = play([recording(0, send(1, 1)), program], PAIR)
    assert [(s.start_s, s.end_s) for s in timeline.spans if s.label == "F0"] == [
        (0.0, 1.0),
        (2.5, 3.5),
    ]


def test_step_by_step_gives_the_same_clock_as_the_whole():
    clock = VirtualClock(PAIR)
    first = [recording(0, operator(1, (), (2,)), send(1, 2)), recording(1, receive(0, 7))]
    second = [recording(0, operator(1)), recording(1, operator(2, (7,)))]
    clock.advance(first)
    assert clock.now_s == [3.5, 3.5]  # a recording ends when all it posted has ended
    timeline = clock.advance(second)
    assert clock.now_s == [4.5, 5.5]
    assert timeline.start_s == 3.5


# ---- programs that do not fit together


def test_a_receive_that_nobody_sends_is_a_deadlock_that_names_rank_and_operation():
    waits = recording(1, receive(0, 7, tag=3), operator(1, (7,)))
    with pytest.raises(
        ProgramMismatchError,
        match="deadlock: rank 1 waits at aten::mm for a message from rank 0 with tag 3",
    ):
        play([recording(0, operator(1)), waits], PAIR)
    with pytest.raises(ProgramMismatchError, match="rank 1 ended and still waits for a message"):
        play([recording(0), recording(1, receive(0, 7))], PAIR)


def test_two_ranks_that_wait_for_each_other_are_both_named():
    def waits(rank):
        other = 1 - rank
        return recording(rank, receive(other, 7), operator(1, (7,), (8,)), send(other, 8))

    with pytest.raises(ProgramMismatchError, match="rank 0 waits.*rank 1 waits"):
        play([waits(0), waits(1)], PAIR)


def test_a_message_that_nobody_receives_is_an_error():
    with pytest.raises(ProgramMismatchError, match=r"rank 0 sent 1 message\(s\) with tag 0 to"):
        play([recording(0, send(1, 1)), recording(1)], PAIR)


def test_a_message_of_another_size_is_an_error_where_gloo_says_nothing():
    with pytest.raises(ProgramMismatchError, match="sends 2 bytes .* receives 4"):
        play([recording(0, send(1, 1, 2)), recording(1, receive(0, 7, 4))], PAIR)


def test_collectives_that_differ_are_an_error():
    ranks = [
        recording(0, collective("all_reduce", (0, 1), 1)),
        recording(1, collective("broadcast", (0, 1), 1)),
    ]
    with pytest.raises(ProgramMismatchError, match="rank 0 calls all_reduce, rank 1 calls broad"):
        play(ranks, PAIR)
    ranks[1] = recording(1, collective("all_reduce", (0, 1), 1, 8))
    with pytest.raises(ProgramMismatchError, match="rank 0 has 4 bytes, rank 1 has 8 bytes"):
        play(ranks, PAIR)


def test_a_collective_that_one_rank_leaves_out_is_a_deadlock():
    joins = recording(0, collective("all_reduce", (0, 1), 1), operator(1, (1,)))
    with pytest.raises(ProgramMismatchError, match=r"all_reduce number 0 of ranks \[0, 1\]"):
        play([joins, recording(1)], PAIR)


def test_recordings_must_fit_the_machine():
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] on 'pair' with 2 devices"):
        play([recording(0), recording(2)], PAIR)
    with pytest.raises(ValueError, match=r"ranks \[0, 0\]"):
        play([recording(0), recording(0)], PAIR)


def test_collective_times_follow_the_ring_formulas():
    members = (0, 1, 2, 3)
    expected = {
        "all_reduce": 6 * 0.5 + 12,
        "all_gather": 3 * 0.5 + 6,
        "reduce_scatter": 3 * 0.5 + 6,
        "broadcast": 3 * 0.5 + 8,
        "all_to_all": 3 * 0.5 + 6,
        "barrier": 6 * 0.5,
    }
    for kind, seconds in expected.items():
        assert collective_s(kind, 8, members, FOUR) == seconds, kind
    with pytest.raises(ValueError, match="'all_think' is unknown"):
        collective_s("all_think", 8, members, FOUR)


def test_over_a_rendezvous_link_a_message_leaves_when_its_receiver_has_posted():
    meeting = uniform_machine("meeting", TOY, replace(WIRE, rendezvous=True), 2)
    ranks = [
        recording(0, send(1, 1), operator(1, (), (1,))),
        recording(1, operator(3, (1,)), receive(0, 7), operator(1, (7,))),
    ]
    timeline = play(ranks, meeting)
    assert ends(timeline, kind="transfer") == [3 + 2.5]
    assert ends(timeline, rank=1, kind="compute") == [3.0, 6.5]
    assert ends(timeline, rank=0, kind="compute") == [6.5]  # overwrites what was sent
    with pytest.raises(ProgramMismatchError, match="rank 0 .* its message to rank 1"):
        play([ranks[0], recording(1)], meeting)


def test_collectives_of_one_ring_follow_each_other():
    ranks = [
        recording(r, *(collective("all_gather", (0, 1), s, 2) for s in (1, 2))) for r in (0, 1)
    ]
    assert ends(play(ranks, PAIR), rank=0, kind="collective") == [1.5, 3.0]


# ---- any program

steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=30
)


@settings(deadline=None)
@given(steps)
def test_any_program_runs_as_its_dependencies_say(drawn):
    """Each step is an operator on rank a (a = b) or a message a -> b of what a computed last.

    Taken in the order drawn, every step's start is the latest of: its device free, its input
    there, its link free. The clock, which sees each rank's program alone, must find the same.
    """
    programs, latest, number = {0: [], 1: [], 2: []}, [100, 101, 102], 0
    free, link_free, there = [0.0] * 3, {}, {}
    expected = set()
    for a, b, size in drawn:
        number += 1
        if a == b:
            start = max(free[a], there.get(latest[a], 0.0))
            free[a] = there[number] = start + size
            programs[a].append(operator(size, (latest[a],), (number,)))
            expected.add((a, free[a]))
        else:
            start = max(free[a], there.get(latest[a], 0.0), link_free.get((a, b), 0.0))
            link_free[a, b] = start + 0.5 + size
            there[number] = max(link_free[a, b], free[b])
            programs[a].append(send(b, latest[a], size))
            programs[b].append(receive(a, number, size))
        latest[b] = number
    three = uniform_machine("three", TOY, WIRE, 3)
    timeline = play([recording(rank, *events) for rank, events in programs.items()], three)
    computed = [s for s in timeline.spans if s.kind == "compute"]
    assert {(s.rank, s.end_s) for s in computed} <= expected
    for rank in range(3):
        assert timeline.busy_s(rank) == sum(e.flops for e in programs[rank])
        ended = [end for r, end in expected if r == rank]
        assert max(ends(timeline, rank=rank, kind="compute"), default=0) == max(ended, default=0)

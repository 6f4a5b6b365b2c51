import pickle
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_nvml import FakeGPU
from spawned import run_ranks

from labkit.devices.links import link_check
from labkit.devices.links.link_check import (
    Delivery,
    UnreliableLinkError,
    check_copies,
    check_messages,
    reliable_transport,
    require_right,
)
from labkit.devices.links.link_copies import DeviceCopies, StagedCopies
from labkit.devices.links.link_transport import GroupTransport, HostStaged
from labkit.devices.links.links import _turns, measure_links, time_collective, time_pairs
from labkit.devices.links.peer_claims import own_uuid, peer_claimed

CPU = torch.device("cpu")
SIZES = (4096, 1 << 20)


class ZeroesTheSecond(GroupTransport):
    """Delivers a zero in the second message that arrives."""

    received = 0

    def receive(self, tensor, peer):
        super().receive(tensor, peer)
        self.received += 1
        if self.received == 2:
            tensor[5] = 0


class Hangs(GroupTransport):
    """Rank 0 sends nothing for longer than anyone waits."""

    def send(self, tensor, peer):
        if self.rank == 0:
            time.sleep(2)
        super().send(tensor, peer)


class Slow(GroupTransport):
    """50 MB/s, and 20 ms of latency between ranks 0 and 2."""

    def send(self, tensor, peer):
        latency_s = 0.02 if {self.rank, peer} == {0, 2} else 0
        time.sleep(latency_s + tensor.nbytes / 5e7)
        super().send(tensor, peer)


class Disturbed(GroupTransport):
    """Every third message of rank 0 is 30 ms late."""

    sent = 0

    def send(self, tensor, peer):
        self.sent += 1
        if self.rank == 0 and self.sent % 3 == 0:
            time.sleep(0.03)
        super().send(tensor, peer)


def _measure(rank):
    world = dist.group.WORLD
    pair = dist.new_group([1, 2])
    found = {
        "pairs": time_pairs(world, CPU, sizes=SIZES, rounds=3),
        "slow": measure_links(world, CPU, sizes=SIZES, rounds=2, transport=Slow(world, CPU)),
        "disturbed": time_pairs(
            world, CPU, sizes=SIZES[:1], rounds=3, transport=Disturbed(world, CPU)
        ),
        "late": time_pairs(
            world, CPU, sizes=SIZES[:1], rounds=3, transport=Disturbed(world, CPU), quantile=1
        ),
        "all_reduce": time_collective("all_reduce", world, CPU, sizes=(3 * 4096,), rounds=3),
    }
    if rank in (1, 2):
        found["of two"] = [
            time_collective(kind, pair, CPU, sizes=SIZES, rounds=2)
            for kind in ("all_gather", "reduce_scatter", "broadcast")
        ]
    with pytest.raises(ValueError, match="4096.* positive multiples of 12 bytes"):
        time_collective("all_reduce", world, CPU, sizes=(4096,))
    with pytest.raises(ValueError, match="'gossip' is unknown"):
        time_collective("gossip", world, CPU)
    with pytest.raises(ValueError, match="rounds=0"):
        time_pairs(world, CPU, sizes=SIZES, rounds=0)
    with pytest.raises(ValueError, match="quantile=2 must lie"):
        time_collective("all_reduce", world, CPU, sizes=(3 * 4096,), quantile=2)
    return found


def test_every_pair_and_collective_is_timed_and_all_ranks_know():
    zero, one, two = run_ranks(_measure, 3)
    assert list(zero["pairs"]) == [(0, 1), (0, 2), (1, 2)]
    assert zero["pairs"] == one["pairs"] == two["pairs"]
    assert all(s.seconds > 0 for samples in zero["pairs"].values() for s in samples)
    assert zero["all_reduce"] == one["all_reduce"] and zero["all_reduce"][0].num_bytes == 12288
    assert one["of two"] == two["of two"] and len(one["of two"]) == 3
    assert zero["slow"][0, 2].predict_s(4096) > 0.02
    assert all(fit.bandwidth_bytes_per_s < 6e7 for fit in one["slow"].values())
    # half of 30 ms, in a third of the trips: not in the quartile that counts
    assert zero["disturbed"][0, 1][0].seconds < 0.015 < zero["late"][0, 1][0].seconds


def test_all_sizes_take_turns_in_one_order_that_every_rank_makes_up_alike():
    turns = list(_turns((4096, 4 << 20), 2))
    assert turns == list(_turns((4096, 4 << 20), 2))
    assert sum(counts for place, counts in turns if place == 0) == 2 * 8
    assert sum(counts for place, counts in turns if place == 1) == 2 * 2
    assert not any(counts for _, counts in turns[: 9 + 3])  # the first round warms up


def _check(rank):
    control = dist.new_group(backend="gloo")
    world = dist.group.WORLD
    way, _ = reliable_transport(control, world, CPU)
    assert type(way) is GroupTransport
    way, seen = reliable_transport(control, world, CPU, transport=ZeroesTheSecond(world, CPU))
    assert type(way) is HostStaged and not all(delivery.right for delivery in seen)
    with (
        mock.patch.object(link_check, "own_uuid", lambda device: f"GPU-{rank}"),
        mock.patch.object(link_check, "peer_claimed", lambda *uuids: uuids == ("GPU-0", "GPU-1")),
    ):
        claims = check_messages(control, group=world, device=CPU, num_bytes=4096)
    assert [d.claimed for d in claims] == [True, False]
    told = [
        check_messages(control, group=world, device=CPU, num_bytes=4096),
        check_messages(control, transport=HostStaged(world, CPU), num_bytes=4096),
        check_messages(control, transport=ZeroesTheSecond(world, CPU), num_bytes=4096),
        check_messages(control, transport=Hangs(world, CPU), num_bytes=4096, timeout_s=0.3),
    ]
    time.sleep(2.5)  # what was left behind ends before the process does
    return told


def test_messages_that_arrive_changed_or_late_are_seen_and_refused():
    told = run_ranks(_check, 2)
    assert pickle.dumps(told[0]) == pickle.dumps(told[1])
    sound, staged, zeroed, hung = told[0]
    assert [(d.source, d.target, d.right) for d in sound] == [(0, 1, True), (1, 0, True)]
    assert staged == sound
    require_right(sound)
    assert [d.reason for d in zeroed] == ["1 of 4096 bytes of transfer 1 arrived wrong"] * 2
    assert len(hung) == 1 and hung[0].hung and "not arrived after 0.3 s" in hung[0].reason
    with pytest.raises(UnreliableLinkError, match="0->1: no claim, 1 of 4096.*NCCL_P2P_DISABLE"):
        require_right(zeroed)


class Copies:
    """Three devices; what is copied from 1 to 2 hangs, from 2 to 0 arrives as zeros later on."""

    count = 3

    def __init__(self):
        self.copied = []

    def claimed(self, source, target):
        return True

    def copy(self, on_host, source, target):
        self.copied.append((source, target))
        if (source, target) == (1, 2):
            time.sleep(1)
        late = self.copied.count((2, 0)) > 1
        return torch.zeros_like(on_host) if (source, target) == (2, 0) and late else on_host


def test_copies_of_one_process_are_checked_in_both_directions_and_again():
    copies = Copies()
    deliveries = check_copies(copies, num_bytes=64, rounds=2, timeout_s=0.2)
    wrong = {(d.source, d.target): d for d in deliveries if not d.right}
    assert len(deliveries) == 6 and set(wrong) == {(1, 2), (2, 0)}
    assert wrong[1, 2].hung and copies.copied.count((1, 2)) == 1
    assert str(wrong[2, 0]) == (
        "2->0: peer access claimed, 64 of 64 bytes of transfer 1 arrived wrong"
    )


def test_a_copy_that_raises_keeps_its_error():
    class Broken(Copies):
        def copy(self, on_host, source, target):
            raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        check_copies(Broken())


def test_a_verdict_says_what_is_claimed_and_what_is_so():
    assert str(Delivery(0, 1, False, True)) == "0->1: no peer access, right"


def test_peer_access_is_asked_of_the_driver_by_uuid(gpus):
    cards = FakeGPU(uuid="GPU-a"), FakeGPU(uuid="GPU-b"), FakeGPU(uuid="GPU-c", p2p=1)
    silent = FakeGPU(uuid="GPU-d", unsupported=("nvmlDeviceGetP2PStatus",))
    with gpus(*cards, silent):
        assert peer_claimed("GPU-a", "GPU-b") is True
        assert peer_claimed("GPU-c", "GPU-a") is False
        assert peer_claimed("GPU-d", "GPU-a") is None
        assert peer_claimed("GPU-a", "GPU-of-another-host") is None
        assert peer_claimed("GPU-a", None) is None
    assert own_uuid(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_direct_and_staged_copies_between_gpus_arrive():
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    require_right(check_copies(StagedCopies(devices)))
    assert all(d.claimed is not None for d in check_copies(DeviceCopies(devices)))

"""Does what is sent arrive? Copies and compares, both ways, first and later transfers.

There are machines whose GPUs report peer access and deliver wrong data
(NVIDIA/open-gpu-kernel-modules#1257), or hang in the first transfer (pytorch#79299).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.devices.links.link_copies import Copies
from labkit.devices.links.link_transport import GroupTransport, HostStaged, Transport
from labkit.devices.links.peer_claims import own_uuid, peer_claimed


@dataclass(frozen=True)
class Delivery:
    """What became of the transfers from one device to another.

    Attributes:
        claimed: whether the driver claims peer access; None where nobody can be asked.
        right: every transfer arrived unchanged and in time.
        reason: "" or what went wrong first, in which transfer.
        hung: a transfer had not arrived in time; nothing was tried after it.
    """

    source: int
    target: int
    claimed: bool | None
    right: bool
    reason: str = ""
    hung: bool = False

    @property
    def claim(self) -> str:
        """``claimed`` in words."""
        words = {True: "peer access claimed", False: "no peer access", None: "no claim"}
        return words[self.claimed]

    def __str__(self) -> str:
        return f"{self.source}->{self.target}: {self.claim}, {self.reason or 'right'}"


class UnreliableLinkError(RuntimeError):
    """A transfer arrived changed or not at all; the message says how to go around it."""


def require_right(deliveries: list[Delivery]) -> None:
    """Refuse links that do not deliver.

    Raises:
        UnreliableLinkError: names every wrong direction and the way out.
    """
    wrong = [str(delivery) for delivery in deliveries if not delivery.right]
    if wrong:
        raise UnreliableLinkError(
            "; ".join(wrong) + ". Go through the host: StagedCopies or HostStaged, and for NCCL "
            "set NCCL_P2P_DISABLE=1 before the ranks start"
        )


def check_copies(
    copies: Copies, *, num_bytes: int = 1 << 20, rounds: int = 3, timeout_s: float = 10.0
) -> list[Delivery]:
    """Copy between every two devices of this process, both ways, and compare.

    Args:
        copies: ``DeviceCopies(devices)``, or a stand-in.
        rounds: transfers in each direction: a first one can be right and a later one wrong.
        timeout_s: for each transfer. One that hangs is left behind in a thread of its own, and
            nothing more is tried between the two.

    Returns:
        One verdict for each direction.
    """

    def transfer(source: int, target: int, sent: Tensor) -> Tensor:
        return copies.copy(sent, source, target)

    return [
        _verdict(
            source, target, copies.claimed(source, target), transfer, num_bytes, rounds, timeout_s
        )
        for source, target in permutations(range(copies.count), 2)
    ]


def _verdict(
    source: int,
    target: int,
    claimed: bool | None,
    transfer: Callable[[int, int, Tensor], Tensor],
    num_bytes: int,
    rounds: int,
    timeout_s: float,
) -> Delivery:
    reasons = []
    for turn in range(rounds):  # all of them, also after a wrong one: the other side goes on too
        sent = pattern(source, target, turn, num_bytes)
        try:
            arrived = within(timeout_s, lambda sent=sent: transfer(source, target, sent))
        except TimeoutError:
            reasons.append(f"transfer {turn} had not arrived after {timeout_s:g} s")
            return Delivery(source, target, claimed, False, reasons[0], hung=True)
        wrong = int((arrived != sent).sum())
        if wrong:
            reasons.append(f"{wrong} of {num_bytes} bytes of transfer {turn} arrived wrong")
    return Delivery(source, target, claimed, not reasons, "".join(reasons[:1]))


def pattern(source: int, target: int, turn: int, num_bytes: int) -> Tensor:
    """Bytes 1 to 255 that differ for every direction and turn, so that no stale data passes."""
    generator = torch.Generator().manual_seed((source * 1000 + target) * 1000 + turn)
    return torch.randint(1, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def within(timeout_s: float, function: Callable[[], Tensor]) -> Tensor:
    """The function's result, from a thread that is left behind when it takes too long.

    Raises:
        TimeoutError: it has not returned after ``timeout_s``.
    """
    outcome: list = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # handed on to the caller below
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True, name="labkit-transfer")
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise TimeoutError(f"not done after {timeout_s:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def check_messages(
    control: dist.ProcessGroup,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    transport: Transport | None = None,
    num_bytes: int = 1 << 20,
    rounds: int = 3,
    timeout_s: float = 10.0,
) -> list[Delivery]:
    """Send between every two ranks, both ways, and compare; runs on all ranks together.

    After a transfer that hangs the checked group is of no more use: make it anew, or let its
    successor go through the host.

    Args:
        control: a gloo group of the same ranks, other than the one under test: the verdicts
            travel on it.
        group, device: what is tested, unless ``transport`` is given.

    Returns:
        One verdict for each direction, the same on every rank.

    Raises:
        ValueError: neither ``group`` and ``device`` nor ``transport`` are given.
    """
    if transport is None:
        if group is None or device is None:
            raise ValueError("give group and device, or a transport of your own")
        transport = GroupTransport(group, device)
    way: Transport = transport

    def send(source: int, target: int, sent: Tensor) -> Tensor:
        way.send(sent.to(way.device), target)
        way.synchronize()
        return sent

    def receive(source: int, target: int, sent: Tensor) -> Tensor:
        arrived = torch.zeros_like(sent, device=way.device)
        way.receive(arrived, source)
        way.synchronize()
        return arrived.cpu()

    verdicts = []
    uuids: list[str | None] = [None] * way.size
    dist.all_gather_object(uuids, own_uuid(way.device), group=control)
    for source, target in permutations(range(way.size), 2):
        own = None
        if way.rank in (source, target):
            role = send if way.rank == source else receive
            claimed = peer_claimed(uuids[source], uuids[target])
            own = _verdict(source, target, claimed, role, num_bytes, rounds, timeout_s)
        everyone: list[Delivery | None] = [None] * way.size
        dist.all_gather_object(everyone, own, group=control)
        told = [everyone[target], everyone[source]]  # the receiver knows best
        verdicts.append(next((v for v in told if v and not v.right), told[0]))
        if any(v.hung for v in told):
            break  # what still waits would take in the next pair's message
    return verdicts


def reliable_transport(
    control: dist.ProcessGroup,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    transport: Transport | None = None,
    timeout_s: float = 10.0,
) -> tuple[Transport, list[Delivery]]:
    """The direct way between the ranks where it delivers, else the one through the host.

    Args:
        control: a gloo group of the same ranks, other than ``group``; messages go over it if they
            have to be staged.

    Returns:
        The transport, the same kind on every rank, and the verdicts on the direct one.

    Raises:
        UnreliableLinkError: not even the way through the host delivers.
    """
    direct = transport or GroupTransport(group, device)
    deliveries = check_messages(control, transport=direct, timeout_s=timeout_s)
    if all(delivery.right for delivery in deliveries):
        return direct, deliveries
    staged = HostStaged(control, device)
    require_right(check_messages(control, transport=staged, timeout_s=timeout_s))
    return staged, deliveries

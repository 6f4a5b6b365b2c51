"""What a collective takes on a ring of devices.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005 (ring all-gather, reduce-scatter and all-reduce); NCCL's performance
notes (nccl-tests, doc/PERFORMANCE.md) give the same bytes on the wire. The additions of a
reduction are left out: they hide behind the link.
"""

from __future__ import annotations

from labkit.devices.profiles import Link, Machine

# collective -> (share of the payload that crosses each link, number of steps), n members
_RING = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: n - 1),
    "gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "broadcast": (lambda n: 1.0, lambda n: n - 1),  # pipelined around the ring
    "reduce": (lambda n: 1.0, lambda n: n - 1),
    "barrier": (lambda n: 0.0, lambda n: 2 * (n - 1)),  # an empty all-reduce
}


def ring_pairs(members: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The directed links of the ring in the order of the members.

    >>> ring_pairs((0, 1, 2))
    ((0, 1), (1, 2), (2, 0))
    """
    return tuple(zip(members, members[1:] + members[:1], strict=True)) if len(members) > 1 else ()


def collective_s(kind: str, num_bytes: int, members: tuple[int, ...], machine: Machine) -> float:
    """Seconds from the arrival of the last member to the end, over the ring's slowest links.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter,
            all_to_all or barrier.
        num_bytes: of the tensor that is reduced, gathered or spread.
        members: ranks of the group; alone it takes no time.

    Raises:
        ValueError: the kind is unknown.

    >>> from labkit.devices.profiles import Link, Profile, uniform_machine
    >>> toy = Profile("toy", {"float32": 1e9}, 1e9, 1 << 30, 0.0, 0.0, "made up")
    >>> pair = uniform_machine("pair", toy, Link("wire", 1e6, 0.5, "made up"), 2)
    >>> collective_s("all_reduce", 1_000_000, (0, 1), pair)
    2.0
    """
    if kind not in _RING:
        raise ValueError(f"collective {kind!r} is unknown; one of {', '.join(_RING)}")
    if len(members) == 1:
        return 0.0
    links: list[Link] = [machine.link(a, b) for a, b in ring_pairs(members)]
    share, steps = (of(len(members)) for of in _RING[kind])
    slowest = min(link.bandwidth_bytes_per_s for link in links)
    return steps * max(link.latency_s for link in links) + share * num_bytes / slowest

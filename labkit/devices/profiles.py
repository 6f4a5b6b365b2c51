"""What the model of a device knows: the figures by which a recorded program is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """One direction of the connection between two devices; both directions work at once.

    Args:
        name: such as ``PCIe 4.0 x16``.
        bandwidth_bytes_per_s: of one direction, > 0.
        latency_s: what an empty message takes, >= 0.
        source: where the figures come from; assumptions are called so.
        rendezvous: a message leaves only when its receiver has posted, as over gloo; else it may
            leave before.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    rendezvous: bool = False

    def __post_init__(self) -> None:
        _need_positive(self.name, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        _need_not_negative(self.name, "latency_s", self.latency_s)
        _need_source(self.name, self.source)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds for one message: latency + bytes / bandwidth.

        >>> Link("wire", 1e9, 0.001, "made up").transfer_s(1_000_000)
        0.002
        """
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Profile:
    """One device as a roofline with a launch overhead (Williams et al. 2009, CACM 52(4)).

    Args:
        name: such as ``RTX A6000``.
        peak_flops: dense FLOP/s by dtype name; ``float32`` means without TF32, torch's default.
            An optional ``tf32`` is what ``using_tf32`` puts in its place.
        memory_bandwidth_bytes_per_s: > 0.
        memory_bytes: capacity, > 0.
        launch_overhead_s: fixed cost of every operator, >= 0.
        message_overhead_s: what sending, receiving or joining a collective costs the device's own
            stream, beside the time on the link, >= 0.
        source: where the figures come from; assumptions are called so.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_overhead_s: float
    message_overhead_s: float
    source: str

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flops:
            raise ValueError(f"{self.name}: peak_flops={dict(self.peak_flops)} lacks float32")
        for dtype, peak in self.peak_flops.items():
            _need_positive(self.name, f"peak_flops[{dtype!r}]", peak)
        for field in ("memory_bandwidth_bytes_per_s", "memory_bytes"):
            _need_positive(self.name, field, getattr(self, field))
        for field in ("launch_overhead_s", "message_overhead_s"):
            _need_not_negative(self.name, field, getattr(self, field))
        _need_source(self.name, self.source)

    def operator_s(self, flops: int, num_bytes: int, dtype: str = "float32") -> float:
        """Seconds for one operator: launch overhead + max(FLOPs / peak, bytes / bandwidth).

        Raises:
            ValueError: it counts FLOPs in a dtype whose peak is not known.

        >>> profile = Profile("toy", {"float32": 1e9}, 1e9, 1 << 30, 0.001, 0.0, "made up")
        >>> profile.operator_s(flops=3_000_000, num_bytes=2_000_000)
        0.004
        """
        memory_s = num_bytes / self.memory_bandwidth_bytes_per_s
        if not flops:
            return self.launch_overhead_s + memory_s
        if dtype not in self.peak_flops:
            known = ", ".join(sorted(self.peak_flops))
            raise ValueError(
                f"{self.name} has no peak FLOP/s for {dtype} (it has {known}); give one with "
                f"dataclasses.replace(profile, peak_flops={{..., {dtype!r}: ...}})"
            )
        return self.launch_overhead_s + max(flops / self.peak_flops[dtype], memory_s)

    def using_tf32(self) -> Profile:
        """The profile after ``torch.set_float32_matmul_precision("high")``.

        Raises:
            ValueError: the profile states no ``tf32`` figure.
        """
        if "tf32" not in self.peak_flops:
            raise ValueError(f"{self.name} states no tf32 peak, only {sorted(self.peak_flops)}")
        peaks = {**self.peak_flops, "float32": self.peak_flops["tf32"]}
        return replace(self, name=f"{self.name} tf32", peak_flops=peaks)


@dataclass(frozen=True)
class Machine:
    """All devices of one computer, and the link of every pair.

    Args:
        name: stands in the provenance of every number that it yields.
        profiles: one per device; device i runs rank i.
        links: one per unordered pair, keyed (i, j) with i < j.
    """

    name: str
    profiles: tuple[Profile, ...]
    links: Mapping[tuple[int, int], Link]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError(f"machine {self.name!r} needs at least one profile, has none")
        pairs = {(i, j) for j in range(self.count) for i in range(j)}
        if set(self.links) != pairs:
            raise ValueError(
                f"machine {self.name!r} with {self.count} devices needs links {sorted(pairs)}, "
                f"has {sorted(self.links)}; key each pair (lower, higher)"
            )

    @property
    def count(self) -> int:
        return len(self.profiles)

    @property
    def provenance(self) -> str:
        """Label of every number that this machine yields: really executed, time modelled."""
        return f"virtual:{self.name}"

    def link(self, source: int, target: int) -> Link:
        """The link between two different devices.

        Raises:
            ValueError: a device is not there, or both are one.
        """
        pair = (min(source, target), max(source, target))
        if pair not in self.links:
            raise ValueError(
                f"machine {self.name!r} has no link {source}->{target}; "
                f"its devices are 0..{self.count - 1}"
            )
        return self.links[pair]

    def scaled(self, width: float, name: str | None = None) -> Machine:
        """A machine on which a model 1/``width`` times as wide takes the wide one's time.

        The lab's models are so narrow that on a real card nothing but launch overhead would show.
        Matrix products have FLOPs and parameters that grow with width squared, activations and
        messages with width; so peaks shrink by width squared, bandwidths and memory by width, and
        launch overhead, latency and message overhead stay. What does not carry over: what is done
        to and kept of parameters (optimizer, gradient all-reduce, weights in memory) has bytes that
        grow with width squared and comes out too fast and too small by a factor of ``width``;
        attention scores do not depend on width.

        Raises:
            ValueError: ``width`` is not above 0.
        """
        _need_positive(self.name, "width", width)
        note = f"; scaled for a model 1/{width:g} as wide (modelled)"
        profiles = tuple(
            replace(
                p,
                name=f"{p.name} / width {width:g}",
                peak_flops={dtype: peak / width**2 for dtype, peak in p.peak_flops.items()},
                memory_bandwidth_bytes_per_s=p.memory_bandwidth_bytes_per_s / width,
                memory_bytes=max(1, int(p.memory_bytes / width)),
                source=p.source + note,
            )
            for p in self.profiles
        )
        links = {
            pair: replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / width,
                source=link.source + note,
            )
            for pair, link in self.links.items()
        }
        return Machine(name or f"{self.name}-narrow{width:g}", profiles, links)


def uniform_machine(name: str, profile: Profile, link: Link, count: int) -> Machine:
    """``count`` equal devices, every pair joined by an equal link.

    Raises:
        ValueError: ``count`` is below 1.
    """
    pairs = [(i, j) for j in range(count) for i in range(j)]
    return Machine(name, (profile,) * count, dict.fromkeys(pairs, link))


def _need_positive(owner: str, field: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{owner}: {field}={value} must be above 0")


def _need_not_negative(owner: str, field: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{owner}: {field}={value} must not be negative")


def _need_source(owner: str, source: str) -> None:
    if not source.strip():
        raise ValueError(
            f"{owner}: source is empty; say where the figures come from, or that they are assumed"
        )

"""Named machines whose figures are the vendor's data sheet's, for virtual GPUs.

Dense peaks without sparsity; ``bfloat16`` and ``float16`` with FP32 accumulation. A data sheet's
peak is never reached in practice: a modelled time is a lower bound of the real card's, and ratios
between programs on one machine are what it is good for. What no data sheet states is assumed, and
called so in ``source``: 5 us for a launch, 10 us for an empty message.
"""

from __future__ import annotations

from labkit.devices.profiles import Link, Machine, Profile, uniform_machine

LAUNCH_OVERHEAD_S = 5e-6
MESSAGE_LATENCY_S = 10e-6
_ASSUMED = "; launch overhead 5 us and message overhead 5 us assumed"
GIB = 1 << 30


def _card(
    name: str, float32: float, tf32: float, bfloat16: float, gb_per_s: float, gib: int, source: str
) -> Profile:
    """A profile from TFLOP/s, GB/s and GiB as data sheets state them."""
    peaks = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": bfloat16}
    return Profile(
        name,
        {dtype: peak * 1e12 for dtype, peak in peaks.items()},
        gb_per_s * 1e9,
        gib * GIB,
        LAUNCH_OVERHEAD_S,
        LAUNCH_OVERHEAD_S,
        source + _ASSUMED,
    )


_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper v2.0, appendix"
_AD102 = "NVIDIA Ada GPU architecture white paper, appendix"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
CARDS = {
    "a6000": _card(
        "RTX A6000",
        38.7,
        77.4,
        154.8,
        768,
        48,
        f"{_GA102} C; NVIDIA RTX A6000 data sheet (memory, links)",
    ),
    "3090": _card("GeForce RTX 3090", 35.6, 35.6, 71.0, 936, 24, f"{_GA102} A"),
    "6000-ada": _card(
        "RTX 6000 Ada Generation",
        91.1,
        182.1,
        364.2,
        960,
        48,
        "NVIDIA RTX 6000 Ada Generation data sheet and Ada professional white paper",
    ),
    "4090": _card("GeForce RTX 4090", 82.6, 82.6, 165.2, 1008, 24, f"{_AD102} A"),
    "a100-40": _card("A100 40GB SXM", 19.5, 156, 312, 1555, 40, _A100),
    "a100-80": _card("A100 80GB SXM", 19.5, 156, 312, 2039, 80, _A100),
    "h200": _card(
        "H200 SXM",
        67,
        494.7,
        989.5,
        4800,
        140,
        "NVIDIA H200 Tensor Core GPU data sheet, figures with sparsity halved",
    ),
}

PCIE4 = Link(
    "PCIe 4.0 x16",
    31.5e9,
    MESSAGE_LATENCY_S,
    "PCI Express 4.0: 16 GT/s x 16 lanes x 128/130 / 8, one direction; latency assumed",
)
NVLINK_BRIDGE = Link(
    "NVLink 3 bridge",
    56.25e9,
    MESSAGE_LATENCY_S,
    "NVIDIA RTX A6000 data sheet: 112.5 GB/s both directions together; latency assumed",
)
NVLINK_A100 = Link(
    "NVLink 3, 12 links",
    300e9,
    MESSAGE_LATENCY_S,
    "NVIDIA A100 data sheet: 600 GB/s both directions together; latency assumed",
)
NVLINK_H200 = Link(
    "NVLink 4, 18 links",
    450e9,
    MESSAGE_LATENCY_S,
    "NVIDIA H200 data sheet: 900 GB/s both directions together; latency assumed",
)
# machine name -> (card, link of a pair, link of the bridged pairs 0-1, 2-3 ...)
_MACHINES = {
    "a6000-pcie": ("a6000", PCIE4, PCIE4),
    "a6000-nvlink": ("a6000", PCIE4, NVLINK_BRIDGE),
    "3090-pcie": ("3090", PCIE4, PCIE4),
    "6000-ada-pcie": ("6000-ada", PCIE4, PCIE4),
    "4090-pcie": ("4090", PCIE4, PCIE4),
    "a100-40-nvlink": ("a100-40", NVLINK_A100, NVLINK_A100),
    "a100-80-nvlink": ("a100-80", NVLINK_A100, NVLINK_A100),
    "h200-nvlink": ("h200", NVLINK_H200, NVLINK_H200),
}
LAB_WIDTH = 32  # the lab's 128 channels stand for 4096


def machine_names() -> tuple[str, ...]:
    """Every name that ``machine`` takes."""
    return (*_MACHINES, "lab")


def machine(name: str, count: int) -> Machine:
    """A named machine with ``count`` devices.

    Args:
        name: one of ``machine_names()``. ``a6000-nvlink`` bridges devices 0-1, 2-3 ... and joins
            the rest over PCIe. ``lab`` is no card: it is ``a6000-pcie`` scaled so that the lab's
            narrow model shows the ratios of one 32 times as wide (``Machine.scaled``).
        count: number of devices, >= 1.

    Raises:
        ValueError: the name is unknown, or ``count`` is below 1.

    >>> machine("a6000-nvlink", 4).link(0, 1).name, machine("a6000-nvlink", 4).link(1, 2).name
    ('NVLink 3 bridge', 'PCIe 4.0 x16')
    >>> machine("lab", 2).provenance
    'virtual:lab-2x-a6000-pcie-narrow32'
    """
    if name not in machine_names():
        raise ValueError(f"machine {name!r} is unknown; choose one of {', '.join(machine_names())}")
    if count < 1:
        raise ValueError(f"count={count} devices of {name!r}: must be at least 1")
    if name == "lab":
        label = f"lab-{count}x-a6000-pcie-narrow{LAB_WIDTH}"
        return machine("a6000-pcie", count).scaled(LAB_WIDTH, label)
    card, link, bridge = _MACHINES[name]
    plain = uniform_machine(f"{name}-{count}x", CARDS[card], link, count)
    bridged = {pair: bridge if _is_bridged(*pair) else link for pair in plain.links}
    return Machine(plain.name, plain.profiles, bridged)


def _is_bridged(lower: int, higher: int) -> bool:
    return lower % 2 == 0 and higher == lower + 1

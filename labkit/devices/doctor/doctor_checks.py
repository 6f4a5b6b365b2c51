"""What the doctor looks for: why each check matters, where that is written, what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARNING, FAILURE, UNKNOWN = "ok", "warning", "failure", "unknown"


@dataclass(frozen=True)
class Check:
    """``why`` it matters, a public ``reference`` for it, and the ``advice`` where it fails."""

    why: str
    reference: str
    advice: str


_NVML = "https://docs.nvidia.com/deploy/nvml-api/"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"

CHECKS = {
    "driver": Check(
        "torch sees no GPU where the driver's library and kernel module differ in version",
        "https://github.com/pytorch/pytorch/issues/45109",
        "reboot after a driver upgrade",
    ),
    "torch": Check(
        "torch needs a build for CUDA and a driver that is new enough for it",
        "https://pytorch.org/get-started/locally/",
        "install the build for CUDA and a recent driver; look at CUDA_VISIBLE_DEVICES",
    ),
    "sli": Check(
        "SLI and Base Mosaic join GPUs for drawing; CUDA then has fewer devices or less memory",
        "https://download.nvidia.com/XFree86/Linux-x86_64/535.54.03/README/sli.html",
        "remove the option from the X configuration and restart X; the NVLink bridge stays usable",
    ),
    "iommu": Check(
        "an IOMMU that translates sends peer-to-peer traffic through the processor: slow, or hangs",
        "https://github.com/NVIDIA/nccl/issues/2079",
        "turn VT-d off in the BIOS, or boot with iommu=pt; then look at the peer data check again",
    ),
    "acs": Check(
        "PCIe Access Control redirects peer-to-peer traffic to the root complex: slow, or hangs",
        _NCCL,
        "turn ACS off in the BIOS, or per bridge with setpci as the reference shows",
    ),
    "shared memory": Check(
        "NCCL and DataLoader workers pass data through /dev/shm; too small is a bus error",
        "https://github.com/pytorch/pytorch/issues/5040",
        "docker run --shm-size=8g, or --ipc=host",
    ),
    "open files": Check(
        "tensors shared between processes hold a file descriptor each",
        "https://docs.pytorch.org/docs/stable/multiprocessing.html",
        "ulimit -n 65536 before the notebook server starts",
    ),
    "numa": Check(
        "a rank on another NUMA node than its GPU copies over the link between processors",
        _TUNING,
        "numactl --cpunodebind=N --membind=N for the rank, or torchrun's NUMA binding",
    ),
    "wsl": Check(
        "under WSL 2 part of NVML is missing, and so is peer-to-peer",
        "https://docs.nvidia.com/cuda/wsl-user-guide/index.html",
        "expect empty columns; use native Linux for timing",
    ),
    "tuning": Check(
        "an earlier run changed clocks, fans or power and was killed before it restored them",
        "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceCommands.html",
        "as root: python -m labkit tune restore",
    ),
    "mixed cards": Check(
        "CUDA numbers the fastest card first, NVML by PCI bus: an index means two cards",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID; expect the slowest card to set the pace",
    ),
    "lost": Check(
        "a GPU that has fallen off the bus answers nothing until the machine restarts",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        "look for the Xid in dmesg; check power cables and seating",
    ),
    "pcie width": Check(
        "half the lanes are half the bandwidth between devices without NVLink",
        f"{_NVML}group__nvmlDeviceQueries.html",
        "reseat the card, or choose a slot with all lanes",
    ),
    "pcie generation": Check(
        "each generation doubles the bandwidth; an idle card lowers it to save power",
        f"{_NVML}group__nvmlDeviceQueries.html",
        "set the slot's speed in the BIOS",
    ),
    "ecc": Check(
        "ECC finds memory errors and costs memory and bandwidth on GDDR6; a change waits for a "
        "reboot",
        "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
        "reboot to let the change take effect; compare cards only with the same setting",
    ),
    "ecc errors": Check(
        "uncorrected memory errors mean wrong numbers or a crash",
        "https://docs.nvidia.com/deploy/gpu-debug-guidelines/index.html",
        "reset the GPU; if they come back, replace the card",
    ),
    "mig": Check(
        "a process uses one MIG instance at most, and instances cannot reach each other",
        "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
        "nvidia-smi -mig 0, as root, for work on several devices",
    ),
    "persistence": Check(
        "without it the driver unloads when nobody uses it: the next start takes seconds longer",
        "https://docs.nvidia.com/deploy/driver-persistence/index.html",
        "enable nvidia-persistenced, or nvidia-smi -pm 1",
    ),
    "power limit": Check(
        "a capped card is slower than its data sheet",
        "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
        "nvidia-smi -pl, as root, sets it back; or keep it and say so with every result",
    ),
    "throttling": Check(
        "a hot or badly fed card lowers its clocks: times then depend on the weather",
        f"{_NVML}group__nvmlClocksEventReasons.html",
        "more cooling for thermal reasons; check power cables for slowdown and brake",
    ),
    "display": Check(
        "a card that drives a display has less memory and irregular times",
        f"{_NVML}group__nvmlDeviceQueries.html",
        "name it last in CUDA_VISIBLE_DEVICES, or drive the display from another card",
    ),
    "other processes": Check(
        "another program on the card shares its time and memory",
        f"{_NVML}group__nvmlDeviceQueries.html",
        "end it, or measure later",
    ),
    "peer access": Check(
        "without peer-to-peer every message between GPUs goes through the host's memory",
        _NCCL,
        "look at iommu, acs and the slots; some consumer cards have none",
    ),
    "peer data": Check(
        "some machines report peer-to-peer as able and deliver wrong data: losses become nan",
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257",
        "set NCCL_P2P_DISABLE=1 for every rank until the copies are right",
    ),
    "nvlink": Check(
        "a bridge joins two cards; links that are down halve the bandwidth, and more than two "
        "bridged A6000 cards are known to hang NCCL",
        "https://github.com/pytorch/pytorch/issues/79299",
        "reseat the bridge; if collectives hang on more than two cards, try NCCL_P2P_DISABLE=1",
    ),
}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: a key of ``CHECKS``.
        level: ok, warning, failure, or unknown where it could not be looked at.
        found: in words, with the figures.
        device: such as ``GPU 1`` or ``GPU 0 and 1``; empty for the machine.
    """

    check: str
    level: str
    found: str
    device: str = ""

    def __post_init__(self) -> None:
        if self.check not in CHECKS or self.level not in (OK, WARNING, FAILURE, UNKNOWN):
            raise ValueError(f"check={self.check!r} or level={self.level!r} is unknown")

    @property
    def about(self) -> Check:
        return CHECKS[self.check]

    def to_json(self) -> dict:
        return asdict(self) | asdict(self.about)

"""NVIDIA's management library through nvitop: which GPUs there are, and one query at a time.

nvitop's API knows identity, order and MIG; figures come from raw queries through it, each with the
reason where there is none. https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import nvitop
from nvitop import libnvml

LOST = "the GPU is lost: it has fallen off the bus (dmesg names the Xid)"
_REASONS = {
    libnvml.NVML_ERROR_NOT_SUPPORTED: "not supported by this device",
    libnvml.NVML_ERROR_NO_PERMISSION: "no permission",
    libnvml.NVML_ERROR_GPU_IS_LOST: LOST,
    libnvml.NVML_ERROR_FUNCTION_NOT_FOUND: "this driver does not know the query",
    libnvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed",
    libnvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    libnvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the driver's library and kernel module differ in version: reboot"
    ),
}
# these will be the same at the next try
LASTING = frozenset(
    _REASONS[code]
    for code in (
        libnvml.NVML_ERROR_NOT_SUPPORTED,
        libnvml.NVML_ERROR_NO_PERMISSION,
        libnvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    )
)
_UNKNOWN = object()


class Answer(NamedTuple):
    """What a query gave: ``value``, or None with the ``reason`` in words."""

    value: object
    reason: str | None = None


def ask(function: str, *arguments: object) -> Answer:
    """Call one NVML function by its name, such as ``nvmlDeviceGetPowerUsage``; never raises."""
    try:
        value = libnvml.nvmlQuery(
            function,
            *arguments,
            default=_UNKNOWN,
            ignore_errors=False,
            ignore_function_not_found=True,  # else nvitop logs a traceback
        )
    except libnvml.NVMLError as error:
        return Answer(None, reason_of(error))
    if value is _UNKNOWN:
        return Answer(None, _REASONS[libnvml.NVML_ERROR_FUNCTION_NOT_FOUND])
    return Answer(value)


def ask_field(handle: object, field: int, scope: int = 0) -> Answer:
    """Read one NVML field value, a number of ``NVML_FI_DEV_...``."""
    values, reason = ask("nvmlDeviceGetFieldValues", handle, [(field, scope)])
    if reason:
        return Answer(None, reason)
    code = values[0].nvmlReturn
    if code != libnvml.NVML_SUCCESS:
        return Answer(None, reason_of(libnvml.NVMLError(code)))
    kind = {
        libnvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        libnvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        libnvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        libnvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        libnvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    }.get(values[0].valueType)
    return Answer(getattr(values[0].value, kind)) if kind else Answer(None, "of unknown type")


def reason_of(error: libnvml.NVMLError) -> str:
    """The error in words."""
    return _REASONS.get(error.value, str(error))


class Gpus(NamedTuple):
    """GPUs in the order of NVML, which is that of the PCI bus; ``reason`` where there are none."""

    devices: tuple[nvitop.Device, ...]
    reason: str | None = None


def physical_gpus() -> Gpus:
    """All GPUs that the driver knows, whatever the environment hides; silent without a driver."""
    log = logging.getLogger("nvitop.api.libnvml")
    silenced, log.disabled = log.disabled, True  # a banner of ten lines for a machine without GPU
    try:
        count, reason = ask("nvmlDeviceGetCount")
    finally:
        log.disabled = silenced
    if reason:
        return Gpus((), reason)
    if not count:
        return Gpus((), "the NVIDIA driver knows no GPU")
    return Gpus(tuple(nvitop.Device(index=index) for index in range(count)))


def visible_gpu_uuids() -> list[str]:
    """UUIDs of the GPUs that a CUDA program in this environment sees, in its order."""
    uuids = [str(gpu.uuid()) for gpu in physical_gpus().devices]
    return visible_uuids(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)


def gpu_of_uuid(uuid: str) -> nvitop.Device | None:
    """The GPU, or MIG instance, of that UUID; None where NVML knows none.

    torch gives a MIG instance's UUID without its prefix, so that ``GPU-`` may be wrong for it.
    """
    for name in (uuid, uuid.replace("GPU-", "MIG-", 1)):
        try:
            return nvitop.Device(uuid=name)
        except libnvml.NVMLError:
            continue
    return None


def visible_uuids(variable: str | None, uuids: Sequence[str]) -> list[str]:
    """Which GPUs CUDA lets a program see, in its order.

    The rules of the CUDA programming guide, "CUDA environment variables": entries are indices or
    beginnings of UUIDs that fit one GPU; the first entry that fits none ends the list; an entry
    that comes twice makes it empty; MIG instances are named by their whole UUID. Indices count in
    PCI order, which is CUDA's with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and for cards of one type.

    Args:
        variable: value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        uuids: of all GPUs, in PCI order.

    >>> visible_uuids("1,0", ["GPU-aa", "GPU-ab"])
    ['GPU-ab', 'GPU-aa']
    >>> visible_uuids("GPU-ab,7,0", ["GPU-aa", "GPU-ab"])
    ['GPU-ab']
    >>> visible_uuids("GPU-a", ["GPU-aa", "GPU-ab"])
    []
    """
    if variable is None:
        return list(uuids)
    seen: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.startswith("MIG-"):
            fits = [entry]
        elif entry.isdigit():
            fits = [uuids[int(entry)]] if int(entry) < len(uuids) else []
        else:
            fits = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(fits) != 1:
            break
        if fits[0] in seen:
            return []
        seen += fits
    return seen

"""Records what a rank really executes: operators, messages, regions and live bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.measure.profiler_labels import region_of_label, runs_on_own_stream
from labkit.measure.regions import listening
from labkit.measure.virtual import communication
from labkit.measure.virtual.live_storages import LiveStorages, tensors_in
from labkit.measure.virtual.operator_costs import (
    OperatorClass,
    bytes_of_call,
    classify,
    flat_tensors,
    written_tensors,
)
from labkit.measure.virtual.recording import NO_REGION, Event, Recording, Region

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # a fake one has a plain one's operators
_NO_KWARGS: dict[str, Any] = {}


class Recorder(TorchDispatchMode):
    """Records everything between ``with recorder:`` and its end; the program runs as ever.

    Regions named with ``regions.region`` are noted, and those that torch labels for its profiler.
    The recorder sees what reaches torch's dispatcher, backward included, of whatever engine runs
    the layer: tensor subclasses such as DTensor are seen as the plain operators they turn into. It
    does not see ``Work.wait()``: that received data is waited for follows from who reads it.

    Args:
        rank: by default the rank in ``torch.distributed``, or 0 without it.
        capacity_bytes: memory of the virtual device; None for no limit.

    Raises:
        VirtualOutOfMemoryError: (while recording) more bytes are alive than ``capacity_bytes``.

    >>> with Recorder() as recorder:
    ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> recording = recorder.take()
    >>> [(event.name, event.flops) for event in recording.events][-1]
    ('aten::mm', 48)
    """

    def __init__(self, rank: int | None = None, capacity_bytes: int | None = None) -> None:
        super().__init__()
        self.rank = _current_rank() if rank is None else rank
        self.storages = LiveStorages(f"virtual device {self.rank}", capacity_bytes)
        self._classes: dict[Any, OperatorClass] = {}
        self._opened_by_profiler: list[ExitStack] = []
        self._while_recording = ExitStack()
        self._regions: dict[Region, int] = {NO_REGION: 0}
        self._region = 0
        self._stream = "compute"
        self._start_anew()

    def _start_anew(self) -> None:
        self._events: list[Event] = []
        self._unknown: Counter[str] = Counter()
        self.storages.peak_bytes = self.storages.bytes

    def hold(self, *things: object) -> None:
        """Count modules, optimizers, tensors and nestings of them as alive from the start.

        A storage that is not held counts from the first operator that touches it.

        Raises:
            VirtualOutOfMemoryError: they do not fit.
        """
        for thing in things:
            before = self.storages.bytes
            for tensor in tensors_in(thing):
                self.storages.number(tensor)
            self.storages.check_capacity(f"holding a {type(thing).__name__}", before)

    def take(self) -> Recording:
        """What was recorded since the last ``take``; the next recording starts here."""
        recording = Recording(
            self.rank,
            tuple(self._events),
            tuple(self._regions),
            self.storages.peak_bytes,
            dict(self._unknown),
        )
        self._start_anew()
        return recording

    @contextmanager
    def region(self, label: str, kind: str = "compute") -> Iterator[None]:
        """Name what runs inside; regions nest, and the innermost names an event.

        Args:
            label: such as F3.
            kind: a ``Span``'s: forward, backward, weight, optimizer or compute.
        """
        outer = self._region
        self._region = self._regions.setdefault(Region(label, kind), len(self._regions))
        try:
            yield
        finally:
            self._region = outer

    @contextmanager
    def _on_stream(self, stream: str) -> Iterator[None]:
        outer, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = outer

    def __enter__(self) -> Recorder:
        self._while_recording.enter_context(listening(self.region))
        self._while_recording.enter_context(_resizes_reported(self.storages))
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._while_recording.close()

    def __torch_dispatch__(
        self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented  # the subclass turns it into plain operators, seen then
        kwargs = _NO_KWARGS if kwargs is None else kwargs
        entered = thread_time()
        bytes_before = self.storages.bytes
        result = func(*args, **kwargs)
        own_s = thread_time() - entered
        if func.namespace in communication.NAMESPACES:
            self._note_communication(func, args, kwargs, result, own_s)
        else:
            self._note_operator(func, args, kwargs, result, own_s)
        if self.storages.bytes > bytes_before:
            self.storages.check_capacity(func._schema.name, bytes_before)
        return result

    def _note_operator(
        self, func: Any, args: tuple, kwargs: dict, result: Any, own_s: float
    ) -> None:
        its = self._classes.get(func)
        if its is None:
            its = self._classes[func] = classify(func)
        outputs = flat_tensors(result)
        if its.free:
            self._note_free(its, args, outputs)
            return
        inputs = flat_tensors(args)
        if kwargs:
            inputs += flat_tensors(list(kwargs.values()))
        if any(t.is_meta for t in inputs + outputs):
            return  # shapes are worked out, nothing runs
        if not its.known:
            self._unknown[its.name] += 1
        number = self.storages.number
        written = outputs
        if its.written_args:  # what is changed in place is often returned as well
            written = written_tensors(its, args, kwargs)
            changed = {number(t) for t in written}
            written += [t for t in outputs if number(t) not in changed]
        flops = its.flops(*args, **kwargs, out_val=result) if its.flops else 0
        self._events.append(
            Event(
                "compute",
                its.name,
                flops,
                bytes_of_call(its, inputs, written),
                str(inputs[0].dtype)[6:] if flops else "",
                tuple([number(t) for t in inputs]),
                tuple([number(t) for t in written]),
                self._region,
                stream=self._stream,
                own_s=own_s,
            )
        )

    def _note_free(self, its: OperatorClass, args: tuple, outputs: list[torch.Tensor]) -> None:
        """A view, an allocation or a profiler's label: no time, but maybe a new storage."""
        if its.name.startswith("profiler::"):
            self._follow_profiler(its.name, args)
        for tensor in outputs:
            if not tensor.is_meta:
                self.storages.number(tensor)

    def _note_communication(
        self, func: Any, args: tuple, kwargs: dict, result: Any, own_s: float
    ) -> None:
        event = communication.event_of(func, args, kwargs, result, self.storages.number)
        if event is not None:
            self._events.append(
                event._replace(region=self._region, stream=self._stream, own_s=own_s)
            )

    def _follow_profiler(self, name: str, args: tuple) -> None:
        """Open and close regions with the ``record_function`` labels that torch itself sets."""
        if name == "profiler::_record_function_enter_new":
            stack = ExitStack()
            if (named := region_of_label(args[0])) is not None:
                stack.enter_context(self.region(*named))
            if runs_on_own_stream(args[0]):
                stack.enter_context(self._on_stream("communication"))
            self._opened_by_profiler.append(stack)
        elif self._opened_by_profiler:
            self._opened_by_profiler.pop().close()


def _current_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def _resizes_reported(storages: LiveStorages) -> Iterator[None]:
    """Count storages resized in place, which no operator announces: FSDP2 frees and refills so."""
    resize = torch.UntypedStorage.resize_

    def reporting_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        storages.resized(storage)
        return result

    torch.UntypedStorage.resize_ = reporting_resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize

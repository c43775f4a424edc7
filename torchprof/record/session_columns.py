"""The events of a session of torch's profiler as columns: what every event has, and the signatures of ops."""

from __future__ import annotations

import json
import marshal
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]

from torchprof.attribute.event_columns import EventColumns, EventKind, Numbers, by_thread
from torchprof.attribute.event_names import MEMORY, OVERHEAD, event_kind, is_a_common_name
from torchprof.attribute.events import ACCUMULATES, PREFIX, Detail, Event, Kind, SignatureTable
from torchprof.attribute.launches import first_correlation_id, launches_of, numbers_of_devices, threads_of_overhead
from torchprof.record.torch_internals import needed, optional
from torchprof.run.collectives import RECORDS_COLLECTIVE, signature_of
from torchprof.run.torch_names import LAUNCHING
from torchprof.run.words import BEFORE, Signature, is_collective, is_runtime_call

RawEvent = needed("torch._C._autograd._KinetoEvent")
# To call a method of torch by ``map`` takes less time than calling it in a loop.
end_ns: Callable[[Any], int] = getattr(RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())  # torch 2.4
_name, _scope, _start_ns = RawEvent.name, RawEvent.scope, RawEvent.start_ns
_thread, _sequence, _forward_thread = RawEvent.start_thread_id, RawEvent.sequence_nr, RawEvent.fwd_thread_id
_correlation, _linked = RawEvent.correlation_id, RawEvent.linked_correlation_id
_is_python_function: Callable[[Any], bool] = getattr(RawEvent, "is_python_function", lambda raw: False)
_is_annotation: Callable[[Any], bool] | None = getattr(RawEvent, "is_user_annotation", None)
# The stream of a kernel. In a torch that does not record it, all work of a device has one number.
_stream: Callable[[Any], int] = getattr(RawEvent, "device_resource_id", RawEvent.start_thread_id)
_shapes_of_lists: Callable[[Any], list[Any]] | None = optional(
    "torch._C._autograd._KinetoEvent.structured_input_shapes"
)
HAS_COLLECTIVE_METADATA = "expose_kineto_event_metadata" in (
    getattr(optional("torch._C._profiler._ExperimentalConfig"), "__init__", None).__doc__ or ""
)
"""Whether this torch gives the metadata of events, as the shapes of collectives, not only in trace files."""

BACKWARD_SCOPE, USER_SCOPE = 1, 7  # that of a function is 0
# Source lines that are left out: Python's builtins, torch's marks of modules, the functions that every call of a module
# goes through, and the labels and stand-ins of torchprof/record.
_NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/record/")
_BLOCK = 1024
"""How many events are read at a time: they fit in the cache of a processor, and the next method finds them there."""


class RawEvents:
    """The events of a session in the order of start (``all``), and by index of an event:

    - ``names_of``: the index of its name in ``names``; ``scopes``.
    - ``starts``, ``ends``, in ns; ``threads``.
    - ``sequences``: autograd sequence numbers, -1 for none; ``forward_threads``, on which these were counted.
    """

    def __init__(self, raws: Sequence[Any]) -> None:
        """``raws``: those of torch, in the order of start."""
        self.all = raws
        self.starts, self.ends, self.sequences, self.forward_threads = (array("q") for _ in range(4))
        self.threads: list[int] = []  # small numbers, of which Python has one object each
        self.scopes, self.names_of = bytearray(), array("l")
        numbers: Numbers[str] = Numbers()
        for first in range(0, len(raws), _BLOCK):
            block = raws[first : first + _BLOCK]
            self.starts.extend(map(_start_ns, block))
            self.ends.extend(map(end_ns, block))
            self.threads.extend(map(_thread, block))
            self.sequences.extend(map(_sequence, block))
            self.forward_threads.extend(map(_forward_thread, block))
            self.scopes.extend(map(_scope, block))
            self.names_of.extend(map(numbers.__getitem__, map(_name, block)))
        self.names = [*numbers]

    @classmethod
    def in_order(cls, raws: Sequence[Any]) -> RawEvents:
        """torch's events usually come in the order of start. Of equal starts, the first one stays the first."""
        events = cls(raws)
        is_sorted = all(map(operator.le, events.starts, islice(events.starts, 1, None)))
        return events if is_sorted else cls(sorted(raws, key=_start_ns))


class InputSignatures(SignatureTable):
    """The inputs of the operators and collectives of one session. ``with_stack``: whether signatures have source
    lines."""

    def __init__(self, with_stack: bool) -> None:
        super().__init__()
        self._with_stack = with_stack
        self._with_source: dict[tuple[int, int], int] = {}  # see called_from

    def number_of(self, raw: Any, detail: Detail) -> int:
        """The number of the inputs of an event."""
        shapes, dtypes = raw.shapes(), raw.dtypes()
        if "TensorList" in dtypes and _shapes_of_lists is not None:
            shapes = _shapes_of_lists(raw)
        scalars = () if detail is Detail.SHAPES else raw.concrete_inputs()
        if detail is Detail.ONES:  # the counter of a loop must not make a new signature in each iteration
            scalars = [value if value is None or value in (0, 1) else 2 for value in scalars]
        stack = [line for line in raw.stack() if not line.startswith(_NO_SOURCE)] if self._with_stack else []
        if not (shapes or dtypes or stack):
            return 0  # as in a trace: no inputs and inputs that were not recorded look the same
        try:
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        except ValueError:  # a scalar that is no plain value
            scalars = [value if isinstance(value, (bool, int, float, str, list)) else None for value in scalars]
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        if (number := self._number_of_bytes.get(key)) is None:
            known = [
                None if dtype == "TensorList" and _shapes_of_lists is None else shape
                for shape, dtype in zip(shapes, dtypes)
            ]
            # In this order: after Ctrl-C between any two lines, the events can be read again with what is here.
            number = len(self.all)
            self.all.append(Signature(_frozen(known), tuple(dtypes), _frozen(scalars), tuple(stack)))
            self._number_of_bytes[key] = number
        return number

    def number_of_collective(self, raw: Any) -> int:
        """The number of the inputs of a collective, from the metadata that its event has in a trace; 0 if the session
        did not record the metadata. torch gives it as the inside of a JSON object."""
        try:
            signature = signature_of(json.loads("{" + raw.metadata_json() + "}"))
        except ValueError:
            return 0
        return 0 if signature is None else self._number(signature)

    def called_from(self, signature: int, source: int) -> int:
        """The number of a signature like ``signature`` with the source lines of ``source``."""
        if (number := self._with_source.get((signature, source))) is None:
            number = self._number(self.all[signature]._replace(stack=self.all[source].stack))
            self._with_source[signature, source] = number
        return number


def _frozen(value: Any) -> Any:
    """A value with tuples for lists, and None for a number that JSON cannot hold (a complex one)."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return None if isinstance(value, complex) else value


class SessionColumns:
    """The columns of one session. ``inputs``: numbers the inputs of ops. ``on_device``: a device was recorded, too."""

    def __init__(self, events: RawEvents, inputs: InputSignatures, on_device: bool) -> None:
        self._work: list[Any] = []
        if on_device:
            # The memory events of all devices are the CPU's.
            of_cpu = [raw.device_type() == DeviceType.CPU or raw.name() == MEMORY for raw in events.all]
            self._work = [*compress(events.all, map(operator.not_, of_cpu))]
            events = RawEvents([*compress(events.all, of_cpu)])
        self._events = events
        self._inputs = inputs
        self._devices: dict[tuple[Any, int], str] = {}  # the names of devices
        self._kinds: Numbers[EventKind | None] = Numbers({None: 0})  # None: such events are left out
        self._numbers = array("i")  # by index of an event
        self._ends = events.ends
        self._threads: Sequence[int] = self._events.threads
        self._correlations = array("q")
        self._calls: list[int] = []  # the correlation IDs of calls of the device's runtime
        self._launches: set[int] = set()  # those of calls that launch kernels
        self._unlinked: set[int] = set()  # those of the calls outside of all ops, as the replay of a graph may be
        if on_device:
            self._find_launches()

    def columns(
        self, detail: Callable[[str], Detail] | None, address_of: Mapping[tuple[int, int, int], int]
    ) -> EventColumns:
        """``detail``: see ``SessionEvents.columns``. ``address_of``: of memory events, by time, thread and bytes."""
        events = self._events
        self._number_kinds()
        nbytes, addresses = self._memory_columns(address_of)
        self._shorten_async()
        kinds = [EventKind(Kind.OP, "") if kind is None else kind for kind in self._kinds]
        has_nodes = any(kind.kind in (Kind.NODE, Kind.BACKWARD_FUNCTION) for kind in kinds)
        signatures = self._signatures(detail)
        kept = compress(range(len(self._numbers)), self._numbers)  # 0 is the number of events that are left out
        threads, order = by_thread(kept, self._threads)
        is_in_order = len(threads) == 1 and len(order) == len(self._numbers)

        def column(values: array[int], code: str = "q") -> array[int]:
            return array(code, values if is_in_order else map(values.__getitem__, order))

        return EventColumns(
            kinds,
            threads,
            column(self._numbers, "i"),
            column(events.starts),
            column(self._ends),
            sequence=column(events.sequences),
            forward_thread=column(events.forward_threads) if has_nodes else None,
            correlation=column(self._correlations) if self._correlations else None,
            signature=column(signatures, "i") if signatures else None,
            nbytes=column(nbytes) if nbytes else None,
            address=column(addresses) if addresses else None,
            kernels=(kernels := [*self._device_work()]),
            first_work_ns=min((kernel.start_ns for kernel in kernels), default=0),
            launched=len(self._launches),
            lost=len(self._launches.difference(map(_correlation, self._work))),
        )

    def _find_launches(self) -> None:
        """Set the IDs by which kernels find the ops that launched them. A call of the device's runtime counts on the
        thread of its op, overhead on that of the op that it interrupts::

            event                                   ID    of op      becomes
            aten::mm, an op                          7        0      7: kernels name it as their launcher
            cudaLaunchKernel, called in aten::mm    31        7      0, on the thread of aten::mm
            cudaGraphLaunch, outside of all ops     32        0      -32: an op may have the ID 32
            overhead, in the op or range 7           7        0      0: it launches nothing
        """
        events = self._events
        raws, names, names_of, scopes = events.all, events.names, events.names_of, events.scopes
        self._correlations = array("q", map(_correlation, raws))
        linked = [*map(_linked, raws)]
        is_wanted = [LAUNCHING.fullmatch(name) is not None for name in names]
        calls = [*compress(range(len(raws)), map(is_wanted.__getitem__, names_of))]
        self._launches = launches_of(
            (events.starts[index], events.threads[index], names[names_of[index]], self._correlations[index])
            for index in calls
        )
        is_call = [is_runtime_call(name) for name in names]
        is_overhead = [name in OVERHEAD for name in names]
        ranges = [
            index
            for index, (launcher, name, scope) in enumerate(zip(linked, names_of, scopes))
            if not launcher and (scope == USER_SCOPE or not is_overhead[name])
        ]
        thread_of = {self._correlations[index]: events.threads[index] for index in ranges}
        threads = [*events.threads]
        overhead: list[int] = []
        for index, (launcher, name) in enumerate(zip(linked, names_of)):
            if launcher:
                threads[index] = thread_of.get(launcher, threads[index])
                self._calls.append(self._correlations[index])
                self._correlations[index] = 0
            elif scopes[index] != USER_SCOPE and is_overhead[name]:
                overhead.append(index)
                self._correlations[index] = 0
            elif is_call[name] and scopes[index] != USER_SCOPE:
                self._calls.append(self._correlations[index])
                self._unlinked.add(self._correlations[index])
                self._correlations[index] *= -1
        if overhead:
            ops = ((events.starts[index], threads[index]) for index in ranges if scopes[index] != USER_SCOPE)
            self._move_overhead(overhead, threads, ops)
        self._threads = threads

    def _move_overhead(self, overhead: list[int], threads: list[int], ops: Iterable[tuple[int, int]]) -> None:
        """Put the events of overhead on the threads of the ops that they interrupt. ``ops``: start and thread."""
        starts = self._events.starts
        overhead.sort(key=starts.__getitem__)
        for index, thread in zip(overhead, threads_of_overhead([starts[index] for index in overhead], ops)):
            threads[index] = thread or threads[index]

    def _number_kinds(self) -> None:
        """The kind of an event follows from its name and its scope."""
        events = self._events
        names, names_of, scopes = events.names, events.names_of, events.scopes
        first = dict(zip(reversed(names_of), reversed(events.all)))
        is_python = [_is_python_function(first[number]) for number in range(len(names))]
        numbers: dict[tuple[int, int], int] = {}  # by number of the name, and scope

        def number_of(name: int, scope: int) -> int:
            kind = None if is_python[name] else _kind_of(names[name], scope)
            event_kind = None if kind is None else EventKind(kind, names[name])
            return self._kinds[event_kind]

        of_functions = [number_of(name, 0) for name in range(len(names))]
        self._numbers = array("i", map(of_functions.__getitem__, names_of))
        for index in compress(range(len(scopes)), scopes):
            key = names_of[index], scopes[index]
            if key not in numbers:
                numbers[key] = number_of(*key)
            self._numbers[index] = numbers[key]

    def _indices_of(self, is_wanted: Callable[[EventKind], bool]) -> list[int]:
        """The indices of the events whose kinds are wanted."""
        wanted = [kind is not None and is_wanted(kind) for kind in self._kinds]
        events = compress(range(len(self._numbers)), map(wanted.__getitem__, self._numbers))
        return [*events] if any(wanted) else []

    def _memory_columns(
        self, address_of: Mapping[tuple[int, int, int], int]
    ) -> tuple[array[int] | None, array[int] | None]:
        """The bytes and the addresses of memory events. Each device has a kind of its own."""
        if not (of_memory := self._indices_of(lambda kind: kind.kind is Kind.MEMORY)):
            return None, None
        raws, starts, threads = self._events.all, self._events.starts, self._threads
        nbytes, addresses = array("q", bytes(8 * len(raws))), array("q", bytes(8 * len(raws)))
        numbers: dict[str, int] = {}
        for index in of_memory:
            raw, start = raws[index], starts[index]
            size = nbytes[index] = raw.nbytes()
            addresses[index] = address_of.get((start, threads[index], size), 0)
            device = _device_name(raw.device_type(), raw.device_index(), self._devices)
            if device not in numbers:
                numbers[device] = self._kinds[EventKind(Kind.MEMORY, MEMORY, device)]
            self._numbers[index] = numbers[device]
            self._ends[index] = start
        return nbytes, addresses

    def _shorten_async(self) -> None:
        """A label that ends on another thread takes no time of its own thread."""
        for index in self._indices_of(lambda kind: kind.kind is Kind.USER_LABEL):
            raw = self._events.all[index]
            moves = raw.is_async() or raw.end_thread_id() != raw.start_thread_id()
            if moves and self._events.scopes[index] == USER_SCOPE:
                self._ends[index] = self._events.starts[index]

    def _signatures(self, detail: Callable[[str], Detail] | None) -> array[int] | None:
        """The numbers of the inputs of ops; None if none were recorded."""
        collectives = self._indices_of(lambda kind: kind.name == RECORDS_COLLECTIVE) if HAS_COLLECTIVE_METADATA else []
        if detail is None and not collectives:
            return None
        wanted = [_detail_of(kind, detail) for kind in self._kinds]
        raws, number_of, nothing = self._events.all, self._inputs.number_of, Detail.NOTHING
        numbers = array("i", bytes(4 * len(raws)))
        for index, number in enumerate(self._numbers):
            if wanted[number] is not nothing:
                numbers[index] = number_of(raws[index], wanted[number])
        for index in collectives:
            numbers[index] = self._inputs.number_of_collective(raws[index]) or numbers[index]
        return numbers

    def _device_work(self) -> Iterator[Event]:
        """The kernels, copies and sets of devices."""
        work, devices = self._work, self._devices
        hip = [index for device_type, index in devices if device_type.name == "HIP"]
        counted = numbers_of_devices((raw.device_index() for raw in work), hip)
        first = first_correlation_id(self._calls, (raw.correlation_id() for raw in work if raw.linked_correlation_id()))
        labels = {kind.name for kind in self._kinds if kind is not None and kind.kind is Kind.USER_LABEL}
        for raw in work:
            name = raw.name()
            # A copy of a CPU range on the device's timeline is no work. If this torch does not mark such copies, they
            # are recognized by the name of the range; only then, because a user's kernel may have its name, too.
            if name.startswith(PREFIX) or (_is_annotation(raw) if _is_annotation is not None else name in labels):
                continue
            launcher, index = raw.linked_correlation_id(), raw.device_index()
            if not launcher:
                call = raw.correlation_id()
                if call in self._unlinked:
                    launcher = -call
                elif 0 < call < first:
                    launcher = BEFORE
            device = _device_name(raw.device_type(), counted.get(index, index), devices)
            start, end = raw.start_ns(), end_ns(raw)
            yield Event(Kind.KERNEL, name, start, end, _stream(raw), correlation=launcher, device=device)


def _kind_of(name: str, scope: int) -> Kind | None:
    """The kind of the events with a name and a scope; None if they are left out."""
    kind = event_kind(name)
    if scope == USER_SCOPE and is_a_common_name(name):
        return Kind.USER_LABEL
    if kind is not Kind.OP:
        return kind
    if scope == USER_SCOPE:  # a user's label may have the name of an op
        return Kind.COLLECTIVE if is_collective(name) else Kind.USER_LABEL
    return Kind.BACKWARD_FUNCTION if scope == BACKWARD_SCOPE else Kind.OP


def _detail_of(kind: EventKind | None, detail: Callable[[str], Detail] | None) -> Detail:
    """How much is read of the inputs of events of one kind."""
    if detail is None or kind is None:
        return Detail.NOTHING
    if kind.kind is Kind.COLLECTIVE:
        return Detail.SHAPES
    if kind.kind is Kind.OP or (kind.kind is Kind.BACKWARD_FUNCTION and kind.name.endswith(ACCUMULATES)):
        return detail(kind.name)
    return Detail.NOTHING


def _device_name(device_type: Any, index: int, known: dict[tuple[Any, int], str]) -> str:
    """The name of a device. torch calls a ROCm device "cuda"; only the profiler's memory events call it "hip"."""
    if (device := known.get((device_type, index))) is None:
        kind = device_type.name.lower().replace("hip", "cuda")
        device = "cpu" if kind in ("cpu", "mkldnn", "ideep") else f"{kind}:{max(index, 0)}"
        known[device_type, index] = device
    return device

"""One profiler session, and its events: the only file that touches ``torch.autograd.profiler``.

Every difference between the profilers of torch's versions ends here.
"""

from __future__ import annotations

import gzip
import itertools
import json
import marshal
import operator
import shutil
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler_util import EventList

from torchprof.attribute.collectives import ACCUMULATES, RECORDS_COLLECTIVE
from torchprof.attribute.event_names import (
    GARBAGE_COLLECTION_LABEL,
    MEMORY,
    RAISED,
    STARTED,
    STEP_MARK,
    STOPPED,
    event_kind,
    is_a_common_name,
    is_torchs_step,
    numbers_of_devices,
)
from torchprof.attribute.events import COMPILED_INPUTS, HOOKS, PREFIX, Detail, Event, Kind
from torchprof.attribute.launches import first_correlation_id
from torchprof.attribute.nesting import OpenRanges
from torchprof.errors import TorchprofError
from torchprof.record.cpu_time import CpuTime
from torchprof.run.collectives import signature_of
from torchprof.run.words import BEFORE, Signature, is_collective, is_runtime_call

OURS = "_is_torchprofs"
"""The attribute that marks a profiler of torch's as ours."""
_USER_SCOPE, _BACKWARD_SCOPE = 7, 1
# No source lines: Python's builtins, torch's marks of modules, what every call of a module goes through, and the labels
# and stand-ins of torchprof/record.
_NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/record/")

_RawEvent = torch._C._autograd._KinetoEvent
# torch 2.4 has none of these: an end, a mark of Python functions, a mark of annotations.
_end_ns: Callable[[Any], int] = getattr(_RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())
_is_python_function: Callable[[Any], bool] = getattr(_RawEvent, "is_python_function", lambda raw: False)
_is_annotation: Callable[[Any], bool] | None = getattr(_RawEvent, "is_user_annotation", None)
# Which stream something ran on; a torch that does not say that gives all work of a device one number.
_stream: Callable[[Any], int] = getattr(_RawEvent, "device_resource_id", _RawEvent.start_thread_id)
_shapes_of_lists: Callable[[Any], list[Any]] | None = getattr(_RawEvent, "structured_input_shapes", None)

TELLS_COLLECTIVES = "expose_kineto_event_metadata" in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or "")
"""Whether torch can be asked for what events say in traces beside what they all have."""


class Call(NamedTuple):
    """One forward call of a labelled module: its label and where its events are."""

    label: str
    start_ns: int
    end_ns: int
    thread: int
    finished: bool


class _OpenCall(NamedTuple):
    """A call that has not ended, and its number in the order of start."""

    end_ns: int
    number: int


class Recording:
    """What one session of torch's profiler has recorded, to be read after its end.

    ``profiler`` is a ``torch.autograd.profiler.profile`` that has ended. ``device`` is the kind of device whose kernels
    it recorded ("cuda", "xpu", …), None for the CPU alone.
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        self.device: str | None = profiler.use_device
        self.cpu_time: CpuTime | None = None
        self.signatures: list[Signature] = [Signature((), ())]
        self._numbers: dict[bytes, int] = {}  # of signatures
        self._moved: dict[tuple[int, int], int] = {}  # (signature, another with its source lines) → its number
        self._number_of: dict[Signature, int] = {self.signatures[0]: 0}
        self._trace: Path | None = None

    @property
    def has(self) -> dict[str, bool]:
        """What was recorded beside times: ``profile_memory``, ``record_shapes``, and ``with_stack``, which torch leaves
        out of its events where nobody asked for ``experimental_config=_ExperimentalConfig(verbose=True)``."""
        has = {name: bool(getattr(self._profiler, name)) for name in ("profile_memory", "record_shapes", "with_stack")}
        has["with_stack"] = has["with_stack"] and any(raw.stack() for raw in self._raw())
        return has

    @property
    def with_stack(self) -> bool:
        """Whether Python's calls were recorded."""
        return bool(self._profiler.with_stack)

    @property
    def wall_ns(self) -> int:
        """How long the session lasted, as torch says; where it does not, from the first event to the last."""
        start, end = (getattr(self._profiler, f"profiling_{which}_time_ns", 0) for which in ("start", "end"))
        if end > start > 0:
            return int(end - start)
        raws = self._raw()
        return max(map(_end_ns, raws)) - raws[0].start_ns() if raws else 0

    @property
    def torchs_steps(self) -> int:
        """How many steps of ``torch.profiler.profile`` there are, as ranges of their own."""
        return sum(is_torchs_step(raw.name()) for raw in self._raw() if raw.device_type() == DeviceType.CPU)

    @property
    def start_ns(self) -> int | None:
        """When it began, on the clock of the events; None where nothing was recorded."""
        results = self._profiler.kineto_results
        return None if results is None else int(results.trace_start_ns())

    def events(self, detail: Callable[[str], Detail] | None = None, addresses: bool = False) -> Iterator[Event]:
        """What happened, in the order of start: ops, labels, autograd nodes and memory; then the work of the device.

        That comes last because the device has a clock of its own: a kernel may seem to run before it was launched.
        ``detail`` says for the name of an op what is read of its inputs (None: nothing); the numbers that events carry
        are indices in ``signatures``. That takes a session with ``record_shapes``. With ``addresses``, memory events
        carry theirs.
        """
        raws = self._raw()
        address_of = self._addresses() if addresses else {}
        on_device = self.device is not None
        kinds: dict[str, Kind | None] = {}  # by name; None: left out
        details: dict[str, Detail] = {}  # by name of an op
        nothing = Detail.NOTHING
        threads: dict[int, int] = {}  # correlation number of an op → its thread
        devices: dict[tuple[Any, int], str] = {}
        work: list[Any] = []
        calls: list[int] = []  # the numbers of calls of the device's runtime
        cpu = DeviceType.CPU
        memory, node, backward, user_label = Kind.MEMORY, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.USER_LABEL
        op, collective, compiling = Kind.OP, Kind.COLLECTIVE, Kind.COMPILING
        correlation = 0
        new = tuple.__new__  # a third of the time that Event(...) takes, once for every event
        if on_device:
            threads = {raw.correlation_id(): raw.start_thread_id() for raw in raws if not raw.linked_correlation_id()}
        for raw in raws:
            name = raw.name()
            thread = raw.start_thread_id()
            if on_device:
                if raw.device_type() != cpu and name != MEMORY:
                    work.append(raw)
                    continue
                # A call of the device's runtime (cudaLaunchKernel) is linked to the op it ran in, on that op's thread.
                launcher = raw.linked_correlation_id()
                thread = threads.get(launcher, thread) if launcher else thread
                correlation = raw.correlation_id()
                if launcher or (is_runtime_call(name) and raw.scope() != _USER_SCOPE):
                    calls.append(correlation)
                    correlation = 0  # calls and ops are numbered each by themselves
            try:
                kind = kinds[name]
            except KeyError:
                kind = kinds[name] = _kind(raw, name)
            if kind is None:
                continue
            start = raw.start_ns()
            if kind is memory:
                size = raw.nbytes()
                address = address_of.get((start, thread, size), 0)
                device = _device(raw.device_type(), raw.device_index(), devices)
                yield new(Event, (kind, name, start, start, thread, -1, 0, address, device, size, 0))
                continue
            if kind is op or kind is user_label:  # one name may be both: a label around a function of that name
                kind = user_label if raw.scope() == _USER_SCOPE else op
            elif kind is compiling and is_a_common_name(name) and raw.scope() == _USER_SCOPE:
                kind = user_label
            sequence = raw.sequence_nr()
            end = _end_ns(raw)
            forward_thread = signature = 0
            if kind is user_label:
                if is_collective(name):
                    kind = collective
                    if detail is not None:
                        signature = self._signature(raw, Detail.SHAPES)
                elif raw.is_async() or raw.end_thread_id() != thread:
                    end = start  # it ends on whatever thread: of this one it is no time
            elif sequence >= 0:
                if kind is node:
                    forward_thread = raw.fwd_thread_id()
                elif raw.scope() == _BACKWARD_SCOPE:
                    kind = backward
                    forward_thread = raw.fwd_thread_id()
            if detail is not None and (kind is op or (kind is backward and name.endswith(ACCUMULATES))):
                wanted = details.get(name)
                if wanted is None:
                    wanted = details[name] = detail(name)
                if wanted is not nothing:
                    signature = self._signature(raw, wanted)
            if name == RECORDS_COLLECTIVE and TELLS_COLLECTIVES:
                signature = self._of_collective(raw) or signature
            yield new(
                Event, (kind, name, start, end, thread, sequence, forward_thread, correlation, "cpu", 0, signature)
            )
        hip = [index for device_type, index in devices if device_type.name == "HIP"]
        counted = numbers_of_devices((raw.device_index() for raw in work), hip)
        first = first_correlation_id(calls, (raw.correlation_id() for raw in work if raw.linked_correlation_id()))
        for raw in work:
            name = raw.name()
            # A span that only mirrors a range of the CPU on the device's timeline is no work. Where torch does not mark
            # it, it is known by the range's name, and a kernel of the user's may bear that, too: only there.
            if name.startswith(PREFIX) or (
                _is_annotation(raw) if _is_annotation is not None else kinds.get(name) is user_label
            ):
                continue
            start, end, stream = raw.start_ns(), _end_ns(raw), _stream(raw)
            launcher, index = raw.linked_correlation_id(), raw.device_index()
            device = _device(raw.device_type(), counted.get(index, index), devices)
            if not launcher and 0 < raw.correlation_id() < first:
                launcher = BEFORE
            yield new(Event, (Kind.KERNEL, name, start, end, stream, -1, 0, launcher, device, 0, 0))

    def _addresses(self) -> dict[tuple[int, int, int], int]:
        """The address of each memory event, by its time, thread and bytes: only torch's tree of events knows it."""
        found: dict[tuple[int, int, int], int] = {}
        results = self._profiler.kineto_results
        waiting = [] if results is None else [results.experimental_event_tree()]
        allocation = torch._C._profiler._ExtraFields_Allocation
        while waiting:
            for event in waiting.pop():
                children = event.children
                if children:
                    waiting.append(children)
                    continue  # only what has none inside can be an allocation: each look at its fields is a copy
                fields = event.extra_fields
                if type(fields) is allocation:
                    found[event.start_time_ns, event.start_tid, fields.alloc_size] = fields.ptr
        return found

    def _signature(self, raw: Any, detail: Detail) -> int:
        """The number of what an op was called on; equal ones have one number."""
        shapes, dtypes = raw.shapes(), raw.dtypes()
        if "TensorList" in dtypes and _shapes_of_lists is not None:
            shapes = _shapes_of_lists(raw)
        scalars = () if detail is Detail.SHAPES else raw.concrete_inputs()
        if detail is Detail.ONES:  # whatever a loop counts up must not make a signature of its own each time
            scalars = [value if value is None or value in (0, 1) else 2 for value in scalars]
        stack = [line for line in raw.stack() if not line.startswith(_NO_SOURCE)] if self.with_stack else []
        if not (shapes or dtypes or stack):
            return 0  # as in a trace: no inputs and inputs that were not recorded look the same
        try:
            # As a key, bytes cost half of what nested tuples do. Version 2 of the format knows no references between
            # equal parts: it depends on values alone.
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        except ValueError:  # a scalar that is no plain value
            scalars = [value if isinstance(value, (bool, int, float, str, list)) else None for value in scalars]
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        number = self._numbers.get(key)
        if number is None:
            known = [
                None if dtype == "TensorList" and _shapes_of_lists is None else shape
                for shape, dtype in zip(shapes, dtypes)
            ]
            # In this order: Ctrl-C may come between any two lines, and reading begin anew with what is here.
            number = len(self.signatures)
            self.signatures.append(Signature(_frozen(known), tuple(dtypes), _frozen(scalars), tuple(stack)))
            self._numbers[key] = number
        return number

    def _of_collective(self, raw: Any) -> int:
        """The number of what a collective was called on, as its op says in a trace; 0 where torch was not asked for
        that. What torch gives is the inside of an object of JSON."""
        try:
            signature = signature_of(json.loads("{" + raw.metadata_json() + "}"))
        except ValueError:
            return 0
        return 0 if signature is None else self._number(signature)

    def _number(self, signature: Signature) -> int:
        number = self._number_of.get(signature)
        if number is None:
            number = len(self.signatures)
            self.signatures.append(signature)
            self._number_of[signature] = number
        return number

    def called_from(self, signature: int, source: int) -> int:
        """The number of a signature that is like ``signature`` and has the source lines of ``source``."""
        number = self._moved.get((signature, source))
        if number is None:
            number = self._number(self.signatures[signature]._replace(stack=self.signatures[source].stack))
            self._moved[signature, source] = number
        return number

    def calls(self) -> list[Call]:
        """The forward calls of labelled modules, in the order in which they ended."""
        found: list[Call] = []
        open_calls: OpenRanges[_OpenCall] = OpenRanges()
        for raw in self._raw():
            name = raw.name()
            if not name.startswith(PREFIX) or raw.device_type() != DeviceType.CPU:
                continue
            start, thread = raw.start_ns(), raw.start_thread_id()
            around = open_calls.at(thread, start)
            if name in (RAISED, STOPPED) and around:
                number = around[-1].number
                found[number] = found[number]._replace(finished=False)
            elif name not in (RAISED, STOPPED, STARTED, STEP_MARK, GARBAGE_COLLECTION_LABEL) and not name.startswith(
                (HOOKS, COMPILED_INPUTS)
            ):
                end = _end_ns(raw)
                around.append(_OpenCall(end, len(found)))
                found.append(Call(name, start, end, thread, True))
        return sorted(found, key=lambda call: call.end_ns)

    def event_list(self) -> EventList:
        """torch's own list of the whole session, as it would be without our labels."""
        return self._event_list(self._unlabelled())

    def event_lists(self, calls: list[Call]) -> list[EventList]:
        """For each call, torch's own list of what happened in it: its ops, their kernels and their memory."""
        by_thread: dict[int, list[Any]] = {}
        kernels: dict[int, list[Any]] = {}  # by the correlation number of the op
        for raw in self._unlabelled():
            launcher = raw.linked_correlation_id()
            if launcher:
                kernels.setdefault(launcher, []).append(raw)
            elif raw.device_type() == DeviceType.CPU or raw.name() == MEMORY:
                by_thread.setdefault(raw.start_thread_id(), []).append(raw)
        starts = {thread: [raw.start_ns() for raw in raws] for thread, raws in by_thread.items()}
        lists = []
        for call in calls:
            on_thread = starts.get(call.thread, [])
            first, last = bisect_left(on_thread, call.start_ns), bisect_left(on_thread, call.end_ns)
            inside = by_thread.get(call.thread, [])[first:last]
            launched = [
                kernel for raw in inside if raw.correlation_id() for kernel in kernels.get(raw.correlation_id(), ())
            ]
            lists.append(self._event_list(inside + launched))
        return lists

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the trace that torch makes of the session, gzipped where the name ends in ``.gz``."""
        if self._trace is None:  # torch writes it once
            folder = Path(mkdtemp(prefix="torchprof-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._profiler.kineto_results.save(str(folder / "trace.json"))
            self._trace = folder / "trace.json"
        wanted = Path(path)
        with (
            self._trace.open("rb") as trace,
            gzip.open(wanted, "wb") if wanted.suffix == ".gz" else wanted.open("wb") as file,
        ):
            shutil.copyfileobj(trace, file)

    def _event_list(self, raws: list[Any]) -> EventList:
        results = self._profiler.kineto_results
        if results is None:
            return empty_event_list()
        parsed = self._profiler._parse_kineto_results(_Results(raws, results.trace_start_ns()))
        events = EventList(parsed, use_device=self.device, profile_memory=self._profiler.profile_memory)
        events._build_tree()
        return events

    def _unlabelled(self) -> list[Any]:
        return [raw for raw in self._raw() if not raw.name().startswith(PREFIX)]

    def _raw(self) -> list[Any]:
        results = self._profiler.kineto_results
        if results is None:
            return []
        raws: list[Any] = results.events()
        if self.with_stack:
            raws = [raw for raw in raws if _has_name(raw)]
        # They come sorted. To look costs no memory; to sort would take a number for each event, at the peak.
        if raws:
            start_ns = type(raws[0]).start_ns
            if not all(map(operator.le, map(start_ns, raws), map(start_ns, itertools.islice(raws, 1, None)))):
                raws.sort(key=start_ns)
        return raws


def finished_recording(profiler: Any) -> Recording:
    """What a profiler of the user's has recorded. Raises TorchprofError where that is none, or has not ended."""
    inner = getattr(profiler, "profiler", profiler)  # torch.profiler.profile has torch.autograd.profiler.profile inside
    if inner is None or not isinstance(inner, torch_profiler.profile):
        if isinstance(profiler, torch.profiler.profile):
            raise TorchprofError("This profiler was not started: there is nothing to read.")
        raise TorchprofError(
            f"{profiler!r:.80} is no profiler of torch's: give a torch.profiler.profile or a "
            "torch.autograd.profiler.profile."
        )
    if inner.kineto_results is None:
        raise TorchprofError("This profiler has not ended, or has recorded nothing: read it after its block.")
    return Recording(inner)


class _Results(NamedTuple):
    """What torch's parser asks of a result, for a part of the events."""

    raws: list[Any]
    start_ns: int

    def events(self) -> list[Any]:
        return self.raws

    def trace_start_ns(self) -> int:
        return self.start_ns


def empty_event_list() -> EventList:
    """What a profiler that was switched off has seen."""
    events = EventList([])
    events._build_tree()
    return events


def _frozen(value: Any) -> Any:
    """Lists as tuples; a number that JSON does not know (a complex one) as None."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return None if isinstance(value, complex) else value


def _kind(raw: Any, name: str) -> Kind | None:
    """The kind of the CPU events of one name; None for what is left out."""
    kind = event_kind(name)
    if kind is not Kind.OP:
        return kind
    if _is_python_function(raw):
        return None
    if raw.scope() == _USER_SCOPE:
        return Kind.USER_LABEL
    return Kind.BACKWARD_FUNCTION if raw.scope() == _BACKWARD_SCOPE else Kind.OP


def _has_name(raw: Any) -> bool:
    """Whether torch can say the name of an event: it cuts long names of Python functions inside a character."""
    try:
        return bool(raw.name())
    except UnicodeDecodeError:
        return False


def _device(device_type: Any, index: int, known: dict[tuple[Any, int], str]) -> str:
    """The name of a device. ROCm's own is cuda everywhere in torch, but for the profiler's memory events: there hip."""
    device = known.get((device_type, index))
    if device is None:
        kind = device_type.name.lower().replace("hip", "cuda")
        device = "cpu" if kind in ("cpu", "mkldnn", "ideep") else f"{kind}:{max(index, 0)}"
        known[device_type, index] = device
    return device

"""One profiler session, and its events: the only file that touches ``torch.autograd.profiler``.

Every difference between the profilers of torch's versions ends here.
"""

from __future__ import annotations

import atexit
import functools
import gc
import gzip
import itertools
import json
import marshal
import operator
import os
import shutil
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler_util import EventList

from torchprof.attribute import BEFORE, GIVEN, HOOKS, PREFIX, Detail, Event, Kind, Signature
from torchprof.collectives import signature_of
from torchprof.cpu_time import CpuTime
from torchprof.errors import TorchprofError
from torchprof.event_names import (
    GARBAGE,
    MEMORY,
    RAISED,
    STARTED,
    STEP,
    STOPPED,
    is_a_common_name,
    is_collective,
    is_runtime_call,
    is_torchs_step,
    kind_of,
    numbers_of_devices,
)
from torchprof.exchanges import ACCUMULATES, RECORDS_COLLECTIVE
from torchprof.launches import first_call

record: Callable[[str], Any] = getattr(torch._C._profiler, "_RecordFunctionFast", torch_profiler.record_function)
"""A context manager that puts a range of this name into the session."""
is_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a session records the calling thread."""

_OURS = "_is_torchprofs"
"""The attribute that marks a profiler of torch's as ours."""
_USER_SCOPE, _BACKWARD_SCOPE = 7, 1
# No source lines: Python's builtins, torch's marks of modules, what every call of a module goes through, our labels.
_NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/instrument.py(")

_RawEvent = torch._C._autograd._KinetoEvent
# torch 2.4 has none of these: an end, a mark of Python functions, a mark of annotations.
_end_ns: Callable[[Any], int] = getattr(_RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())
_is_python_function: Callable[[Any], bool] = getattr(_RawEvent, "is_python_function", lambda raw: False)
_is_annotation: Callable[[Any], bool] | None = getattr(_RawEvent, "is_user_annotation", None)
# Which stream something ran on; a torch that does not say that gives all work of a device one number.
_stream: Callable[[Any], int] = getattr(_RawEvent, "device_resource_id", _RawEvent.start_thread_id)
_shapes_of_lists: Callable[[Any], list[Any]] | None = getattr(_RawEvent, "structured_input_shapes", None)

_TELLS_COLLECTIVES = "expose_kineto_event_metadata" in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or "")
"""Whether torch can be asked for what events say in traces beside what they all have."""

_STARTS = (
    (torch_profiler.profile, "_prepare_trace"),
    (torch_profiler.profile, "_start_trace"),
    (torch_profiler.emit_nvtx, "__enter__"),
    (torch_profiler.emit_itt, "__enter__"),
)
"""Where sessions of torch's begin; older versions have not all of them."""

_WAY_OUT = (
    "torch runs one profiler session in a process at a time. End it before the `with torchprof.Profile(...)` block, or "
    "take one of the two away: torchprof's own figures come with torch's `prof.key_averages()` and `prof.raw()`."
)


class Call(NamedTuple):
    """One forward call of a labelled module: its label and where its events are."""

    label: str
    start_ns: int
    end_ns: int
    thread: int
    finished: bool


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
            if name == RECORDS_COLLECTIVE and _TELLS_COLLECTIVES:
                signature = self._of_collective(raw) or signature
            yield new(
                Event, (kind, name, start, end, thread, sequence, forward_thread, correlation, "cpu", 0, signature)
            )
        hip = [index for device_type, index in devices if device_type.name == "HIP"]
        counted = numbers_of_devices((raw.device_index() for raw in work), hip)
        first = first_call(calls, (raw.correlation_id() for raw in work if raw.linked_correlation_id()))
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
            return 0  # a trace cannot tell an op that takes nothing from one whose inputs were not recorded: nor do we
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
        open_calls: dict[int, list[int]] = {}  # by thread, outer to inner
        for raw in self._raw():
            name = raw.name()
            if not name.startswith(PREFIX) or raw.device_type() != DeviceType.CPU:
                continue
            start, thread = raw.start_ns(), raw.start_thread_id()
            around = open_calls.setdefault(thread, [])
            while around and found[around[-1]].end_ns <= start:
                around.pop()
            if name in (RAISED, STOPPED) and around:
                found[around[-1]] = found[around[-1]]._replace(finished=False)
            elif name not in (RAISED, STOPPED, STARTED, STEP, GARBAGE) and not name.startswith((HOOKS, GIVEN)):
                around.append(len(found))
                found.append(Call(name, start, _end_ns(raw), thread, True))
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


class Session(Recording):
    """One session of torch's profiler, from ``start`` to ``stop``; afterwards, what it has recorded.

    ``in_job``: whether this process is one of several ranks, whose collectives on a device are to say what they were
    called on.

    ``device`` is the kind of device whose kernels are recorded ("cuda", "xpu", …), None for the CPU alone. A process
    that is forked meanwhile, as the workers of a DataLoader are, records nothing. ``began_ns``: when the first mark was
    made, on the clock of ``time.perf_counter_ns``; ``clock_jump_ns``: by how much the system's clock was set meanwhile.
    """

    _under_way: ClassVar[bool] = False

    def __init__(
        self,
        device: str | None,
        *,
        profile_memory: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
        in_job: bool = False,
    ) -> None:
        options: dict[str, Any] = {"verbose": True} if with_stack else {}
        if in_job and device is not None and _TELLS_COLLECTIVES:
            options["expose_kineto_event_metadata"] = True
        config = torch._C._profiler._ExperimentalConfig(**options) if options else None
        super().__init__(
            torch_profiler.profile(
                use_kineto=True,
                use_device=device,
                profile_memory=profile_memory,
                record_shapes=record_shapes,
                with_stack=with_stack,
                experimental_config=config,
            )
        )
        self.started = False
        self.steps = 0
        self._prepared = False
        self.began_ns = self._epoch_ns = self.clock_jump_ns = 0
        self._wall_ns = 0
        self._cpu_at_start: CpuTime | None = None
        self._guard = Guard()
        setattr(self._profiler, _OURS, True)

    @property
    def torchs_steps(self) -> int:
        return 0  # it has marks

    @property
    def is_lost(self) -> bool:
        """Whether it has ended and torch has given nothing of it: an error came between."""
        return self.started and self._profiler.kineto_results is None

    @property
    def wall_ns(self) -> int:
        return self._wall_ns

    def prepare(self) -> None:
        """Make ready what the first recorded step should not pay for. ``refuse_if_profiled`` says whether that can be
        done. What was prepared has to be started or discarded."""
        self._guard.on()
        self._profiler._prepare_trace()
        self._prepared = True

    def discard(self) -> None:
        """End what was prepared and not started: torch knows no other end than that of a session."""
        self.start()
        self.stop()
        self.started = False

    def start(self, step_begins: bool = True) -> None:
        """Begin to record, with a step or in the middle of one. ``refuse_if_profiled`` says whether one can."""
        if not self._prepared:
            self._guard.on()
        try:
            if not self._prepared:
                self._profiler._prepare_trace()
            self._profiler._start_trace()
            # The first event of a session pays for its buffers: let it be ours, not one of the first layer's.
            with record(STEP if step_begins else STARTED):
                self._cpu_at_start = CpuTime.now()
                self.began_ns = time.perf_counter_ns()
                self._epoch_ns = time.time_ns() - self.began_ns
        except BaseException:
            self._guard.off()
            if is_observed():  # Ctrl-C came when torch's session had just begun: nobody else would end it
                self.stop()
            raise
        self.started = Session._under_way = True
        self._process = os.getpid()
        atexit.register(self._end_with_process)

    def mark_step(self) -> None:
        """Record that here a step ends."""
        with record(STEP):
            pass
        self.steps += 1

    def stop(self, distributed: str | None = None) -> None:
        """End it. ``distributed``: what its trace is to say of the job that this process is a rank of, as JSON."""
        self._wall_ns = time.perf_counter_ns() - self.began_ns
        if self._cpu_at_start is not None:
            self.cpu_time = CpuTime.now().since(self._cpu_at_start)
        atexit.unregister(self._end_with_process)
        Session._under_way = False
        self._guard.off()
        # torch 2.4 makes its whole EventList when it stops: here that waits until somebody asks for one.
        self._profiler._parse_kineto_results = lambda *_: []
        if distributed is not None:
            torch._C._autograd._add_metadata_json("distributedInfo", distributed)
        try:
            self._profiler.__exit__(None, None, None)
        except BaseException:  # of a handler of a signal, at any line of torch's
            if is_observed():
                self._profiler.__exit__(None, None, None)
            if is_profiled():
                torch_profiler._run_on_profiler_stop()
            raise
        finally:
            del self._profiler._parse_kineto_results
        self.clock_jump_ns = time.time_ns() - time.perf_counter_ns() - self._epoch_ns

    def _end_with_process(self) -> None:
        """A process that ends with a session open dies in torch: who started it and never stopped it is spared that."""
        if os.getpid() == self._process:
            self.stop()


def _after_fork_in_child() -> None:
    """Nobody will read what the child records; and it would grow by a kilobyte with each op."""
    if Session._under_way:
        torch._C._autograd._enable_record_function(False)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Guard:
    """While it is on, a session that is not ours is refused: it would end ours, or kill the process.

    With ``give_way`` that is called instead, and has to end ours: then theirs begins. Guards may be on inside of each
    other, and the last comes off first.
    """

    _giving_way: ClassVar[Callable[[], None] | None] = None

    def __init__(self, give_way: Callable[[], None] | None = None) -> None:
        self._give_way = give_way
        self._originals: list[tuple[type, str, Any]] = []

    def on(self) -> None:
        def refusing(original: Any) -> Any:
            @functools.wraps(original)
            def guarded(other: Any, *args: Any, **kwargs: Any) -> Any:
                # A guard that is off may still be called, by one inside of it that has just given way.
                if self._originals and not getattr(other, _OURS, False):
                    if Guard._giving_way is None:
                        raise TorchprofError(f"A profiler was started inside a torchprof.Profile block. {_WAY_OUT}")
                    Guard._giving_way()
                return original(other, *args, **kwargs)

            return guarded

        if self._give_way is not None:
            Guard._giving_way = self._give_way
        for cls, name in _STARTS:
            original = cls.__dict__.get(name)
            if original is not None:
                self._originals.append((cls, name, original))
                setattr(cls, name, refusing(original))

    def off(self) -> None:
        if self._give_way is not None:
            Guard._giving_way = None
        for cls, name, original in self._originals:
            setattr(cls, name, original)
        self._originals.clear()


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


def is_profiled() -> bool:
    """Whether a profiler session is active in this process."""
    return bool(getattr(torch_profiler, "_is_profiler_enabled", False)) or is_observed()


def refuse_if_profiled() -> None:
    """Raise TorchprofError where a profiler session is active, or prepared, in this process, and does not give way."""
    if Guard._giving_way is not None:
        Guard._giving_way()
    if is_profiled():
        raise TorchprofError(f"Another profiler is active in this process. {_WAY_OUT}")
    if _is_prepared():
        gc.collect()  # it may be garbage: of a loop that ended with an error, say
        if _is_prepared():
            raise TorchprofError(f"A torch profiler is in the warm-up of its schedule. {_WAY_OUT}")


def _is_prepared() -> bool:
    """Whether a schedule in warm-up has prepared a session, which no flag tells of: starting ours then kills the
    process."""
    return any(
        type(thing) is torch_profiler.profile and getattr(thing, "entered", False) and thing.kineto_results is None
        for thing in gc.get_referrers(torch_profiler.profile)
    )


def missing_device(device: str) -> str | None:
    """Why kernels of this kind of device cannot be recorded here, None where they can."""
    name = device.upper()
    if device == "mps":
        return f"{name} reports no kernels to torch's profiler: its columns are unknown, the CPU's are right."
    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        return f"{name} was asked for, but torch finds no {name} device here: its columns are unknown."
    activity = getattr(torch.profiler.ProfilerActivity, name, torch.profiler.ProfilerActivity.CPU)
    if activity not in torch.profiler.supported_activities():
        return f"{name} was asked for, but this torch cannot record its kernels: its columns are unknown."
    return None


def _frozen(value: Any) -> Any:
    """Lists as tuples; a number that JSON does not know (a complex one) as None."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return None if isinstance(value, complex) else value


def _kind(raw: Any, name: str) -> Kind | None:
    """The kind of the CPU events of one name; None for what is left out."""
    kind = kind_of(name)
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

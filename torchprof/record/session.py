"""A session of torch's profiler, and what keeps it apart from others: one process has one at a time."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import ENDED, OPENED, STARTED, STEP_MARK
from torchprof.attribute.events import Detail
from torchprof.attribute.loop import keep_recorded
from torchprof.errors import TorchprofError
from torchprof.measure.recording import CpuTime
from torchprof.record.session_columns import HAS_COLLECTIVE_METADATA
from torchprof.record.session_events import OURS, SessionEvents
from torchprof.record.torch_internals import SharedChange, needed, optional, replaced
from torchprof.run.meta import RunWarning

record: Callable[[str], Any] = optional("torch._C._profiler._RecordFunctionFast", torch_profiler.record_function)
"""A context manager that records a range with a name."""
is_observed: Callable[[], bool] = needed("torch._C._autograd._profiler_enabled")
"""Whether a profiler session records the calling thread."""
for _name in ("_prepare_trace", "_start_trace"):
    needed(f"torch.autograd.profiler.profile.{_name}")

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_LOGS_SESSIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether this version of torch writes the start and the stop of each session to stderr ("USDT:")."""


class Session(SessionEvents):
    """One session of torch's profiler, from ``start`` to ``stop``; afterwards, its events.

    The session also has what torchprof does; the recording lasts from the return of ``begin`` to the call of ``end``.

    ``device``: the kind of device whose kernels are recorded ("cuda", "xpu", …), None for the CPU alone. ``in_job``:
    this process is one of several ranks, and the shapes of collectives on a device are recorded. A child process that
    is forked meanwhile, such as a worker of a DataLoader, records nothing. ``began_ns``: when the recording began,
    on the clock of ``time.perf_counter_ns``. ``clock_jump_ns``: by how much the system clock was changed meanwhile.
    """

    _under_way: ClassVar[bool] = False
    _waiting: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()  # prepared, and not started yet

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
        if in_job and device is not None and HAS_COLLECTIVE_METADATA:
            options["expose_kineto_event_metadata"] = True
        make_config = optional("torch._C._profiler._ExperimentalConfig")
        config = make_config(**options) if options and make_config is not None else None
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
        self._step_ends: list[int] = []
        self._prepared = False
        self.began_ns = self._epoch_ns = self.clock_jump_ns = 0
        self._wall_ns: int | None = None
        self._first_mark: str | None = STEP_MARK  # None: the recording has begun
        self._cpu_at_start: CpuTime | None = None
        self._guard = Guard()
        self._custom_ops = CustomOps()
        setattr(self._profiler, OURS, True)

    @property
    def torchs_steps(self) -> int:
        return 0  # ours has marks of steps instead

    @property
    def is_lost(self) -> bool:
        """Whether the session was started, but torch gave no result at its end because of an error."""
        return self.started and self._profiler.kineto_results is None

    @property
    def wall_ns(self) -> int:
        return self._wall_ns or 0

    def columns(self, detail: Callable[[str], Detail] | None = None, addresses: bool = False) -> EventColumns:
        columns = super().columns(detail, addresses)
        recorded_ns = keep_recorded(columns)
        if recorded_ns is not None:  # on the clock of the events: it is that of the trace, too, and rows add up to it
            self._wall_ns = recorded_ns
        return columns

    def prepare(self) -> None:
        """Do what the first step should not pay for, after ``refuse_if_profiled``, before ``start`` or ``discard``."""
        self._guard.on()
        self._prepare_trace()
        self._prepared = True
        Session._waiting.add(self)

    def _prepare_trace(self) -> None:
        """Prepare torch's session. The first one of the process reads how much its library logs: torch 2.13 would write
        two lines to stderr in each session. A level that the user has set stays."""
        is_quiet = _LOG_LEVEL in os.environ or not _LOGS_SESSIONS
        if not is_quiet:
            os.environ[_LOG_LEVEL] = "99"
        try:
            self._profiler._prepare_trace()
        finally:
            if not is_quiet:
                del os.environ[_LOG_LEVEL]

    def discard(self) -> None:
        """End a prepared session. torch can only end a started one, so this starts and stops it."""
        self.start()
        self.stop()
        self.started = False

    def start(self, step_begins: bool = True) -> None:
        """Start torch's session. ``step_begins``: a step begins with the recording, too. Call ``refuse_if_profiled``
        before, and ``begin`` after, as the last thing before the code that is to be recorded."""
        Session._waiting.discard(self)
        if not self._prepared:
            self._guard.on()
        self._custom_ops.on()
        try:
            if not self._prepared:
                self._prepare_trace()
            self._profiler._start_trace()
            # The first event of a session allocates its buffers.
            with record(OPENED):
                self.began_ns = time.perf_counter_ns()  # until the recording begins
                self._epoch_ns = time.time_ns() - self.began_ns
                self._first_mark = STEP_MARK if step_begins else STARTED
        except BaseException:
            self._guard.off()
            self._custom_ops.off()
            if is_observed():  # Ctrl-C came right after torch's session had begun
                self.stop()
            raise
        self.started = Session._under_way = True
        self._process = os.getpid()
        atexit.register(self._end_with_process)

    def begin(self) -> None:
        """Begin the recording, if it has not begun."""
        if self.started and self._first_mark is not None:
            first, self._first_mark = self._first_mark, None
            self._cpu_at_start = CpuTime.now()
            with record(first):
                pass
            self.began_ns = time.perf_counter_ns()

    def end(self) -> None:
        """End the recording, if it has not ended. torch's session continues until ``stop``."""
        if self.started and self._wall_ns is None:
            self._wall_ns = time.perf_counter_ns() - self.began_ns
            with record(ENDED):
                pass
            ended_ns = time.perf_counter_ns()
            if self._cpu_at_start is not None:
                used = CpuTime.now().since(self._cpu_at_start)
                self.cpu_time = used.without_delay_of(time.perf_counter_ns() - ended_ns)  # while the file was read

    def mark_step(self) -> None:
        """Record the end of a step."""
        with record(STEP_MARK):
            pass
        self._step_ends.append(time.perf_counter_ns())

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return len(self._step_ends)

    @property
    def step_starts(self) -> list[int]:
        """When the recording, and each step after the first, began: in ns since 1970."""
        return [time_ns + self._epoch_ns for time_ns in (self.began_ns, *self._step_ends)]

    def stop(self, distributed: str | None = None) -> None:
        """End the session. ``distributed``: the job of this process, as JSON for the trace."""
        self.end()
        atexit.unregister(self._end_with_process)
        Session._under_way = False
        self._guard.off()
        self._custom_ops.off()
        # torch 2.4 makes its EventList at the end of the session: it is made here only when it is asked for.
        self._profiler._parse_kineto_results = lambda *_: []
        add_to_trace = optional("torch._C._autograd._add_metadata_json")
        if distributed is not None and add_to_trace is not None:
            add_to_trace("distributedInfo", distributed)
        try:
            self._profiler.__exit__(None, None, None)
        except BaseException:  # a signal handler may raise at any line of torch's code
            if is_observed():
                self._profiler.__exit__(None, None, None)
            if is_profiled():
                optional("torch.autograd.profiler._run_on_profiler_stop", bool)()
            raise
        finally:
            del self._profiler._parse_kineto_results
        self.clock_jump_ns = time.time_ns() - time.perf_counter_ns() - self._epoch_ns

    def _end_with_process(self) -> None:
        """Stop a session that is still open at the end of the process: otherwise the process would crash in torch."""
        if os.getpid() == self._process:
            self.stop()


def _after_fork_in_child() -> None:
    """Turn recording off in a forked child: its events are never read, and each needs a kilobyte."""
    if Session._under_way:
        optional("torch._C._autograd._enable_record_function", bool)(False)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork_in_child)


def missing_device(device: str) -> RunWarning | None:
    """The reason why kernels of this kind of device cannot be recorded here; None if they can."""
    name = device.upper()
    if device == "mps":
        return RunWarning.of("device_without_kernels", device=name)
    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        return RunWarning.of("no_device", device=name)
    activity = getattr(torch.profiler.ProfilerActivity, name, torch.profiler.ProfilerActivity.CPU)
    is_recordable = activity in torch.profiler.supported_activities()
    return None if is_recordable else RunWarning.of("device_not_recordable", device=name)


class CustomOps(SharedChange):
    """All custom ops that are defined before ``on`` pass through the dispatcher, as in older torch. torch 2.15 calls a
    ``torch.library.custom_op`` without its dispatcher ("PyObject dispatch", pytorch#187949). torch's profiler observes
    the dispatcher, so it would record only what the op calls: the op would have no row, and a FLOPs formula that the
    user registered for it would not be used."""

    def on(self) -> None:
        self._all_on.add(self)
        known: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        for definition in list(known.values()):
            op: Any = getattr(definition, "_opoverload", None)
            if getattr(op, "_pyobj_dispatcher", None) is not None and hasattr(op, "_enable_pyobj_dispatch"):
                op._enable_pyobj_dispatch(False)
                self._undo.append(partial(op._enable_pyobj_dispatch, True))


# Other sessions

_STARTS = (  # the functions with which torch's profiler sessions begin
    (torch_profiler.profile, "_prepare_trace"),
    (torch_profiler.profile, "_start_trace"),
    (torch_profiler.emit_nvtx, "__enter__"),
    (torch_profiler.emit_itt, "__enter__"),
)
_WAY_OUT = (
    "torch runs one profiler session in a process at a time. End it before the `with torchprof.Profile(...)` block, or "
    "remove one of the two: torchprof's own figures come with torch's `prof.key_averages()` and `prof.raw()`."
)


class Guard:
    """While it is on, no other profiler session can start: it would end ours, or crash the process. ``give_way``: if
    given, it is called instead of raising an error, and has to end our session; then the other one starts. Guards may
    be nested; the last one must be turned off first."""

    _giving_way: ClassVar[Callable[[], None] | None] = None

    def __init__(self, give_way: Callable[[], None] | None = None) -> None:
        self._give_way = give_way
        self._restores: list[Callable[[], None]] = []

    @classmethod
    def gives_way(cls) -> bool:
        """Whether a recording is active that ends where another one starts."""
        return cls._giving_way is not None

    def on(self) -> None:
        if self._give_way is not None:
            Guard._giving_way = self._give_way
        for cls, name in _STARTS:
            self._restores.append(replaced(cls, name, self._guarded(cls.__dict__[name])))

    def off(self) -> None:
        if self._give_way is not None:
            Guard._giving_way = None
        while self._restores:
            self._restores.pop()()

    def _guarded(self, original: Any) -> Any:
        @functools.wraps(original)
        def guarded(other: Any, *args: Any, **kwargs: Any) -> Any:
            # A guard that is off may still be called by a nested one that has just given way.
            if self._restores and not getattr(other, OURS, False):
                if Guard._giving_way is None:
                    raise TorchprofError(f"A profiler was started inside a torchprof.Profile block. {_WAY_OUT}")
                Guard._giving_way()
            return original(other, *args, **kwargs)

        return guarded


def is_profiled() -> bool:
    """Whether a profiler session is active in this process."""
    return bool(getattr(torch_profiler, "_is_profiler_enabled", False)) or is_observed()


def refuse_if_profiled() -> None:
    """Raise TorchprofError if this process has an active or a prepared profiler session that does not stop for ours."""
    if Guard._giving_way is not None:
        Guard._giving_way()
    if is_profiled():
        raise TorchprofError(f"Another profiler is active in this process. {_WAY_OUT}")
    if _is_prepared():
        gc.collect()  # it may be garbage, for example of a loop that ended with an error
        if _is_prepared():
            raise TorchprofError(f"A torch profiler is in the warm-up of its schedule. {_WAY_OUT}")


def _is_prepared() -> bool:
    """Whether a schedule in warm-up has prepared a session: to start ours then would crash the process. torch has no
    flag for that. A ``torch.profiler.profile`` counts its steps from its creation to the end of its block: only while
    one does, the session is searched for among all objects of the process, which may be millions."""
    if Session._waiting:
        return True
    steps = optional("torch.autograd.profiler.KinetoStepTracker._step_dict")
    if steps is not None and PROFILER_STEP_NAME not in steps:
        return False
    return any(
        type(thing) is torch_profiler.profile and getattr(thing, "entered", False) and thing.kineto_results is None
        for thing in gc.get_referrers(torch_profiler.profile)
    )

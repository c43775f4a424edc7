"""A session of torch's profiler."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as torch_profiler

from torchprof.attribute.event_names import STARTED, STEP
from torchprof.errors import TorchprofError
from torchprof.record.cpu_time import CpuTime
from torchprof.record.recording import OURS, TELLS_COLLECTIVES, Recording
from torchprof.run.warnings import Caveat, caveat

record: Callable[[str], Any] = getattr(torch._C._profiler, "_RecordFunctionFast", torch_profiler.record_function)
"""A context manager that puts a range of this name into the session."""
is_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a session records the calling thread."""

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
        if in_job and device is not None and TELLS_COLLECTIVES:
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
        setattr(self._profiler, OURS, True)

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
                if self._originals and not getattr(other, OURS, False):
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


def missing_device(device: str) -> Caveat | None:
    """Why kernels of this kind of device cannot be recorded here, None where they can."""
    name = device.upper()
    if device == "mps":
        return caveat("device_without_kernels", device=name)
    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        return caveat("no_device", device=name)
    activity = getattr(torch.profiler.ProfilerActivity, name, torch.profiler.ProfilerActivity.CPU)
    if activity not in torch.profiler.supported_activities():
        return caveat("device_not_recordable", device=name)
    return None

"""Profile a whole program, unmodified: its models are found when they are first called."""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchprof.errors import TorchprofError
from torchprof.measure.recording import CycleEnd, Options
from torchprof.profile.arguments import check_count
from torchprof.profile.cycle import Cycle, Setup
from torchprof.profile.cycles import Cycles
from torchprof.profile.signals import DelayedSignals, uninterrupted
from torchprof.record.compiled.inductor import Provenance
from torchprof.record.forwards import OutermostCalls, backward_task
from torchprof.record.labels import Labels
from torchprof.record.plan import Plan
from torchprof.record.session import Guard, is_observed, missing_device, record, refuse_if_profiled
from torchprof.record.this_process import bytes_in_use
from torchprof.record.torch_internals import optional
from torchprof.run.merge import add_cycle
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_MOST_MODELS = 32
_CYCLE_S, _CYCLE_EVENTS = 10.0, 100_000
"""After so many seconds, or about so many events of 2 to 3 KB each, a cycle ends where no backward is outstanding."""
_PATIENCE = 5  # after this many times these limits, a cycle ends at the next call of a model in any case
_EVENTS_A_MODULE = 30.0  # a guess of the events of one call of a module, until the first cycle is read
_CYCLES_OF_CACHES, _FEWEST_RISES = 2, 2
_LEAST_RISE = 0.2  # of the memory in use at the last cycle's start
_LONG_START = 0.1  # a larger share of the time before the first call of a model gives a warning
_LARGE_START_UP = 0.01  # a larger share of start-up, which is left out, gives a warning
_FOLLOWING_CALLS = 3  # the first step is start-up only if at least this many calls of models follow it
_LABELING = "torchprof: labels a model"
"""The range around our work before the first call of a model that is found inside a recording: some 17 us a module."""

_tracing_state: Callable[[], Any] = optional("torch._C._get_tracing_state", lambda: None)


class Program:
    """Profiles all that runs in a ``with`` block, whatever models it makes and calls.

    A model is a module with parameters, buffers or children that is called while no other module's call is active, and
    that is not one of torch's losses. It is found at its first such call. Work outside of models is ``(outside)``.

    ``warmup_calls``: this many calls of models come first and are not recorded. With None, start-up is left out of the
    run, and a warning has its time: what runs before the first call of a model, and the first step (with its
    compilation and caches) if at least three calls follow. A step ends with that of an optimizer; without gradients it
    is one call. If no model is called, the run has everything. ``max_calls``: after this many recorded calls, recording
    ends where the next call would begin; it also ends, with a warning, where the program starts a profiler of its own.
    ``options``: what else is recorded, ``profile_memory`` and others of ``Options``. Arguments are as for ``Profile``.

    Raises TorchprofError for an invalid number of calls, and on entry while another profiler is active.
    """

    def __init__(
        self,
        *,
        warmup_calls: int | None = 0,
        max_calls: int | None = None,
        use_cuda: bool = False,
        compile_layers: bool = False,
        **options: bool,
    ) -> None:
        if warmup_calls is not None:
            check_count(warmup_calls, 0, "warmup_calls must be a number of calls, 0 or more")
        if max_calls is not None:
            check_count(max_calls, 1, "max_calls must be a number of calls, 1 or more")
        device = "cuda" if use_cuda else None
        missing = missing_device(device) if device else None
        warnings = [missing] if missing else []
        self._provenance = Provenance.if_supported(warnings) if compile_layers else None
        asked = Options(device=device, compile_layers=self._provenance is not None, **options)
        self._warmup_calls = warmup_calls or 0
        following = min(_FOLLOWING_CALLS, max_calls or _FOLLOWING_CALLS)
        self._start_up = _StartUp(following) if warmup_calls is None else None
        self._max_calls = max_calls
        self._plan = Plan([], None)
        kind = None if missing else device
        setup = Setup(self._plan, asked, kind, self._provenance, from_first_mark=False, is_program=True)
        self._labels = Labels(())
        self._cycles = Cycles(setup, warnings, self._labels)
        self._run: Run | None = None
        self._calls = 0  # of models
        self._calls_elsewhere: Counter[str] = Counter()  # of modules, on threads that are not recorded, by class
        self._start_ns = 0  # the recorded time before the first call of a model
        self._events_a_module = _EVENTS_A_MODULE
        self._cycle_began_s = 0.0  # by time.perf_counter()
        self._modules_before_cycle = 0  # calls of modules
        self._in_use: list[tuple[int, int]] = []  # at the start of each cycle: calls of models, bytes in use
        self._models = 0
        self._guard = Guard(lambda: uninterrupted(functools.partial(self._end, RunWarning.of("gave_way"))))
        self._outermost = OutermostCalls(self._before_call, self._count_elsewhere)
        self._undo = ExitStack()
        self._has_ended = False
        self._is_settled = True  # whether all backward of the calls so far has probably run

    def __enter__(self) -> Program:
        refuse_if_profiled()
        try:
            with DelayedSignals():
                self._attach()
            self._cycles.begin_recording()
            return self
        except BaseException:
            uninterrupted(self._detach)
            raise

    def __exit__(self, *_: Any) -> None:
        try:
            self._cycles.end_recording()
        finally:
            uninterrupted(self._end)

    def _attach(self) -> None:
        self._guard.on()
        self._undo.callback(self._labels.detach)
        self._labels.attach()
        self._cycles.split_ranges.on()
        self._undo.callback(self._outermost.detach)
        self._outermost.attach()
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        if self._provenance is not None:
            self._undo.callback(self._provenance.off)
            self._provenance.on()
        if not self._warmup_calls:
            self._start_cycle()

    def _detach(self) -> None:
        try:
            self._cycles.abandon()
        finally:
            self._undo.close()
            self._guard.off()

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the recording has ended."""
        if self._run is None:
            raise TorchprofError("The program has not ended: there is no run yet.")
        return self._run

    # While it runs

    def _before_call(self, module: nn.Module) -> None:
        """Before a call of a module that is in no other module's call: start or end cycles, or end the recording."""
        # A recomputation by a checkpoint is part of backward. While TorchScript traces, nothing may be added.
        if backward_task() != -1 or _tracing_state() is not None:
            return
        if not self._ensure_labelled(module):
            return
        left_out = self._warmup_calls if self._start_up is None else self._start_up.calls
        if self._cycles.is_recording and self._calls - left_out == self._max_calls:
            self._cycles.end_recording()
            uninterrupted(functools.partial(self._end, RunWarning.of("calls_reached", calls=self._max_calls)))
            return
        self._calls += 1
        if self._cycles.is_recording and self._cycles.last is not None:
            self._maybe_end_cycle(self._cycles.last, module)
        elif self._calls > self._warmup_calls:
            self._start_cycle()
        if torch.is_grad_enabled():
            self._is_settled = False
        self._cycles.begin_recording()

    def _ensure_labelled(self, module: nn.Module) -> bool:
        """Label a new model. Returns whether the module is a model, or part of one."""
        if self._plan.knows(module):
            return True
        if self._models >= _MOST_MODELS or not _is_model(module):
            return False
        # A plan that is half made has no layers, and a label that is not known is never removed. A recording goes on
        # here, because the backward of an earlier call may be outstanding: the range says whose time this is.
        with DelayedSignals(), record(_LABELING):
            self._labels.add(self._plan.add(module))
            self._models += 1
        if self._models == _MOST_MODELS:
            self._cycles.observations.warnings.append(RunWarning.of("too_many_models", count=_MOST_MODELS))
        return True

    def _count_elsewhere(self, module: nn.Module) -> None:
        """Count a call on a thread that is not recorded."""
        if not self._plan.knows(module) and not is_observed() and _is_model(module):
            self._calls_elsewhere[type(module).__name__] += 1

    def _after_step(self, *_: Any) -> None:
        self._is_settled = True

    # Cycles

    def _maybe_end_cycle(self, cycle: Cycle, module: nn.Module) -> None:
        """Before a call of a model: end this cycle and start the next one, if this one has recorded enough."""
        if cycle.job.metadata is None:  # the script may destroy its process group soon
            cycle.update_job()
        age_s = time.perf_counter() - self._cycle_began_s
        if self._calls == 1:
            self._start_ns = round(age_s * 1e9)
        if self._start_up is not None and self._start_up.ends_before(module, self._is_settled):
            self._cycles.split_recording()
            with DelayedSignals():
                self._set_start_up_aside(self._start_up)
            return
        fill = max(age_s / _CYCLE_S, self._modules_in_cycle * self._events_a_module / _CYCLE_EVENTS)
        if fill > _PATIENCE or (fill > 1 and self._is_settled):
            self._cycles.split_recording()
            with DelayedSignals():
                self._end_cycle()
                self._start_cycle()

    def _set_start_up_aside(self, start_up: _StartUp) -> None:
        """Before the first call of a model, and before the first call after the first step: start to record anew."""
        if self._calls == 1:
            self._cycles.stop()
        else:
            self._end_cycle()
            start_up.first, self._cycles.run = self._cycles.run, None
            start_up.calls = self._calls - 1
            live = self._cycles.end_of_last.live if self._cycles.end_of_last is not None else {}
            self._cycles.end_of_last = CycleEnd(live=live)  # the step that is open there is not whole in the run
        self._start_cycle()

    def _start_cycle(self) -> None:
        with DelayedSignals():
            self._modules_before_cycle += self._modules_in_cycle
            if (in_use := bytes_in_use()) is not None:
                self._in_use.append((self._calls, in_use))
            self._cycles.start()
            self._cycle_began_s = time.perf_counter()

    def _end_cycle(self) -> None:
        cycle = self._cycles.stop_and_add()
        self._events_a_module = cycle.rows.total("calls") / max(self._modules_in_cycle, 1)

    @property
    def _modules_in_cycle(self) -> int:
        """How often modules were called in this cycle."""
        return self._calls + self._outermost.inner - self._modules_before_cycle

    # The end

    def _end(self, why: RunWarning | None = None) -> None:
        """Switch everything off and make the run. Later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._cycles.end_recording()
        with ExitStack() as last:  # all are called, even if one raises an error
            last.callback(self._guard.off)
            if self._cycles.is_recording:
                last.callback(self._end_cycle)
            self._undo.close()
        if self._start_up is not None:
            self._add_short_start_up(self._start_up)
        self._cycles.finish()
        self._add_warnings(why)
        why_nothing = RunWarning.of("nothing_after_calls", warmup=self._warmup_calls, calls=self._calls)
        self._run = self._cycles.result(self._plan.layers(), why_nothing)

    def _add_short_start_up(self, start_up: _StartUp) -> None:
        """Put the first step back into the run if too few calls followed it: then it is not start-up."""
        first, run = start_up.first, self._cycles.run
        if first is not None and self._calls - start_up.calls < start_up.following:
            self._cycles.run = first if run is None else add_cycle(first, run)
            start_up.first = None

    def _add_warnings(self, why: RunWarning | None) -> None:
        """Add the warnings about the recording as a whole. ``why``: the reason if it ended before the program."""
        warnings, recorded = self._cycles.observations.warnings, self._cycles.run
        if why is not None:
            warnings.insert(0, why)
        if recorded is not None and not self._models:
            warnings.append(RunWarning.of("no_model_called"))
        elif recorded is not None and self._start_up is not None:
            warnings[:0] = self._start_up.warnings(self._start_ns, recorded)
        elif recorded is not None and self._start_ns > _LONG_START * recorded.meta.wall_ns:
            wall_ns = recorded.meta.wall_ns  # by torch's clock, which may be a little slower
            warnings.append(RunWarning.of("long_start", start_ns=min(self._start_ns, wall_ns), wall_ns=wall_ns))
        if not self._cycles.setup.asked.profile_memory and (growth := _growth_of(self._in_use)):
            warnings.append(RunWarning.of("memory_grows", nbytes=growth))
        if self._calls_elsewhere:
            classes = tuple(self._calls_elsewhere.most_common())
            warnings.append(RunWarning.of("calls_on_other_threads", classes=classes))


@dataclass
class _StartUp:
    """What is left out as start-up: all before the first call of a model, and ``first``, the run of the first step.
    ``calls``: the calls of models in the first step. ``following``: at least this many calls must follow it. ``model``:
    a weak reference to the model that was called first."""

    following: int
    first: Run | None = None
    calls: int = 0
    model: weakref.ref[nn.Module] | None = None

    def ends_before(self, module: nn.Module, is_settled: bool) -> bool:
        """Whether a part of start-up ends before this call of a model. The first step ends where the model that was
        called first is called again, if an optimizer has made a step or there are no gradients (``is_settled``):
        between the calls of other models, backward through its output may follow."""
        if self.model is None:
            self.model = weakref.ref(module)
            return True
        return self.first is None and is_settled and self.model() is module

    def warnings(self, before_ns: int, recorded: Run) -> list[RunWarning]:
        """How long start-up was, if that is worth a warning. ``before_ns``: the time before the first call."""
        first_ns, calls = (0, 0) if self.first is None else (self.first.meta.wall_ns, self.calls)
        all_ns = before_ns + first_ns + recorded.meta.wall_ns
        if before_ns + first_ns <= _LARGE_START_UP * all_ns:
            return []
        return [RunWarning.of("start_up", before_ns=before_ns, first_ns=first_ns, calls=calls, all_ns=all_ns)]


def _growth_of(in_use: Sequence[tuple[int, int]]) -> int:
    """By how many bytes a call memory grew; 0 if it did not, or not steadily. ``in_use``: at the start of each cycle,
    the calls so far and the bytes in use. The first cycles are left out: caches fill in them."""
    late = in_use[_CYCLES_OF_CACHES:]
    rises = [(after - before) / max(calls - earlier, 1) for (earlier, before), (calls, after) in pairwise(late)]
    if len(rises) < _FEWEST_RISES or late[-1][1] - late[0][1] < _LEAST_RISE * late[-1][1]:
        return 0
    mean = (late[-1][1] - late[0][1]) / max(late[-1][0] - late[0][0], 1)
    return round(mean) if min(rises) > mean / 2 else 0


def _is_model(module: nn.Module) -> bool:
    """Whether a module is a model. torch's losses are not, although some have buffers (the weights of classes)."""
    if isinstance(module, optional("torch.nn.modules.loss._Loss", ())):
        return False
    return bool(module._modules or module._parameters or module._buffers)

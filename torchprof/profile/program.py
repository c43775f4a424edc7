"""Profile a whole program, unmodified: its models are found when they are first called."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchprof.errors import TorchprofError
from torchprof.measure.recording import CycleEnd, Options
from torchprof.profile.arguments import check_count
from torchprof.profile.cycle import Setup
from torchprof.profile.cycles import Cycles
from torchprof.profile.pass_times import samples_in, with_exact_counts
from torchprof.profile.passes import PassKind, PassLog, Settling, StartUp, is_sampled
from torchprof.profile.signals import DelayedSignals, uninterrupted
from torchprof.record.compiled.inductor import Provenance
from torchprof.record.forwards import OutermostCalls, backward_task
from torchprof.record.labels import Labels
from torchprof.record.peak import with_ordinary_times
from torchprof.record.plan import Plan
from torchprof.record.ranges import OptimizerMarks, SplitRanges
from torchprof.record.session import Guard, is_observed, missing_device, record, refuse_if_profiled
from torchprof.record.this_process import ChildProcesses, bytes_in_use
from torchprof.record.torch_internals import optional
from torchprof.run.merge import add_cycle
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_MOST_MODELS = 32
_SHORT_PASS_NS, _OFTEN_S = 100_000_000, 0.001
"""If passes are so short, source lines are sampled so often: else 20 passes would have hardly any samples."""
_CYCLE_S, _CYCLE_EVENTS = 10.0, 100_000
"""After so many seconds, or about so many events of 2 to 3 KB each, a cycle ends before the next pass."""
_PATIENCE = 20  # after so many times these events, a cycle ends inside a pass
_EVENTS_A_MODULE = 30.0  # a guess of the events of one call of a module, until the first cycle is read
_CYCLES_OF_CACHES, _FEWEST_RISES = 2, 2
_MOST_CYCLES = 64  # of which the memory in use is known at the start
_LEAST_RISE = 0.2  # of the memory in use at the last cycle's start
_LONG_START = 0.1  # a larger share of the time before the first call of a model gives a warning
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
    ``passes``: of the passes through a model, which are recorded, by their number among those of their kind: a range,
    or a function that samples them; None for all, as with ``max_calls``. See ``PassLog``: the run is that of all passes
    if they are sampled. ``models``: only these are found, and modules around or inside them; None for all.
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
        passes: Callable[[int], bool] | range | None = is_sampled,
        models: Sequence[nn.Module] | None = None,
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
        self._start_up = StartUp(following) if warmup_calls is None else None
        self._max_calls = max_calls
        self._plan = Plan([], None)
        kind = None if missing else device
        setup = Setup(
            self._plan, asked, kind, self._provenance, from_first_mark=False, is_program=True, samples_lines=True
        )
        self._labels = Labels(())
        self._cycles = Cycles(setup, warnings, self._labels)
        self._run: Run | None = None
        self._is_complete = False
        self._calls = self._recorded_calls = 0  # of models
        self._calls_elsewhere: Counter[str] = Counter()  # of modules, on threads that are not recorded, by class
        self._start_ns = 0  # the recorded time before the first call of a model
        self._events_a_module = _EVENTS_A_MODULE
        self._cycle_began_s = 0.0  # by time.perf_counter()
        self._calls_at_cycle = 0  # of models, when it began
        self._calls_before_cycle = self._modules_before_cycle = 0  # of models, and of all modules in recorded calls
        self._in_use: list[tuple[int, int]] = []  # at the start of each cycle: calls of models, bytes in use
        self._models = 0
        self._wanted = None if models is None else WeakSet(part for model in models for part in model.modules())
        self._unwanted = WeakSet[nn.Module]()
        self._passes = PassLog(None if max_calls is not None else passes)
        self._settling = Settling(self._passes.steps, lambda: self._plan.models)
        self._is_labelling = False
        self._ranges_before = self._ranges_at_first_call = Counter[str]()  # that were left before what is recorded
        self._children = ChildProcesses()
        self._guard = Guard(self._give_way)
        self._outermost = OutermostCalls(self._before_call, self._after_call, self._count_elsewhere)
        self._undo = ExitStack()
        self._has_ended = False

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
        OptimizerMarks.recorded.clear()
        self._labels.attach()
        self._is_labelling = True
        self._cycles.split_ranges.on()
        self._undo.callback(self._outermost.detach)
        self._outermost.attach()
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._undo.callback(self._settling.off)
        self._settling.on()
        self._undo.callback(self._passes.lines.off)
        self._undo.callback(self._children.off)
        self._children.on()
        if self._provenance is not None:
            self._undo.callback(self._provenance.off)
            self._provenance.on()
        if self._warmup_calls:
            self._cycles.split_ranges.close()
        else:
            self._start_cycle(with_more=True)

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
        if not self._is_complete:  # not at its end, which may be in a step, and with signals delayed
            self._run, self._is_complete = with_ordinary_times(self._run, self._plan.products), True
        return self._run

    # While it runs

    def _before_call(self, module: nn.Module) -> bool:
        """Before a call of a module that is in no other module's call: a pass may begin here, and cycles and the
        recording may end. Returns whether the call is not recorded, and is to be timed."""
        if not may_be_in_pass() or not self._ensure_labelled(module):
            return False
        if self._cycles.is_recording and self._recorded_calls == self._max_calls:
            self._cycles.end_recording()
            uninterrupted(functools.partial(self._end, RunWarning.of("calls_reached", calls=self._max_calls)))
            return False
        self._calls += 1
        if self._cycles.is_recording and self._cycles.last is not None:
            if self._calls == 1:
                self._start_ns = round((time.perf_counter() - self._cycle_began_s) * 1e9)
            if self._cycles.last.job.metadata is None:  # the script may destroy its process group soon
                self._cycles.last.update_job()
            if self._start_up is not None and self._start_up.ends_before(module, self._settling.is_settled):
                self._set_start_up_aside(self._start_up)
        if self._calls > self._warmup_calls and self._may_begin_pass():
            self._begin_pass(self._kind_of(module))
        elif self._cycles.is_recording and self._events_in_cycle > _PATIENCE * _CYCLE_EVENTS:
            self._begin_cycle_anew(with_more=True)
        self._settling.note_call()
        if self._cycles.is_recording:
            self._recorded_calls += 1
            self._cycles.begin_recording()
        return self._passes.begun() and not self._cycles.is_recording

    def _after_call(self, module: nn.Module, ns: int) -> None:
        """After a call that was not recorded."""
        times = self._passes.calls[self._plan.layer_of(module)]
        if times.add(0, time.perf_counter_ns(), ns):
            times.add_up()

    def _ensure_labelled(self, module: nn.Module) -> bool:
        """Label a new model. Returns whether the module is a model, or part of one."""
        if self._plan.knows(module):
            return True
        if self._models >= _MOST_MODELS or not is_model(module) or not self._is_wanted(module):
            return False
        # A plan that is half made has no layers, and a label that is not known is never removed. A recording goes on
        # here, because the backward of an earlier call may be outstanding: the range says whose time this is.
        with DelayedSignals(), record(_LABELING):
            targets = self._plan.add(module)
            if self._is_labelling:
                self._labels.add(targets)
            self._models += 1
        if self._models == _MOST_MODELS:
            self._cycles.observations.warnings.append(RunWarning.of("too_many_models", count=_MOST_MODELS))
        return True

    def _is_wanted(self, module: nn.Module) -> bool:
        """Whether a module is one of the models that are to be found, is inside one, or has one inside."""
        if self._wanted is None:
            return True
        if module not in self._unwanted and not any(part in self._wanted for part in module.modules()):
            self._unwanted.add(module)
        return module not in self._unwanted

    def _count_elsewhere(self, module: nn.Module) -> bool:
        """Count a call on a thread that is not recorded. Labels count those of known modules, while they are there."""
        if (label := self._plan.label_of(module)) and not self._is_labelling:
            self._labels.unobserved[label] += 1
        elif not label and not is_observed() and is_model(module):
            self._calls_elsewhere[type(module).__name__] += 1
        return False

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._settling.note_step(optimizer)
        if self._cycles.is_recording:
            self._passes.steps.interrupt()

    # Passes and cycles

    def _may_begin_pass(self) -> bool:
        """Whether a pass may begin at this call: no backward is outstanding, and start-up is over."""
        if self._warmup_calls and not self._passes.has_begun:
            return True
        in_first_step = self._start_up is not None and self._start_up.first is None and self._settling.is_settled
        return self._settling.may_begin_pass and not in_first_step

    def _kind_of(self, module: nn.Module) -> PassKind:
        is_training = getattr(module, "training", False)  # a frozen ScriptModule has no mode
        return PassKind(self._plan.layer_of(module), is_training, torch.is_grad_enabled())

    def _begin_pass(self, kind: PassKind) -> None:
        """A pass ends, and one of this kind begins. Cycles end, and recording starts and stops, only here."""
        self._passes.end()
        must_split = self._passes.splits_before(kind)
        if not self._passes.begin(kind):
            if self._cycles.is_recording:
                self._rest()
        elif not self._cycles.is_recording:
            self._wake()
        elif must_split or self._is_cycle_full:
            self._begin_cycle_anew()

    def _begin_cycle_anew(self, with_more: bool = False) -> None:
        self._cycles.split_recording()
        with DelayedSignals():
            self._end_cycle()
            self._start_cycle(with_more)

    def _rest(self) -> None:
        """Stop recording until a pass comes that is to be recorded. Until then, only outermost calls are seen."""
        self._cycles.split_recording()
        with DelayedSignals():
            self._end_cycle()
            if (end := self._cycles.end_of_last) is not None:
                self._cycles.end_of_last = CycleEnd(end.loop)  # the step that is open there is not whole in the run
            self._labels.targets = self._plan.targets
            if not self._labels.are_compiled:  # torch.compile would compile again what it has compiled with labels
                self._labels.detach()
                self._is_labelling = False
            self._passes.lines.on(threading.get_ident(), self._plan.layer_with_id)

    def _wake(self) -> None:
        with DelayedSignals():
            self._passes.lines.off()
            self._passes.steps.interrupt()
            if self._cycles.setup.device is not None:  # else kernels of passes before would run in the recording
                getattr(torch, self._cycles.setup.device).synchronize()
            if self._cycles.last is None:  # after warm-up calls
                self._ranges_before = SplitRanges.left()
            if not self._is_labelling:
                self._labels.targets = self._plan.targets  # with those of models that were found meanwhile
                self._labels.attach()
                self._is_labelling = True
            self._start_cycle()

    def _set_start_up_aside(self, start_up: StartUp) -> None:
        """Before the first call of a model, and before the first call after the first step: start to record anew."""
        self._cycles.split_recording()
        with DelayedSignals():
            if self._calls == 1:
                self._cycles.stop()
            else:
                start_up.first, start_up.calls = self._cycles.stop_and_add(), self._calls - 1
                self._events_a_module = self._events_of(start_up.first)
                live = self._cycles.end_of_last.live if self._cycles.end_of_last is not None else {}
                self._cycles.run = None
                self._cycles.end_of_last = CycleEnd(live=live)  # the step that is open there is not whole in the run
            self._recorded_calls = 0
            self._ranges_at_first_call, self._ranges_before = self._ranges_before, SplitRanges.left()
            self._start_cycle(with_more=self._calls == 1 or not self._settling.may_begin_pass)

    @property
    def _is_cycle_full(self) -> bool:
        age_s = time.perf_counter() - self._cycle_began_s
        is_new = self._calls == self._calls_at_cycle  # it began before this call
        return not is_new and (age_s > _CYCLE_S or self._events_in_cycle > _CYCLE_EVENTS)

    def _start_cycle(self, with_more: bool = False) -> None:
        """``with_more``: the cycle has more than passes."""
        with DelayedSignals():
            self._passes.begin_cycle(with_more=with_more)
            self._calls_at_cycle = self._calls
            self._calls_before_cycle, self._modules_before_cycle = self._recorded_calls, self._outermost.inner
            if (in_use := bytes_in_use()) is not None:
                self._in_use.append((self._calls, in_use))
            if self._passes.weighs and 0 < self._pass_ns < _SHORT_PASS_NS:
                self._cycles.sampled_every_s = _OFTEN_S
            self._cycles.start()
            self._cycle_began_s = time.perf_counter()

    @property
    def _pass_ns(self) -> float:
        """How long a recorded pass took, or the first step; 0 if it is unknown."""
        first = self._start_up.first if self._start_up is not None else None
        return self._passes.recorded_pass_ns or (0 if first is None else first.meta.wall_ns)

    def _end_cycle(self) -> Run:
        assert self._cycles.last is not None
        key = self._passes.end_cycle(is_alone=self._cycles.last.job.world_size == 1)
        self._cycles.run = self._passes.runs.pop(key, None)
        cycle = self._cycles.stop_and_add()
        if self._cycles.run is not None:
            self._passes.runs[key] = self._cycles.run
        self._events_a_module = self._events_of(cycle)
        return cycle

    def _events_of(self, cycle: Run) -> float:
        return cycle.rows.total("calls") / max(self._modules_in_cycle, 1)

    @property
    def _events_in_cycle(self) -> float:
        return self._modules_in_cycle * self._events_a_module

    @property
    def _modules_in_cycle(self) -> int:
        """How often modules were called in this cycle."""
        return self._recorded_calls - self._calls_before_cycle + self._outermost.inner - self._modules_before_cycle

    # The end

    def take(self) -> Run | None:
        """The run since the last one that was taken; None if nothing was recorded. The next run begins now. It may be
        called between passes, while nothing is recorded."""
        self._cycles.run = self._passes.whole(SplitRanges.entered - self._ranges_before)
        if self._cycles.run is None:
            return None
        self._add_warnings(None)
        run = self._cycles.take(self._plan.layers())
        self._passes.restart()
        self._ranges_before, self._start_up = SplitRanges.left(), None
        del self._in_use[_CYCLES_OF_CACHES:-_MOST_CYCLES:2]
        return run

    def _give_way(self) -> None:
        """Another profiler is about to start."""
        uninterrupted(functools.partial(self._end, RunWarning.of("gave_way")))

    def _end(self, why: RunWarning | None = None) -> None:
        """Switch everything off and make the run. Later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._cycles.end_recording()
        self._passes.end()
        with ExitStack() as last:  # all are called, even if one raises an error
            last.callback(self._guard.off)
            if self._cycles.is_recording:
                last.callback(self._end_cycle)
            self._undo.close()
        self._cycles.run = self._passes.whole(SplitRanges.entered - self._ranges_before)
        if self._start_up is not None:
            self._add_short_start_up(self._start_up)
        self._cycles.finish()
        self._add_warnings(why)
        why_nothing = RunWarning.of("nothing_after_calls", warmup=self._warmup_calls, calls=self._calls)
        if self._cycles.run is None and (about := [*self._passes.about_chosen()]):  # no pass has such a number
            why_nothing, self._cycles.last = about[0], None
        self._run = self._cycles.result(self._plan.layers(), why_nothing)

    def _add_short_start_up(self, start_up: StartUp) -> None:
        """Put the first step back into the run if too few calls followed it: then it is not start-up."""
        first, run = start_up.first, self._cycles.run
        if first is not None and self._calls - start_up.calls < start_up.following:
            both = first if run is None else add_cycle(first, run)
            entered = SplitRanges.entered - self._ranges_at_first_call
            self._cycles.run = with_exact_counts(both, entered, samples_in(both))
            start_up.first = None

    def _add_warnings(self, why: RunWarning | None) -> None:
        """Add the warnings about the recording as a whole. ``why``: the reason if it ended before the program."""
        warnings, recorded = self._cycles.observations.warnings, self._cycles.run
        if why is not None:
            warnings.insert(0, why)
        chosen = [*self._passes.about_chosen()] if recorded is not None else []
        warnings += chosen
        if recorded is not None and not self._models:
            warnings.append(RunWarning.of("no_model_called"))
        elif recorded is None or chosen:  # start-up is no part of what was asked for
            pass
        elif self._start_up is not None:
            warnings[:0] = self._start_up.warnings(self._start_ns, recorded)
        elif self._start_ns > _LONG_START * recorded.meta.wall_ns:
            wall_ns = recorded.meta.wall_ns  # by torch's clock, which may be a little slower
            warnings.append(RunWarning.of("long_start", start_ns=min(self._start_ns, wall_ns), wall_ns=wall_ns))
        if not self._cycles.setup.asked.profile_memory and (growth := _growth_of(self._in_use)):
            warnings.append(RunWarning.of("memory_grows", nbytes=growth))
        if self._children.count:
            warnings.append(RunWarning.of("child_processes", count=self._children.count))
        if self._calls_elsewhere:
            classes = tuple(self._calls_elsewhere.most_common())
            warnings.append(RunWarning.of("calls_on_other_threads", classes=classes))


def _growth_of(in_use: Sequence[tuple[int, int]]) -> int:
    """By how many bytes a call memory grew; 0 if it did not, or not steadily. ``in_use``: at the start of each cycle,
    the calls so far and the bytes in use. The first cycles are left out: caches fill in them."""
    late = in_use[_CYCLES_OF_CACHES:]
    rises = [(after - before) / max(calls - earlier, 1) for (earlier, before), (calls, after) in pairwise(late)]
    if len(rises) < _FEWEST_RISES or late[-1][1] - late[0][1] < _LEAST_RISE * late[-1][1]:
        return 0
    mean = (late[-1][1] - late[0][1]) / max(late[-1][0] - late[0][0], 1)
    return round(mean) if min(rises) > mean / 2 else 0


def may_be_in_pass() -> bool:
    """Whether a call is one of a pass: a recomputation by a checkpoint is part of backward, and while TorchScript
    traces, nothing may be added."""
    return backward_task() == -1 and _tracing_state() is None


def is_model(module: nn.Module) -> bool:
    """Whether a module is a model. torch's losses are not, although some have buffers (the weights of classes)."""
    if isinstance(module, optional("torch.nn.modules.loss._Loss", ())):
        return False
    return bool(module._modules or module._parameters or module._buffers)

"""The cycles of a ``Profile`` or of a ``Program``, their sum, and torch's own lists of the last one."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from copy import deepcopy
from os import PathLike
from typing import Any

from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from torchprof.errors import TorchprofError
from torchprof.measure.assemble import with_warnings
from torchprof.measure.recording import CycleEnd, Observations
from torchprof.measure.warnings import about_buckets
from torchprof.profile.cycle import Cycle, Setup
from torchprof.profile.passes import PassKind, PassLog, Sampled, is_sampled
from torchprof.profile.signals import DelayedSignals
from torchprof.record.compiled.dynamo_code import about_left_out_stacks, awaiting_compilation
from torchprof.record.labels import Labels
from torchprof.record.modules import Trace
from torchprof.record.ranges import SplitRanges
from torchprof.record.session import Session, is_profiled, refuse_if_profiled
from torchprof.record.session_events import event_list_of
from torchprof.run.layers import Layer
from torchprof.run.merge import add_cycle
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_LOST = RunWarning.of("recording_lost")
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Cycles:
    """The cycles of one recording, one after the other, and their sum.

    A cycle goes through ``start``, ``begin_recording``, ``end_recording``, and then either ``stop``, which leaves it to
    be read by ``result``, or ``stop_and_add``, after which the next may start. ``finish`` follows the last cycle.

    ``run``: the sum of all cycles that were added, without warnings; None before the first. ``observations``: of these
    cycles. ``last``: the cycle that is recording, or else the last one that recorded. ``prepared``: the next cycle; its
    session was made ready during the warm-up of a schedule. ``end_of_last``: where the last cycle ended; None if the
    next one does not begin there. ``split_ranges``: of the user, if cycles may end inside them. ``sampled_every_s``: as
    in ``Cycle``, for the next one.
    """

    def __init__(self, setup: Setup, warnings: list[RunWarning], labels: Labels) -> None:
        """``warnings``: warnings about the recording as a whole. They come before all others."""
        self.setup = setup
        self.labels = labels
        self.observations = Observations(warnings=[*warnings])
        self.run: Run | None = None
        self.last: Cycle | None = None
        self.prepared: Cycle | None = None
        self.is_recording = False
        self.sampled_every_s = 0.005
        self.split_ranges = SplitRanges()
        self.end_of_last = CycleEnd() if setup.is_program else None
        self._is_lost = False
        self._is_observed = True  # whether ``observations`` include those of the last cycle

    @property
    def session(self) -> Session | None:
        return None if self.last is None else self.last.session

    def start(self) -> None:
        """Start the prepared cycle, or a new one."""
        cycle, self.prepared = self.prepared or self._new(), None
        self.last = cycle  # frees the previous cycle now, and not while this one is recording
        self._is_lost = self._is_observed = False
        cycle.start()
        self.is_recording = True

    def _new(self, with_stack: bool = False) -> Cycle:
        job = None if self.last is None else self.last.job
        is_first = self.run is None
        return Cycle(
            self.setup,
            with_stack=with_stack,
            last_job=job,
            last_end=self.end_of_last,
            is_first=is_first,
            sampled_every_s=self.sampled_every_s,
        )

    def begin_recording(self) -> None:
        """Begin the recording of a cycle that was just started. Call it last, right before the user's code."""
        if self.is_recording and self.last is not None:
            self.last.session.begin()
            self.split_ranges.reopen()

    def split_recording(self) -> None:
        """End the recording of the current cycle where another one may begin, which opens the open ranges again."""
        self.split_ranges.close()
        self.end_recording()

    def end_recording(self) -> None:
        """End the recording of the current cycle. Call it first, right after the user's code; ``stop`` follows."""
        if self.is_recording and self.last is not None:
            self.last.session.end()

    def stop(self) -> None:
        """Stop the cycle that is recording. It is read later."""
        assert self.last is not None
        self.end_recording()
        self.is_recording = False
        try:
            self.last.stop()
        finally:
            if self.last.session.is_lost:
                self._is_lost, self.last.session = True, Session(None)

    def stop_and_add(self) -> Run:
        """Stop the cycle that is recording, read it, and add its run to the sum at once: the next cycle needs the
        memory. Returns the run of the cycle, without warnings."""
        self.stop()
        assert self.last is not None
        cycle = self.last.read(self.setup.plan.layers(), self.last.observations)
        self.run = add_cycle(self.run, cycle)
        self.end_of_last = self.last.observations.end
        self.observations.add(self.last.observations)
        self._is_observed = True
        return cycle

    def finish(self) -> None:
        """Complete the observations after the last cycle, whether it was added or only stopped."""
        if self.last is not None and not self._is_observed:
            self.observations.add(self.last.observations)
        self.split_ranges.off()
        self._observe_labels()

    def abandon(self) -> None:
        """Switch everything off; the current cycle will not be read."""
        self.split_ranges.off()
        if self.is_recording and self.last is not None:
            self.last.abandon()
        else:
            self.discard_prepared()
        self.last, self.is_recording = None, False

    def discard_prepared(self) -> None:
        if self.prepared is not None:
            prepared, self.prepared = self.prepared, None
            prepared.session.discard()

    def _observe_labels(self) -> None:
        """Observe the calls until now that were not recorded, and the modules without a label, added or removed."""
        plan, observations = self.setup.plan, self.observations
        # Copies, since other threads may add calls.
        unobserved, unlabelled = self.labels.unobserved.copy(), {*self.labels.unlabelled}
        observations.unobserved, observations.unlabelled = Counter(), set()
        for label in plan.sites.keys() & {*unobserved, *unlabelled}:
            layers = plan.sites[label].layers
            if plan.selected is not None and plan.selected.isdisjoint(layers):
                continue
            if label in unobserved:
                observations.unobserved[layers[0]] += unobserved[label]
            if label in unlabelled:
                observations.unlabelled.add(layers[0])
        observations.added, observations.removed = plan.changes()

    def result(self, layers: tuple[Layer, ...], why_nothing: RunWarning) -> Run:
        """The sum of the cycles, with its warnings; or the run of a single cycle, if it was stopped and not added.
        ``why_nothing``: the warning if nothing was recorded. This may be called again after an error."""
        run, observations = self.run, deepcopy(self.observations)
        if run is None:
            cycle = self.last
            if cycle is None or not cycle.session.started:  # no device was recorded, either
                cycle = Cycle(dataclasses.replace(self.setup, device=None))
                observations.nothing = _LOST if self._is_lost else why_nothing
            run = cycle.read(layers, observations)
        elif self._is_lost:
            observations.warnings.append(_LOST)
        return with_warnings(run, observations)

    def take(self, layers: tuple[Layer, ...]) -> Run:
        """The sum of the cycles until now, with its warnings. The next sum begins. While nothing is recorded."""
        self._observe_labels()
        run = self.result(layers, _LOST)
        self.run, self.observations = None, Observations()
        self.labels.unobserved.clear()
        return run


class ScheduledCycles(Cycles):
    """The cycles of a ``Profile``. They start and end, step by step, as a schedule says; the rules are those of
    ``torch.profiler.profile``. Without a schedule there is a single cycle, from ``start`` to ``stop``. ``run_of_last``:
    of the last added cycle, with warnings, until the Profile takes it; None without ``keeps_runs``. With the schedule
    ``sampled()`` all steps are timed, and the result is that of all."""

    def __init__(
        self,
        setup: Setup,
        warnings: list[RunWarning],
        labels: Labels,
        schedule: object = None,
        *,
        keeps_runs: bool = False,
    ) -> None:
        super().__init__(setup, warnings, labels)
        self.sampled_every_s = 0.001  # a block may be short
        self._steps = PassLog(is_sampled) if isinstance(schedule, Sampled) else None
        self._entered = Counter[str]()  # the ranges of the user in the block
        # A frozen ScriptModule has no mode.
        self._kind = PassKind(0, any(getattr(model, "training", False) for model in setup.plan.models[:1]), True)
        self.run_of_last: Run | None = None
        self._general_warnings = warnings
        self._keeps_runs = keeps_runs
        self._action = ProfilerAction.NONE

    def end_step(self, action: ProfilerAction) -> None:
        """End the cycle if it ends before a step with this action: after RECORD_AND_SAVE, and where a schedule stops
        recording without that action; there, torch warns and does not call on_trace_ready."""
        self.split_ranges.on()
        if self._steps is not None:
            self._steps.end()
        before, self._action = self._action, action
        if self.is_recording and (before is ProfilerAction.RECORD_AND_SAVE or action not in _RECORDING):
            self.split_recording()
            self.stop_and_add()

    def begin_step(self) -> None:
        """Do what the action of the step that begins requires: warm up, record, or neither."""
        action = self._action
        if self._steps is not None:
            self._begin_sampled(self._steps)
        if action is ProfilerAction.WARMUP and self.prepared is None:
            with DelayedSignals():
                _refuse_active_profiler()
                # Prepared now, so that the first recorded step does not include the time for that.
                self.prepared = self._new(self.setup.asked.with_stack)
                self.prepared.session.prepare()
        elif action in _RECORDING and not self.is_recording:
            with DelayedSignals():
                self.start()
        elif action is ProfilerAction.NONE and self.prepared is not None:
            with DelayedSignals():
                self.discard_prepared()

    def _begin_sampled(self, steps: PassLog) -> None:
        """Begin a step of a sampled loop: they are all of one kind. Labels take time even while nothing is recorded."""
        steps.begin(self._kind)
        with DelayedSignals():
            if self._action is not ProfilerAction.NONE and not self.labels.is_attached:
                self.labels.attach()
            elif self._action is ProfilerAction.NONE and not self.labels.are_compiled:
                self.labels.detach()

    def begin_recording(self) -> None:
        super().begin_recording()
        if self._steps is not None:
            self._steps.begun()

    def end_block(self) -> None:
        """The block ends. Call it first, right after the user's code."""
        if self._steps is not None:
            self._steps.end_or_drop()
            self._entered = SplitRanges.entered.copy()
        self.end_recording()

    def result(self, layers: tuple[Layer, ...], why_nothing: RunWarning) -> Run:
        run = super().result(layers, why_nothing)
        if self._steps is None or self.run is None:
            return run
        self._steps.put(run)
        return self._steps.whole(self._entered) or run

    def start(self) -> None:
        """Start the next cycle. Source lines are left out while code waits to be compiled; a warning says so."""
        warnings: list[RunWarning] = []
        with_stack = self.setup.asked.with_stack
        waiting = awaiting_compilation(self.setup.plan.models) if with_stack else []
        if waiting:
            warnings.append(about_left_out_stacks(waiting))
            self.discard_prepared()
        if self.last is None:
            warnings += about_buckets(self.setup.plan.unordered())
        if self.prepared is None:  # else a guard has kept others out since then
            _refuse_active_profiler()
            self.prepared = self._new(with_stack and not waiting)
        self.prepared.observations.warnings += warnings
        super().start()

    def stop_and_add(self) -> Run:
        """Do the same as for other cycles, and keep the run of the cycle, with its warnings, for on_trace_ready."""
        with DelayedSignals():
            unobserved_before = self.observations.unobserved
            cycle = super().stop_and_add()
            self._observe_labels()
            if self._keeps_runs and self.last is not None:
                observations = self.last.observations
                observations.warnings[:0] = self._general_warnings
                observations.copy_labels(self.observations, unobserved_before)
                self.run_of_last = with_warnings(cycle, observations)
            return cycle


def _refuse_active_profiler() -> None:
    """Raise TorchprofError if another profiler is active inside the block. ``refuse_if_profiled`` alone would also
    search all objects of the process for a prepared one. That takes long, and was done at the start of the block."""
    if is_profiled():
        refuse_if_profiled()


class ListsOfTorch:
    """What a ``Profile`` has of torch's profiler: its lists of events, and its trace."""

    enabled: bool
    exited: bool
    traces: tuple[Trace, ...]
    _cycles: ScheduledCycles
    _run_of_cycle: Run | None

    @property
    def _has_run(self) -> bool:
        return self.exited or self._run_of_cycle is not None

    @property
    def _session(self) -> Session | None:
        return self._cycles.session

    def raw(self) -> tuple[tuple[Trace, ...], defaultdict[tuple[str, ...], list[EventList]]] | None:
        """``(traces, event_lists)``; None before the end.

        ``event_lists[path]`` has torch's own ``EventList`` for each finished call of that module, in order. It has the
        selected modules, or the leaves if no paths were given. It is made when it is first asked for.
        """
        return (self.traces, self.trace_profile_events) if self._has_run else None

    @property
    def trace_profile_events(self) -> defaultdict[tuple[str, ...], list[EventList]]:
        """The ``event_lists`` of ``raw()``; empty before the end."""
        cycle = self._cycles.last
        return defaultdict(list) if not self._has_run or cycle is None else cycle.event_lists

    def key_averages(self, *args: Any, **kwargs: Any) -> EventList:
        """torch's own averages over all events, with torch's arguments; empty with ``enabled=False``.

        ``group_by_input_shape`` needs ``record_shapes=True``, ``group_by_stack_n`` needs ``with_stack=True``. Raises
        TorchprofError before the end.
        """
        if self.enabled and not self._has_run:
            raise TorchprofError("The block of this Profile has not ended: there are no averages yet.")
        if self._session is None:
            return event_list_of()
        if "group_by_input_shape" in kwargs:  # torch.profiler's spelling; EventList's has an s
            kwargs["group_by_input_shapes"] = kwargs.pop("group_by_input_shape")
        averages: EventList = self._session.event_list().key_averages(*args, **kwargs)
        return averages

    def export_chrome_trace(self, path: str | PathLike[str], use_python_export: bool = False) -> None:
        """Write torch's trace, for Perfetto or chrome://tracing; gzipped if the name ends in ``.gz``.

        Each forward call of a layer is a range with the name ``torchprof:`` + path, percent-escaped. With
        ``enabled=False`` nothing is written. ``use_python_export`` has no effect: torch's own
        ``tensorboard_trace_handler`` passes it, and it works here, too. Raises TorchprofError before the end and if
        nothing was recorded, and OSError as ``open`` does.
        """
        if not self.enabled:
            return
        if not self._has_run:
            raise TorchprofError("The block of this Profile has not ended: there is no trace yet.")
        if self._session is None or not self._session.started:
            raise TorchprofError("Nothing was recorded: there is no trace.")
        self._session.export_chrome_trace(path)

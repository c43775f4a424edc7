"""The cycles of a ``Profile`` or of a ``Program``, and their sum. These decide what is labelled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from torch.profiler import ProfilerAction

from torchprof.measure.assemble import with_warnings
from torchprof.measure.recording import CycleEnd, Observations
from torchprof.measure.warnings import about_buckets
from torchprof.profile.cycle import Cycle, Setup
from torchprof.profile.sigterm import DelayedSignals
from torchprof.record.compiled.dynamo_code import about_left_out_stacks, awaiting_compilation
from torchprof.record.labels import Labels
from torchprof.record.ranges import SplitRanges
from torchprof.record.session import Session, is_profiled, refuse_if_profiled
from torchprof.run.layers import Layer
from torchprof.run.merge import add_cycle
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_LOST = RunWarning.of("recording_lost")
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Cycles:
    """The cycles of one recording, one after the other, and their sum.

    ``run``: the sum of all cycles that ``end`` has ended, without warnings; None before the first. ``seen``: the
    observations of these cycles. ``last``: the cycle that is recording, or else the last one that recorded.
    ``prepared``: the next cycle; its session was made ready during the warm-up of a schedule. ``end_of_last``: where
    the last cycle ended; None if the next one does not begin there. ``split_ranges``: of the user, if cycles may end
    inside them.
    """

    def __init__(self, setup: Setup, warnings: list[RunWarning], labels: Labels) -> None:
        """``warnings``: warnings about the recording as a whole. They come before all others."""
        self.setup = setup
        self.labels = labels
        self.seen = Observations(warnings=[*warnings])
        self.run: Run | None = None
        self.last: Cycle | None = None
        self.prepared: Cycle | None = None
        self.is_recording = False
        self.split_ranges = SplitRanges()
        self.end_of_last = None if setup.has_gaps else CycleEnd()
        self._is_lost = False
        self._is_added = True  # whether ``seen`` includes the observations of the last cycle

    @property
    def session(self) -> Session | None:
        return None if self.last is None else self.last.session

    def _new(self, with_stack: bool) -> Cycle:
        job = None if self.last is None else self.last.job
        return Cycle(self.setup, with_stack=with_stack, before=job, end=self.end_of_last)

    def discard_prepared(self) -> None:
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            prepared.session.discard()

    def start(self, with_stack: bool = False, warnings: Sequence[RunWarning] = ()) -> None:
        """Start the prepared cycle, or a new one. ``warnings``: warnings about this cycle."""
        cycle, self.prepared = self.prepared or self._new(with_stack), None
        cycle.seen.warnings += warnings
        self.last = cycle  # frees the previous cycle now, and not while this one is recording
        self._is_lost = self._is_added = False
        cycle.start()
        self.is_recording = True

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

    def end(self) -> Run:
        """Stop the cycle that is recording, and add its run, which is returned without warnings, to the sum at once, to
        free its memory for the next one."""
        self.stop()
        assert self.last is not None
        cycle = self.last.read(self.setup.plan.layers(), self.last.seen)
        self.run = add_cycle(self.run, cycle)
        self.end_of_last = self.last.seen.end
        self.seen.add(self.last.seen)
        self._is_added = True
        return cycle

    def close(self) -> None:
        """Add the observations of the last cycle, whether it was read or not. No further cycle may follow."""
        if self.last is not None and not self._is_added:
            self.seen.add(self.last.seen)
        self.split_ranges.off()
        self.note_labels()

    def abandon(self) -> None:
        """Switch everything off; the current cycle will not be read."""
        self.split_ranges.off()
        if self.is_recording and self.last is not None:
            self.last.abandon()
        else:
            self.discard_prepared()
        self.last, self.is_recording = None, False

    def note_labels(self) -> None:
        """Note the calls that were not recorded, and the modules that were added or removed."""
        plan = self.setup.plan
        # Copies, since other threads may add calls.
        unobserved, unlabelled = self.labels.unobserved.copy(), {*self.labels.unlabelled}
        self.seen.unobserved, self.seen.unlabelled = Counter(), set()
        for label in plan.sites.keys() & {*unobserved, *unlabelled}:
            layers = plan.sites[label].layers
            if plan.selected is None or not plan.selected.isdisjoint(layers):
                if label in unobserved:
                    self.seen.unobserved[layers[0]] += unobserved[label]
                if label in unlabelled:
                    self.seen.unlabelled.add(layers[0])
        self.seen.added, self.seen.removed = plan.changes()

    def result(self, layers: tuple[Layer, ...], why_nothing: RunWarning) -> Run:
        """The sum of the cycles, with its warnings; or the run of a single cycle, if it was stopped and not ended.
        ``why_nothing``: the warning if nothing was recorded. This may be called again after an error."""
        run, seen = self.run, deepcopy(self.seen)
        if run is None:
            cycle = self.last
            if cycle is None or not cycle.session.started:  # no device was recorded, either
                cycle = Cycle(dataclasses.replace(self.setup, device=None))
                seen.nothing = _LOST if self._is_lost else why_nothing
            run = cycle.read(layers, seen)
        elif self._is_lost:
            seen.warnings.append(_LOST)
        return with_warnings(run, seen)


class ScheduledCycles(Cycles):
    """Cycles that start and end, step by step, as a schedule says; the rules are those of ``torch.profiler.profile``.

    Without a schedule there is a single cycle: ``start_cycle`` starts it, and ``stop`` ends it. ``ended``: the run of
    the last ended cycle with its warnings, until the Profile takes it; None without ``keeps_runs``.
    """

    def __init__(self, setup: Setup, warnings: list[RunWarning], labels: Labels, keeps_runs: bool) -> None:
        super().__init__(setup, warnings, labels)
        self.ended: Run | None = None
        self._general_warnings = warnings
        self._keeps_runs = keeps_runs
        self._action = ProfilerAction.NONE

    def end_step(self, action: ProfilerAction) -> None:
        """End the cycle if it ends before a step with this action: after RECORD_AND_SAVE, and where a schedule stops
        recording without that action; there, torch warns and does not call on_trace_ready."""
        self.split_ranges.on()
        before, self._action = self._action, action
        if self.is_recording and (before is ProfilerAction.RECORD_AND_SAVE or action not in _RECORDING):
            self.split_recording()
            self.end_cycle()

    def begin_step(self) -> None:
        """Do what the action of the step that begins requires: warm up, record, or neither."""
        action = self._action
        if action is ProfilerAction.WARMUP and self.prepared is None:
            with DelayedSignals():
                if is_profiled():
                    refuse_if_profiled()
                # Prepared now, so that the first recorded step does not include the time for that.
                self.prepared = self._new(self.setup.asked.with_stack)
                self.prepared.session.prepare()
        elif action in _RECORDING and not self.is_recording:
            with DelayedSignals():
                self.start_cycle()
        elif action is ProfilerAction.NONE and self.prepared is not None:
            with DelayedSignals():
                self.discard_prepared()

    def start_cycle(self) -> None:
        """Start a cycle. Source lines are left out while code waits to be compiled; a warning says so."""
        warnings: list[RunWarning] = []
        with_stack = self.setup.asked.with_stack
        waiting = awaiting_compilation(self.setup.plan.models) if with_stack else []
        if waiting:
            warnings.append(about_left_out_stacks(waiting))
            self.discard_prepared()
        if self.last is None:
            warnings += about_buckets(self.setup.plan.unordered())
        if self.prepared is None and is_profiled():
            refuse_if_profiled()
        self.start(with_stack and not waiting, warnings)

    def end_cycle(self) -> None:
        """Read what was recorded and add it to the sum at once: the next cycle needs the memory."""
        with DelayedSignals():
            unobserved_before = self.seen.unobserved
            cycle = self.end()
            self.note_labels()
            if self._keeps_runs and self.last is not None:
                seen = self.last.seen
                seen.warnings[:0] = self._general_warnings
                seen.unobserved = self.seen.unobserved - unobserved_before
                seen.unlabelled = self.seen.unlabelled
                seen.added, seen.removed = self.seen.added, self.seen.removed
                self.ended = with_warnings(cycle, seen)

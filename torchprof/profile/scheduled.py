"""The cycles of a ``Profile``: when each starts and ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.profiler import ProfilerAction

from torchprof.measure.warnings import about_buckets
from torchprof.profile.cycle import Cycles, Setup
from torchprof.profile.sigterm import DelayedSignals
from torchprof.record.compiled.dynamo_code import about_left_out_stacks, awaiting_compilation
from torchprof.record.labels import Labels
from torchprof.record.session import is_profiled, refuse_if_profiled
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class ScheduledCycles(Cycles):
    """Cycles that start and end, step by step, as a schedule says; the rules are those of ``torch.profiler.profile``.

    Without a schedule there is a single cycle: ``start_cycle`` starts it, and ``stop`` ends it. ``ended``: the run of
    the last ended cycle with its warnings, until the Profile takes it; None without ``keeps_runs``.
    """

    def __init__(
        self, setup: Setup, warnings: list[RunWarning], models: Sequence[nn.Module], labels: Labels, keeps_runs: bool
    ) -> None:
        super().__init__(setup, warnings)
        self.ended: Run | None = None
        self._keeps_runs = keeps_runs
        self._models = models
        self._labels = labels
        self._action = ProfilerAction.NONE

    def end_step(self, action: ProfilerAction) -> None:
        """End the cycle if it ends before a step with this action.

        A cycle ends after RECORD_AND_SAVE. It also ends where a schedule stops recording without that action: there,
        torch warns and does not call on_trace_ready.
        """
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
                self.prepare()
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
        waiting = awaiting_compilation(self._models) if with_stack else []
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
            unobserved = self.seen.unobserved
            cycle = self.end()
            self.note(self._labels)
            if self._keeps_runs:
                self.ended = self.with_its_warnings(cycle, unobserved)

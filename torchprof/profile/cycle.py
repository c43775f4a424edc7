"""A cycle is one recording, from the start of a profiler session to its stop, read into a ``Run``; cycles add up.

``Profile`` and ``Program`` both record in cycles. They decide when a cycle starts and stops, and what is labelled.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property, partial
from threading import get_ident
from weakref import ref

from torch import nn
from torch.autograd.profiler_util import EventList

from torchprof.attribute.events import Attributed, Kind
from torchprof.measure.assemble import assemble, attribution_of, wanted_detail, with_warnings
from torchprof.measure.recording import NOT_MEASURED, CompiledForward, CycleEnd, Observations, Options, Recording
from torchprof.measure.warnings import about_clock
from torchprof.record.compiled.dynamo_code import StackWarning, compilations, compiled_regions, forwards_under_compile
from torchprof.record.compiled.inductor import CalledGraphs, Provenance
from torchprof.record.labels import Labels, Target, label_of
from torchprof.record.plan import Plan
from torchprof.record.python_lines import Sampler
from torchprof.record.ranges import SplitRanges
from torchprof.record.session import Session, is_profiled
from torchprof.record.this_process import Job, held_now, this_job, this_process
from torchprof.run.layers import Layer
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Compilation, CompiledRegion, RunWarning
from torchprof.run.run import Run

_LOST = RunWarning.of("recording_lost")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all cycles of one recording have in common.

    ``device``: the kind of device whose kernels are recorded; None for the CPU alone. ``asked.device`` is the device
    that the user asked for; it may be missing on this machine. ``provenance`` finds the layers of compiled graphs.
    ``from_first_mark``: whether a cycle begins with a step, and not in the middle of one. ``has_gaps``: False if each
    cycle begins where the one before ended, and a step of a loop may be in several. ``samples_python``: whether a
    sampling thread notes the source line of the thread that starts the cycle.
    """

    plan: Plan
    asked: Options
    device: str | None = None
    provenance: Provenance | None = None
    from_first_mark: bool = True
    has_gaps: bool = True
    samples_python: bool = False


class Cycle:
    """One recording: a session of torch's profiler, and what is observed in addition.

    Observed are the model's memory at the start and at the stop, the code that torch.compile made, and the job that
    this process is a rank of. ``seen``: the observations of this cycle alone. After an error, ``read`` may be repeated.
    """

    def __init__(
        self, setup: Setup, *, with_stack: bool = False, before: Job | None = None, end: CycleEnd | None = None
    ) -> None:
        """``before``: the job as the previous cycle saw it. ``end``: of that cycle, if this one begins there."""
        asked = setup.asked
        self.seen = Observations()
        self.job = this_job(setup.plan.models, before)
        self.session = Session(
            setup.device,
            profile_memory=asked.profile_memory,
            record_shapes=asked.record_shapes or asked.with_flops,
            with_stack=with_stack,
            in_job=self.job.world_size > 1,
        )
        self._setup = setup
        self._start_memory = self._end_memory = NOT_MEASURED
        self._regions: tuple[CompiledRegion, ...] = ()
        self._compilations: tuple[Compilation, ...] = ()
        self._under_compile: tuple[CompiledForward, ...] = ()
        self._stack_warning = StackWarning()
        self._sampler: Sampler | None = None
        self._called = CalledGraphs()
        self._end_before = end
        if end is not None:
            self.session.loop_before = end.loop

    def start(self) -> None:
        """Start recording. If this fails, all that was switched on is switched off again."""
        setup = self._setup
        try:
            if setup.asked.profile_memory:
                self._start_memory = held_now(setup.plan.models, watch=True)
            if setup.samples_python:
                self._sampler = Sampler(get_ident())
            self._called.on()
            self.session.start(step_begins=setup.from_first_mark)
            if self._sampler is not None:
                self._sampler.start()
            if self.session.with_stack:
                self._stack_warning.on()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Switch everything off; this cycle will not be read."""
        with ExitStack() as last:
            if self.session.started:
                last.callback(self.session.stop)
            self._stop_watching()

    def stop(self) -> None:
        """Stop recording. torch's session is stopped even if something else raises an error."""
        setup = self._setup
        try:
            self._stop_watching()
            self.look_at_job()
        finally:
            self.session.stop(self.job.in_traces)
        self.seen.warnings += about_clock(self.session.clock_jump_ns, self.session.wall_ns)
        if self._called.knows_parameters:
            self.seen.warnings.append(RunWarning.of("layers_by_parameters", asked=setup.provenance is not None))
        self._regions = compiled_regions()
        self._compilations = compilations(self.session.step_starts)
        self._under_compile = forwards_under_compile(setup.plan.under_compile)
        if setup.asked.profile_memory:
            self._end_memory = held_now(setup.plan.models)

    def look_at_job(self) -> None:
        """Note which rank of which job this is: a process group may be made or destroyed while we record."""
        self.job = this_job(self._setup.plan.models, self.job)

    def read(self, layers: tuple[Layer, ...], seen: Observations) -> Run:
        """Make the run of this cycle, without warnings. What is observed while reading is added to ``seen``."""
        setup, session = self._setup, self.session
        recording = Recording(
            session,
            partial(session.columns, wanted_detail(setup.asked), setup.asked.profile_memory),
            layers,
            this_process(self.job),
            seen,
            group=self.job.group,
            graphs=self._called.layers(setup.plan, setup.provenance),
            called=self._called.by_key,
            regions=self._regions,
            compilations=self._compilations,
            under_compile=self._under_compile,
            start=self._start_memory,
            end=self._end_memory,
            has_steps=session.steps > 0,
            before=self._end_before,
            from_first_mark=setup.from_first_mark,
            python_samples=None if self._sampler is None else self._sampler.samples(),
            began_ns=session.began_ns,
        )
        return assemble(recording, setup.plan, dataclasses.replace(setup.asked, with_stack=session.with_stack))

    @cached_property
    def event_lists(self) -> defaultdict[tuple[str, ...], list[EventList]]:
        """torch's own events of each call, by the real path of the module; read when first asked for."""
        return _event_lists_by_path(self.session, self._setup.plan)

    def _stop_watching(self) -> None:
        with ExitStack() as each:  # all are called, even if one raises an error
            each.callback(self._stack_warning.off)
            each.callback(self._called.off)
            each.callback(self._start_memory.stop_watching)
            if self._sampler is not None:
                each.callback(self._sampler.stop)


class Cycles:
    """The cycles of one recording, one after the other, and their sum.

    ``run``: the sum of all cycles that ``end`` has ended, without warnings; None before the first. ``seen``: the
    observations of these cycles. ``last``: the cycle that is recording, or else the last one that recorded.
    ``prepared``: the next cycle; its session was made ready during the warm-up of a schedule. ``end_of_last``: where
    the last cycle ended; None if the next one does not begin there. ``split_ranges``: of the user, if cycles may end
    inside them.
    """

    def __init__(self, setup: Setup, warnings: list[RunWarning]) -> None:
        """``warnings``: warnings about the recording as a whole. They come before all others."""
        self.setup = setup
        self.seen = Observations(warnings=[*warnings])
        self.run: Run | None = None
        self.last: Cycle | None = None
        self.prepared: Cycle | None = None
        self.is_recording = False
        self.split_ranges = SplitRanges()
        self.end_of_last = None if setup.has_gaps else CycleEnd()
        self._is_lost = False
        self._is_added = True  # whether ``seen`` includes the observations of the last cycle
        self._general_warnings = warnings

    @property
    def session(self) -> Session | None:
        """The session that is recording, or else the last one that recorded; None before the first."""
        return None if self.last is None else self.last.session

    def new(self, with_stack: bool = False) -> Cycle:
        job = None if self.last is None else self.last.job
        return Cycle(self.setup, with_stack=with_stack, before=job, end=self.end_of_last)

    def prepare(self) -> None:
        """Prepare the next session, so that the first recorded step does not include the time for that."""
        self.prepared = self.new(self.setup.asked.with_stack)
        self.prepared.session.prepare()

    def discard_prepared(self) -> None:
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            prepared.session.discard()

    def start(self, with_stack: bool = False, warnings: list[RunWarning] | None = None) -> None:
        """Start the prepared cycle, or a new one. ``warnings``: warnings about this cycle."""
        cycle, self.prepared = self.prepared or self.new(with_stack), None
        cycle.seen.warnings += warnings or []
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
        """End the recording of the current cycle where another one may begin. Ranges that are open are closed here, and
        opened again by ``begin_recording``."""
        self.split_ranges.close()
        self.end_recording()

    def end_recording(self) -> None:
        """End the recording of the current cycle. Call it first, right after the user's code; ``stop`` follows."""
        if self.is_recording and self.last is not None:
            self.last.session.end()

    def look_at_job(self) -> None:
        """Note the job of this process, if that is not known: the script may destroy its process group soon."""
        if self.last is not None and self.last.job.in_traces is None:
            self.last.look_at_job()

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
        """Stop the cycle that is recording, and add it to the sum at once, to free its memory for the next one.

        Returns the run of this cycle, without warnings.
        """
        self.stop()
        assert self.last is not None
        cycle = self.last.read(self.setup.plan.layers(), self.last.seen)
        self.run = add_cycle(self.run, cycle)
        self.end_of_last = self.last.seen.end
        self.seen.add(self.last.seen)
        self._is_added = True
        return cycle

    def close(self, labels: Labels) -> None:
        """Add the observations of the last cycle, whether it was read or not. No further cycle may follow."""
        if self.last is not None and not self._is_added:
            self.seen.add(self.last.seen)
        self.split_ranges.off()
        self.note(labels)

    def abandon(self) -> None:
        """Switch everything off; the current cycle will not be read."""
        self.split_ranges.off()
        if self.is_recording and self.last is not None:
            self.last.abandon()
        else:
            self.discard_prepared()
        self.last, self.is_recording = None, False

    def note(self, labels: Labels) -> None:
        """Note the calls that were not recorded, and the modules that were added or removed."""
        plan = self.setup.plan
        unobserved, unlabelled = labels.unobserved.copy(), {*labels.unlabelled}  # other threads may add calls
        self.seen.unobserved, self.seen.unlabelled = Counter(), set()
        for label in plan.sites.keys() & {*unobserved, *unlabelled}:
            layers = plan.sites[label].layers
            if plan.selected is None or not plan.selected.isdisjoint(layers):
                if label in unobserved:
                    self.seen.unobserved[layers[0]] += unobserved[label]
                if label in unlabelled:
                    self.seen.unlabelled.add(layers[0])
        self.seen.added, self.seen.removed = plan.changes()

    def with_its_warnings(self, cycle: Run, unobserved_before: Counter[int]) -> Run:
        """The run of the last cycle with its own warnings. ``unobserved_before``: the unrecorded calls before it."""
        assert self.last is not None
        seen = self.last.seen
        seen.warnings[:0] = self._general_warnings
        seen.unobserved = self.seen.unobserved - unobserved_before
        seen.unlabelled = self.seen.unlabelled
        seen.added, seen.removed = self.seen.added, self.seen.removed
        return with_warnings(cycle, seen)

    def result(self, layers: tuple[Layer, ...], why_nothing: RunWarning) -> Run:
        """The sum of the cycles, with its warnings; or the run of a single cycle, if it was stopped and not ended.

        ``why_nothing``: the warning if nothing was recorded. This may be called again after an error.
        """
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


def _event_lists_by_path(session: Session, plan: Plan) -> defaultdict[tuple[str, ...], list[EventList]]:
    """For each module, by its real path: a list for each of its finished calls, in the order in which they ended."""
    lists: defaultdict[tuple[str, ...], list[EventList]] = defaultdict(list)
    paths = {}
    for item in attribution_of(plan).attribute(session.columns()):
        if isinstance(item, Attributed) and item.event.kind is Kind.LABEL:
            path = plan.real_paths.get((item.event.name, item.place.layer))
            if path is not None and path in plan.with_event_lists:
                paths[item.event.thread, item.event.start_ns] = path
    calls = [call for call in session.calls() if call.finished and (call.thread, call.start_ns) in paths]
    for call, events in zip(calls, session.event_lists(calls)):
        lists[paths[call.thread, call.start_ns]].append(events)
    return lists


# The time that one label takes, measured right after a recording.

_BLOCKS, _CALLS = 10, 20
_calibration = threading.Lock()
_calibrated: list[float] = []


def label_ns() -> float | None:
    """The time that one label takes inside a session, in nanoseconds; None if another session is active.

    It is measured once in a process, in a session of its own: calls of a module that does nothing, with a label and
    without, in ten blocks of 20 calls each. Other processes and threads interrupt some blocks and make them longer, so
    the shortest block is the closest to the cost of a label. Call it right after a session of ours has ended.
    """
    with _calibration:
        if not _calibrated and not is_profiled():
            module = nn.Identity()
            shortest = []
            session = Session(None)
            session.start()
            session.begin()
            try:
                for targets in ([], [Target(ref(module), label_of(("calibration",)))]):
                    labels = Labels(targets)
                    labels.attach()
                    try:
                        module(None)
                        shortest.append(min(_block_ns(module) for _ in range(_BLOCKS)))
                    finally:
                        labels.detach()
            finally:
                session.stop()
            _calibrated.append(max(shortest[1] - shortest[0], 0) / _CALLS)
        return _calibrated[0] if _calibrated else None


def _block_ns(module: nn.Module) -> int:
    start = time.perf_counter_ns()
    for _ in range(_CALLS):
        module(None)
    return time.perf_counter_ns() - start

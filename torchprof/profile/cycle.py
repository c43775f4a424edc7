"""One recording, from the start of a profiler session to its stop, read into a ``Run``; and what a label costs."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import cached_property, partial
from threading import get_ident
from timeit import repeat
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.profiler_util import EventList

from torchprof.attribute.events import Attributed, Kind
from torchprof.measure.assemble import assemble, attribution_of, wanted_detail
from torchprof.measure.memory_blocks import NOT_MEASURED
from torchprof.measure.recording import CycleEnd, Observations, Options, Recording
from torchprof.measure.warnings import about_clock
from torchprof.record.compiled.dynamo_code import StackWarning, compilations, compiled_regions, forwards_under_compile
from torchprof.record.compiled.inductor import CalledGraphs, Provenance
from torchprof.record.holders import holder_of, holder_of_others
from torchprof.record.labels import Labels, Target, label_of
from torchprof.record.plan import Plan
from torchprof.record.python_lines import Sampler
from torchprof.record.ranges import EngineRanges
from torchprof.record.session import Session, is_profiled
from torchprof.record.this_process import Job, live_memory, this_job, this_process
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.run import Run


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all cycles of one recording have in common.

    ``device``: the kind of device whose kernels are recorded; None for the CPU alone, as where ``asked.device``, which
    the user asked for, is missing on this machine. ``provenance`` finds the layers of compiled graphs.
    ``from_first_mark``: whether a cycle begins with a step, and not in the middle of one. ``is_program``: each cycle
    begins where the one before ended. ``samples_lines``: a thread samples the source line of the one that starts it.
    """

    plan: Plan
    asked: Options
    device: str | None = None
    provenance: Provenance | None = None
    from_first_mark: bool = True
    is_program: bool = False
    samples_lines: bool = False


class Cycle:
    """One recording: a session of torch's profiler, the memory of the model at its start and its stop, the code that
    torch.compile made, and the job that this process is a rank of.

    The life of a cycle, in this order::

        session.prepare()   only in the warm-up of a schedule: what the first recorded step should not pay for
        start()             torch's session starts
        session.begin()     right before the user's code: recorded time begins
        session.end()       right after the user's code: recorded time ends
        stop()              torch's session stops
        read()              the events become a run; after an error, this may be repeated

    A prepared cycle that is not started ends with ``session.discard``, a started one that will not be read with
    ``abandon``. ``observations``: of this cycle alone.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        with_stack: bool = False,
        last_job: Job | None = None,
        last_end: CycleEnd | None = None,
        is_first: bool = True,
        sampled_every_s: float = 0.005,
    ) -> None:
        """``last_job``: the job as the last cycle saw it. ``last_end``: where that ended, if this one begins there.
        ``is_first``: whether to find out what keeps the other tensors, which takes a while. ``sampled_every_s``: the
        seconds from sample to sample of the source line."""
        asked = setup.asked
        self.observations = Observations()
        self.job = this_job(setup.plan.models, last_job)
        self.session = Session(
            setup.device,
            profile_memory=asked.profile_memory,
            record_shapes=asked.record_shapes or asked.with_flops,
            with_stack=with_stack,
            in_job=self.job.world_size > 1,
        )
        self._setup = setup
        self._start_memory = self._end_memory = NOT_MEASURED
        self._compiled: dict[str, Any] = {}  # the parts of a Recording that say what torch.compile made
        self._stack_warning = StackWarning()
        self._sampler: Sampler | None = None
        self._before = EngineRanges.partial, Target.autocast_calls
        self._sampled_every_s = sampled_every_s
        self._called_graphs = CalledGraphs()
        self._last_end, self._is_first = last_end, is_first
        if last_end is not None:
            self.session.loop_before = last_end.loop

    def start(self) -> None:
        """Start torch's session. If this fails, all that was switched on is switched off again."""
        setup = self._setup
        try:
            if setup.asked.profile_memory:
                recorded = self._last_end.live if self._last_end is not None else {}
                start = live_memory(setup.plan.models, watch=True, recorded=recorded)
                holders = {device: holder_of_others(start, device) for device in start.sizes if self._is_first}
                self._start_memory = dataclasses.replace(start, holders=holders)
            if setup.samples_lines:
                self._sampler = Sampler(get_ident(), self._sampled_every_s)
                self._sampler.start()  # before the session, which would record that a thread starts
            self._called_graphs.on()
            self.session.start(step_begins=setup.from_first_mark)
            if self._sampler is not None:
                self._sampler.forget()
            if self.session.with_stack:
                self._stack_warning.on()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Switch everything off; this cycle will not be read."""
        with ExitStack() as last:
            last.callback(self._stop_sampling)
            if self.session.started:
                last.callback(self.session.stop)
            self._stop_watching()

    def stop(self) -> None:
        """Stop torch's session, even if something else raises an error, and note the state at the end."""
        setup = self._setup
        try:
            self._stop_watching()
            self.update_job()
        finally:
            try:
                self.session.stop(self.job.metadata)
            finally:
                self._stop_sampling()
        self.observations.warnings += about_clock(self.session.clock_jump_ns, self.session.wall_ns)
        if self._called_graphs.knows_parameters:
            asked = setup.provenance is not None
            self.observations.warnings.append(RunWarning.of("layers_by_parameters", asked=asked))
        self._compiled = {
            "regions": compiled_regions(),
            "compilations": compilations(self.session.step_starts),
            "under_compile": forwards_under_compile(setup.plan.under_compile),
        }
        if setup.asked.profile_memory:
            self._end_memory = live_memory(setup.plan.models)

    def _stop_watching(self) -> None:
        with ExitStack() as each:  # all are called, even if one raises an error
            each.callback(self._stack_warning.off)
            each.callback(self._called_graphs.off)
            each.callback(self._start_memory.stop_watching)

    def _stop_sampling(self) -> None:
        """Not within the session, which would record that we wait for the end of the thread."""
        if self._sampler is not None:
            self._sampler.stop()

    def update_job(self) -> None:
        """Note which rank of which job this is: a process group may be made or destroyed while we record."""
        self.job = this_job(self._setup.plan.models, self.job)

    def read(self, layers: tuple[Layer, ...], observations: Observations) -> Run:
        """Make the run of this cycle, without warnings. What is observed while reading is added to ``observations``."""
        setup, session = self._setup, self.session
        recording = Recording(
            source=session,
            columns=partial(session.columns, wanted_detail(setup.asked), setup.asked.profile_memory),
            layers=layers,
            origin=self._origin(),
            observations=observations,
            group=self.job.group,
            graphs=self._called_graphs.layers(setup.plan, setup.provenance),
            called=self._called_graphs.by_key,
            **self._compiled,
            start=self._start_memory,
            end=self._end_memory,
            has_steps=session.steps > 0,
            before=self._last_end,
            from_first_mark=setup.from_first_mark,
            python_samples=None if self._sampler is None else self._sampler.samples(),
            began_ns=session.began_ns,
            holder_of=holder_of,
        )
        for use in [] if self._sampler is None else self._sampler.other_threads():
            observations.threads[use.line] += Counter(cpu_ns=use.cpu_ns, over_ns=use.over_ns)
        asked = dataclasses.replace(setup.asked, with_stack=session.with_stack)
        return assemble(recording, setup.plan.layer_plan(), asked)

    def _origin(self) -> Meta:
        """What this process is, whether only ``backward()`` called autograd's engine, and whether models were called
        under autocast of the CPU."""
        origin = this_process(self.job, self.session.step_starts[0])
        counts = EngineRanges.partial, Target.autocast_calls
        said = (str(now > before) for before, now in zip(self._before, counts))
        return dataclasses.replace(
            origin, switches=(*origin.switches, *zip(("partial_backward", "cpu_autocast"), said))
        )

    @cached_property
    def event_lists(self) -> defaultdict[tuple[str, ...], list[EventList]]:
        """torch's own events of each finished call, in the order in which calls ended, by the module's real path."""
        session, plan = self.session, self._setup.plan
        lists: defaultdict[tuple[str, ...], list[EventList]] = defaultdict(list)
        paths = {}
        for item in attribution_of(plan.layer_plan()).attribute(session.columns()):
            if isinstance(item, Attributed) and item.event.kind is Kind.LABEL:
                path = plan.real_paths.get((item.event.name, item.place.layer))
                if path is not None and path in plan.with_event_lists:
                    paths[item.event.thread, item.event.start_ns] = path
        calls = [call for call in session.calls() if call.finished and (call.thread, call.start_ns) in paths]
        for call, events in zip(calls, session.event_lists(calls)):
            lists[paths[call.thread, call.start_ns]].append(events)
        return lists


_BLOCKS, _CALLS = 10, 20  # how many blocks are timed, and the calls in one
_calibration = threading.Lock()
_calibrated: list[float] = []


def label_ns() -> float | None:
    """The time that one label takes inside a session, in nanoseconds; None if another session is active. It is measured
    once in a process, in a session of its own: calls of a module that does nothing, with a label and without. Of the
    blocks of calls the shortest counts, since other processes and threads interrupt some."""
    with _calibration:
        if not _calibrated and not is_profiled():
            module = nn.Identity()
            label = Target(ref(module), label_of(("calibration",)))
            session = Session(None)
            session.start()
            session.begin()
            try:
                without_s, with_s = _seconds_of_calls(module, []), _seconds_of_calls(module, [label])
            finally:
                session.stop()
            _calibrated.append(max(with_s - without_s, 0) * 1e9 / _CALLS)
        return _calibrated[0] if _calibrated else None


def _seconds_of_calls(module: nn.Module, targets: list[Target]) -> float:
    """The time of the shortest block of calls of a module that has these labels."""
    call = partial(module, torch.empty(0))  # whose shape is noted at the first call, as in models
    labels = Labels(targets)
    labels.attach()
    try:
        call()
        return min(repeat(call, repeat=_BLOCKS, number=_CALLS))
    finally:
        labels.detach()

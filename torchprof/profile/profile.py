"""``Profile``: labels on, session on, the user's code, both off, and a ``Run``. The one conductor."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from datetime import timedelta
from html import escape
from os import PathLike
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction

from torchprof.attribute.events import Kind
from torchprof.encoding import fitting
from torchprof.errors import TorchprofError, suggest
from torchprof.measure.assemble import assemble, attribution_of, wanted_detail, with_warnings
from torchprof.measure.live_memory import NOTHING
from torchprof.measure.recording import Asked, Seen
from torchprof.measure.warnings import about_buckets, about_clock
from torchprof.profile.calibration import label_ns
from torchprof.profile.gather import gather
from torchprof.profile.sigterm import HeldSignals, HeldSigterm, undisturbed
from torchprof.record.compiled_code import StackWarning, about_left_out_stacks, awaiting_compilation, compiled_regions
from torchprof.record.compiler import Provenance
from torchprof.record.environment import this_process
from torchprof.record.job import Job, this_job
from torchprof.record.labels import Labels
from torchprof.record.model_memory import held_now
from torchprof.record.modules import Trace, checked_models, walk_modules
from torchprof.record.plan import Plan
from torchprof.record.recording import empty_event_list
from torchprof.record.session import Guard, Session, is_profiled, missing_device, refuse_if_profiled
from torchprof.run.cycles import add_cycle
from torchprof.run.layers import Layer
from torchprof.run.meta import CompiledRegion
from torchprof.run.run import Run
from torchprof.run.warnings import Caveat, caveat
from torchprof.run.words import DIVISORS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["Profile", "Trace", "walk_modules"]

_UNFINISHED = "<unfinished torchprof.profile>"
_LOST = caveat("recording_lost")
_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_ACTIONS = (ProfilerAction.NONE, ProfilerAction.WARMUP, *_RECORDING)  # torch has another, for itself alone


class Profile:
    """Profile a model, layer by layer, forward and backward, in a ``with`` block.

    ``model``: a module, or a list of modules that run together. ``enabled=False`` records nothing and costs nothing.
    ``use_cuda`` records CUDA kernels; ``use_device`` names another kind of device ("xpu", "mps", …).
    ``profile_memory`` records allocations; ``with_timeline`` keeps each of them, and when each layer ran, in
    ``run.timeline``.
    ``paths`` selects modules, leaf or not: tuples of names or dotted strings, with or without the root, ``*`` for any
    one step; work elsewhere is shown as ``(not selected)``. ``warmup``: so many calls of the model's own forward (of
    several models: of any of them) come first and are not recorded.
    ``with_flops`` counts parameters, MACs and FLOPs from the input shapes of the operators (see docs/flops.md).
    ``record_shapes`` and ``with_stack`` record input shapes and source lines, for the ``ops`` report, ``key_averages``
    and ``raw``. ``compile_layers`` gives the kernels of what torch.compile compiles inside the block back to their
    layers; a kernel of several is a row of its own, or divided among them by "flops" or by "bytes" (see
    docs/compile.md).

    In a loop, ``step()`` ends a step. ``schedule`` (``torch.profiler.schedule(wait=…, warmup=…, active=…)``, or any
    function from a step's number to a ``torch.profiler.ProfilerAction``) says which steps are recorded. At the end of
    each cycle of recorded steps ``on_trace_ready`` is called with this Profile, and meanwhile ``run``, ``raw()``,
    ``key_averages()`` and ``export_chrome_trace()`` give that cycle; after the block ``run`` is the sum of all cycles,
    the others give the last. Without a schedule, all is one cycle.

    Instead of the block, ``start()`` and ``stop()`` do the same; and a Profile is a decorator of a function, whose
    first call it profiles.

    Afterwards ``run`` holds the result, ``display()`` the table, ``raw()`` and ``key_averages()`` torch's own lists.
    A Profile is used once. Raises TorchprofError (a RuntimeError) on entry for a path that matches nothing, while
    another profiler is active, and for a second entry.
    """

    _open: ClassVar[Profile | None] = None  # one block at a time in a process, of whatever thread
    _turn: ClassVar[threading.Lock] = threading.Lock()
    _timed: ClassVar[bool] = True  # whether times are asked for

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        enabled: bool = True,
        use_cuda: bool = False,
        profile_memory: bool = False,
        paths: Iterable[Any] | None = None,
        *,
        use_device: str | None = None,
        warmup: int = 0,
        with_flops: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
        with_timeline: bool = False,
        compile_layers: bool | str = False,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Profile], Any] | None = None,
    ) -> None:
        self._model = model
        self.enabled = enabled
        self.use_cuda = use_cuda
        self.profile_memory = profile_memory
        self.paths = paths
        self.use_device = use_device
        self.warmup = warmup
        self.with_flops = with_flops
        self.record_shapes = record_shapes
        self.with_stack = with_stack
        self.with_timeline = with_timeline
        self.compile_layers = compile_layers
        self.schedule = schedule
        self.on_trace_ready = on_trace_ready

        self.entered = False
        self.exited = False
        self.traces: tuple[Trace, ...] = ()
        self._event_lists: defaultdict[tuple[str, ...], list[EventList]] | None = None
        self._run: Run | None = None  # of all cycles
        self._ended: Run | None = None  # a cycle, until on_trace_ready is called with it
        self._cycle: Run | None = None  # while on_trace_ready looks at it
        self._prepared: Session | None = None  # in the warm-up of a schedule
        self._session: Session | None = None  # the one that records, else the last that did
        self._recording = False
        self.step_num = 0
        self._action = ProfilerAction.NONE
        self._seen = Seen()  # of all cycles that have ended
        self._of_cycle = Seen()  # of the one that is recorded
        self._layers: tuple[Layer, ...] = ()  # as the block ended; none where an error came then
        self._finished = False
        self._failed = False  # whether an error ended the block
        self._labels = Labels(())
        self._guard = Guard()
        self._provenance: Provenance | None = None
        self._start_holding = self._end_holding = NOTHING
        self._job = Job()
        self._regions: tuple[CompiledRegion, ...] = ()
        self._asked_of_buckets = False
        self._stack_warning = StackWarning()

    # The block

    def __enter__(self) -> Profile:
        if not self.enabled:
            return self
        if self.entered:
            raise TorchprofError("torchprof profiler is not reentrant")
        try:
            with HeldSignals():
                self._enter()
            return self
        except BaseException:
            undisturbed(self._undo_enter)
            raise

    def _enter(self) -> None:
        with Profile._turn:
            if Profile._open is not None:
                raise TorchprofError(
                    "Another torchprof.Profile block is open, or another of its integrations' profilers: end it first. "
                    "One block can hold several models."
                )
            Profile._open = self
        self._models = checked_models(self._model)
        self._provenance = self._checked_provenance()
        self._asked = self._checked_options()
        self._general_notes = tuple(self._seen.notes)
        self._plan = Plan(self._models, self.paths)
        refuse_if_profiled()
        self._labels = Labels(self._plan.targets)
        self._warmup_left = self.warmup
        if self.warmup:
            self._labels.trigger = self._models
            self._labels.before_first = self._warm
        self._labels.attach()
        if self._provenance is not None:
            self._provenance.on()
        if self.schedule is not None:
            self._guard.on()
            self._go_on(self._action_of(0))
        elif not self.warmup:
            self._start_cycle()
        self.entered = True
        self.traces = self._plan.traces

    def _undo_enter(self) -> None:
        """Leave all as it was before the block, which will not be run."""
        self.entered = False
        try:
            if self._recording and self._session is not None:
                self._recording = False
                self._session.stop()
            elif self._prepared is not None:
                self._prepared.discard()
        finally:
            self._session = self._prepared = None
            self._take_off()

    def _take_off(self) -> None:
        with ExitStack() as last:  # each of them, whatever error another one raises
            last.callback(self._release)
            last.callback(self._guard.off)
            last.callback(self._start_holding.stop_watching)
            last.callback(self._stack_warning.off)
            if self._provenance is not None:
                last.callback(self._provenance.off)
            self._labels.detach()

    def _release(self) -> None:
        """Allow another block to be entered."""
        if Profile._open is self:
            Profile._open = None

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if not self.entered or self.exited:
            return
        undisturbed(functools.partial(self._leave, exc_type is not None))
        if self.schedule is not None:
            self._show_cycle()
        elif self.on_trace_ready is not None and self._session is not None:
            self.on_trace_ready(self)

    def _leave(self, failed: bool) -> None:
        self._failed = failed
        with ExitStack() as last:  # each of them, the last one first, whatever error another one raises
            last.callback(self._take_off)
            last.callback(self._note_end)
            last.callback(self._end_session)
            if self._provenance is not None:
                last.callback(self._provenance.off)
            self._labels.detach()

    def _end_session(self) -> None:
        if self._recording and self.schedule is not None:
            self._end_cycle()
        elif self._recording:
            self._stop_session()
        elif self._prepared is not None:
            self._prepared.discard()
        if self._session is not None and self._session.started and self._timed:
            self._seen.label_ns = label_ns()

    def _note_end(self) -> None:
        """Note what there is of the model as the block ends."""
        self.exited = True
        self._seen.add(self._of_cycle)
        self._layers = self._plan.layers()
        self._note_seen()

    def start(self) -> None:
        """What entering the block does."""
        self.__enter__()

    def stop(self) -> None:
        """What leaving the block does. Raises TorchprofError where it was not started."""
        if self.enabled and not self.entered:
            raise TorchprofError("This Profile was not started: call start() before stop().")
        self.__exit__(*sys.exc_info())

    def step(self) -> None:
        """End a step of the loop, and begin the next: to be called once in each pass, at its end.

        Raises TorchprofError outside the block.
        """
        if not self.enabled:
            return
        if not self.entered or self.exited:
            raise TorchprofError("step() belongs inside the block of this Profile, at the end of each pass of a loop.")
        action = self._action_of(self.step_num + 1)
        if self._recording and self._session is not None:
            self._session.mark_step()
        self.step_num += 1
        self._go_on(action)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; or, with a function alone, decorate it."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, MethodType, BuiltinFunctionType)):
            return self._decorated(args[0])
        if not isinstance(self._model, nn.Module):
            raise TorchprofError("This Profile holds several models: call the one you mean itself.")
        return self._model(*args, **kwargs)

    def _decorated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def profiled(*args: Any, **kwargs: Any) -> Any:
            if self.entered:  # it is used once: later calls, and those inside the first, are the user's alone
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def profiled_coroutine(*args: Any, **kwargs: Any) -> Any:
            if self.entered:
                return await function(*args, **kwargs)
            with self:
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def profiled_generator(*args: Any, **kwargs: Any) -> Any:
            if self.entered:
                return (yield from function(*args, **kwargs))
            with self:
                return (yield from function(*args, **kwargs))

        if inspect.isasyncgenfunction(function):
            raise TorchprofError(
                f"{function.__qualname__} is an asynchronous generator, which Profile cannot decorate: put the block "
                "inside it, or around the loop that uses it."
            )
        if inspect.iscoroutinefunction(function):
            return profiled_coroutine
        return profiled_generator if inspect.isgeneratorfunction(function) else profiled

    # Cycles

    def _action_of(self, step: int) -> ProfilerAction | None:
        """What the schedule says of a step; None without one. An error changes nothing."""
        if self.schedule is None:
            return None
        action = self.schedule(step)
        if action not in _ACTIONS:
            raise TorchprofError(
                f"schedule({step}) gave {action!r}, where one of {', '.join(map(str, _ACTIONS))} was expected: use "
                "torch.profiler.schedule(wait=1, warmup=1, active=3), say."
            )
        return action

    def _go_on(self, action: ProfilerAction | None) -> None:
        """From one step to the next, as torch.profiler.profile does. A cycle ends with RECORD_AND_SAVE; and where the
        schedule stops without that, for which torch has a warning and no call of on_trace_ready."""
        if action is None:
            return
        before, self._action = self._action, action
        if self._recording and (before is ProfilerAction.RECORD_AND_SAVE or action not in _RECORDING):
            self._end_cycle()
            self._show_cycle()
        if action is ProfilerAction.WARMUP and self._prepared is None:
            with HeldSignals():
                self._prepared = self._new_session(self._asked.with_stack)
                self._prepared.prepare()
        elif action in _RECORDING and not self._recording:
            with HeldSignals():
                self._start_cycle()
        elif action is ProfilerAction.NONE and self._prepared is not None:
            with HeldSignals():
                self._prepared.discard()
                self._prepared = None

    def _new_session(self, with_stack: bool) -> Session:
        self._job = this_job(self._models, self._job)
        if is_profiled():
            refuse_if_profiled()
        asked = self._asked
        return Session(
            asked.device if self._records_device else None,
            profile_memory=asked.profile_memory,
            record_shapes=asked.record_shapes or asked.with_flops,
            with_stack=with_stack,
            in_job=self._job.world_size > 1,
        )

    def _start_cycle(self) -> None:
        waiting = awaiting_compilation(self._models) if self._asked.with_stack else []
        if waiting:
            self._of_cycle.notes.append(about_left_out_stacks(waiting))
            if self._prepared is not None:
                self._prepared.discard()
                self._prepared = None
        self._session = self._prepared or self._new_session(self._asked.with_stack and not waiting)
        self._prepared = self._event_lists = None
        if not self._asked_of_buckets:
            self._asked_of_buckets = True
            self._of_cycle.notes += about_buckets(self._plan.unordered())
        self._start_holding = held_now(self._models, watch=True) if self.profile_memory else NOTHING
        self._session.start(step_begins=not self.warmup)
        self._recording = True
        if self._session.with_stack:
            self._stack_warning.on()

    def _stop_session(self) -> None:
        assert self._session is not None
        self._recording = False
        try:
            self._stack_warning.off()
            self._start_holding.stop_watching()
            self._job = this_job(self._models, self._job)
        finally:
            self._session.stop(self._job.in_traces)
        self._of_cycle.notes += about_clock(self._session.clock_jump_ns, self._session.wall_ns)
        self._regions = compiled_regions()
        self._end_holding = held_now(self._models) if self.profile_memory else NOTHING

    def _end_cycle(self) -> None:
        """Fold what was recorded into the run at once: the next cycle needs the memory. ``_show_cycle`` is to follow,
        when signals are no longer held."""
        with HeldSignals():
            self._stop_session()
            unobserved = self._seen.unobserved
            self._note_seen()
            seen = self._of_cycle
            cycle = self._assemble(self._plan.layers(), seen)
            self._run = add_cycle(self._run, cycle)
            self._seen.add(seen)
            self._of_cycle = Seen()
            if self.on_trace_ready is not None:
                seen.notes[:0] = self._general_notes
                seen.unobserved = self._seen.unobserved - unobserved
                seen.unlabelled = self._seen.unlabelled
                seen.added, seen.removed = self._seen.added, self._seen.removed
                self._ended = with_warnings(cycle, self._plan, seen)

    def _show_cycle(self) -> None:
        """Call on_trace_ready, if a cycle has ended that it was not called for."""
        if self.on_trace_ready is None or self._ended is None:
            return
        self._cycle, self._ended = self._ended, None
        try:
            self.on_trace_ready(self)
        finally:
            self._cycle = None

    def _assemble(self, layers: tuple[Layer, ...], seen: Seen) -> Run:
        assert self._session is not None
        return assemble(
            self._session,
            self._session.events(wanted_detail(self._asked), self._asked.profile_memory),
            self._plan,
            layers,
            dataclasses.replace(self._asked, with_stack=self._session.with_stack),
            seen,
            origin=this_process(self._job),
            group=self._job.group,
            graphs=None if self._provenance is None else self._provenance.graphs(self._plan),
            regions=self._regions,
            start=self._start_holding,
            end=self._end_holding,
            steps=self._session.steps > 0,
            from_first_mark=not self.warmup,
            began_ns=self._session.began_ns,
        )

    def _note_seen(self) -> None:
        self._seen.unobserved = self._labels.unobserved.copy()
        self._seen.unlabelled = set(self._labels.unlabelled)
        self._seen.added, self._seen.removed = self._plan.changes()

    def _warm(self) -> bool:
        """Called before each call of the model until the session starts; says whether it has."""
        if self._warmup_left:
            self._warmup_left -= 1
            return False
        with HeldSignals():
            refuse_if_profiled()
            self._start_cycle()
        return True

    # The result

    @property
    def _readable(self) -> bool:
        return self.exited or self._cycle is not None

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the block has ended, and where profiling was switched off."""
        if not self.enabled:
            raise TorchprofError("This Profile was made with enabled=False: nothing was recorded.")
        if self._cycle is not None:
            return self._cycle
        if not self.exited:
            raise TorchprofError("The block of this Profile has not ended: there is no run yet.")
        if not self._finished:
            self._finish()
        assert self._run is not None
        return self._run

    def _finish(self) -> None:
        """The run of all cycles, with its warnings; without a schedule it is read only now. Where Ctrl-C breaks that
        off, it begins anew when the run is asked for again."""
        run, seen = self._run, deepcopy(self._seen)
        is_lost = self._session is not None and self._session.is_lost
        if run is None:
            if self._session is None or not self._session.started or is_lost:
                seen.nothing = _LOST if is_lost else self._why_nothing()
                self._session = Session(None)
            run = self._assemble(self._layers or self._plan.layers(), seen)
        elif is_lost:
            seen.notes.append(_LOST)
        self._run, self._seen, self._finished = with_warnings(run, self._plan, seen), seen, True

    def _why_nothing(self) -> Caveat:
        if self.schedule is not None:
            return caveat("nothing_after_steps", steps=self.step_num)
        return caveat("nothing_after_warmup", warmup=self.warmup, calls=self.warmup - self._warmup_left)

    def display(
        self,
        show_events: bool = False,
        *,
        depth: int | None = None,
        sort_by: str | None = None,
        top: int | None = None,
        percent: bool = False,
        tablefmt: str | None = None,
        hot: bool = False,
        file: TextIO | None = None,
    ) -> str:
        """The tree table; see ``torchprof.reports.tree`` for what the options do.

        With ``file``, an open text file, the table is written there as well, with a line's end; characters that its
        encoding does not have become ASCII ("≥" is ">="). Before the block has
        ended, and with ``enabled=False``, the text is ``<unfinished torchprof.profile>``.
        """
        if file is not None and not hasattr(file, "write"):
            raise TorchprofError(f"file={file!r} is no open text file: use `open(path, 'w')`, or sys.stdout.")
        text = _UNFINISHED
        if self._readable:
            text = self.run.report(
                "tree",
                show_events=show_events,
                depth=depth,
                sort_by=sort_by,
                top=top,
                percent=percent,
                tablefmt=tablefmt,
                hot=hot,
            )
        if file is not None:
            file.write(fitting(text, file) + "\n")
        return text

    def __str__(self) -> str:
        return self.display()

    def _repr_html_(self) -> str:
        """What a notebook shows of a profile: the table, as soon as there is one."""
        return self.run.report("notebook") if self._readable else f"<pre>{escape(_UNFINISHED)}</pre>"

    def show(self, *, height: int = 640) -> None:
        """Show the page of the run in a notebook; see ``Run.show``."""
        self.run.show(height=height)

    def gather(
        self, group: ProcessGroup | None = None, dst: int = 0, *, timeout: float | timedelta | None = None
    ) -> Run | None:
        """Bring the run of every rank of a job to rank ``dst``, merged into one; see docs/ranks-in-a-job.md.

        To be called after the block, before ``destroy_process_group``, by all ranks of ``group`` (None: all of the
        job), as often and in the same order, as a collective is. Ranks are numbered as in the job. ``dst`` gets the
        merged run; the others, and those that are not in the group, None. With ``enabled=False`` a rank adds nothing,
        and where none added anything the run is None. Without a process group, it is the run of this process.

        ``dst`` waits for the others so many seconds, or a timedelta; by default as long as the process group waits, but
        10 s where an error ended the block or is under way, or SIGTERM comes: then a rank has probably died. Who has
        not come by then is left out (``run.missing_ranks``). SIGTERM is delivered 10 s after ``dst`` has the run.

        Raises TorchprofError before the block has ended, for a ``dst`` that is not in the group, where the job's
        process group has no key-value store (MPI) or is there no more, and for a run that was recorded before it.
        """
        failed = self._failed or sys.exc_info()[0] is not None
        with HeldSigterm() as sigterm:  # also while the run is made: another rank may just have died
            run = self.run if self.enabled else None
            return gather(run, group, dst, timeout, failed=failed, sigterm=sigterm)

    def raw(self) -> tuple[tuple[Trace, ...], defaultdict[tuple[str, ...], list[EventList]]] | None:
        """``(traces, event_lists)``, None before the end.

        ``event_lists[path]`` holds torch's own ``EventList`` for each finished call of that module, in order: of the
        selected modules, or of the leaves where no paths were given. Built when first asked for.
        """
        return (self.traces, self.trace_profile_events) if self._readable else None

    @property
    def trace_profile_events(self) -> defaultdict[tuple[str, ...], list[EventList]]:
        """The mapping that ``raw()`` gives; empty before the end."""
        if not self._readable or self._session is None:
            return defaultdict(list)
        if self._event_lists is None:
            lists: defaultdict[tuple[str, ...], list[EventList]] = defaultdict(list)
            paths = {}
            for event, place, *_ in attribution_of(self._plan).attribute(self._session.events()):
                if event.kind is Kind.LABEL:
                    path = self._plan.real_path(event.name, place.layer)
                    if path is not None and path in self._plan.with_event_lists:
                        paths[event.thread, event.start_ns] = path
            calls = [call for call in self._session.calls() if call.finished and (call.thread, call.start_ns) in paths]
            for call, events in zip(calls, self._session.event_lists(calls)):
                lists[paths[call.thread, call.start_ns]].append(events)
            self._event_lists = lists
        return self._event_lists

    def key_averages(self, *args: Any, **kwargs: Any) -> EventList:
        """torch's own averages over all events, with torch's arguments (``group_by_input_shape`` needs
        ``record_shapes=True``, ``group_by_stack_n`` needs ``with_stack=True``). Empty with ``enabled=False``; raises
        TorchprofError before the end."""
        if not self.enabled:
            return empty_event_list()
        if not self._readable:
            raise TorchprofError("The block of this Profile has not ended: there are no averages yet.")
        if self._session is None:
            return empty_event_list()
        if "group_by_input_shape" in kwargs:  # torch.profiler's spelling; EventList's has an s
            kwargs["group_by_input_shapes"] = kwargs.pop("group_by_input_shape")
        averages: EventList = self._session.event_list().key_averages(*args, **kwargs)
        return averages

    def export_chrome_trace(self, path: str | PathLike[str], use_python_export: bool = False) -> None:
        """Write torch's trace, for Perfetto or chrome://tracing, gzipped where the name ends in ``.gz``.

        Every layer's forward is a range ``torchprof:`` + its path, percent-escaped. With ``enabled=False`` nothing is
        written. ``use_python_export`` is what torch's own ``tensorboard_trace_handler`` passes, so that it works here,
        too; it changes nothing. Raises TorchprofError before the end and where nothing was recorded, OSError as
        ``open`` does.
        """
        if not self.enabled:
            return
        if not self._readable:
            raise TorchprofError("The block of this Profile has not ended: there is no trace yet.")
        if self._session is None or not self._session.started:
            raise TorchprofError("Nothing was recorded: there is no trace.")
        self._session.export_chrome_trace(path)

    # How it comes about

    def _checked_options(self) -> Asked:
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise TorchprofError(f"warmup is a number of calls, 0 or more, not {self.warmup!r}.")
        if self.schedule is not None and not callable(self.schedule):
            raise TorchprofError(
                f"schedule={self.schedule!r:.80} is no schedule: use torch.profiler.schedule(wait=1, warmup=1, "
                "active=3), say."
            )
        if self.schedule is not None and self.warmup:
            raise TorchprofError("warmup= counts calls, and schedule= steps: leave one out (schedules have a warmup).")
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise TorchprofError(f"on_trace_ready={self.on_trace_ready!r:.80} cannot be called: it takes this Profile.")
        device = self._checked_device()
        missing = missing_device(device) if device else None
        self._records_device = device is not None and missing is None
        self._seen.notes += [missing] if missing else []
        return Asked(
            device=device,
            profile_memory=bool(self.profile_memory),
            with_flops=bool(self.with_flops),
            record_shapes=bool(self.record_shapes),
            with_stack=bool(self.with_stack),
            with_timeline=bool(self.with_timeline),
            compile_layers=self._provenance is not None,
            timed=self._timed,
        )

    def _checked_provenance(self) -> Provenance | None:
        """What tells the layers of compiled graphs, where they were asked for and this torch can tell."""
        if self.compile_layers not in (False, True, *DIVISORS):
            raise TorchprofError(
                f"compile_layers={self.compile_layers!r:.80} is none of True, False, "
                f"{' and '.join(map(repr, DIVISORS))}: these two say by what a kernel of several layers is divided."
            )
        if not self.compile_layers:
            return None
        divisor = self.compile_layers if isinstance(self.compile_layers, str) else None
        return Provenance.if_told(divisor, self._seen.notes)

    def _checked_device(self) -> str | None:
        if self.use_device is None:
            return "cuda" if self.use_cuda else None
        backend = torch._C._get_privateuse1_backend_name()
        known = (*_DEVICES, *([backend] if backend != "privateuseone" else []))
        if self.use_device not in known:
            raise TorchprofError(
                f"use_device={self.use_device!r} is no kind of device. {suggest(str(self.use_device), known)}"
            )
        if self.use_cuda and self.use_device != "cuda":
            raise TorchprofError(
                f"use_cuda=True and use_device={self.use_device!r} contradict each other: leave one out."
            )
        return self.use_device

"""``Profile``: attach labels, start a profiler session, run the user's code, stop and detach, make a ``Run``."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from html import escape
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from torch import nn
from torch.profiler import ProfilerAction

from torchprof.errors import TorchprofError, encodable
from torchprof.measure.recording import Options
from torchprof.profile import arguments
from torchprof.profile.cycle import Setup, label_ns
from torchprof.profile.cycles import ListsOfTorch, ScheduledCycles
from torchprof.profile.signals import DelayedSignals, DelayedSigterm, uninterrupted
from torchprof.record.compiled.inductor import Provenance
from torchprof.record.labels import Labels
from torchprof.record.modules import Trace, checked_models
from torchprof.record.peak import with_ordinary_times
from torchprof.record.plan import Plan
from torchprof.record.ranges import OptimizerMarks
from torchprof.record.session import Guard, missing_device, refuse_if_profiled
from torchprof.run.layers import Layer
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run, output

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_UNFINISHED = "<unfinished torchprof.profile>"


class Profile(ListsOfTorch):
    """Profile a model, layer by layer, forward and backward, in a ``with`` block.

    ``model``: a module, a list of modules that run together, or a pipeline's schedule. ``enabled=False`` costs nothing.
    ``device``: the kind of device to record in addition to the CPU: "cuda", "xpu", "mps", …; "cpu" for none. "auto" is
    what the model is on when the block begins: the kind of its first parameter or buffer on a device. All devices of
    the kind are recorded, so that the index of "cuda:1" has no effect. Name the device if the parameters are there
    only during a call (offloading), and if there are none. ``use_cuda`` and ``use_device`` are older spellings: True is
    "cuda", False is "cpu", and ``use_device`` names a kind.
    ``profile_memory`` records allocations. ``with_timeline`` keeps each one, and when layers ran, in ``run.timeline``.
    ``paths`` selects modules, leaf or not: tuples of names or dotted strings, with or without the root; ``*`` matches
    any one step. Work elsewhere is shown as ``(not selected)``. ``warmup``: this many calls of the model (with several
    models: of any of them) come first and are not recorded. Calls of its own forward count, wherever they come from.
    ``with_flops`` counts parameters, MACs and FLOPs from the input shapes of the operators (see docs/flops.md).
    ``record_shapes`` and ``with_stack`` record input shapes and source lines, for the ``ops`` report, ``key_averages``
    and ``raw``. ``compile_layers`` assigns the kernels of code that torch.compile compiles inside the block to their
    layers; a kernel of several layers has its own row (see docs/compile.md). ``lines``: a thread samples the source
    lines of the one that opens the block, for the report "lines".

    In a loop, ``step()`` ends a step. ``schedule`` selects the steps that are recorded: it is
    ``torchprof.sampled()``, for loops of any length, ``torch.profiler.schedule(wait=…, warmup=…, active=…)``, or any
    function from a step's number to a ``torch.profiler.ProfilerAction``. At the end of each cycle of recorded steps,
    ``on_trace_ready`` is called with this Profile. During that call, ``run``, ``raw()``, ``key_averages()`` and
    ``export_chrome_trace()`` give this cycle. After the block, ``run`` is the sum of all cycles, and the others give
    the last cycle. Without a schedule, there is one cycle.

    ``start()`` and ``stop()`` do the same as the block. As a decorator, a Profile profiles the function's first call.

    Afterwards, ``run`` is the result, ``display()`` the table, ``raw()`` and ``key_averages()`` torch's own lists.
    A Profile is used once. Options can be read; those after ``paths`` cannot be set afterwards. Raises TypeError for an
    unknown option, and TorchprofError (a RuntimeError) on entry for a path that matches nothing, while another profiler
    is active, and the second time.
    """

    _open: ClassVar[Profile | None] = None  # the Profile whose block is open: one in a process, in any thread
    _opening: ClassVar[threading.Lock] = threading.Lock()
    _timed: ClassVar[bool] = True  # whether times are measured

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        enabled: bool = True,
        use_cuda: bool | None = None,
        profile_memory: bool = False,
        paths: Iterable[Any] | None = None,
        *,
        device: str | torch.device = arguments.AUTO,
        use_device: str | None = None,
        warmup: int = 0,
        with_flops: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
        with_timeline: bool = False,
        compile_layers: bool = False,
        lines: bool = True,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Profile], Any] | None = None,
        **unknown: Any,
    ) -> None:
        arguments.refuse_unknown(unknown, Profile)
        self._model = model
        self.enabled = enabled
        self.use_cuda = bool(use_cuda)
        self.profile_memory = profile_memory
        self.paths = paths
        self.device = device
        self.use_device = use_device
        self.warmup = warmup
        self.with_flops = with_flops
        self.record_shapes = record_shapes
        self.with_stack = with_stack
        self.with_timeline = with_timeline
        self.compile_layers = compile_layers
        self.lines = lines
        self.schedule = schedule
        self.on_trace_ready = on_trace_ready

        self._refuses_cuda = use_cuda is not None and not use_cuda
        self.entered = False
        self.exited = False
        self.traces: tuple[Trace, ...] = ()
        self._run: Run | None = None  # of all cycles, made when it is first asked for
        self._run_of_cycle: Run | None = None  # while on_trace_ready is called for this cycle
        self.step_num = 0
        self._layers: tuple[Layer, ...] = ()  # at the end of the block; empty if they could not be read then
        self._failed = False  # whether an error ended the block
        self._plan = Plan([], None)
        self._labels = Labels(())
        self._cycles = ScheduledCycles(Setup(self._plan, Options()), [], self._labels)
        self._guard = Guard()
        self._provenance: Provenance | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises TorchprofError for options; those of torchprof 1.4.0 can be set before the block."""
        if name in (Profile.__init__.__kwdefaults__ or ()) and name in vars(self):
            raise TorchprofError(f"The option {name!r} of a Profile cannot be changed: write Profile(model, {name}=…).")
        super().__setattr__(name, value)

    # The block

    def __enter__(self) -> Profile:
        if not self.enabled:
            return self
        if self.entered:
            raise TorchprofError("torchprof profiler is not reentrant")
        try:
            with DelayedSignals():
                self._enter()
            self._cycles.begin_recording()
            return self
        except BaseException:
            self.entered = False
            uninterrupted(functools.partial(self._detach_and, self._cycles.abandon))
            raise

    def _enter(self) -> None:
        self._open_block()
        self._models = checked_models(self._model)
        self._set_up()
        refuse_if_profiled()
        self._warmup_left = self.warmup
        if self.warmup:
            self._labels.trigger = self._models
            self._labels.before_first = self._before_call
        OptimizerMarks.recorded.clear()
        self._labels.attach()
        if self._provenance is not None:
            self._provenance.on()
        if self.schedule is not None:
            self._guard.on()
            self._begin_step(arguments.action_of(self.schedule, 0))
        elif not self.warmup:
            self._cycles.start()
        self.entered = True
        self.traces = self._plan.traces

    def _open_block(self) -> None:
        with Profile._opening:
            if Profile._open is not None:
                raise TorchprofError(
                    "Another torchprof.Profile block is open, or another of its integrations' profilers: end it first. "
                    "One block can hold several models."
                )
            Profile._open = self

    def _set_up(self) -> None:
        """Check the options, and plan the labels and the cycles."""
        warnings: list[RunWarning] = []
        self._provenance = arguments.checked_provenance(self.compile_layers, warnings)
        arguments.checked_schedule(self.schedule, self.warmup, self.on_trace_ready)
        asked = Options(
            device=self._device(),
            profile_memory=bool(self.profile_memory),
            with_flops=bool(self.with_flops),
            record_shapes=bool(self.record_shapes),
            with_stack=bool(self.with_stack),
            with_timeline=bool(self.with_timeline),
            compile_layers=self._provenance is not None,
            timed=self._timed,
        )
        missing = missing_device(asked.device) if asked.device else None
        warnings += [missing] if missing else []
        self._plan = Plan(self._models, self.paths, self._model)
        kind = None if missing else asked.device
        samples = self._timed and bool(self.lines)
        setup = Setup(self._plan, asked, kind, self._provenance, from_first_mark=not self.warmup, samples_lines=samples)
        self._labels = Labels(self._plan.targets)
        self._cycles = ScheduledCycles(
            setup, warnings, self._labels, self.schedule, keeps_runs=self.on_trace_ready is not None
        )

    def _device(self) -> str | None:
        use_cuda = True if self.use_cuda else False if self._refuses_cuda else None
        return arguments.checked_device(self.device, use_cuda, self.use_device, self._models)

    def _detach_and(self, *steps: Callable[[], None]) -> None:
        """Detach the labels, do these steps, and allow other profilers. All is done, even after an error."""
        with ExitStack() as last:
            last.callback(self._close_block)
            last.callback(self._guard.off)
            for step in reversed(steps):
                last.callback(step)
            if self._provenance is not None:
                last.callback(self._provenance.off)
            self._labels.detach()

    def _close_block(self) -> None:
        if Profile._open is self:
            Profile._open = None

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if not self.entered or self.exited:
            return
        try:
            self._cycles.end_block()
            self._failed = exc_type is not None
        finally:
            uninterrupted(functools.partial(self._detach_and, self._end_session, self._complete_observations))
        if self.schedule is not None:
            self._show_cycle()
        elif self.on_trace_ready is not None and self._session is not None:
            self.on_trace_ready(self)

    def _end_session(self) -> None:
        cycles = self._cycles
        if cycles.is_recording and self.schedule is not None:
            cycles.stop_and_add()
        elif cycles.is_recording:
            cycles.stop()
        else:
            cycles.discard_prepared()
        if self._timed and cycles.session is not None and cycles.session.started:
            cycles.observations.label_ns = label_ns()

    def _complete_observations(self) -> None:
        """Read the layers of the model at the end of the block, and complete the observations."""
        self.exited = True
        try:
            self._layers = self._plan.layers()
        finally:
            kind, observations = self._device(), self._cycles.observations
            if self._cycles.setup.asked.device is None and kind is not None:  # "auto" would choose it now
                observations.warnings.append(RunWarning.of("moved_to_device", device=kind.upper(), kind=kind))
            self._cycles.finish()

    def start(self) -> None:
        """Do what entering the block does."""
        self.__enter__()

    def stop(self) -> None:
        """Do what leaving the block does. Raises TorchprofError if the Profile was not started."""
        if self.enabled and not self.entered:
            raise TorchprofError("This Profile was not started: call start() before stop().")
        self.__exit__(*sys.exc_info())

    def step(self) -> None:
        """End a step of the loop, and begin the next. Call it once in each pass of the loop, at its end. Raises
        TorchprofError outside the block."""
        if not self.enabled:
            return
        if not self.entered or self.exited:
            raise TorchprofError("step() belongs inside the block of this Profile, at the end of each pass of a loop.")
        action = arguments.action_of(self.schedule, self.step_num + 1)
        if self._cycles.is_recording and self._session is not None:
            self._session.mark_step()
        self.step_num += 1
        self._begin_step(action)
        self._cycles.begin_recording()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. If the only argument is a function, decorate that instead."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, MethodType, BuiltinFunctionType)):
            return arguments.decorated(args[0], lambda: nullcontext() if self.entered else self)
        if not isinstance(self._model, nn.Module):
            raise TorchprofError("This Profile holds several models: call one of the models directly.")
        return self._model(*args, **kwargs)

    # Cycles

    def _begin_step(self, action: ProfilerAction | None) -> None:
        """Begin a step for which the schedule gave this action. Without a schedule, the one cycle continues."""
        if action is None:
            return
        self._cycles.end_step(action)
        self._show_cycle()
        self._cycles.begin_step()

    def _show_cycle(self) -> None:
        """Call on_trace_ready if a cycle has ended for which it was not called yet. Signals are not delayed here."""
        if self.on_trace_ready is None or self._cycles.run_of_last is None:
            return
        self._run_of_cycle, self._cycles.run_of_last = self._cycles.run_of_last, None
        try:
            self.on_trace_ready(self)
        finally:
            self._run_of_cycle = None

    def _before_call(self) -> bool:
        """Before a call of a model: count a warm-up call, or start to record. Returns whether recording started."""
        if self._warmup_left:
            self._warmup_left -= 1
            return False
        with DelayedSignals():
            refuse_if_profiled()
            self._cycles.start()
        self._cycles.begin_recording()
        return True

    # The result

    @property
    def run(self) -> Run:
        """The result. Raises TorchprofError before the block has ended, and with ``enabled=False``."""
        if not self.enabled:
            raise TorchprofError("This Profile was made with enabled=False: nothing was recorded.")
        if self._run_of_cycle is not None:
            return self._run_of_cycle
        if not self.exited:
            raise TorchprofError("The block of this Profile has not ended: there is no run yet.")
        if self._run is None:  # without a schedule, events are read only now; after Ctrl-C, again
            why_nothing = RunWarning.of("nothing_after_steps", steps=self.step_num)
            if self.schedule is None:
                calls = self.warmup - self._warmup_left
                why_nothing = RunWarning.of("nothing_after_warmup", warmup=self.warmup, calls=calls)
            layers = self._layers or self._plan.layers()
            self._run = with_ordinary_times(self._cycles.result(layers, why_nothing), self._plan.products)
        return self._run

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
        """The table of layers as a tree; ``OPTIONS`` in ``torchprof.analyze.report`` says what the options mean.

        With ``file``, an open text file, the table is also written there, with a newline; characters that the file's
        encoding lacks become ASCII ("≥" is ">="). Before the block has ended, and with ``enabled=False``, the text is
        ``<unfinished torchprof.profile>``.
        """
        if file is not None and not hasattr(file, "write"):
            raise TorchprofError(f"file={file!r} is not an open text file: use `open(path, 'w')`, or sys.stdout.")
        text = _UNFINISHED
        if self._has_run:
            rows = {"depth": depth, "sort_by": sort_by, "top": top, "percent": percent}
            text = self.run.report("tree", show_events=show_events, tablefmt=tablefmt, hot=hot, **rows)
        if file is not None:
            file.write(encodable(text, file) + "\n")
        return text

    def __str__(self) -> str:
        """The headline, the largest places and the layers in few rows; ``display`` shows the whole tree."""
        return output("printed")(self.run, "prof.display() shows all.") if self._has_run else _UNFINISHED

    def _repr_html_(self) -> str:
        """What a notebook shows for a Profile."""
        return self.run.report("notebook") if self._has_run else f"<pre>{escape(_UNFINISHED)}</pre>"

    def verify(self, *args: Any, seconds: float = 20.0, **kwargs: Any) -> Run:
        """Carry out the remedies of the first findings, and measure what they gain: ``prof.verify(x)``, after the
        block. Returns the run: its findings say "Measured: 31% (28–33%)" in place of "Up to 33%"; also ``prof.run``.

        ``args``, ``kwargs``: the inputs of a call of the model. Copies of the model are called with copies of them, as
        it is and with the remedy in turn, in training with the backward of the sum of all outputs, until the interval
        of 95 % is narrow or 2 s are spent; all in ``seconds``. The model, its optimizer, gradients and random states
        are as before. See docs/advice.md for what is tried, and what is not. Raises TorchprofError before the end, for
        a Profile of several models, and inside a job of several ranks, in which ranks would wait for each other.
        """
        from torchprof.profile.trials import verified

        self._run = verified(self.run, self._plan, args, kwargs, seconds)
        return self._run

    def metrics(self, layers: int | str | Iterable[str | tuple[str, ...]] | None = None) -> dict[str, int | float]:
        """The run as a flat dict of numbers; see ``Run.metrics``."""
        return self.run.metrics(layers)

    def show(self, *, height: int = 640) -> None:
        """Show the page of the run in a notebook; see ``Run.show``."""
        self.run.show(height=height)

    def gather(
        self,
        group: ProcessGroup | None = None,
        dst: int = 0,
        *,
        timeout: float | timedelta | None = None,
        ranks: str | Iterable[int] | None = None,
    ) -> Run | None:
        """Collect the runs of the ranks of a job on rank ``dst``, and merge them; see docs/ranks-in-a-job.md.

        Call it after the block and before ``destroy_process_group``, equally often and in the same order on all ranks
        of ``group`` (None: the job), which are numbered as in the job. Returns the merged run on ``dst``, None on the
        others and if all have ``enabled=False``. Without a process group, it is the run of this process.

        ``ranks``: whose runs, the same on each rank: "all", or numbers of ranks. The default is all of up to 64 ranks.
        Of more, all are compared, and ``dst``, for which they wait, chooses stragglers and some others.

        ``timeout``: how long ``dst`` waits, in seconds or as a timedelta. The default is that of the process group;
        10 s after an error or SIGTERM, since a rank has probably died. Ranks that are missing at the end are left out
        (``run.missing_ranks``). SIGTERM is delivered 10 s after ``dst`` has the run.

        Raises TorchprofError before the block has ended, for ranks that are not in the group, if the process group has
        no key-value store (MPI) or was destroyed, and for a run that was recorded before the group was made.
        """
        from torchprof.profile.gather import gather

        failed = self._failed or sys.exc_info()[0] is not None
        with DelayedSigterm() as sigterm:  # before the run is made, since another rank may have died already
            run = self.run if self.enabled else None
            return gather(run, group, dst, timeout, ranks, failed=failed, sigterm=sigterm)

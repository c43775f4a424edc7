"""Watch a training: some steps are recorded, all are timed, and from time to time a line in the log says what changed,
and which rank of a job is slow."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from torch import nn

from torchprof.errors import TorchprofError
from torchprof.profile.arguments import check_count
from torchprof.profile.gather import Comparisons, store_of_job
from torchprof.profile.passes import BURST, PassKind, is_sampled
from torchprof.profile.program import Program
from torchprof.profile.signals import uninterrupted
from torchprof.record.modules import checked_models
from torchprof.record.session import Guard, refuse_if_profiled
from torchprof.run.formats import format_number, format_time
from torchprof.run.meta import RunWarning
from torchprof.run.passes import Passes
from torchprof.run.run import Run, output

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger("torchprof")
_numbers = count()  # of watches

# Watching


def watch(
    model: nn.Module | Sequence[nn.Module],
    *,
    every: float = 3600.0,
    folder: str | PathLike[str] | None = None,
    keep: int = 24,
    metrics: Callable[[dict[str, int | float]], Any] | None = None,
    use_cuda: bool | None = None,
    profile_memory: bool = False,
    with_flops: bool = False,
    record_shapes: bool = False,
    compile_layers: bool = False,
) -> Watch:
    """Watch a training of any length from now on: ``torchprof.watch(model)`` before the loop is all it takes.

    All steps are timed. Few are recorded: the first 20, four more at each doubling of their number, and after 64 steps
    so many that recording takes at most 0.5 % of the time. ``every`` so many seconds, and for the first time after a
    minute, there is a report:

    - one line in the log, with the logger "torchprof": how long a step took, what took far longer, and, as a warning,
      whether steps take longer than in the first full report, beyond noise, and in which layers. In a job, ranks other
      than 0 log warnings alone;
    - ``metrics(numbers)`` is called with the numbers of ``Run.metrics``, with those of the layers below the model;
    - ``folder`` gets the run of the report, in a file ``<start>-<process>-<report>-rank<rank>.json.gz``. The first full
      one and the last ``keep`` stay, of those that this call wrote;
    - in a job, rank 0 also logs which rank is slow, as ``log_stragglers`` does.

    ``model``: a module, or a list. ``use_cuda``: by default, whether CUDA is available. The last four arguments are as
    for ``Profile``.

    While another profiler records, this one does not; one that starts while this one records ends it. An error of
    torchprof or of ``metrics`` is logged, and ends no training. Raises TorchprofError for a wrong model or
    number, if the folder cannot be made, and while another watch or profiler is active.
    """
    options = {
        "use_cuda": torch.cuda.is_available() if use_cuda is None else use_cuda,
        "profile_memory": profile_memory,
        "with_flops": with_flops,
        "record_shapes": record_shapes,
        "compile_layers": compile_layers,
    }
    return Watch(checked_models(model), every, folder, keep, metrics, options)


class Watch:
    """A training that is watched, see ``torchprof.watch``, from the start to ``stop()``, to the end of its ``with``
    block, or of the process. ``run``: that of the last report, None before the first. ``steps``: how many steps there
    were until then."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        every: float,
        folder: str | PathLike[str] | None,
        keep: int,
        metrics: Callable[[dict[str, int | float]], Any] | None,
        options: dict[str, bool],
    ) -> None:
        active = _Recording.active() if _Recording.active is not None else None
        if active is not None and not active._has_ended:
            raise TorchprofError(
                "Another torchprof.watch is active: stop it first, or give it all models: watch([first, second])."
            )
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not every > 0:
            raise TorchprofError(f"every={every!r:.60} is not a number of seconds above 0.")
        check_count(keep, 1, "keep must be a number of files, 1 or more")
        if metrics is not None and not callable(metrics):
            raise TorchprofError(f"metrics={metrics!r:.60} is not a function: give for example wandb.log.")
        self.run: Run | None = None
        self.steps = 0
        self._recording: _Recording | None = None
        if Guard.gives_way():
            _LOG.warning("This script is recorded by torchprof run: torchprof.watch does nothing.")
            return
        self._usual: tuple[Run, str] | None = None  # that of the first full report, and its steps in words
        self._metrics = metrics
        self._files = _Files(Path(folder), keep) if folder is not None else None
        self._ranks = Comparisons("each rank has to call torchprof.watch")
        self._recording = _Recording(self._report, self.stop, every, models=models, **options)
        self._recording.__enter__()
        _Recording.active = ref(self._recording)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, with a last report. Does nothing the second time."""
        atexit.unregister(self.stop)
        if self._recording is not None and self._recording.is_of_this_process:
            self._recording.__exit__()

    def _report(self, run: Run, steps: range, number: int) -> None:
        """Make a report of these steps. ``number``: how many came before."""
        first, last = steps[0], steps[-1]
        about, is_first_full = f"Steps {first:,} to {last:,}", number == 1
        before, self.run, self.steps = self._usual, run, last
        if is_first_full:
            self._usual = run, about.lower()
        for output_of in (
            partial(_log, run, about, before),
            partial(self._files.add, run, number, stays=is_first_full) if self._files is not None else None,
            partial(self._pass_metrics, run),
            partial(self._ranks.add, run, number, (first, last), *_rank_and_world_size()),
        ):
            try:
                if output_of is not None:
                    output_of()
            except Exception as error:  # of a function of the user, or a full disk: it ends no training
                _LOG.warning("A part of a report failed: %s: %s", type(error).__name__, error)

    def _pass_metrics(self, run: Run) -> None:
        if self._metrics is not None:
            self._metrics(run.metrics(layers=1))


def _log(run: Run, about: str, usual: tuple[Run, str] | None) -> None:
    """Log a line ``about`` the steps of a run. ``usual``: the run to compare with, and its steps in words."""
    has_changed, sentences = False, [*_about_times(run)]
    if usual is not None:
        has_changed, sentence = output("drift")(usual[0], run, usual[1])
        sentences += [sentence] if sentence else []
    rank, is_job = run.meta.rank, run.meta.world_size > 1
    level = logging.WARNING if has_changed else logging.INFO if rank == 0 else logging.DEBUG
    _LOG.log(level, "%s: %s", f"Rank {rank}, {about.lower()}" if is_job else about, " ".join(sentences))


def _passes_in(run: Run) -> int:
    """The number of passes through a model, of those with gradients if there are any."""
    return sum(passes.count for passes in _step_passes(run))


def _step_passes(run: Run) -> list[Passes]:
    return [passes for passes in run.passes if passes.gradients] or [*run.passes]


_FEWEST = 8  # steps without the profiler, from which on their median is shown


def _about_times(run: Run) -> Iterator[str]:
    """Sentences on how long the steps of a run took, and on unusual ones."""
    spreads = [spread for key, spread in run.samples.items() if key.measure == "step_ns"]
    passes = _step_passes(run)
    timed = [*spreads[:1], *(each.ns for each in passes if each.ns is not None)]
    recorded = sum(each.recorded for each in passes)
    if timed and (not run.passes or sum(each.ns.count for each in passes if each.ns is not None) >= _FEWEST):
        how_many = f"{format_number(recorded)} recorded" if run.passes else "all recorded"
        yield f"median {format_time(timed[0].median)}, P95 {format_time(timed[0].quantile(0.95))}, {how_many}."
    elif recorded:
        recorded_ns = sum(each.recorded_ns for each in passes)
        mean = format_time(recorded_ns / recorded)
        yield f"{format_number(recorded)} recorded, in which a step took {mean} on average."
    else:
        yield "Their times are unknown: there are too few."
    unusual = [each for passes in _step_passes(run) for each in passes.unusual]
    if unusual:
        longest = max(unusual, key=lambda each: each.ns)
        more_ns = sum(passes.unusual_ns for passes in _step_passes(run))
        where = f" at {longest.line}" if longest.line else ""
        where += f" in {run.layers[longest.layer].name}" if longest.layer >= 0 else ""
        yield (
            f"Unusual steps took {format_time(more_ns)} longer than the median; "
            f"the longest, {longest.number + 1:,}, took {format_time(longest.ns)}{where}."
        )
    for warning in run.warnings:
        if warning.code == "memory_grows":
            yield str(warning)


class _Files:
    """The files of runs in a folder. ``keep``: how many stay, but for those that are never removed."""

    def __init__(self, folder: Path, keep: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TorchprofError(f"No folder for runs can be made at {folder}: {error.strerror}.") from error
        self._folder, self._keep = folder.resolve(), keep
        self._started = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._written: deque[Path] = deque()

    def add(self, run: Run, number: int, *, stays: bool) -> None:
        file = self._folder / f"{self._started}-{number:05}-rank{run.meta.rank}.json.gz"
        run.save(file)
        if not stays:
            self._written.append(file)
        while len(self._written) > self._keep:
            self._written.popleft().unlink(missing_ok=True)


_MOST_COST = 0.005  # of the time: recording takes at most so much
_LEAST_GAP = 64
_USUAL_GAP = 1024  # if it is not known what recording costs
_FIRST_S = 60.0


class Pace:
    """Which passes of a training are recorded, and when reports are due; in a job as rank 0 says, so that all ranks
    record the same steps, and report them together.

    After the first ones, a burst of passes is recorded in each ``gap``: a power of two of passes, the smallest in which
    recording takes at most 0.5 % of the time, but a burst comes in each ``every_s``. A report comes right after a burst
    of the ``main`` kind of passes, the first with gradients. Rank 0 announces it one burst before.
    """

    def __init__(self, every_s: float, may_record: Callable[[], bool]) -> None:
        self.reports = 0
        self._every_s, self._may_record = every_s, may_record
        self._due_s = time.monotonic() + min(every_s, _FIRST_S)
        self._main: PassKind | None = None
        self._is_main = False  # the pass that comes
        self._gap: int | None = None
        self._own_gap: int | None = None  # as measured here
        self._report_after: int | None = None  # the number of a pass
        self._prefix = f"torchprof/watch/{next(_numbers)}"  # the same on all ranks, which watch in the same order

    def note(self, kind: PassKind) -> bool:
        """A pass of this kind comes. Returns whether it is of the main kind."""
        is_candidate = kind.gradients or _rank_and_world_size()[1] == 1  # only rank 0 may evaluate
        if is_candidate and (self._main is None or (kind.gradients and not self._main.gradients)):
            self._main, self._gap, self._own_gap = kind, None, None
        self._is_main = kind == self._main
        return self._is_main

    def is_recorded(self, number: int) -> bool:
        return self._has_turn(number) and self._may_record()

    def is_after_burst(self, number: int) -> bool:
        """Whether the pass before the one with this number, of the main kind, was the first after a burst."""
        return number > BURST and self._has_turn(number - 2) and not self._has_turn(number - 1)

    def _has_turn(self, number: int) -> bool:
        if number < _LEAST_GAP:
            return is_sampled(number)
        if self._gap is None and self._is_main:
            self._gap = self._agreed_gap()
        return number % (self._gap or _USUAL_GAP) < BURST

    def _agreed_gap(self) -> int:
        if (store := self._store()) is None:
            return self._own_gap or _USUAL_GAP
        with suppress(RuntimeError):  # the store is gone
            return int(store.get("gap")) if store.check(["gap"]) else _USUAL_GAP
        return _USUAL_GAP

    def note_cost(self, cost_ns: float, usual_ns: float) -> None:
        """What a burst of the main kind took longer than so many passes of ``usual_ns``. The first one counts."""
        if self._own_gap is not None or usual_ns <= 0:
            return
        self._own_gap = _LEAST_GAP
        while self._own_gap * usual_ns * _MOST_COST < cost_ns and 2 * self._own_gap * usual_ns < self._every_s * 1e9:
            self._own_gap *= 2
        with suppress(RuntimeError):
            if (store := self._store()) is not None and _rank_and_world_size()[0] == 0:
                store.set("gap", str(self._own_gap))

    def is_due(self, number: int) -> bool:
        """Whether a report is due, before the pass of the main kind with this number, after a burst."""
        is_late = time.monotonic() >= self._due_s
        if (store := self._store()) is None:
            return is_late
        key = f"report/{self.reports}"
        with suppress(RuntimeError):
            if self._report_after is None:
                if _rank_and_world_size()[0] == 0:
                    if is_late:
                        self._report_after = number
                        store.set(key, str(number))
                elif store.check([key]):
                    self._report_after = int(store.get(key))
        return self._report_after is not None and number > self._report_after

    def note_report(self) -> None:
        self.reports += 1
        self._report_after = None
        self._due_s = time.monotonic() + self._every_s

    def _store(self) -> Any:
        """The part of the job's store for this watch; None without a job, or if it has none."""
        try:
            return store_of_job(self._prefix) if _rank_and_world_size()[1] > 1 else None
        except TorchprofError:
            return None


def _rank_and_world_size() -> tuple[int, int]:
    """(0, 1) without a process group."""
    distributed = torch.distributed
    is_job = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if is_job else (0, 1)


class _Recording(Program):
    """Records some passes of a training, as ``Pace`` says, and calls ``report`` with the run since the last report, the
    numbers of its steps, from 1 on, and the number of reports before. ``stop``: what is to be called when the process
    ends."""

    active: ClassVar[ref[_Recording] | None] = None

    def __init__(
        self, report: Callable[[Run, range, int], None], stop: Callable[[], None], every_s: float, **options: Any
    ) -> None:
        self._pace = Pace(every_s, self._may_record)
        self._make_report, self._stop = report, stop
        self._overhead_ns = 0  # of starting and ending the recordings since the last burst
        self._has_woken = False
        self._process = os.getpid()
        self._steps = 0  # that optimizers have ended
        self._reported = 0  # steps, or without optimizers passes
        super().__init__(warmup_calls=None, passes=self._pace.is_recorded, **options)
        self._passes.records_again = False

    def _may_record(self) -> bool:
        """Whether no other profiler is active, or would be harmed."""
        if self._cycles.is_recording:
            return True
        try:
            refuse_if_profiled()
        except TorchprofError:
            return False
        return True

    @property
    def is_of_this_process(self) -> bool:
        """Whether this is not a fork of the process that is watched."""
        return self._process == os.getpid()

    def _before_call(self, module: nn.Module) -> bool:
        return self.is_of_this_process and bool(self._safely(super()._before_call, module))

    def _after_call(self, module: nn.Module, ns: int) -> None:
        self._safely(super()._after_call, module, ns)

    def _safely(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of ours. No error of it ends a training."""
        try:
            return call(*arguments)
        except Exception as error:
            _LOG.warning("Watching has ended: %s: %s", type(error).__name__, error)
            self._has_ended = True
            uninterrupted(self._detach)
            return None

    def _begin_pass(self, kind: PassKind) -> None:
        self._passes.end()
        is_main = self._pace.note(kind)
        # By the steps, since what is set aside as start-up differs between ranks, of which one may evaluate first.
        number = self._passes.next_number(kind, self._steps if is_main and self._steps else None)
        if is_main and self._pace.is_after_burst(number):
            if self._has_woken:  # the first recording began with the watch
                recorded_ns, usual_ns = self._passes.last_recorded_ns(kind, BURST), self._passes.usual_ns(kind)
                self._pace.note_cost(self._overhead_ns + BURST * max(recorded_ns - usual_ns, 0), usual_ns)
            self._overhead_ns = 0
            if self._pace.is_due(number):
                if self._cycles.is_recording:  # passes of another kind
                    self._rest()
                count = self._passes.steps.count
                self._report(self.take(), count)
        super()._begin_pass(kind)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        before = self._passes.steps.count
        self._safely(super()._after_step, optimizer)
        self._steps += self._passes.steps.count > before

    def _wake(self) -> None:
        began_ns = time.perf_counter_ns()
        super()._wake()
        self._overhead_ns += time.perf_counter_ns() - began_ns
        self._has_woken = True

    def _rest(self) -> None:
        began_ns = time.perf_counter_ns()
        super()._rest()
        self._overhead_ns += time.perf_counter_ns() - began_ns

    def _start_cycle(self, with_more: bool = False) -> None:
        super()._start_cycle(with_more)
        # The last registered is called first, and an open session loses its events when it is.
        atexit.unregister(self._stop)
        atexit.register(self._stop)

    def _add_warnings(self, why: RunWarning | None) -> None:
        """Without that on start-up, which is not what one watches for."""
        super()._add_warnings(why)
        warnings = self._cycles.observations.warnings
        warnings[:] = [warning for warning in warnings if warning.code not in ("start_up", "long_start")]

    def _give_way(self) -> None:
        """Another profiler is about to start. It may, while this one does not record."""
        if self._cycles.is_recording:
            super()._give_way()

    def _end(self, why: RunWarning | None = None) -> None:
        if self._has_ended:
            return
        count = self._passes.steps.count
        if not self._cycles.is_recording:  # it has what comes after the loop, too
            self._passes.drop_open()
        try:
            super()._end(why)
            if self._cycles.run is not None:
                self._report(self.run, count)
            elif (spread := self._passes.steps.times.spread) is not None and self.run.meta.rank == 0:
                first, last = self._steps - count + 1, self._steps
                self._reported = last
                times = format_time(spread.median), format_time(spread.quantile(0.95))
                _LOG.info("Steps %s to %s: median %s, P95 %s, none recorded.", f"{first:,}", f"{last:,}", *times)
        except Exception as error:
            _LOG.warning("The last report of a watch failed: %s: %s", type(error).__name__, error)
            uninterrupted(self._detach)
        if why is not None:
            _LOG.warning("Watching has ended: %s", why)
        elif not self._reported:
            _LOG.warning("A watch saw no step: torchprof.watch has to be called on the thread that trains the model.")

    def _report(self, run: Run | None, count: int) -> None:
        """Report a run with so many steps of optimizers."""
        if run is None:
            return
        if count:
            steps = range(self._steps - count + 1, self._steps + 1)
        else:  # without optimizers
            steps = range(self._reported + 1, self._reported + 1 + (run.meta.steps or _passes_in(run)))
        if steps:
            self._reported = steps[-1]
            self._make_report(run, steps, self._pace.reports)
            self._pace.note_report()

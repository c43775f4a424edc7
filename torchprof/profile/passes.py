"""Where the passes of a program begin, which of them are recorded, and the run of all of them."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerAction

from torchprof.profile.cycle import label_ns
from torchprof.profile.pass_times import (
    UNUSUAL,
    Lines,
    PassTimes,
    StepClock,
    parameters_in,
    samples_in,
    with_exact_counts,
    with_times,
    without_profiler,
)
from torchprof.record.modules import instances_of
from torchprof.record.ranges import EngineRanges
from torchprof.run.merge import add_cycle
from torchprof.run.meta import RunWarning
from torchprof.run.part import Scale
from torchprof.run.passes import Passes
from torchprof.run.run import Run

FIRST, BURST = 16, 4
"""The first passes of each kind are recorded, and after them so many at each doubling of their number."""


def is_sampled(number: int) -> bool:
    """Whether the pass of this number, from 0 on, is recorded: 68 of 100,000. It depends on nothing but the number, so
    that all ranks of a job decide alike."""
    return number < FIRST or number - (1 << (number.bit_length() - 1)) < BURST


class Sampled:
    """A schedule for ``Profile``, see ``sampled``."""

    def __call__(self, step: int) -> ProfilerAction:
        if not is_sampled(step):
            return ProfilerAction.NONE
        return ProfilerAction.RECORD if is_sampled(step + 1) else ProfilerAction.RECORD_AND_SAVE

    def __repr__(self) -> str:
        return "torchprof.sampled()"


def sampled() -> Callable[[int], ProfilerAction]:
    """A schedule for a loop of any length: ``Profile(model, schedule=torchprof.sampled())``, with ``prof.step()`` at
    the end of each step. It records the first 16 steps, and four more at each doubling of their number: 68 of 100,000.

    All steps are timed. The run is that of all steps, as estimated from the recorded ones: times are those of the steps
    that ran without the profiler, calls and FLOPs those of all. ``run.passes`` says how many were recorded.
    """
    return Sampled()


class PassKind(NamedTuple):
    """A kind of passes, see ``torchprof.run.passes.Passes``."""

    layer: int
    training: bool
    gradients: bool


class CycleKind(NamedTuple):
    """Cycles whose runs add up: those with passes of one ``kind``; None for others. ``is_interrupted``: those in which
    a pass took far longer than others."""

    kind: PassKind | None
    is_interrupted: bool = False


class PassLog:
    """All passes of a program since its start-up, and the runs of the recorded ones.

    ``recorded``: whether a pass with this number of its kind is recorded; a range of numbers, if the user chose them;
    None: all are recorded. ``weighs``: those that are recorded stand for all of their kind, unless they were chosen.
    ``runs``: those of cycles add up by kind, if a cycle has passes of one kind
    and nothing else. Others stand for themselves: those with the time before the first pass, those with the first
    passes of several kinds, and those in which a pass took far longer than others, as where the machine was
    interrupted, unless no others are of that kind.
    """

    def __init__(self, recorded: Callable[[int], bool] | range | None) -> None:
        self.steps = StepClock()
        self.calls: defaultdict[int, PassTimes] = defaultdict(PassTimes)  # of models, by layer
        self.lines = Lines()
        self._is_all = recorded is None
        self._is_chosen = isinstance(recorded, range)
        self.weighs = not (self._is_all or self._is_chosen)
        self._is_recorded = recorded.__contains__ if isinstance(recorded, range) else recorded or bool
        self._numbers: Counter[PassKind] = Counter()  # of the next pass of each kind
        self._counts: Counter[PassKind] = Counter()  # of the passes since ``restart``
        self._recorded: defaultdict[PassKind, list[int]] = defaultdict(list)  # the times of the recorded passes
        self._times: defaultdict[PassKind, PassTimes] = defaultdict(PassTimes)  # of the others
        self._firsts: defaultdict[PassKind, list[int]] = defaultdict(list)  # of the recorded ones, the first of cycles
        self.records_again = True  # other passes in place of unusual ones, if this process is not a rank of a job
        self._again: Counter[PassKind] = Counter()  # so many passes are recorded in place of unusual ones
        self._open: tuple[PassKind, int, bool] | None = None
        self._is_new = False
        self._began_ns = 0
        self._in_cycles: defaultdict[CycleKind, list[int]] = defaultdict(list)  # the times of the passes in a run
        # Calls of models: in the open pass, in the cycle, in cycles, and of each kind in passes that are not recorded.
        self._calls_in_pass = self._calls_in_cycle = 0
        self._calls: Counter[CycleKind] = Counter()
        self._calls_left: Counter[PassKind] = Counter()
        # The recorded passes of the current cycle, with their times.
        self._in_cycle: list[tuple[PassKind | None, int]] = []
        self.runs: dict[CycleKind, Run] = {}

    # Passes

    def end(self) -> None:
        """A pass ends now, if one is open."""
        if self._open is None:
            return
        ns = perf_counter_ns() - self._began_ns
        (kind, number, is_recorded), self._open = self._open, None
        if is_recorded:
            self._recorded[kind].append(ns)
            self._in_cycle.append((kind, ns))
            self._calls_in_cycle += self._calls_in_pass
            return
        self._calls_left[kind] += self._calls_in_pass
        if self._times[kind].add(number, self._began_ns, ns):
            self._add_up()

    def begin(self, kind: PassKind) -> bool:
        """A pass of this kind comes. Returns whether it is recorded."""
        if not self._counts:  # the steps before were start-up, or warm-up
            self.steps.restart()
        number = self._numbers[kind]
        self._numbers[kind] += 1
        self._counts[kind] += 1
        is_recorded = self._is_all or self._is_recorded(number)
        if not is_recorded and self._again[kind] > 0:
            self._again[kind] -= 1
            is_recorded = True
        self._open, self._is_new = (kind, number, is_recorded), True
        return is_recorded

    @property
    def has_begun(self) -> bool:
        return bool(self._counts)

    def begun(self) -> bool:
        """Our work before a call has ended: a pass that begins with it begins now. Returns whether one is open."""
        if self._is_new:
            self._is_new = False
            self._calls_in_pass = 0
            self._began_ns = perf_counter_ns()
        self._calls_in_pass += 1
        return self._open is not None

    def _add_up(self) -> None:
        for kind, times in self._times.items():
            times.add_up(self.lines.between, self._recorded[kind])
        self.lines.forget()

    # Cycles

    def begin_cycle(self, *, with_more: bool) -> None:
        """A cycle begins. ``with_more``: it has more than passes."""
        self._in_cycle = [(None, 0)] if with_more else []
        self._calls_in_cycle = 0

    def splits_before(self, kind: PassKind) -> bool:
        """Whether a cycle has to end before a pass of this kind, since it has passes of others. The first passes of
        each kind may be together."""
        if self._is_chosen:  # what is before the first chosen pass has a cycle of its own
            return any(known is None for known, _ in self._in_cycle)
        kinds = {known for known, _ in self._in_cycle if known is not None} | {kind}
        return self.weighs and len(kinds) > 1 and any(self._numbers[each] > FIRST for each in kinds)

    def end_cycle(self, is_alone: bool) -> CycleKind:
        """The cycle that is recording ends. Returns which of ``runs`` its run is added to. ``is_alone``: this process
        is not a rank of a job, so that it may record other passes in place of unusual ones."""
        kinds = {kind for kind, _ in self._in_cycle}
        key = CycleKind(kinds.pop() if len(kinds) == 1 and self.weighs else None)
        if self._is_chosen and (None in kinds or not kinds):  # what is not in a pass was not chosen
            return CycleKind(None, is_interrupted=True)
        if key.kind is not None and self._was_interrupted(key.kind):
            may_record_again = self.records_again and is_alone and len(self._in_cycles[key]) < 2 * FIRST
            self._again[key.kind] += BURST if may_record_again else 0
            key = CycleKind(key.kind, is_interrupted=True)
        self._in_cycles[key] += [ns for _, ns in self._in_cycle]
        self._calls[key] += self._calls_in_cycle
        return key

    def _was_interrupted(self, kind: PassKind) -> bool:
        """Whether a pass in this cycle took far longer than others. The first pass in a cycle takes longer anyway."""
        (_, first), *others = self._in_cycle
        self._firsts[kind].append(first)
        usual, usual_first = median(self._recorded[kind]), median(self._firsts[kind])
        return first > UNUSUAL * max(usual_first, usual) or any(ns > UNUSUAL * usual for _, ns in others)

    # All passes

    def restart(self) -> None:
        """Forget the passes until now, but not their numbers. Between passes, while nothing is recorded."""
        for known in (self._counts, self._recorded, self._times, self._firsts, self._in_cycles, self._calls):
            known.clear()
        self._calls_left.clear()
        self.calls.clear()
        self.runs = {}

    def next_number(self, kind: PassKind, number: int | None = None) -> int:
        """The number of the next pass of a kind; from now on ``number``, if that is given."""
        if number is not None:
            self._numbers[kind] = number
        return self._numbers[kind]

    def drop_open(self) -> None:
        """The pass that is open does not count."""
        if self._open is not None:
            self._counts[self._open[0]] -= 1
            self._open = None

    def last_recorded_ns(self, kind: PassKind, count: int) -> float:
        """The median time of the last recorded passes of a kind; 0 if there are none."""
        return median(self._recorded[kind][-count:] or [0])

    @property
    def recorded_pass_ns(self) -> float:
        """The median time of the recorded passes of all kinds; 0 if there are none."""
        return median([*chain.from_iterable(self._recorded.values())] or [0])

    def usual_ns(self, kind: PassKind) -> int:
        """The median time of the passes of a kind that were not recorded; 0 if it is unknown."""
        times = self._times[kind]
        times.add_up(self.lines.between, self._recorded[kind])
        return times.usual_ns

    def end_or_drop(self) -> None:
        """The program ends. The pass that is open counts if it took as long as half of one: else it has only begun."""
        if self._open is None:
            return
        kind = self._open[0]
        usual = [*self._recorded[kind], *filter(None, [self._times[kind].usual_ns])]
        if perf_counter_ns() - self._began_ns > _HALF * median(usual or [0]):
            self.end()
        else:
            self.drop_open()

    def put(self, run: Run) -> None:
        """The run of all recorded passes, which are of one kind, if others have added it up."""
        for kind, ns in self._recorded.items():
            self._calls[CycleKind(kind)], self._in_cycles[CycleKind(kind)] = len(ns), ns
            self.runs = {CycleKind(kind): run}

    def whole(self, entered: Mapping[str, int]) -> Run | None:
        """The run of all passes; None if nothing was recorded. ``entered``: see ``with_exact_counts``."""
        self._add_up()
        self.steps.times.add_up()
        if self._is_chosen:
            self.runs.pop(CycleKind(None, is_interrupted=True), None)
        kinds = {key.kind: key for key in sorted(self.runs, key=lambda key: -key.is_interrupted)}  # rather without
        whole, samples = None, sum(map(samples_in, self.runs.values()))
        for key, run in self.runs.items():
            scaled = self._scaled(key, run) if kinds[key.kind] == key else run
            whole = scaled if whole is None else add_cycle(whole, scaled)
        if whole is None:
            return None
        if self.weighs and any(times.spread for times in self._times.values()):
            passes = [*self._passes(whole.meta.rank, kinds)]
            left_ns = sum(each.unusual_ns for each in passes)
            left_ns += sum(
                times.spread.sum - times.unusual_ns
                for kind, times in self._times.items()
                if times.spread is not None and kind not in kinds
            )
            whole = replace(whole, passes=tuple(passes))
            whole = with_times(whole, self._timed_steps(whole), self.calls, left_ns)
        return whole if self._is_chosen else with_exact_counts(whole, entered, samples)

    def about_chosen(self) -> Iterator[RunWarning]:
        """A warning if passes were chosen by their numbers: the figures are theirs alone."""
        if self._is_chosen:
            recorded, count = sum(map(len, self._recorded.values())), sum(self._counts.values())
            yield RunWarning.of("passes_chosen", recorded=recorded, count=count)

    def _scaled(self, key: CycleKind, run: Run) -> Run:
        """The run of all passes of a kind but those of other cycles."""
        kind = key.kind
        times = None if kind is None else self._times[kind]
        if kind is None or times is None or times.spread is None:
            return run
        count, calls = len(self._in_cycles[key]), self._calls[key]
        of_all = count + times.spread.count
        usual_ns = (times.spread.sum - times.unusual_ns) / times.spread.count
        run = without_profiler(run, count, usual_ns, label_ns() or 0)
        counting = max(calls + self._calls_left[kind], 1), max(calls, 1)
        run = run.scaled(Scale(counting, (max(round(usual_ns * of_all), 1), run.meta.wall_ns)))
        # Under the profiler, a device waits longer for a slower CPU: it was not in use for longer than the passes took.
        most_ns = run.meta.wall_ns
        devices = (replace(each, span_ns=max(min(each.span_ns, most_ns), each.busy_ns)) for each in run.device_times)
        return replace(run, device_times=tuple(devices))

    def _passes(self, rank: int, keys: Mapping[PassKind | None, CycleKind]) -> Iterator[Passes]:
        """``keys``: by kind, which of ``runs`` stands for all of its passes, with the times of the others."""
        for kind, count in self._counts.items():
            times, recorded = self._times[kind], self._recorded[kind]
            most = UNUSUAL * median(recorded or [0])
            unusual_ns = times.unusual_ns
            if times.spread is not None and kind in keys:
                unusual_ns += sum(round(ns - most / UNUSUAL) for ns in self._in_cycles[keys[kind]] if ns > most)
            yield Passes(
                rank,
                *kind,
                count=count,
                recorded=len(recorded),
                recorded_ns=sum(recorded),
                ns=times.spread,
                unusual_ns=unusual_ns,
                unusual=times.unusual,
                trend=times.trend,
            )

    def _timed_steps(self, run: Run) -> tuple[int, PassTimes] | None:
        """How many steps there were, and the times of those that were not recorded; None if that is unknown. Without
        optimizers, they are the passes with gradients, or else those of the model that was called first."""
        if self.steps.times.spread is not None:
            return self.steps.count, self.steps.times
        kinds = [kind for kind in self._counts if kind.gradients] or [*self._counts][:1]
        if len(kinds) != 1 or not run.meta.steps:
            return None
        return self._counts[kinds[0]], self._times[kinds[0]]


# Where passes begin

_CALLS_WITHOUT_BACKWARD = 4  # from so many on, a model with gradients is taken for one without backward
_BACKWARD_WITHOUT_STEP = 256  # from so many on, optimizers are taken for none
_HALF = 0.5  # of the usual time of a pass
_LARGE_START_UP = 0.01  # a larger share of start-up, which is left out, gives a warning


class Settling:
    """Whether the backward of all calls so far has probably run.

    ``is_settled``: an optimizer has made a step since the last call with gradients. ``may_begin_pass``: a step of the
    loop has ended since then, see ``StepClock``; without optimizers, a backward pass; without any backward, as where
    evaluation forgets ``no_grad``, several calls had none. Optimizers that make no step in hundreds of backward passes
    count as none.
    """

    def __init__(self, steps: StepClock, models: Callable[[], Iterable[nn.Module]]) -> None:
        """``models``: those that were called."""
        self.is_settled = True
        self._models = models
        self._steps = steps
        self._waits = self._has_optimizer = self._has_backward = False
        self._calls = self._backwards = 0  # since the last step

    def on(self) -> None:
        self._home = get_ident()
        self._engine = EngineRanges()
        self._engine.on()
        EngineRanges.after.append(self._note_backward)

    def off(self) -> None:
        EngineRanges.after.remove(self._note_backward)
        self._engine.off()

    def note_call(self) -> None:
        if torch.is_grad_enabled():
            self.is_settled, self._waits = False, True
            self._calls += 1

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if get_ident() != self._home:
            return
        self._find_optimizers()
        self._has_optimizer = True
        self._calls = self._backwards = 0
        self.is_settled = True
        if self._steps.add(optimizer):
            self._waits = False

    def _note_backward(self) -> None:
        if get_ident() != self._home:
            return
        self._find_optimizers()
        self._backwards += 1
        if not self._has_optimizer or self._backwards > _BACKWARD_WITHOUT_STEP:
            self._waits = False

    def _find_optimizers(self) -> None:
        """Once, when the first backward pass has ended: find the optimizers of the models that were called."""
        if not self._has_backward:
            self._has_backward = True
            called = {id(parameter) for model in self._models() for parameter in model.parameters()}
            optimizers = [each for each in instances_of(torch.optim.Optimizer) if called & parameters_in(each)]
            self._has_optimizer = bool(optimizers)
            self._steps.know(optimizers)

    @property
    def may_begin_pass(self) -> bool:
        return not self._waits or (not self._has_backward and self._calls >= _CALLS_WITHOUT_BACKWARD)


@dataclass
class StartUp:
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

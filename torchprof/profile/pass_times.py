"""How long passes, steps and calls take that are not recorded; and a run with these times."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from time import perf_counter_ns
from typing import Any
from weakref import ref

from torchprof.record.python_lines import Sampler
from torchprof.run.groups import lists_by_key
from torchprof.run.measures import Cost, SampleKey, Spread
from torchprof.run.part import Scale
from torchprof.run.passes import MOST_UNUSUAL, Unusual, longest
from torchprof.run.rows import rows_of_lines
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, OUTSIDE, PHASES, UNUSUAL_PASSES, Frame, FrameKind

UNUSUAL = 3
"""A pass that takes so many times as long as the median is unusual."""
_PIECE = 1024  # times that are added up at once
_FEWEST = 8  # times, from which on their median tells what is usual
_PERIOD = 8  # of an optimizer that has made no step yet


class PassTimes:
    """The times of passes, or steps, that were not recorded. Memory stays the same, however many there are.

    ``spread``, ``unusual_ns``, ``unusual``: as in ``Passes``, after ``add_up``.
    """

    def __init__(self) -> None:
        self.spread: Spread | None = None
        self.unusual_ns = 0
        self.unusual: tuple[Unusual, ...] = ()
        self._waiting = array("q"), array("q"), array("q")  # numbers, starts, times

    def add(self, number: int, start_ns: int, ns: int) -> bool:
        """Returns whether it is time to add up."""
        numbers, starts, times = self._waiting
        numbers.append(number)
        starts.append(start_ns)
        times.append(ns)
        return len(times) >= _PIECE

    def add_up(self, line_between: Callable[[int, int], str] = lambda start, end: "") -> None:
        """Add the times since the last call. ``line_between``: the source line that was sampled most in a time."""
        numbers, starts, times = self._waiting
        if not times:
            return
        self._waiting = array("q"), array("q"), array("q")
        spread = Spread.of([*zip(starts, times)])
        self.spread = spread if self.spread is None else self.spread + spread
        if self.spread.count < _FEWEST:
            return
        usual = self.usual_ns
        found = [number for number, ns in enumerate(times) if ns > UNUSUAL * usual]
        self.unusual_ns += sum(times[number] - usual for number in found)
        found = sorted(found, key=times.__getitem__)[-MOST_UNUSUAL:]
        unusual = [
            Unusual(numbers[each], times[each], line_between(starts[each], starts[each] + times[each]))
            for each in found
        ]
        self.unusual = longest([*self.unusual, *unusual])

    @property
    def usual_ns(self) -> int:
        """The median; 0 if it is unknown."""
        return 0 if self.spread is None else round(self.spread.median)


class Lines:
    """The source lines of the thread while nothing is recorded, sampled every 20 ms."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def on(self, thread: int) -> None:
        if self._sampler is None:
            self._sampler = Sampler(thread, 0.02)
        self._sampler.start()

    def off(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def between(self, start_ns: int, end_ns: int) -> str:
        """The line that was sampled most in this time; "" without samples."""
        samples = () if self._sampler is None else self._sampler.samples()
        lines: Counter[str] = Counter()
        for at_ns, line, intervals in samples:
            if start_ns <= at_ns < end_ns:
                lines[line] += intervals
        return lines.most_common(1)[0][0] if lines else ""

    def forget(self) -> None:
        if self._sampler is not None:
            self._sampler.forget()


class StepClock:
    """Times the steps of a loop. A step ends where each optimizer in the loop has made a step since the last end, as
    the steps of ``attribute.loop``: so those of a critic and of a generator are one.

    An optimizer is in the loop until it is freed, or has made no step for twice its period, which is the most steps (of
    all) from one of its steps to the next. Those that are known before their first step are waited for, too, for a
    while.
    """

    def __init__(self) -> None:
        self.times = PassTimes()
        self.count = 0
        self._number = 0  # of steps of optimizers
        self._known: dict[int, ref[Any]] = {}  # the optimizers, by id
        self._last: dict[int, int] = {}  # by optimizer, the number of its last step
        self._period: dict[int, int] = {}
        self._done: set[int] = set()  # the optimizers that have made a step since the last end
        self._began_ns = 0  # 0: unknown

    def interrupt(self) -> None:
        """The step that is open now is not timed."""
        self._began_ns = 0

    def know(self, optimizers: Iterable[Any]) -> None:
        """These optimizers may make steps."""
        for optimizer in optimizers:
            if id(optimizer) not in self._known:
                self._known[id(optimizer)] = ref(optimizer)
                self._last[id(optimizer)], self._period[id(optimizer)] = self._number, _PERIOD

    def add(self, optimizer: Any) -> bool:
        """An optimizer has made a step. Returns whether it ends a step of the loop."""
        key, now = id(optimizer), perf_counter_ns()
        self._number += 1
        if key not in self._known or self._known[key]() is not optimizer:
            self._known[key], self._period[key] = ref(optimizer), 1
        else:
            before = 0 if self._period[key] == _PERIOD else self._period[key]
            self._period[key] = max(self._number - self._last[key], before)
        self._last[key] = self._number
        self._done.add(key)
        for other in [*self._known] if len(self._known) > 1 else ():
            if other not in self._done:
                if self._known[other]() is not None and self._number - self._last[other] <= 2 * self._period[other]:
                    return False
                del self._known[other]
        self._done.clear()
        self.count += 1
        if self._began_ns and self.times.add(self.count, self._began_ns, now - self._began_ns):
            self.times.add_up()
        self._began_ns = now
        return True


def with_times(run: Run, steps: tuple[int, PassTimes] | None, calls: Mapping[int, PassTimes], left_ns: int) -> Run:
    """The run with the times of steps, and of calls of models, as they are without the profiler. ``left_ns``: the time
    of passes that no recorded one stands for, and by how much unusual ones took longer: it has a row of its own."""
    samples = dict(run.samples)
    if steps is not None and steps[1].spread is not None:
        count, times = steps
        samples = _with_steps(samples, run.meta.rank, count, steps[1].spread, times.unusual_ns)
        run = replace(run, metas=(replace(run.meta, steps=count),))
    for layer, times in calls.items():
        times.add_up()
        key = SampleKey(layer, FORWARD, run.meta.rank, "cpu", "cpu_ns")
        if times.spread is not None and key in samples:
            count = max(samples[key].count, times.spread.count)
            samples[key] = times.spread.scaled(_counting(count, times.spread.count), True)
    run = replace(run, samples=samples)
    return _with_time_left(run, left_ns) if left_ns > 0 else run


def _with_steps(
    samples: dict[SampleKey, Spread], rank: int, count: int, timed: Spread, unusual_ns: int
) -> dict[SampleKey, Spread]:
    """The samples with the times of ``count`` steps, of which some were ``timed``. The parts of the recorded steps are
    scaled to the usual ones of these, and by what unusual ones took longer counts as other work: the means of the parts
    add up to the mean of a step."""
    key = SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns")
    if (recorded := samples.get(key)) is None:
        return samples
    usual_ns = max(timed.sum - unusual_ns, 1)
    scale = Scale((count, recorded.count), (usual_ns * count, max(recorded.sum, 1) * timed.count))
    scaled = {
        each: spread.scaled(scale, True) if each.measure.startswith("step_") else spread
        for each, spread in samples.items()
    }
    scaled[key] = timed.scaled(_counting(count, timed.count), True)
    other = key._replace(measure="step_other_ns")
    if unusual_ns:
        known = scaled.get(other, Spread(count, 0, 0, 0, 0, (0,), (0,)))
        scaled[other] = replace(known, sum=known.sum + unusual_ns * count // timed.count)
    return scaled


def with_calls_of_ranges(run: Run, entered: Mapping[str, int]) -> Run:
    """The run with the right number of calls of ranges of ``record_function``: a range that was open in several cycles,
    as that of an epoch, was recorded in each. ``entered``: how often those of each name were entered."""
    rows = run.rows
    names = {
        number: chain[-1].name
        for number, chain in enumerate(rows.frames)
        if chain and chain[-1].kind == FrameKind.LABEL and chain[-1].name in entered
    }
    places = lists_by_key((names[chain], place) for place, chain in enumerate(rows.columns["frames"]) if chain in names)
    calls = array("q", rows.columns["calls"])
    for name, of_name in places.items():
        recorded = [calls[place] for place in of_name]
        if sum(recorded):
            for place, exact in zip(of_name, Scale((entered[name], sum(recorded)), (1, 1)).counts(recorded)):
                calls[place] = exact
    return replace(run, rows=replace(rows, columns={**rows.columns, "calls": calls}))


def _counting(count: int, known: int) -> Scale:
    """The scale from ``known`` times to ``count`` like them."""
    return Scale((count, known), (count, known))


def _with_time_left(run: Run, left_ns: int) -> Run:
    line: dict[tuple[int, ...], tuple[int, ...]] = {
        (OUTSIDE, PHASES.index(FORWARD), 0, 0, 1, 0, run.meta.rank): (0, *astuple(Cost(cpu_ns=left_ns)))
    }
    frames = (), (Frame(FrameKind.OP, UNUSUAL_PASSES),)
    rows = run.rows.added(rows_of_lines(run.rows.layers, line, frames, ["cpu"]))
    return replace(run, rows=rows, metas=(replace(run.meta, wall_ns=run.meta.wall_ns + left_ns),))

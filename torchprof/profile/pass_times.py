"""How long passes, steps and calls take that are not recorded; and a run with these times."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from time import perf_counter_ns
from typing import Any

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
_EXPIRES = 8  # steps of others, beyond twice its period, after which an optimizer has left the loop


class Times:
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
    """Times the steps of a loop by those of its optimizers: from a step of the one that makes the fewest to its next.
    Before each call, the caller says whether the time since the last one counts.

    An optimizer that steps no more, as that of a fold of a cross-validation, makes way for others.
    """

    def __init__(self) -> None:
        self.times = Times()
        self._counts: Counter[int] = Counter()  # steps by optimizer
        self._last: dict[int, int] = {}  # by optimizer, the number of its last step among all
        self._number = 0
        self._chosen: int | None = None
        self._period = 0  # steps of all from one of the chosen one to its next
        self._before = 0  # steps by those that have made way
        self._began_ns = 0  # 0: unknown

    @property
    def count(self) -> int:
        """How many steps there were; 0 without an optimizer."""
        return 0 if self._chosen is None else self._before + self._counts[self._chosen]

    def interrupt(self) -> None:
        """The step that is open now is not timed."""
        self._began_ns = 0

    def add(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
        key, now = id(optimizer), perf_counter_ns()
        self._number += 1
        self._counts[key] += 1
        since_last = self._number - self._last.get(key, self._number)
        self._last[key] = self._number
        if self._chosen is None or self._number - self._last[self._chosen] > 2 * self._period + _EXPIRES:
            self._before = self.count
            self._choose(key, 1)
        elif key != self._chosen and since_last > self._period:
            self.times = Times()
            self._choose(key, since_last)
        if key != self._chosen:
            return
        self._period = max(self._period, since_last)
        if self._began_ns and self.times.add(self.count, self._began_ns, now - self._began_ns):
            self.times.add_up()
        self._began_ns = now

    def _choose(self, key: int, period: int) -> None:
        self._chosen, self._period, self._began_ns = key, period, 0


def with_times(run: Run, steps: tuple[int, Times] | None, calls: Mapping[int, Times], left_ns: int) -> Run:
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

"""How long passes, steps and calls take that are not recorded; and a run with these times."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from operator import add
from statistics import median
from time import perf_counter_ns
from typing import Any
from weakref import ref

from torchprof.attribute.event_names import is_node_range
from torchprof.record.python_lines import Sampler
from torchprof.run.groups import lists_by_key
from torchprof.run.measures import Cost, SampleKey, Spread
from torchprof.run.part import Scale
from torchprof.run.passes import MOST_UNUSUAL, Stretch, Unusual, lengthened, longest
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.run import Run
from torchprof.run.torch_names import purpose_of
from torchprof.run.words import (
    AUTOGRAD_ENGINE,
    FORWARD,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    UNUSUAL_PASSES,
    Frame,
    FrameKind,
    sampled_line,
)

UNUSUAL = 3
"""A pass that takes so many times as long as the median is unusual."""
_PIECE = 1024  # times that are added up at once
_FEWEST = 8  # times, from which on their median tells what is usual
_UNKNOWN_USE = 0.01  # of the time in unusual passes: from this on, the use of the processor is unknown
_PERIOD = 8  # of an optimizer that has made no step yet


class PassTimes:
    """The times of passes, or steps, that were not recorded. Memory stays the same, however many there are.

    ``spread``, ``unusual_ns``, ``unusual``, ``trend``: as in ``Passes``, after ``add_up``.
    """

    def __init__(self) -> None:
        self.spread: Spread | None = None
        self.unusual_ns = 0
        self.unusual: tuple[Unusual, ...] = ()
        self.trend: tuple[Stretch, ...] = ()
        self._waiting = array("q"), array("q"), array("q")  # numbers, starts, times

    def add(self, number: int, start_ns: int, ns: int) -> bool:
        """Returns whether it is time to add up."""
        numbers, starts, times = self._waiting
        numbers.append(number)
        starts.append(start_ns)
        times.append(ns)
        return len(times) >= _PIECE

    def add_up(
        self,
        place_between: Callable[[int, int], tuple[str, int]] = lambda start, end: ("", OUTSIDE),
        recorded: Sequence[int] = (),
    ) -> None:
        """Add the times since the last call. ``place_between``: the line and layer that were sampled most in a time.
        ``recorded``: the times of the recorded passes, which say what is usual if there are few others."""
        numbers, starts, times = self._waiting
        if not times:
            return
        self._waiting = array("q"), array("q"), array("q")
        spread = Spread.of([*zip(starts, times)])
        self.spread = spread if self.spread is None else self.spread + spread
        is_enough = self.spread.count >= _FEWEST
        usual = self.usual_ns if is_enough else round(median([*recorded, *self.spread.sample]))
        found = [number for number, ns in enumerate(times) if ns > UNUSUAL * usual]
        self.unusual_ns += sum(times[number] - usual for number in found)
        self.trend = lengthened(self.trend, times)
        found = sorted(found, key=times.__getitem__)[-MOST_UNUSUAL:]
        unusual = [
            Unusual(numbers[each], times[each], *place_between(starts[each], starts[each] + times[each]))
            for each in found
        ]
        self.unusual = longest([*self.unusual, *unusual])

    @property
    def usual_ns(self) -> int:
        """The median; 0 if it is unknown."""
        return 0 if self.spread is None else round(self.spread.median)


class Lines:
    """The source lines and layers of the thread while nothing is recorded, sampled every 20 ms."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def on(self, thread: int, layer_with_id: Callable[[int], int]) -> None:
        """``layer_with_id``: the layer of a module, from its id."""
        if self._sampler is None:
            self._sampler, self._layer_with_id = Sampler(thread, 0.02, with_modules=True), layer_with_id
        self._sampler.start()

    def off(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def between(self, start_ns: int, end_ns: int) -> tuple[str, int]:
        """The line and the layer that were sampled most in this time; "" without samples."""
        samples = () if self._sampler is None else self._sampler.samples()
        places: Counter[tuple[str, int]] = Counter()
        for at_ns, line, intervals, module in samples:
            if start_ns <= at_ns < end_ns:
                places[line, self._layer_with_id(module)] += intervals
        return places.most_common(1)[0][0] if places else ("", OUTSIDE)

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

    def restart(self) -> None:
        """Count and time only the steps that end from now on."""
        self.times, self.count, self._began_ns = PassTimes(), 0, 0

    def interrupt(self) -> None:
        """The step that is open now is not timed."""
        self._began_ns = 0

    def know(self, optimizers: Iterable[Any]) -> None:
        """These optimizers may make steps."""
        for optimizer in optimizers:
            if id(optimizer) not in self._known:
                self._known[id(optimizer)] = ref(optimizer)
                self._last[id(optimizer)], self._period[id(optimizer)] = self._number, _PERIOD

    def _forget_wrappers(self, optimizer: Any) -> None:
        """Do not wait for optimizers around this one, as those of accelerate, whose own steps are not seen: they have
        made none, and have the same parameters."""
        parameters = parameters_in(optimizer)
        for key, known in [*self._known.items()]:
            other = known()
            if other is not optimizer and self._period[key] == _PERIOD and parameters & parameters_in(other):
                del self._known[key]

    def add(self, optimizer: Any) -> bool:
        """An optimizer has made a step. Returns whether it ends a step of the loop."""
        key, now = id(optimizer), perf_counter_ns()
        self._number += 1
        if key not in self._known or self._known[key]() is not optimizer:
            self._known[key], self._period[key] = ref(optimizer), 1
            self._forget_wrappers(optimizer)
        elif self._period[key] == _PERIOD:
            self._period[key] = self._number - self._last[key]
            self._forget_wrappers(optimizer)
        else:
            self._period[key] = max(self._number - self._last[key], self._period[key])
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


def parameters_in(optimizer: Any) -> set[int]:
    """The ids of the parameters of an optimizer."""
    with suppress(Exception):  # code of a wrapper may raise anything
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return set()


_EVENT_NS = 200, 350  # the least and the most that an event costs


def without_profiler(run: Run, passes: int, usual_ns: float, label_ns: float) -> Run:
    """The run of so many recorded passes, without the time that the profiler took for its events.

    An event costs what recorded passes take longer than others, divided by the number of events, between 0.2 and 0.35
    us. This time is before and after the event, and so in the range around it. ``usual_ns``: of a pass without the
    profiler. ``label_ns``: what a label costs.
    """
    rows, extra_ns = run.rows, run.meta.wall_ns - passes * usual_ns
    if extra_ns <= 0:
        return run
    places = {key: place for place, key in enumerate(zip(*(rows.columns[name] for name in rows.KEYS)))}
    number_of = {chain: number for number, chain in enumerate(rows.frames)}
    events: Counter[tuple[int, ...]] = Counter()  # by the key of the row around them
    labels: Counter[tuple[int, int]] = Counter()  # by layer and phase around them
    nodes = 0
    for key, calls in zip(places, rows.columns["calls"]):
        layer, phase, shared, within, chain, device, rank = key
        frames = rows.frames[chain]
        if not calls or rows.devices[device] != "cpu":
            continue
        if not frames and layer >= 0:
            parent = run.layers.parent[layer]
            labels[OUTSIDE if parent is None else parent, phase] += calls
        elif frames and is_node_range(frames[-1].name):
            nodes += calls
        elif frames and frames[-1].kind in (FrameKind.OP, FrameKind.LABEL) and sampled_line(frames) is None:
            events[layer, phase, shared, within, number_of.get(frames[:-1], -1), device, rank] += calls
    least, most = _EVENT_NS
    count = max(events.total() + nodes, 1)
    event_ns = min(max((extra_ns - label_ns * labels.total()) / count, least), most)
    cpu_ns = array("q", rows.columns["cpu_ns"])

    def take(of: Sequence[int], ns: float) -> None:
        """Take a time from some rows, in proportion to what they have."""
        having = sum(cpu_ns[place] for place in of)
        for place in of:
            cpu_ns[place] -= round(min(ns / having, 1) * cpu_ns[place]) if having else 0

    own = lists_by_key(((key[0], key[1]), place) for key, place in places.items() if not rows.frames[key[4]])
    is_engine = [bool(chain) and chain[-1].name == AUTOGRAD_ENGINE for chain in rows.frames]
    take([place for key, place in places.items() if is_engine[key[4]]], nodes * event_ns)
    for (layer, phase), calls in labels.items():
        take(own[layer, phase] or own[OUTSIDE, phase], calls * label_ns)
    for key, calls in events.items():
        if key in places:
            take([places[key]], calls * event_ns)
    wall_ns = max(run.meta.wall_ns - sum(rows.columns["cpu_ns"]) + sum(cpu_ns), 1)
    corrected = replace(rows, columns={**rows.columns, "cpu_ns": cpu_ns})
    samples = _in_proportion(run, _sums_of_samples(run, rows), _sums_of_samples(run, corrected))
    return replace(run, rows=corrected, samples=samples, metas=(replace(run.meta, wall_ns=wall_ns),))


def _sums_of_samples(run: Run, rows: Rows) -> dict[tuple[int, str, str], int]:
    """By layer, phase and measure of the CPU's samples: the sum over rows that it is about."""
    sums: Counter[tuple[int, str, str]] = Counter()
    own = rows.summed(("layer", "phase"), "cpu_ns", device="cpu")
    of_layers = {(layer, PHASES[phase]): ns for (layer, phase), ns in own.items()}
    for (layer, phase), ns in run.layers.roll_up_by_phase(of_layers, add).items():
        sums[layer, phase, "step_cpu_ns"] = ns
        sums[layer, phase, "cpu_ns"] = sums[layer, phase, "no_grad_ns"] = ns
    for (phase, chain), ns in rows.summed(("phase", "frames"), "cpu_ns", layer=OUTSIDE, device="cpu").items():
        sums[OUTSIDE, FORWARD, f"step_{purpose_of(PHASES[phase], rows.frames[chain])}_ns"] += ns
    return sums


def _in_proportion(
    run: Run, before: Mapping[tuple[int, str, str], int], after: Mapping[tuple[int, str, str], int]
) -> dict[SampleKey, Spread]:
    """The samples of the run, those of times of the CPU in proportion to sums over rows, before and after a change."""
    samples = dict(run.samples)
    for key, spread in run.samples.items():
        about = key.layer, key.phase, key.measure
        if key.device == "cpu" and before.get(about) and after.get(about):
            samples[key] = spread.scaled(Scale((1, 1), (after[about], before[about])), True)
    return samples


def with_times(run: Run, steps: tuple[int, PassTimes] | None, calls: Mapping[int, PassTimes], left_ns: int) -> Run:
    """The run with the times of steps, and of calls of models, as they are without the profiler. ``left_ns``: the time
    of passes that no recorded one stands for, and by how much unusual ones took longer: it has a row of its own."""
    samples = dict(run.samples)
    if steps is not None and steps[1].spread is not None:
        count, times = steps
        samples = _with_steps(run, count, steps[1].spread, times.unusual_ns)
        run = replace(run, metas=(replace(run.meta, steps=count),))
    for layer, times in calls.items():
        times.add_up()
        key = SampleKey(layer, FORWARD, run.meta.rank, "cpu", "cpu_ns")
        if times.spread is not None and key in samples:
            count = max(samples[key].count, times.spread.count)
            samples[key] = times.spread.scaled(_counting(count, times.spread.count), True)
    run = replace(run, samples=samples)
    return _with_time_left(run, left_ns) if left_ns > 0 else run


def _with_steps(run: Run, count: int, timed: Spread, unusual_ns: int) -> dict[SampleKey, Spread]:
    """The samples of the run with the times of ``count`` steps, of which some were ``timed``. The parts of the recorded
    steps are scaled to the usual ones of these, and by what unusual ones took longer counts as other work: the means of
    the parts add up to the mean of a step."""
    key = SampleKey(OUTSIDE, FORWARD, run.meta.rank, "cpu", "step_ns")
    if (recorded := run.samples.get(key)) is None:
        return dict(run.samples)
    outermost = {NOT_SELECTED, *run.layers.roots}
    parts_ns = 0  # what a step is the sum of, see ``SampleKey``
    for (layer, _, _, device, measure), spread in run.samples.items():
        is_part = layer in outermost if measure == "step_cpu_ns" else measure.startswith("step_")
        if is_part and device == "cpu" and measure != "step_ns":
            parts_ns += -spread.sum if measure == "step_overlap_ns" else spread.sum
    usual_ns = max(timed.sum - unusual_ns, 1)
    scale = Scale((count, recorded.count), (usual_ns * count, max(parts_ns, 1) * timed.count))
    scaled = {
        each: spread.scaled(scale.on(each.device), True) if each.measure.startswith("step_") else spread
        for each, spread in run.samples.items()
    }
    scaled[key] = timed.scaled(_counting(count, timed.count), True)
    other = key._replace(measure="step_other_ns")
    if unusual_ns:
        known = scaled.get(other, Spread(count, 0, 0, 0, 0, (0,), (0,)))
        scaled[other] = replace(known, sum=known.sum + unusual_ns * count // timed.count)
    return scaled


def with_exact_counts(run: Run, entered: Mapping[str, int], samples: int) -> Run:
    """The run with the right number of calls of ranges of ``record_function``, and of samples of source lines.

    A range that was open in several cycles, as that of an epoch, was recorded in each. ``entered``: how often those of
    each name were entered. Samples of passes that stand for many others weigh more, but there are no more than were
    taken, ``samples`` in all: a line with few of them is there by chance.
    """
    rows = run.rows
    counts = {"": samples, **entered}
    names = {}  # of what is counted, by the number of a chain of frames; "" for all source lines
    for number, chain in enumerate(rows.frames):
        if sampled_line(chain) is not None:
            names[number] = ""
        elif chain and chain[-1].kind == FrameKind.LABEL and chain[-1].name in entered:
            names[number] = chain[-1].name
    places = lists_by_key((names[chain], place) for place, chain in enumerate(rows.columns["frames"]) if chain in names)
    calls = array("q", rows.columns["calls"])
    for name, of_name in places.items():
        recorded = [calls[place] for place in of_name]
        if sum(recorded):
            for place, exact in zip(of_name, Scale((1, 1), (counts[name], sum(recorded))).times(recorded)):
                calls[place] = exact
    return replace(run, rows=replace(rows, columns={**rows.columns, "calls": calls}))


def samples_in(run: Run) -> int:
    """How many samples of source lines a run has."""
    return run.rows.total("calls", frames=lambda chain: sampled_line(chain) is not None)


def _counting(count: int, known: int) -> Scale:
    """The scale from ``known`` times to ``count`` like them."""
    return Scale((count, known), (count, known))


def _with_time_left(run: Run, left_ns: int) -> Run:
    line: dict[tuple[int, ...], tuple[int, ...]] = {
        (OUTSIDE, PHASES.index(FORWARD), 0, 0, 1, 0, run.meta.rank): (0, *astuple(Cost(cpu_ns=left_ns)))
    }
    frames = (), (Frame(FrameKind.OP, UNUSUAL_PASSES),)
    rows = run.rows.added(rows_of_lines(run.rows.layers, line, frames, ["cpu"]))
    meta = replace(run.meta, wall_ns=run.meta.wall_ns + left_ns)
    if left_ns > _UNKNOWN_USE * meta.wall_ns:
        meta = replace(meta, process_cpu_ns=None, run_delay_ns=None)
    return replace(run, rows=rows, metas=(meta,))

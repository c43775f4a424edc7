"""Where a recording and its steps begin and end: at marks, and in a loop without marks by what it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import (
    ENGINE_LABEL,
    OPTIMIZER_MARK,
    REGION,
    STEP_MARK,
    is_module_label,
    is_node_range,
    is_torchs_step,
)
from torchprof.attribute.events import Event, Kind
from torchprof.run.groups import lists_by_key
from torchprof.run.words import ANY_STEP, OPTIMIZER_STEP, StepEnd

# At marks


def keep_recorded(columns: EventColumns) -> int | None:
    """Keep the events between the marks at the start and the end of a recording; all events of a session without them.
    The time between the two, in ns; None if there is no such pair."""
    opened, ended = columns.of_kinds(Kind.OPENED), columns.of_kinds(Kind.ENDED)
    begin = end = None
    if opened:
        since, marks = columns.start[opened[0][0]], columns.of_kinds(Kind.STEP)
        begin = next((index for index, _ in marks if columns.start[index] >= since), None)
        if begin is None:  # nothing was recorded
            columns.threads, columns.kernels = [], ()
            return None
    if ended:
        end = ended[0][0]
    columns.keep_between(begin, end)
    return None if begin is None or end is None else columns.start[end] - columns.end[begin]


def add_steps(columns: EventColumns, steps: int) -> None:
    """Add a STEP mark where each step of ``torch.profiler.profile`` begins, and where the last of ``steps`` ends. torch
    numbers their ranges; here they all get the same name."""
    ranges = [
        (index, thread)
        for index, thread in columns.of_kinds(Kind.USER_LABEL)
        if is_torchs_step(columns.kinds[columns.number[index]].name)
    ]
    columns.change((index for index, _ in ranges), name=ANY_STEP)
    times = [(columns.start[index], thread) for index, thread in ranges]
    times += [(columns.end[index], thread) for index, thread in ranges[steps - 1 : steps]]
    columns.add(before=[Event(Kind.STEP, STEP_MARK, time, time, thread) for time, thread in times])


# In a loop without marks: its passes, and its calls without gradients, as in evaluation


class NamedRange(NamedTuple):
    """A range of the profiler, on the clock of the events."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


class OpenPass(NamedTuple):
    """What is known of the loop at the end of a recording, for the one that begins right there.

    ``optimizers``: of each, the number of its last step among the ``steps`` of all, and the most from one of its steps
    to the next. ``missing``: those without a step in the open pass. ``ever_backward``: whether any backward pass was
    seen; ``ever_gradients``: any call with gradients. Whether the open pass ``had_backward``, or ``had_call``: a call
    of a model. ``model``: the label of the one that was called first.
    """

    optimizers: Mapping[str, tuple[int, int]] = MappingProxyType({})
    steps: int = 0
    missing: frozenset[str] = frozenset()
    ever_backward: bool = False
    ever_gradients: bool = False
    had_backward: bool = False
    had_call: bool = False
    model: str = ""


class Loop(NamedTuple):
    """``ends``: where each pass ends, in ns, and ``step_end`` what ends it; None if nothing can. ``thread``: where the
    passes run. ``without_gradients``: the outermost calls of labeled modules without gradients, if there is backward,
    too. None in compiled code, whose operators have no events. ``open``: the state at the end."""

    ends: Sequence[int] = ()
    without_gradients: Sequence[NamedRange] = ()
    step_end: StepEnd | None = None
    thread: int = 0
    open: OpenPass = OpenPass()


_NOTHING = Loop()  # before a recording that follows no other


def loop_of(
    names: Iterable[str],
    ranges_of: Callable[[Set[str]], Iterable[NamedRange]],
    has_gradients: Callable[[NamedRange], bool],
    before: Loop = _NOTHING,
) -> Loop:
    """The loop that was recorded. A pass ends

    - with optimizers: where each optimizer has made a step since the last end, with a backward pass before. So
      accumulated gradients are one pass, and so are the steps of a critic and of a generator. Those that are not in the
      loop yet, or no more, are not waited for. Those of one class count as one without our marks, and where
      one of them makes a single step;
    - with backward alone: where the first call of autograd's engine after a call of a model with gradients ends;
    - else: where a call of the model ends that was called first.

    ``names``: of all ranges of the CPU. ``ranges_of``: the ranges with some of these names, in the order of start.
    ``has_gradients``: whether an operator in a call has a sequence number of autograd: it has one if gradients are
    enabled. ``before``: the loop in the recording right before this one. Once optimizers, or backward, have ended a
    pass, nothing less does: an evaluation that takes a whole recording ends none.
    """
    seen = set(names)
    optimizers = {name for name in seen if name.startswith(OPTIMIZER_STEP)}
    engine = seen & {ENGINE_LABEL}
    backward = engine or {name for name in seen if is_node_range(name)}
    labels = {name for name in seen if is_module_label(name)}
    calls = _outermost(ranges_of(labels)) if labels else []
    last = before.open._replace(ever_backward=before.open.ever_backward or bool(backward))
    without: list[NamedRange] = []
    if calls and last.ever_backward and not any(name.startswith(REGION) for name in seen):
        without = [call for call in calls if not has_gradients(call)]
    if without and engine:  # reentrant checkpointing: the forward is without gradients, and runs again in backward
        passes = _outermost(ranges_of(engine))
        inside = {inner.name for inner in ranges_of(labels) if _is_inside(inner, passes)}
        without = [call for call in without if call.name not in inside]
    last = last._replace(ever_gradients=last.ever_gradients or len(without) < len(calls))
    if optimizers or before.step_end == StepEnd.OPTIMIZER:
        marks = {name for name in seen if name.startswith(OPTIMIZER_MARK)}
        ranges = _named_by_marks(ranges_of(optimizers | backward | marks), last.optimizers)
        ends, thread, last = _of_optimizers(ranges, last)
        return Loop(ends, without, StepEnd.OPTIMIZER, thread, last)
    last = last._replace(had_backward=last.had_backward or bool(backward))
    if engine or before.step_end == StepEnd.BACKWARD:
        of_evaluation = set(without) if last.ever_gradients else set()  # in some models, no operator has a number
        ends, thread, last = _of_backward(_outermost(ranges_of(engine | labels)), of_evaluation, last)
        return Loop(ends, without, StepEnd.BACKWARD, thread, last)
    model = last.model or (calls[0].name if calls else "")
    ends = [call.end_ns for call in calls if call.name == model]
    return Loop(ends, without, StepEnd.CALL if model else None, _thread_of(calls), last._replace(model=model))


_Passes = tuple[list[int], int, OpenPass]  # where passes end, on which thread, and the pass that is open at the end


def _of_optimizers(ranges: Sequence[NamedRange], last: OpenPass) -> _Passes:
    """The passes that steps of optimizers end. ``last``: the pass that was open at the start. For example, with B for
    backward, passes end at the bars in ``B B SGD Adam | B Adam SGD | B SGD …``.

    An optimizer is in the loop from a period before its first step until a period after its last: only then a pass
    waits for its step. The period is the most steps (of all) from one of its steps to the next. After a single step it
    is at least the number of steps before it, and of those up to the end of the recording.
    """
    steps = _outermost(event for event in ranges if event.name.startswith(OPTIMIZER_STEP))
    numbers = lists_by_key((event.name, number) for number, event in enumerate(steps, last.steps))
    end = last.steps + len(steps)
    optimizers: dict[str, tuple[int, int]] = {}
    in_loop: dict[str, range] = {}  # by name, while which steps
    for name in {**last.optimizers, **numbers}:
        before, period = last.optimizers.get(name, (-1, 0))
        made = [*([before] if period else []), *numbers[name]]
        gaps = [after - number for number, after in pairwise(made)]
        since = last.steps if period else made[0] - (gaps or [end - made[0] + 1])[0] + 1
        period = max([period, *gaps]) or made[0] - last.steps + 1
        optimizers[name] = made[-1], period
        in_loop[name] = range(since, made[-1] + period)
    coming = sorted(in_loop, key=lambda name: in_loop[name].start, reverse=True)
    known: list[str] = []  # those that have come
    waiting: list[str] = []  # of these, as a stack, those that may be waited for: each is looked at once in a pass
    done = {*last.optimizers} - last.missing
    ends: list[int] = []
    had_backward, number = last.had_backward, last.steps
    are_steps = set(steps)
    # In the order of their ends: the closure of an optimizer runs backward inside its step.
    for event in sorted(ranges, key=lambda event: event.end_ns):
        if not event.name.startswith(OPTIMIZER_STEP):
            had_backward = True
        elif event in are_steps:
            are_steps.discard(event)  # a trace may have it twice
            while coming and in_loop[coming[-1]].start <= number:
                waiting.append(coming[-1])
                known.append(coming.pop())
            done.add(event.name)
            while waiting and (waiting[-1] in done or number not in in_loop[waiting[-1]]):
                waiting.pop()
            if (had_backward or not last.ever_backward) and not waiting:
                ends.append(event.end_ns)
                known = [name for name in known if number in in_loop[name]]
                waiting, done, had_backward = [*known], set(), False
            number += 1
    kept = {name: optimizers[name] for name in (*known, *coming) if in_loop[name].stop >= end}
    missing = frozenset(kept.keys() - done)
    return (
        ends,
        _thread_of(steps),
        last._replace(optimizers=kept, steps=end, missing=missing, had_backward=had_backward),
    )


def _named_by_marks(ranges: Iterable[NamedRange], known: Iterable[str]) -> list[NamedRange]:
    """The ranges without marks of optimizers. The innermost step of an optimizer around a mark has its number, too, but
    not if one of its class makes a single step, and is not ``known`` from before: then their class counts."""
    named: list[NamedRange] = []
    steps: defaultdict[int, list[int]] = defaultdict(list)  # by thread, those that may be open
    numbered: dict[int, str] = {}
    for event in ranges:
        if event.name.startswith(OPTIMIZER_MARK):
            inside = steps[event.thread]
            while inside and named[inside[-1]].end_ns <= event.start_ns:
                inside.pop()
            if inside:
                numbered[inside[-1]] = f"{named[inside[-1]].name} {event.name.removeprefix(OPTIMIZER_MARK)}"
            continue
        if event.name.startswith(OPTIMIZER_STEP):
            steps[event.thread].append(len(named))
        named.append(event)
    counts = Counter([*numbered.values(), *known])
    of_class = {named[place].name for place, name in numbered.items() if counts[name] == 1}
    for place, name in numbered.items():
        if named[place].name not in of_class:
            named[place] = named[place]._replace(name=name)
    return named


def _of_backward(ranges: Sequence[NamedRange], of_evaluation: Set[NamedRange], last: OpenPass) -> _Passes:
    """The passes that calls of autograd's engine end. ``ranges``: these and the calls of models. ``last``: as above."""
    ends: list[int] = []
    had_call = last.had_call
    for event in ranges:
        if event.name != ENGINE_LABEL:
            had_call |= event not in of_evaluation
        elif had_call:
            ends.append(event.end_ns)
            had_call = False
    return ends, _thread_of(ranges), last._replace(had_call=had_call)


def _thread_of(ranges: Sequence[NamedRange]) -> int:
    return ranges[0].thread if ranges else 0


def _outermost(ranges: Iterable[NamedRange]) -> list[NamedRange]:
    """The ranges of the thread with the first one that are in no other of them."""
    outermost: list[NamedRange] = []
    for event in ranges:
        if not outermost or (event.thread == outermost[0].thread and event.start_ns >= outermost[-1].end_ns):
            outermost.append(event)
    return outermost


def _is_inside(inner: NamedRange, ranges: Sequence[NamedRange]) -> bool:
    """Whether a range begins inside one of others, which do not overlap and are in order."""
    last = bisect_right(ranges, inner.start_ns, key=lambda event: event.start_ns) - 1
    return last >= 0 and inner.start_ns < ranges[last].end_ns

"""Where a recording and its steps begin and end: at marks, and in a loop without marks by what it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
      loop yet, or no more, are not waited for. Without our marks, those of one class count as one;
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
        ranges = _named_by_marks(ranges_of(optimizers | backward | marks))
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
    backward, passes end at the bars in ``B B SGD Adam | B Adam SGD | B SGD …``."""
    steps = _outermost(event for event in ranges if event.name.startswith(OPTIMIZER_STEP))
    number = last.steps
    numbers: defaultdict[str, list[int]] = defaultdict(list)  # of the steps of each; one inside another makes none
    for place, event in enumerate(steps, number):
        numbers[event.name].append(place)
    known = {**last.optimizers}
    # A new optimizer belongs to the loop from a period before its first step on.
    begins = {name: 2 * at[0] - at[1] for name, at in numbers.items() if name not in known and len(at) > 1}

    def waits_for(name: str) -> bool:
        if name in numbers and number < numbers[name][-1]:
            return number > begins.get(name, -1)
        before, period = known[name]
        return number - before < period

    ends: list[int] = []
    missing, had_backward = {*last.missing, *(numbers.keys() - known)}, last.had_backward
    are_steps = set(steps)
    # In the order of their ends: the closure of an optimizer runs backward inside its step.
    for event in sorted(ranges, key=lambda event: event.end_ns):
        if not event.name.startswith(OPTIMIZER_STEP):
            had_backward = True
        elif event in are_steps:
            before, period = known.get(event.name, (-1, 0))
            known[event.name] = number, max(period, number - before)
            missing = {name for name in missing if name != event.name and waits_for(name)}
            number += 1
            if (had_backward or not last.ever_backward) and not missing:
                ends.append(event.end_ns)
                missing, had_backward = {*known, *numbers}, False
    open_pass = last._replace(optimizers=known, steps=number, missing=frozenset(missing), had_backward=had_backward)
    return ends, _thread_of(steps), open_pass


def _named_by_marks(ranges: Iterable[NamedRange]) -> list[NamedRange]:
    """The ranges without marks of optimizers; the innermost step of an optimizer around a mark has its number, too."""
    named: list[NamedRange] = []
    for event in ranges:
        if not event.name.startswith(OPTIMIZER_MARK):
            named.append(event)
            continue
        for place in range(len(named) - 1, -1, -1):
            step = named[place]
            if step.thread == event.thread and step.name.startswith(OPTIMIZER_STEP):
                if event.start_ns < step.end_ns:
                    named[place] = step._replace(name=f"{step.name} {event.name.removeprefix(OPTIMIZER_MARK)}")
                break
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

"""Ranges next to labels: the work of stages of torch.distributed.pipelining, calls of autograd's engine, collections of
garbage; and the ranges that are open where a session ends."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from torchprof.attribute.event_names import ENGINE_LABEL, GARBAGE_COLLECTION_LABEL, OPTIMIZER_MARK, WAITS
from torchprof.attribute.pipeline_ranges import SENDS_LABEL, WAIT_LABEL, action_label, step_label
from torchprof.record.forwards import leave_to_eager, never_compiled
from torchprof.record.modules import instances_of, stages_in, with_wrapped
from torchprof.record.session import is_observed, is_profiled, record
from torchprof.record.torch_internals import SharedChange, optional
from torchprof.run.words import WAITS_FOR_RANKS, WAITS_FOR_THREADS

_STAGES = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_ENGINE_MODULES = ("torch.autograd", "torch.autograd.graph")
"""The modules through whose ``_engine_run_backward`` ``backward()`` and ``grad()`` enter the engine."""
_MOST_PARAMETERS = 64  # of an optimizer, whose gradients are looked at
_OLD_GENERATION = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation whose collection also visits old objects; in Python 3.14, a part of them each time."""

# Ranges that are open where a session of torch's profiler ends and the next one begins


_MOST_NAMES = 4096  # of ranges that are counted


@dataclass(slots=True)
class _OpenRange:
    """A range that is open. ``is_closed``: for a while, between ``close`` and ``reopen``."""

    range: Any
    is_closed: bool = False


class SplitRanges(SharedChange):
    """From ``on`` to ``off``, open ranges of ``record_function`` are known; those that are ``Reopened``, always.

    torch writes the end of a range into the session in which the range began. If another session has begun meanwhile,
    that memory is no longer there, and the process crashes, now or later (torch 2.13). So such ranges are closed before
    the end and opened again in the next session. ``entered``: how often ranges of each name were entered on the thread
    that called ``on``: once each, in however many sessions they are.
    """

    entered: ClassVar[Counter[str]] = Counter()
    _splitting: ClassVar[set[int]] = set()  # the threads that are closing ranges or opening them again just now
    _closed: ClassVar[set[int]] = set()  # the threads between ``close`` and ``reopen``
    _open: ClassVar[defaultdict[int, list[_OpenRange]]] = defaultdict(list)  # by thread, outer to inner

    def _make(self) -> None:
        enter: Any = record_function.__enter__
        leave: Any = record_function.__exit__
        counts, home = SplitRanges.entered, threading.get_ident()
        counts.clear()

        @leave_to_eager
        @functools.wraps(enter)  # TorchScript compiles the source of the original
        def entered(opened: Any) -> Any:
            result = enter(opened)
            if _add_open(opened) and threading.get_ident() == home:
                name = opened.name
                if name in counts or len(counts) < _MOST_NAMES:  # a name may have the number of the step
                    counts[name] += 1
            return result

        @leave_to_eager
        @functools.wraps(leave)
        def left(opened: Any, *error: Any) -> Any:
            _remove_open(opened)
            return leave(opened, *error)

        self._undo.append(_remove_others)
        self._put(record_function, "__enter__", entered)
        self._put(record_function, "__exit__", left)

    def close(self) -> None:
        """Close the open ranges of this thread, the inner ones first, and those that are entered from now on."""
        SplitRanges._closed.add(threading.get_ident())
        with _open_ranges() as ranges:
            for opened in reversed(ranges):
                if not opened.is_closed:
                    opened.is_closed = True
                    opened.range.__exit__(None, None, None)

    def reopen(self) -> None:
        """Open again what ``close`` has closed, except what has been left since."""
        SplitRanges._closed.discard(threading.get_ident())
        with _open_ranges() as ranges:
            for opened in ranges:
                if opened.is_closed:
                    opened.is_closed = False
                    opened.range.__enter__()

    @classmethod
    def left(cls) -> Counter[str]:
        """How often ranges of each name were entered that are not open now."""
        is_open = (opened.range.name for opened in cls._open[threading.get_ident()] if not _is_ours(opened))
        return cls.entered - Counter(is_open)


@contextmanager
def _open_ranges() -> Iterator[list[_OpenRange]]:
    """The open ranges of this thread, in a block in which they are entered and left, but not by the user."""
    here = threading.get_ident()
    SplitRanges._splitting.add(here)
    try:
        yield [*SplitRanges._open[here]]
    finally:
        SplitRanges._splitting.discard(here)


class Reopened:
    """A range of ours around code in which a session may end."""

    __slots__ = ("_range",)

    def __init__(self, opened: Any) -> None:
        self._range = opened

    def __enter__(self) -> None:
        self._range.__enter__()
        _add_open(self)

    def __exit__(self, *error: Any) -> None:
        _remove_open(self)
        self._range.__exit__(None, None, None)


def _is_ours(opened: _OpenRange) -> bool:
    return isinstance(opened.range, Reopened)


def _add_open(opened: Any) -> bool:
    """A range that was entered is open, as the innermost of this thread. False if it was only opened again."""
    here = threading.get_ident()
    if here in SplitRanges._splitting:
        return False
    ranges = SplitRanges._open[here]
    if ranges:  # it may be open already: a decorated function that calls itself
        ranges[:] = [known for known in ranges if known.range is not opened]
    ranges.append(_OpenRange(opened, here in SplitRanges._closed))
    return True


def _remove_open(opened: Any) -> None:
    """A range that was left is not open. It may have been entered on another thread."""
    here = threading.get_ident()
    if here in SplitRanges._splitting:
        return
    ranges = SplitRanges._open[here]
    if ranges and ranges[-1].range is opened:
        ranges.pop()
        return
    for known in (ranges, *[*SplitRanges._open.values()]):
        if any(each.range is opened for each in known):
            known[:] = [each for each in known if each.range is not opened]
            return


def _remove_others() -> None:
    """Nothing will tell when the ranges of others end."""
    SplitRanges._closed.clear()
    for thread, ranges in [*SplitRanges._open.items()]:
        ranges[:] = [opened for opened in ranges if _is_ours(opened)]
        if not ranges:
            SplitRanges._open.pop(thread, None)


# Pipelines


class PipelineRanges(SharedChange):
    """From ``on`` to ``off``, each action of a stage, each step of a schedule and each wait in it is a range. Before
    torch.distributed.pipelining is imported, nothing is done: call ``on`` again when it may have been."""

    def _make(self) -> None:
        base, schedules = _stage_class(), sys.modules.get(_SCHEDULES)
        if base is None or schedules is None or optional(f"{_SCHEDULES}._wait_batch_p2p") is None:
            return
        for name, label_of in _LABELS_OF_ACTIONS.items():
            self._wrap(base, name, partial(_with_range, label_of=label_of))
        for owner in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            self._wrap(getattr(schedules, owner, None), "step", partial(_with_range, label_of=_label_of_step))
        self._wrap(schedules, "_batch_p2p", _marking_sends)
        self._wrap(schedules, "_wait_batch_p2p", partial(_with_range, label_of=_label_of_wait))

    def _wrap(self, owner: Any, name: str, wrapper_of: Callable[[Any], Any]) -> None:
        """Replace a function of a class or a Python module by a wrapper, if it has it."""
        if (function := getattr(owner, name, None)) is not None:
            self._put(owner, name, leave_to_eager(functools.wraps(function)(wrapper_of(function))))


def _with_range(function: Any, label_of: Callable[..., str | None]) -> Any:
    """A function whose calls are ranges. ``label_of`` gets the arguments of a call. A call has no range if the result
    is None, or if there is an error, because a newer torch calls the function in another way."""

    def in_a_range(*args: Any, **kwargs: Any) -> Any:
        label = None
        if is_observed():
            with suppress(Exception):
                label = label_of(*args, **kwargs)
        with nullcontext() if label is None else Reopened(record(label)):
            return function(*args, **kwargs)

    return in_a_range


class _Sends(list[Any]):
    """The works of an exchange in which this rank receives nothing."""


def _marking_sends(exchange: Any) -> Any:
    """``_batch_p2p`` that tells by its list whether something is received: ``_wait_batch_p2p`` gets the same list."""

    def exchanged(ops: Any, *args: Any, **kwargs: Any) -> Any:
        works = exchange(ops, *args, **kwargs)
        only_sends = type(works) is list and bool(ops) and all(getattr(op, "op", None) is dist.isend for op in ops)
        return _Sends(works) if only_sends else works

    return exchanged


def _label_of_wait(works: Any, *_: Any, **__: Any) -> str:
    return SENDS_LABEL if isinstance(works, _Sends) else WAIT_LABEL


def _label_of_forward(stage: Any, fwd_chunk_id: int, *_: Any, **__: Any) -> str:
    return action_label(stage.stage_index, "F", fwd_chunk_id)


def _label_of_backward(
    stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
) -> str | None:
    # Without a loss function and in schedule.eval(), schedules call it, and it does nothing.
    return action_label(stage.stage_index, "B" if full_backward else "I", bwd_chunk_id) if stage.has_backward else None


def _label_of_weights(stage: Any, bwd_chunk_id: int, *_: Any, **__: Any) -> str | None:
    return action_label(stage.stage_index, "W", bwd_chunk_id) if stage.has_backward else None


_step_labels: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""By schedule: its label. A group of a large job has many ranks."""


def _label_of_step(schedule: Any, *_: Any, **__: Any) -> str:
    if (label := _step_labels.get(schedule)) is None:
        stage, *_others = stages_in(schedule)
        ranks: Sequence[int] = ()
        with suppress(Exception):  # of a group that torch does not know the ranks are unknown
            ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        label = _step_labels[schedule] = step_label(type(schedule).__name__, stage.num_stages, ranks)
    return label


_LABELS_OF_ACTIONS: dict[str, Callable[..., str | None]] = {
    "forward_one_chunk": _label_of_forward,
    "backward_one_chunk": _label_of_backward,
    "backward_weight_one_chunk": _label_of_weights,
}


def _stage_class() -> Any:
    """The class of all stages; None before torch.distributed.pipelining is imported."""
    return optional(f"{_STAGES}._PipelineStageBase") if _STAGES in sys.modules else None


def stages_of_modules() -> dict[int, int]:
    """The number of the stage that calls a module, by the id of the module, and of the modules that it wraps. Stages
    are searched among all objects of the process, but for those that ``gc.freeze`` has hidden."""
    base = _stage_class()
    return _numbers_of([] if base is None else instances_of(base))


def stages_given(model: Any) -> dict[int, int]:
    """The same for the stages and schedules that a user gave in place of a model or among several."""
    given = model if isinstance(model, (list, tuple)) else [model]
    return _numbers_of(stage for entry in given for stage in stages_in(entry))


def _numbers_of(stages: Iterable[Any]) -> dict[int, int]:
    """A module that stages with different numbers call is left out."""
    numbers: defaultdict[int, set[int]] = defaultdict(set)
    for stage in stages:
        if getattr(stage, "submod", None) is not None:
            for module in with_wrapped(stage.submod):
                numbers[id(module)].add(stage.stage_index)
    return {key: stage for key, (stage, *others) in numbers.items() if not others}


# What the process does for all layers, in a range for the profiler of the thread on which it happens


class EngineRanges(SharedChange):
    """From ``on`` to ``off``, each call of autograd's engine is a range, on threads that are recorded. Where torch
    records all threads (``profile_all_threads``), ``is_observed`` is False on all of them. ``after``: functions that
    are called after each call of the engine, recorded or not. ``partial``: how many calls were not of ``backward()``
    alone: for some inputs, as of ``torch.autograd.grad``, or with a graph of their own (``create_graph=True``)."""

    partial: ClassVar[int] = 0
    after: ClassVar[list[Callable[[], object]]] = []

    def _make(self) -> None:
        for name in _ENGINE_MODULES:
            if (run_backward := optional(f"{name}._engine_run_backward")) is not None:
                self._put(importlib.import_module(name), "_engine_run_backward", _with_engine_range(run_backward))


def _with_engine_range(run_backward: Any) -> Any:
    @never_compiled
    @functools.wraps(run_backward)
    def in_a_range(*args: Any, **kwargs: Any) -> Any:
        given = *args[3:5], kwargs.get("create_graph"), kwargs.get("inputs")  # after tensors, gradients, keep_graph
        EngineRanges.partial += any(map(bool, given))
        with record(ENGINE_LABEL) if is_profiled() else nullcontext():
            result = run_backward(*args, **kwargs)
        for call in EngineRanges.after:
            call()
        return result

    return in_a_range


class WaitRanges(SharedChange):
    """From ``on`` to ``off``, each call of Python that waits for other ranks or threads is a range. Locks, and waits in
    C++, as those of DistributedDataParallel at the end of backward, cannot be seen here. Where torch records all
    threads, this one alone has such ranges: helpers that wait for work cost no time."""

    def _make(self) -> None:
        home = threading.get_ident()
        works = getattr(dist, "Work", None)  # torch may be built without distributed
        for owner, name, what in (
            (works, "wait", WAITS_FOR_RANKS),
            (threading.Condition, "wait", WAITS_FOR_THREADS),
            (threading.Thread, "join", WAITS_FOR_THREADS),
        ):
            if owner is not None:
                self._put(owner, name, _in_range_of_wait(getattr(owner, name), WAITS + what, home))


def _in_range_of_wait(function: Any, label: str, home: int) -> Any:
    # pybind11 finds out by the name and the first argument of the caller that a subclass in Python calls this method of
    # its base, and then does not call the subclass again: so this function is named after it.
    @never_compiled
    @functools.wraps(function)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_observed() or (threading.get_ident() == home and is_profiled())):
            return function(self, *args, **kwargs)
        with record(label):
            return function(self, *args, **kwargs)

    return wait


class CollectionRanges(SharedChange):
    """From ``on`` to ``off``, each collection that visits old objects is a range on the thread that it interrupts.

    The time of such a collection depends on the number of objects in the process, and it interrupts any code: it
    belongs to no layer. Collections of young objects have no range: their time depends on the objects that were made
    just before, so it counts for the layer that made them. Python runs one collection at a time, and calls back on its
    thread at start and end: at most one range is open.
    """

    _open: ClassVar[list[Any]] = []

    def _make(self) -> None:
        gc.callbacks.append(mark_collection)
        self._undo.append(self._stop_marking)

    @classmethod
    def _stop_marking(cls) -> None:
        if mark_collection in gc.callbacks:  # other code may have emptied the list
            gc.callbacks.remove(mark_collection)
        while cls._open:  # a finalizer ended the recording inside a collection
            cls._open.pop().__exit__(None, None, None)


@never_compiled
def mark_collection(phase: str, info: dict[str, int]) -> None:
    """Open or close a range. Python calls this at the start and the end of each collection (``gc.callbacks``)."""
    if phase == "start":
        if info["generation"] >= _OLD_GENERATION and is_observed():
            opened = record(GARBAGE_COLLECTION_LABEL)
            opened.__enter__()
            CollectionRanges._open.append(opened)
    elif CollectionRanges._open:
        CollectionRanges._open.pop().__exit__(None, None, None)


@dataclass(slots=True)
class StepsOfOptimizer:
    """The recorded steps of an optimizer: the ids of its ``parameters``, how many steps, of how many ``gradients`` of a
    parameter, which were added up, they made use at most, and whether any of them had a closure."""

    parameters: frozenset[int]
    count: int = 0
    gradients: int = 0
    has_closure: bool = False


class OptimizerMarks(SharedChange):
    """From ``on`` to ``off``, each step of an optimizer has a mark with the number of the object: two optimizers of one
    class, as those of a GAN, have steps of one name. ``recorded``: by optimizer, its recorded steps."""

    recorded: ClassVar[WeakKeyDictionary[Any, StepsOfOptimizer]] = WeakKeyDictionary()
    steps: ClassVar[int] = 0  # of all optimizers, since the process began to count
    numbers: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
    next_number: ClassVar[Iterator[int]] = count()

    def _make(self) -> None:
        self._undo.append(register_optimizer_step_pre_hook(mark_optimizer).remove)

    @classmethod
    def steps_of(cls, parameters: Iterable[Any]) -> tuple[int, int] | tuple[None, None]:
        """The steps of the optimizer that has these parameters: how many, and of how many gradients, which were added
        up, they made use. None if that is unknown: of a step with a closure, which computes them later; and where one
        optimizer has all parameters."""
        ids = {*map(id, parameters)}
        used = [steps for steps in cls.recorded.values() if not ids.isdisjoint(steps.parameters)]
        if len(used) != 1 or len(cls.recorded) < 2 or used[0].has_closure:
            return None, None
        return used[0].count, used[0].gradients


@never_compiled
def mark_optimizer(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """torch calls this inside the range of each step of an optimizer."""
    OptimizerMarks.steps += 1
    if not is_observed():
        return
    with suppress(TypeError):  # an object that cannot be a weak key has no mark: its class counts
        if optimizer not in OptimizerMarks.numbers:
            OptimizerMarks.numbers[optimizer] = next(OptimizerMarks.next_number)
        with record(f"{OPTIMIZER_MARK}{OptimizerMarks.numbers[optimizer]}"):
            pass
    with suppress(Exception):  # what serves a finding must not raise an error in a step
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if optimizer not in OptimizerMarks.recorded:
            OptimizerMarks.recorded[optimizer] = StepsOfOptimizer(frozenset(map(id, parameters)))
        steps = OptimizerMarks.recorded[optimizer]
        steps.count += 1
        steps.has_closure |= any(value is not None for value in (*args[1:2], kwargs.get("closure")))
        steps.gradients += _gradients_used(parameters)


def _gradients_used(parameters: Sequence[Any]) -> int:
    """How many gradients were added up in that of a parameter, at most: autograd adds in place. Clipping and scaling
    count, too. Of many parameters some are looked at."""
    some = parameters[:: max(len(parameters) // _MOST_PARAMETERS, 1)]
    gradients = [parameter.grad for parameter in some if parameter.grad is not None]
    return max((1 + int(gradient._version) for gradient in gradients), default=0)

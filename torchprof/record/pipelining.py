"""torch.distributed.pipelining: ranges around the work of its stages, and the stages that call a module."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed as dist

from torchprof.attribute.pipeline_ranges import SENDS_LABEL, WAIT_LABEL, action_label, step_label
from torchprof.record.forwards import leave_to_eager
from torchprof.record.modules import instances_of, stages_in, with_wrapped
from torchprof.record.session import is_observed, record
from torchprof.record.shared_changes import SharedChange
from torchprof.record.split_ranges import Reopened
from torchprof.record.torch_internals import optional

_STAGES = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"


class PipelineRanges(SharedChange):
    """From ``on`` to ``off``, each action of a stage, each step of a schedule and each wait in it is a range.

    Nothing is done before torch.distributed.pipelining is imported: call ``on`` again when it may have been.
    """

    def _make(self) -> None:
        base, schedules = _class_of_stages(), sys.modules.get(_SCHEDULES)
        if base is None or schedules is None or optional(f"{_SCHEDULES}._wait_batch_p2p") is None:
            return
        for name, label_of in _OF_STAGES.items():
            self._wrap(base, name, partial(_in_ranges, label_of=label_of))
        for owner in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            self._wrap(getattr(schedules, owner, None), "step", partial(_in_ranges, label_of=_label_of_step))
        self._wrap(schedules, "_batch_p2p", _telling_sends)
        self._wrap(schedules, "_wait_batch_p2p", partial(_in_ranges, label_of=_label_of_wait))

    def _wrap(self, owner: Any, name: str, wrapper_of: Callable[[Any], Any]) -> None:
        """Replace a function of a class or a Python module by a wrapper, if it has it."""
        function = getattr(owner, name, None)
        if function is not None:
            self._put(owner, name, leave_to_eager(functools.wraps(function)(wrapper_of(function))))


def _in_ranges(function: Any, label_of: Callable[..., str | None]) -> Any:
    """A function in a range. ``label_of`` gets the arguments of a call; None, or an error, as if a newer torch calls it
    in another way: the call has no range."""

    def in_a_range(*args: Any, **kwargs: Any) -> Any:
        label = None
        if is_observed():
            with suppress(Exception):
                label = label_of(*args, **kwargs)
        if label is None:
            return function(*args, **kwargs)
        with Reopened(record(label)):
            return function(*args, **kwargs)

    return in_a_range


class _Sends(list[Any]):
    """The works of an exchange in which this rank receives nothing."""


def _telling_sends(exchange: Any) -> Any:
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
    label = _step_labels.get(schedule)
    if label is None:
        stage, *_others = stages_in(schedule)
        ranks: Sequence[int] = ()
        with suppress(Exception):  # of a group that torch does not know the ranks are unknown
            ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        label = _step_labels[schedule] = step_label(type(schedule).__name__, stage.num_stages, ranks)
    return label


_OF_STAGES: dict[str, Callable[..., str | None]] = {
    "forward_one_chunk": _label_of_forward,
    "backward_one_chunk": _label_of_backward,
    "backward_weight_one_chunk": _label_of_weights,
}


def _class_of_stages() -> Any:
    """The class of all stages; None before torch.distributed.pipelining is imported."""
    return optional(f"{_STAGES}._PipelineStageBase") if _STAGES in sys.modules else None


def stages_of_modules() -> dict[int, int]:
    """The number of the stage that calls a module, by the id of the module, and of the modules that it wraps.

    Stages are searched among all objects of the process, once torch.distributed.pipelining is imported. Those that
    ``gc.freeze`` has hidden are not found.
    """
    base = _class_of_stages()
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

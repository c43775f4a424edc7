"""Changes of the process that recordings share are undone by the last one; custom ops are recorded by name."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchprof
from torchprof.record.session import CustomOps
from torchprof.record.torch_internals import SharedChange

MODULE = SimpleNamespace()
"""Has a ``function`` as soon as it is loaded."""


class Replaced(SharedChange):
    def _make(self) -> None:
        if hasattr(MODULE, "function"):
            self._put(MODULE, "function", "ours")


@pytest.fixture
def module() -> Iterator[SimpleNamespace]:
    MODULE.function = "theirs"
    yield MODULE
    vars(MODULE).clear()
    assert not Replaced._undo


def test_the_last_of_several_users_undoes_a_change(module: SimpleNamespace) -> None:
    first, second = Replaced(), Replaced()
    seen = []
    for step in (first.on, first.on, second.on, first.off, first.off, second.off, second.off):
        step()
        seen.append(module.function)
    assert seen == ["ours"] * 5 + ["theirs"] * 2


def test_a_user_that_was_freed_does_not_keep_a_change(module: SimpleNamespace) -> None:
    user = Replaced()
    user.on()
    Replaced().on()
    assert module.function == "ours"
    user.off()
    assert module.function == "theirs"


def test_what_other_code_has_put_there_meanwhile_stays(module: SimpleNamespace) -> None:
    user = Replaced()
    user.on()
    module.function = "of others"
    user.off()
    assert module.function == "of others"


def test_a_change_that_could_not_be_made_is_tried_again(module: SimpleNamespace) -> None:
    del module.function
    user = Replaced()
    user.on()
    module.function = "loaded later"
    user.on()
    assert module.function == "ours"
    user.off()
    assert module.function == "loaded later"


def test_each_change_has_users_of_its_own(module: SimpleNamespace) -> None:
    user, other = Replaced(), CustomOps()
    user.on()
    other.on()
    user.off()
    assert module.function == "theirs"
    other.off()


# The schema is given because torch 2.4 reads no types that are strings.
@torch.library.custom_op("torchprof_test::doubled", mutates_args=(), schema="(Tensor x) -> Tensor")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


RECORD, NONE = torch.profiler.ProfilerAction.RECORD_AND_SAVE, torch.profiler.ProfilerAction.NONE


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = doubled(x)
        return y


class Overload:
    """What torch 2.15 has for an op: whether it is called without the dispatcher, and a method to choose."""

    def __init__(self) -> None:
        self._pyobj_dispatcher: object | None = object()

    def _enable_pyobj_dispatch(self, enabled: bool = True) -> None:
        self._pyobj_dispatcher = object() if enabled else None

    @property
    def skips_dispatcher(self) -> bool:
        return self._pyobj_dispatcher is not None


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Overload]:
    overload = Overload()
    known: dict[str, Any] = {
        "of torch 2.15": SimpleNamespace(_opoverload=overload),
        "of torch 2.13": SimpleNamespace(_opoverload=object()),
        "of neither": object(),
    }
    monkeypatch.setattr("torch._library.custom_ops.OPDEFS", known)
    yield overload
    assert overload.skips_dispatcher


def operators(prof: torchprof.Profile) -> set[str]:
    return {frames[-1].name for frames in prof.run.rows.frames if frames}


def test_a_custom_op_is_recorded_by_its_name() -> None:
    model = Doubled()
    with torchprof.Profile(model, record_shapes=True) as prof:
        model(torch.rand(3))
    assert operators(prof) >= {"torchprof_test::doubled", "aten::mul"}
    inputs = {frames[-1].signature for frames in prof.run.rows.frames if frames and "doubled" in frames[-1].name}
    assert [one.shapes for one in inputs if one is not None] == [((3,),)]


def test_another_profiler_records_it_inside_annotate() -> None:
    model = Doubled()
    with torchprof.annotate(model), torch.profiler.profile() as profiler:
        model(torch.rand(3))
    assert "torchprof_test::doubled" in {event.name for event in profiler.events()}


def test_during_a_recording_it_passes_through_the_dispatcher(op: Overload) -> None:
    model = nn.Identity()
    prof = torchprof.Profile(model, schedule=lambda step: NONE if step % 2 else RECORD)
    seen = []
    with prof:
        for _ in range(4):
            seen.append(op.skips_dispatcher)
            prof.step()
    assert seen == [False, True, False, True]


def test_overlapping_uses_restore_it_at_the_end_of_the_last(op: Overload) -> None:
    first, second = CustomOps(), CustomOps()
    first.on()
    second.on()
    second.on()
    first.off()
    first.off()
    assert not op.skips_dispatcher
    second.off()


def test_it_is_restored_after_an_error(op: Overload) -> None:
    with pytest.raises(ZeroDivisionError), torchprof.Profile(nn.Identity()), torchprof.annotate(nn.Identity()):
        assert not op.skips_dispatcher
        1 / 0  # noqa: B018

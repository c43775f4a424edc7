"""Custom ops are recorded by name in every version of torch, and are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchprof
from torchprof.record.shared_changes import CustomOps


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

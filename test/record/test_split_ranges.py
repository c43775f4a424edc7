"""Ranges that are open where one session ends and the next begins, and code that fails or goes on elsewhere there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build.processes import in_thread
from torch import nn
from torch.profiler import record_function, schedule

from torchprof import Profile
from torchprof.record.ranges import SplitRanges

X = torch.rand(2, 4)


class Ranges:
    """What is open for torch: the names of the ranges that were entered and not left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[str] = []
        enter, leave = record_function.__enter__, record_function.__exit__

        def entered(opened: Any) -> Any:
            self.open.append(opened.name)
            return enter(opened)

        def left(opened: Any, *error: Any) -> Any:
            if opened.name in self.open:  # torch, too, does nothing if it was left before
                self.open.remove(opened.name)
            return leave(opened, *error)

        monkeypatch.setattr(record_function, "__enter__", entered)
        monkeypatch.setattr(record_function, "__exit__", left)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    return Ranges(monkeypatch)


@pytest.fixture
def split(ranges: Ranges) -> Iterator[SplitRanges]:
    split = SplitRanges()
    split.on()
    yield split
    split.off()


def test_ranges_are_closed_and_opened_again_in_their_order(ranges: Ranges, split: SplitRanges) -> None:
    with record_function("outer"), record_function("inner"):
        split.close()
        assert ranges.open == []
        split.reopen()
        assert ranges.open == ["outer", "inner"]
    assert ranges.open == []


def test_a_range_that_is_left_between_two_sessions_is_not_opened_again(ranges: Ranges, split: SplitRanges) -> None:
    with record_function("outer"):
        with record_function("inner"):
            split.close()
        split.close()  # what is closed stays so
        split.reopen()
        assert ranges.open == ["outer"]


def test_no_range_is_opened_again_after_off(ranges: Ranges) -> None:
    first, second = SplitRanges(), SplitRanges()
    first.on()
    with record_function("mine"):
        first.close()
        first.off()
        second.on()
        second.reopen()
        assert ranges.open == []
        second.off()


def test_a_recording_that_ends_leaves_the_ranges_of_another(ranges: Ranges, split: SplitRanges) -> None:
    other = SplitRanges()
    other.on()
    with record_function("mine"):
        other.off()
        split.close()
        assert ranges.open == []
        split.reopen()
        assert ranges.open == ["mine"]


def test_a_range_may_be_left_in_thread(ranges: Ranges, split: SplitRanges) -> None:
    opened = record_function("mine")
    opened.__enter__()
    in_thread(lambda: opened.__exit__(None, None, None))
    split.close()
    split.reopen()
    assert ranges.open == []


def test_ranges_of_other_threads_are_left_alone(ranges: Ranges, split: SplitRanges) -> None:
    with record_function("mine"):
        in_thread(split.close)
        assert ranges.open == ["mine"]


def test_a_decorated_function_may_call_itself(ranges: Ranges, split: SplitRanges) -> None:
    @record_function("decorated")
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        split.close()
        split.reopen()

    down(2)
    split.close()
    split.reopen()
    assert ranges.open == []


def test_an_error_of_the_users_callback_leaves_no_range_open(ranges: Ranges) -> None:
    """The range was closed before the callback, and the block ends without a next session."""
    model = nn.Linear(4, 4)

    def fails(_: object) -> None:
        raise ValueError("of the user")

    prof = Profile(model, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=fails)
    with pytest.raises(ValueError, match="of the user"), prof, record_function("epoch"):
        for _ in range(3):
            model(X)
            prof.step()
    assert prof.step_num == 2
    with Profile(model):
        assert "epoch" not in ranges.open
        model(X)
    assert ranges.open == []

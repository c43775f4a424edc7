"""The steps of a loop that marks none, and the calls without gradients: against a stopwatch and counts by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof.analyze.steps import time_parts
from torchprof.attribute.loop import Loop as RecordedLoop
from torchprof.attribute.loop import NamedRange, loop_of
from torchprof.profile import program as program_module
from torchprof.profile.program import Program
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, OUTSIDE, StepEnd

MARK = "torchprof:!optimizer:"
ENGINE, CALL, ADAM, SGD = "torchprof:!engine", "torchprof:0", "Optimizer.step#Adam.step", "Optimizer.step#SGD.step"


def loop_in(ranges: Sequence[tuple[str, int, int]], sequenced: Sequence[int], before: RecordedLoop) -> RecordedLoop:
    of_thread = [NamedRange(name, start, end, 1) for name, start, end in sorted(ranges, key=lambda one: one[1])]
    return loop_of(
        {name for name, _, _ in ranges},
        lambda names: [one for one in of_thread if one.name in names],
        lambda call: any(call.start_ns <= at < call.end_ns for at in sequenced),
        before,
    )


def ends_of(ranges: Sequence[tuple[str, int, int]], sequenced: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """The ends of passes, and the starts of the calls without gradients."""
    loop = loop_in(ranges, sequenced, RecordedLoop())
    return [*loop.ends], [one.start_ns for one in loop.without_gradients]


def adams(steps: str) -> list[tuple[str, int, int]]:
    """Steps of Adam, each after a backward pass, with the mark of the object that a letter stands for."""
    return [
        one
        for end, letter in enumerate(steps, 1)
        for one in ((ENGINE, end - 0.9, end - 0.8), (ADAM, end - 0.7, end), (f"{MARK}{letter}", end - 0.6, end - 0.6))
    ]


@pytest.mark.parametrize(
    ("ranges", "ends"),
    [
        pytest.param(
            [(CALL, 0, 3), (ENGINE, 4, 6), (SGD, 6, 7), (CALL, 8, 9), (ENGINE, 9, 10), (SGD, 11, 13)], [7, 13]
        ),
        pytest.param([(ENGINE, 0, 1), (ENGINE, 2, 3), (SGD, 4, 5), (ENGINE, 6, 7)], [5], id="accumulated"),
        pytest.param(
            [(ENGINE, 0, 1), (SGD, 2, 3), (SGD, 4, 5), (ENGINE, 6, 7), (SGD, 8, 9)], [3, 9], id="two of a class"
        ),
        pytest.param([(ENGINE, 0, 1), (ADAM, 2, 3), (ENGINE, 4, 5), (SGD, 6, 7)], [7], id="critic and generator"),
        pytest.param([(SGD, 0, 9), (CALL, 1, 3), (ENGINE, 4, 6), (SGD, 10, 12)], [9], id="in a closure"),
        pytest.param([(ENGINE, 0, 1), (ADAM, 2, 9), (ADAM, 3, 4)], [9], id="an optimizer in another"),
        pytest.param(
            [(ENGINE, 0, 1), (SGD, 2, 9), (ADAM, 3, 4), (ENGINE, 10, 11), (SGD, 12, 13), (ADAM, 12, 13)],
            [9, 13],
            id="an optimizer of another class in another",
        ),
        pytest.param([(SGD, 0, 2), (SGD, 3, 4)], [2, 4], id="backward was not recorded"),
        pytest.param(adams("AB" * 3), [2, 4, 6], id="two of a class that are told apart"),
        pytest.param(adams("AAAB" * 3), [4, 8, 12], id="several of one, then one of another"),
        pytest.param(adams("BAAA" * 3), [1, 5, 9], id="one, then several of another"),
        pytest.param(adams("AAAA" + "BBB"), [1, 2, 3, 4, 5, 6, 7], id="one after the other"),
        pytest.param(adams("AABBCCDD"), [1, 2, 3, 4, 5, 6, 7, 8], id="a new one for every two batches"),
        pytest.param(adams("ABCD"), [1, 2, 3, 4], id="a new one in each batch"),
        pytest.param(adams("AAAAB"), [1, 2, 3, 4, 5], id="one step of another"),
        pytest.param([(SGD, n, n + 0.5) for n in range(9)] + [(ADAM, 9, 9.5)], [n + 0.5 for n in (*range(8), 9)]),
        pytest.param(
            [(CALL, 0, 1), (ENGINE, 2, 3), (ENGINE, 4, 5), (CALL, 6, 7), (ENGINE, 8, 9)], [3, 9], id="backward"
        ),
        pytest.param([(CALL, 0, 5), (CALL, 1, 2), ("torchprof:1", 6, 7), (CALL, 8, 9)], [5, 9], id="calls"),
        pytest.param([("aten::mm", 0, 1)], [], id="no calls"),
    ],
)
def test_where_a_pass_ends(ranges: Sequence[tuple[str, int, int]], ends: list[int]) -> None:
    assert ends_of(ranges)[0] == ends


GAN = [(CALL, 0, 1), (ENGINE, 2, 3), (ADAM, 4, 5), (CALL, 6, 7), (ENGINE, 8, 9), (SGD, 10, 11)]
ACCUMULATED = [(CALL, 0, 1), (ENGINE, 2, 3), (CALL, 4, 5), (ENGINE, 6, 7), (SGD, 8, 9)]
EVALUATED = [(CALL, 0, 1), (CALL, 2, 3), (CALL, 10, 11), (ENGINE, 12, 13), (CALL, 14, 15), (ENGINE, 16, 17)]
TRAINED = [(CALL, 0, 1), (CALL, 2, 3), (CALL, 10, 11), (ENGINE, 12, 13), (SGD, 14, 15)]


@pytest.mark.parametrize(
    ("passes", "with_gradients", "ends", "known"),
    [(GAN, [0, 6], [11], 6), (ACCUMULATED, [0, 4], [9], 0), (EVALUATED, [10], [13], 0), (TRAINED, [10], [15], 0)],
    ids=["critic and generator", "accumulated", "two backward passes of one call", "evaluated"],
)
def test_a_loop_in_several_recordings_has_the_ends_of_one(
    passes: list[tuple[str, int, int]], with_gradients: list[int], ends: list[int], known: int
) -> None:
    """However three passes are cut into recordings, at calls of the model. Ends of a weaker kind do not count. With a
    call without gradients between two backward passes, the second one ends no pass.

    With optimizers of several classes, the first recording has to have all of them: the first ``known`` ranges."""
    ranges = [(name, 100 * number + start, 100 * number + end) for number in range(3) for name, start, end in passes]
    sequenced = [100 * number + at for number in range(3) for at in with_gradients]
    expected = [100 * number + end for number in range(3) for end in ends]
    assert ends_of(ranges, sequenced)[0] == expected
    calls = [index for index, (name, _, _) in enumerate(ranges) if name == CALL and index >= known]
    for first, second in combinations_with_replacement(calls, 2):
        loop, found = RecordedLoop(), dict[str, list[int]]()
        for part in (ranges[:first], ranges[first:second], ranges[second:]):
            loop = loop_in(part, sequenced, loop)
            found.setdefault(str(loop.step_end), []).extend(loop.ends)
        assert found[str(loop.step_end)] == expected, (first, second)


def test_a_call_without_gradients_has_no_sequence_number() -> None:
    ranges = [(CALL, 0, 3), (ENGINE, 4, 5), (CALL, 6, 9), (CALL, 10, 12)]
    assert ends_of(ranges, [2, 11])[1] == [6]
    assert ends_of([(CALL, 0, 3), (CALL, 6, 9)], [2])[1] == [], "without backward, none"
    assert ends_of([*ranges, ("Torch-Compiled Region: 0/0", 7, 8)], [2, 11])[1] == [], "operators are not seen"


class Loop:
    """A model, and the times of its passes by a stopwatch."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data = torch.rand(16, 64)
        self.ended: list[int] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            time.sleep(0.002)
            self.model(self.data).sum().backward()
            self.optimizer.step()
            self.ended.append(time.perf_counter_ns())
            self.optimizer.zero_grad()

    def without_optimizer(self, steps: int) -> None:
        for _ in range(steps):
            self.model(self.data).sum().backward()
            self.ended.append(time.perf_counter_ns())

    def infer(self, calls: int) -> None:
        with torch.no_grad():
            for _ in range(calls):
                time.sleep(0.002)
                self.model(self.data)
                self.ended.append(time.perf_counter_ns())


def steps_of(run: Run) -> Spread | None:
    return run.samples.get(SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"))


@pytest.mark.parametrize("loop", [Loop.train, Loop.without_optimizer, Loop.infer])
def test_steps_last_as_long_as_by_a_stopwatch(loop: Callable[[Loop, int], None], tmp_path: Path) -> None:
    this = Loop()
    with torchprof.Profile(this.model) as prof:
        began = time.perf_counter_ns()
        loop(this, 5)
    steps = steps_of(prof.run)
    assert steps is not None and steps.count == 5
    # The stopwatch is read after the range has ended; a busy machine may do anything between.
    assert steps.sum <= this.ended[-1] - began + 1_000_000
    assert steps.sum >= (this.ended[-1] - began) * 0.8
    end = (
        StepEnd.CALL
        if loop is Loop.infer
        else StepEnd.BACKWARD
        if loop is Loop.without_optimizer
        else StepEnd.OPTIMIZER
    )
    assert (prof.run.meta.steps, prof.run.meta.step_end, prof.run.meta.marked_steps) == (5, end, 0)
    assert "The loop marks no steps: a step ends " in prof.run.report("steps")

    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    of_trace = steps_of(torchprof.from_trace(tmp_path / "trace.json"))
    assert of_trace is not None and of_trace.count == 5
    assert abs(of_trace.sum - steps.sum) <= 5 * 2_000  # a trace rounds to microseconds


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_a_critic_and_a_generator_with_optimizers_of_one_class_make_one_step(critic_steps: int, tmp_path: Path) -> None:
    """Live and in a trace: torch gives the ranges of both the same name, and ours has the number of the object."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    critic, generator = (torch.optim.Adam(part.parameters()) for part in model)

    def loop() -> None:
        for _ in range(4):
            for optimizer in (*[critic] * critic_steps, generator):
                model(torch.rand(2, 4)).sum().backward()
                optimizer.step()

    with torchprof.Profile(model) as prof:
        loop()
    with torchprof.annotate(model), torch.profiler.profile() as traced:
        loop()
    traced.export_chrome_trace(str(tmp_path / "t.json"))
    for run in (prof.run, torchprof.from_trace(tmp_path / "t.json"), torchprof.from_profiler(traced, model)):
        assert run.meta.steps == (4 if run is prof.run else 3)  # in a trace of others, the first may have begun before
        assert not any("!" in frame.name for chain in run.rows.frames for frame in chain)


def test_a_single_pass_is_no_loop() -> None:
    loop = Loop()
    with torchprof.Profile(loop.model) as prof:
        loop.train(1)
    assert steps_of(prof.run) is None
    assert str(prof).startswith("1 forward call of Sequential: ")


def test_marks_come_before_what_optimizers_show() -> None:
    loop = Loop()
    with torchprof.Profile(loop.model) as prof:
        for _ in range(3):
            loop.train(2)
            prof.step()
    steps = steps_of(prof.run)
    assert steps is not None and steps.count == prof.run.meta.steps == 3


def test_training_is_told_apart_from_evaluation() -> None:
    loop = Loop()
    with torchprof.Profile(loop.model) as prof:
        loop.train(4)
        loop.infer(3)
    run = prof.run
    root = run.layers.index(run.roots[0])
    spread = run.samples[SampleKey(root, FORWARD, 0, "cpu", "no_grad_ns")]
    assert spread.count == 3
    every = run.samples[SampleKey(root, FORWARD, 0, "cpu", "cpu_ns")]
    assert every.count == 7 and 0 < spread.sum < every.sum
    parts = time_parts(run, "cpu_ns")
    assert parts["forward (no grad)"] == spread.sum  # of a short forward, it may be less than 1 % of the time
    assert sum(parts.values()) == sum(run.rows.columns["cpu_ns"])
    first = str(prof).splitlines()[0]
    assert first.startswith("4 steps: median ") and "3 calls without gradients: median " in first


def test_a_reentrant_checkpoint_trains_though_its_forward_has_no_gradients() -> None:
    loop = Loop()
    with torchprof.Profile(loop.model) as prof:
        for _ in range(3):
            checkpoint(loop.model, loop.data.clone().requires_grad_(), use_reentrant=True).sum().backward()
    assert not [key for key in prof.run.samples if key.measure == "no_grad_ns"]


def test_calls_of_selected_layers_are_no_calls_of_the_model() -> None:
    """With ``paths=`` the ranges of inner layers are the outermost ones."""
    loop = Loop()
    with torchprof.Profile(loop.model, paths=["Sequential.*"]) as prof:
        loop.train(2)
        loop.infer(2)
    assert not [
        key for key in prof.run.samples if key.measure == "no_grad_ns" and key.layer not in prof.run.layers.roots
    ]


def test_the_steps_of_a_whole_script() -> None:
    loop = Loop()
    with Program(warmup_calls=None) as program:
        loop.train(8)
        loop.infer(2)
    steps = steps_of(program.run)
    # The first step is start-up, and the second one began before the recording.
    assert steps is not None and steps.count == 6
    assert 6 * 2_000_000 <= steps.sum <= program.run.meta.wall_ns
    assert "6 " in program.run.report("steps")
    with pytest.raises(torchprof.TorchprofError, match="No loop was recorded"):
        with Program() as alone:
            loop.infer(1)
        alone.run.report("steps")


def test_steps_that_are_in_two_cycles_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle ends at each call of the model. Each step sleeps 2 ms, and the evaluations end none, though the first one
    comes before any optimizer."""
    loop = Loop()
    monkeypatch.setattr(program_module, "_CYCLE_S", 1e-9)
    with Program() as program:
        loop.infer(3)
        loop.train(5)
        loop.infer(3)
        loop.train(4)
        loop.infer(5)
    run = program.run
    assert run.meta.cycles > 15
    assert (run.meta.steps, run.meta.step_end) == (8, StepEnd.OPTIMIZER), "the first one begins before its first mark"
    steps = steps_of(run)
    assert steps is not None and steps.count == 8
    assert steps.min >= 2_000_000 and steps.max >= 5 * 2_000_000, "the second evaluation is in a step"
    assert steps.sum <= run.meta.wall_ns
    assert not run.lockstep, "it is in no job"

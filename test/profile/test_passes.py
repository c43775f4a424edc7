"""Some passes of a loop are recorded, all are timed, and the run is that of all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from build.hand_made import row, run_of
from build.loops import X, is_recorded, trainer
from build.models import Mlp
from build.processes import in_thread
from torch import Tensor, nn
from torch.profiler import record_function

import torchprof
from torchprof.profile import pass_times
from torchprof.profile import passes as passes_of_program
from torchprof.profile.pass_times import PassTimes, StepClock, samples_in, with_exact_counts, without_profiler
from torchprof.profile.passes import PassKind, PassLog, is_sampled
from torchprof.profile.program import Program
from torchprof.record.ranges import EngineRanges
from torchprof.run.layers import Layer
from torchprof.run.lockstep import Lockstep
from torchprof.run.measures import SampleKey
from torchprof.run.meta import Meta
from torchprof.run.part import Scale
from torchprof.run.passes import Passes, Unusual
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime, Pipeline, StageAction, StreamTime
from torchprof.run.words import AUTOGRAD_ENGINE, FORWARD, OUTSIDE, UNUSUAL_PASSES, Frame, FrameKind, SourceLine


class Clock:
    """The clock of passes and steps, which stands still but for what the program says."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (passes_of_program, pass_times):
        monkeypatch.setattr(module, "perf_counter_ns", clock)
    return clock


class Timed(Mlp):
    """A model whose calls take ``ns``."""

    def __init__(self, clock: Clock, ns: int = 4_000_000) -> None:
        super().__init__()
        self.clock, self.ns = clock, ns

    def forward(self, x: Tensor) -> Tensor:
        self.clock.ns += self.ns
        return super().forward(x)


@pytest.fixture(autouse=True)
def no_other_optimizers() -> None:
    """Those of other tests may be garbage that is still there."""
    gc.collect()


@pytest.fixture
def never_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which passes are recorded follows from their numbers alone, on a busy machine, too."""
    monkeypatch.setattr(passes_of_program, "UNUSUAL", float("inf"))


def profiled(program: Callable[[], Any], **options: Any) -> Run:
    with Program(**options) as block:
        program()
    return block.run


def calls(run: Run) -> dict[str, int]:
    return {layer.name: run.rows.forward_calls(index) for index, layer in enumerate(run.layers)}


def steps_of(run: Run) -> Any:
    return run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")]


# Which passes


def test_which_passes_are_recorded() -> None:
    assert [number for number in range(70) if is_sampled(number)] == [*range(20), *range(32, 36), *range(64, 68)]
    assert sum(map(is_sampled, range(1_000_000))) == 16 + 16 * 4  # 16, 32, …, 524,288
    assert sum(map(is_sampled, range(100_000))) == 68


@pytest.mark.usefixtures("never_interrupted")
def test_the_passes_of_a_loop_are_recorded_by_their_numbers() -> None:
    step, seen = trainer(Mlp()), []

    def program() -> None:
        for _ in range(41):
            step()
            seen.append(is_recorded())

    run = profiled(program, warmup_calls=None)
    assert seen == [True, *map(is_sampled, range(40))]  # the first step is start-up
    assert calls(run) == {"Mlp": 40, "Mlp.fc1": 40, "Mlp.act": 40, "Mlp.fc2": 40}
    [passes] = run.passes
    assert (passes.count, passes.recorded, passes.training, passes.gradients) == (40, 24, True, True)
    assert passes.ns is not None and passes.ns.count == 16
    assert run.meta.steps == steps_of(run).count == 40
    assert sum(row.calls for row in run.rows if row.frames and row.frames[-1].name == "Optimizer.step#SGD.step") == 40


@pytest.mark.usefixtures("never_interrupted")
@pytest.mark.parametrize("options", [{"passes": None}, {"passes": range(5, 9)}, {"warmup_calls": 3}, {"max_calls": 30}])
def test_other_passes_may_be_chosen(options: dict[str, Any]) -> None:
    step, seen = trainer(Mlp()), []

    def program() -> None:
        for _ in range(50):
            step()
            seen.append(is_recorded())

    run = profiled(program, **options)
    if "passes" in options:
        chosen = (options["passes"] or range(50)).__contains__
        assert seen == [*map(chosen, range(50))] and not run.passes
        assert calls(run)["Mlp.fc1"] == sum(seen)
    elif "warmup_calls" in options:
        assert seen == [False] * 3 + [*map(is_sampled, range(47))] and calls(run)["Mlp.fc1"] == 47
    else:
        assert seen == [True] * 30 + [False] * 20 and calls(run)["Mlp.fc1"] == 30 and not run.passes
    about = [str(each) for each in run.warnings if each.code == "passes_chosen"]
    assert [each[:35] for each in about] == ["As requested, 4 of 50 passes of the"] * (
        "passes" in options and not all(seen)
    )


@pytest.mark.usefixtures("never_interrupted")
def test_each_kind_of_passes_has_a_count_of_its_own() -> None:
    model = Mlp()
    step, seen = trainer(model), []

    def program() -> None:
        for _ in range(2):
            for _ in range(30):
                step()
            model.eval()
            with torch.no_grad():
                for _ in range(30):
                    model(X)
                    seen.append(is_recorded())
            model.train()

    run = profiled(program, warmup_calls=0)
    assert seen == [*map(is_sampled, range(60))]
    assert calls(run)["Mlp.fc1"] == 120
    kinds = {(passes.training, passes.gradients): passes for passes in run.passes}
    assert {kind: (passes.count, passes.recorded) for kind, passes in kinds.items()} == {
        (True, True): (60, 24),
        (False, False): (60, 24),
    }


def accumulate(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        for _ in range(3):
            model(X).sum().backward()
        optimizer.step()


def adversarial(model: nn.Module) -> None:
    critic = nn.Sequential(nn.Linear(2, 1))
    of_model, of_critic = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    for _ in range(30):
        fake = model(X)
        critic(fake.detach()).sum().backward()
        of_critic.step()
        critic(fake).sum().backward()
        of_model.step()


def critic_first(model: nn.Module) -> None:
    critic = nn.Sequential(nn.Linear(2, 1))
    of_model, of_critic = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    for _ in range(30):
        critic(torch.rand(3, 2)).sum().backward()
        fake = model(X)
        critic(fake.detach()).sum().backward()
        of_critic.step()
        critic(fake).sum().backward()
        of_model.step()


def critic_more_often(model: nn.Module) -> None:
    critic = nn.Sequential(nn.Linear(2, 1))
    of_model, of_critic = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    for _ in range(30):
        for _ in range(5):
            critic(model(X).detach()).sum().backward()
            of_critic.step()
        critic(model(X)).sum().backward()
        of_model.step()


def without_optimizer(model: nn.Module) -> None:
    for _ in range(30):
        model(X).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def without_no_grad(model: nn.Module) -> None:
    for _ in range(30):
        model(X)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: it passes steps on, and torch does not see its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


def wrapped(model: nn.Module) -> None:
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(30):
        model(X).sum().backward()
        optimizer.step()


def lbfgs(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)


@pytest.mark.usefixtures("never_interrupted")
@pytest.mark.parametrize(
    "program, passes",
    [
        (accumulate, 30),
        (adversarial, 30),
        (critic_first, 31),  # the generator is not known when the critic makes its first step
        (critic_more_often, 30),
        (wrapped, 30),
        (without_optimizer, 30),
        (without_no_grad, 27),  # the first calls might still have a backward
        (lbfgs, 30),
    ],
)
def test_a_pass_begins_where_no_backward_is_outstanding(program: Callable[[nn.Module], None], passes: int) -> None:
    run = profiled(lambda: program(Mlp()))
    assert sum(each.count for each in run.passes) == passes
    assert sum(each.recorded for each in run.passes) < passes
    lost = [row for row in run.rows if row.layer is None and any("AddmmBackward" in frame.name for frame in row.frames)]
    assert not lost  # the forward of each backward was recorded


# How long they took


def test_times_are_those_of_a_stopwatch() -> None:
    model, took = Mlp(), []
    step = trainer(model)

    def program() -> None:
        for _ in range(60):
            took.append(time.perf_counter_ns())
            step()
            time.sleep(0.005)
        took.append(time.perf_counter_ns())

    run = profiled(program, warmup_calls=None)
    ns = [after - before for before, after in pairwise(took)][1:]
    [passes] = run.passes
    not_recorded = [each for number, each in enumerate(ns) if not is_sampled(number)]
    assert passes.ns is not None and passes.ns.median == pytest.approx(median(not_recorded), rel=0.3)
    assert steps_of(run).median == pytest.approx(median(not_recorded), rel=1)


def test_times_are_scaled_to_those_without_the_profiler(clock: Clock) -> None:
    step = trainer(Timed(clock))
    run = profiled(lambda: [step() for _ in range(60)], warmup_calls=None)
    [passes] = run.passes
    assert passes.ns is not None and passes.ns.min == passes.ns.max == 4_000_000
    assert steps_of(run).median == 4_000_000 and steps_of(run).sum == 59 * 4_000_000
    assert run.meta.wall_ns == 59 * 4_000_000
    assert run.rows.total("cpu_ns") == pytest.approx(run.meta.wall_ns, abs=len(run.rows))
    assert mean_of_parts(run) == pytest.approx(4_000_000, rel=0.01)


def mean_of_parts(run: Run) -> float:
    """The sum of the means of the parts of a step."""
    sums = {key: spread.sum for key, spread in run.samples.items() if key.measure.startswith("step_")}
    models = sum(ns for key, ns in sums.items() if key.measure == "step_cpu_ns" and key.layer == 0)
    others = ("step_ns", "step_cpu_ns", "step_overlap_ns")
    parts = sum(ns for key, ns in sums.items() if key.measure not in others)
    overlap = sum(ns for key, ns in sums.items() if key.measure == "step_overlap_ns")
    return (models + parts - overlap) / steps_of(run).count


def test_kinds_are_weighted_by_their_time(clock: Clock) -> None:
    model = Timed(clock)
    step = trainer(model)

    def program() -> None:
        for _ in range(200):
            step()
        model.eval()
        model.ns = 1_000_000
        with torch.no_grad():
            for _ in range(30):
                model(X)

    run = profiled(program, warmup_calls=None)
    training, evaluation = run.passes
    assert (training.recorded, evaluation.recorded) == (32, 20)
    assert run.meta.wall_ns == 199 * 4_000_000 + 30 * 1_000_000
    assert calls(run)["Timed.fc1"] == 229
    text = run.report("steps")
    assert "Timed, training                 | 199" in text and "Timed, evaluation, no gradients | 30" in text


def unusual_ns(run: Run) -> int:
    return sum(row.cost.cpu_ns for row in run.rows if row.frames and row.frames[-1].name == UNUSUAL_PASSES)


def test_an_unusual_pass_is_in_no_layer(clock: Clock) -> None:
    step = trainer(Timed(clock))

    def program() -> None:
        for number in range(60):
            step()
            clock.ns += 300_000_000 * (number == 26)

    run = profiled(program, warmup_calls=None)
    [passes] = run.passes
    assert passes.unusual == (Unusual(25, 304_000_000, ""),)
    assert unusual_ns(run) == passes.unusual_ns == 300_000_000
    assert run.meta.wall_ns == 59 * 4_000_000 + 300_000_000
    assert steps_of(run).median == 4_000_000 and mean_of_parts(run) == pytest.approx(steps_of(run).sum / 59, rel=0.01)
    [warning] = [str(each) for each in run.warnings if each.code == "passes_unusual"]
    assert warning.startswith(
        "Unusual passes of the loop took 300.000ms longer than others: pass 26 of Timed took 304.000ms."
    )
    assert "304.000ms" in run.report("steps") and UNUSUAL_PASSES in run.report("ops")


def test_recorded_passes_that_were_slower_than_others_count_with_their_time(clock: Clock) -> None:
    model = Timed(clock, 10_000_000)

    def program() -> None:
        with torch.no_grad():
            for number in range(120):
                model.ns = 10_000_000 if number < 13 else 2_000_000
                model(X)

    run = profiled(program, warmup_calls=None)  # the first of these is start-up
    assert run.passes[0].unusual_ns == unusual_ns(run) == 12 * 8_000_000
    assert run.meta.wall_ns == 12 * 10_000_000 + 107 * 2_000_000


@pytest.mark.parametrize("passes", [21, 23, 27, 40])
def test_the_time_after_a_loop_is_in_no_layer(clock: Clock, passes: int) -> None:
    """Few passes were not recorded, and the last one lasts until the program ends."""
    model = Timed(clock)

    def program() -> None:
        with torch.no_grad():
            for _ in range(passes):
                model(X)
        clock.ns += 3_000_000_000

    run = profiled(program, warmup_calls=None)
    layers_ns = sum(line.cost.cpu_ns for line in run.rows if line.layer is not None)
    assert layers_ns < passes * 4_000_000 and calls(run)["Timed.fc1"] == passes - 1
    if passes > 21:  # else the last pass is recorded
        assert unusual_ns(run) == pytest.approx(3_000_000_000, rel=0.01)
        assert run.meta.process_cpu_ns is None


def test_the_first_call_that_was_not_recorded_is_no_start_up() -> None:
    class Slow(Mlp):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            self.number += 1
            time.sleep(0.02 * (self.number == 22))  # the first one after the recorded ones
            return super().forward(x)

    step = trainer(Slow())
    run = profiled(lambda: [step() for _ in range(50)], warmup_calls=None)
    assert run.passes and "slow_start" not in {warning.code for warning in run.warnings}


def test_passes_that_become_slower_are_named(clock: Clock) -> None:
    """From 4 ms to 8, a little more each pass; with 40 ms in one at the beginning, which is unusual. By hand: 560
    passes are not recorded, in 70 stretches of 8; two each become one, and a quarter of the 35 are 8 of 16 passes."""
    model = Timed(clock)
    step, recorded = trainer(model), []

    def program() -> None:
        for number in range(600):
            model.ns = 4_000_000 + 8_000 * number + 40_000_000 * (number == 50)
            step()
            recorded.append(is_recorded())

    run = profiled(program, warmup_calls=0)
    [passes] = run.passes
    times = [4_000_000 + 8_000 * number + 40_000_000 * (number == 50) for number in range(600)]
    others = [ns for ns, is_of_burst in zip(times, recorded) if not is_of_burst]
    assert sum(stretch.passes for stretch in passes.trend) == len(others) and len(others) == 560
    assert [stretch.passes for stretch in passes.trend] == [16] * 35
    first, last = (
        [median(sum(of_part[place : place + 16]) / 16 for place in range(0, 128, 16))]
        for of_part in (others[:128], others[-128:])
    )
    [warning] = [each for each in run.warnings if each.code == "passes_slower"]
    assert warning.facts["first_ns"] == pytest.approx(sum(first) / len(first), rel=0.01)
    assert warning.facts["last_ns"] == pytest.approx(sum(last) / len(last), rel=0.01)
    assert str(warning).startswith("Passes of Timed became slower: ") and str(warning) in str(run)
    both = passes + passes
    assert [stretch.passes for stretch in both.trend] == [32] * 35


def test_passes_that_become_many_times_slower_are_named(clock: Clock) -> None:
    """They are unusual for a while, and then they are not."""
    model = Timed(clock)
    step = trainer(model)

    def program() -> None:
        for number in range(600):
            model.ns = 4_000_000 if number < 300 else 20_000_000
            step()

    run = profiled(program, warmup_calls=0)
    [warning] = [each for each in run.warnings if each.code == "passes_slower"]
    assert (warning.facts["first_ns"], warning.facts["last_ns"]) == (4_000_000, 20_000_000)


def test_passes_of_one_time_have_no_trend(clock: Clock) -> None:
    step = trainer(Timed(clock))
    run = profiled(lambda: [step() for _ in range(600)], warmup_calls=0)
    assert run.passes[0].slowdown is None and "passes_slower" not in {each.code for each in run.warnings}


def test_an_unusual_pass_has_the_layer_where_it_was() -> None:
    """The second of two equal layers sleeps once: the line is the same in both."""

    class Layer2(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(self.sleep_s)
            return x * 2

        sleep_s = 0.0

    model = nn.Sequential(Layer2(), Layer2())

    def program() -> None:
        for number in range(31):
            model[1].sleep_s = 0.3 if number == 25 else 0.0
            with torch.no_grad():
                model(X)

    run = profiled(program, warmup_calls=0)
    [unusual, *_] = run.passes[0].unusual
    assert unusual.number == 25 and run.layers[unusual.layer].name == "Sequential.1"
    assert unusual.line.endswith("forward → time.sleep")
    row = next(line for line in run.report("steps").splitlines() if unusual.line in line)
    assert row.split("|")[-1].strip() == "Sequential.1"
    assert run.renumbered([OUTSIDE] * 3, run.layers).passes[0].unusual[0].layer == OUTSIDE


def test_an_unusual_pass_has_the_line_where_it_was() -> None:
    step = trainer(Mlp())

    def program() -> None:
        for number in range(60):
            step()
            if number == 26:
                time.sleep(0.5)

    run = profiled(program, warmup_calls=None)
    [unusual, *_] = run.passes[0].unusual
    assert unusual.number == 25 and unusual.line.endswith("program → time.sleep")
    assert "test_passes.py" in unusual.line and unusual.line in run.report("steps")


def test_an_interrupted_recorded_pass_does_not_stand_for_others(clock: Clock) -> None:
    step, seen = trainer(Timed(clock)), []

    def program() -> None:
        for number in range(100):
            step()
            seen.append(is_recorded())
            clock.ns += 300_000_000 * (number == 34)  # in pass 33, the second one of its burst

    run = profiled(program, warmup_calls=None)
    assert seen[33:43] == [True] * 4 + [False] + [True] * 4 + [False]  # others were recorded in place of these
    assert run.meta.wall_ns < 99 * 4_000_000  # the burst itself counts with its true time, here next to nothing
    assert calls(run)["Timed.fc1"] == 99


def test_a_range_counts_once_in_however_many_cycles_it_is() -> None:
    step = trainer(Mlp())

    def program() -> None:
        for _ in range(2):
            with record_function("epoch"):
                for _ in range(50):
                    with record_function("pass"):
                        step()

    for options in ({}, {"passes": None}):
        run = profiled(program, **options)
        counted = dict.fromkeys(("epoch", "pass", "Optimizer.step#SGD.step"), 0)
        for line in run.rows:
            if line.frames and line.frames[-1].name in counted:
                counted[line.frames[-1].name] += line.calls
        assert counted == {"epoch": 2, "pass": 100, "Optimizer.step#SGD.step": 100}
        epoch = sum(row.cost.cpu_ns for row in run.rows if row.frames and row.frames[0].name == "epoch")
        assert epoch > 0.1 * run.rows.total("cpu_ns", layer=OUTSIDE)  # which may have unusual passes on a busy machine


# What else happens while nothing is recorded


@pytest.mark.usefixtures("never_interrupted")
def test_a_model_that_is_first_called_while_nothing_is_recorded_is_found() -> None:
    step, other = trainer(Mlp()), nn.Sequential(nn.Linear(4, 2))

    def program() -> None:
        for number in range(60):
            step()
            if number == 25:
                with torch.no_grad():
                    other(X)

    run = profiled(program)
    assert calls(run)["Sequential"] == calls(run)["Sequential.0"] == 1 and calls(run)["Mlp.fc1"] == 60


def test_models_of_other_classes_are_found_in_whatever_stretch_they_are_called() -> None:
    class Tiny(nn.Sequential):
        pass

    models = [Tiny(*(nn.Identity() for _ in range(60)), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 2)), Mlp()]

    def program() -> None:
        with torch.no_grad():
            for model in models:
                for _ in range(50):
                    model(X)

    assert {name: count for name, count in calls(profiled(program)).items() if "." not in name} == {
        "Tiny": 50,
        "Sequential": 50,
        "Mlp": 50,
    }


def test_afterwards_everything_is_as_before() -> None:
    before = nn.Module.__call__, nn.Linear.forward, record_function.__enter__, record_function.__exit__
    step = trainer(Mlp())
    for error in (None, ValueError):

        def program(error: Any = error) -> None:
            for _ in range(25):
                step()
            if error is not None:
                raise error

        if error is None:
            profiled(program)
        else:
            with pytest.raises(error):
                profiled(program)
        after = nn.Module.__call__, nn.Linear.forward, record_function.__enter__, record_function.__exit__
        assert after == before and not EngineRanges.after and not is_recorded()


def test_a_compiled_model_gets_no_graph_more() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = torch.compile(Mlp(), backend=backend)
    step = trainer(model)
    run = profiled(lambda: [step() for _ in range(70)], warmup_calls=None)
    assert len(graphs) == 1
    [passes] = run.passes
    assert passes.recorded < passes.count == 69


def test_memory_of_passes_that_were_not_recorded_is_not_taken_for_lost() -> None:
    step = trainer(Mlp())
    run = profiled(lambda: [step() for _ in range(70)], warmup_calls=None, profile_memory=True)
    [memory] = run.memory
    assert memory.growth == () or memory.growth_per_call == 0
    assert calls(run)["Mlp.fc1"] == 69


class Watched(nn.Linear):
    """A layer with a stopwatch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.took: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter_ns()
        result = super().forward(x)
        if not is_recorded():
            self.took.append(time.perf_counter_ns() - began)
        return result


def test_times_of_layers_are_those_of_a_stopwatch_without_the_profiler() -> None:
    model = nn.Sequential(*(Watched(256, 256) for _ in range(4)))
    x = torch.rand(64, 256)

    def program() -> None:
        for _ in range(140):
            model(x).sum().backward()

    run = profiled(program, warmup_calls=None)
    shown_ns = sum(run.rows.total("cpu_ns", layer=index, phase=FORWARD) for index in range(1, 5)) / 139
    assert shown_ns == pytest.approx(sum(sum(layer.took) / len(layer.took) for layer in model), rel=0.6)


def test_samples_are_as_many_as_were_taken() -> None:
    """Of 20 samples, 10 are of each kind of passes. Those of one stand for 30 times as many passes, of the other for 2:
    they have 18 and 2 of the 20: 20 x 300 / 320, rounded down."""
    often, rarely = (Frame(FrameKind.PYTHON, SourceLine("train.py", line, "load")) for line in (3, 7))
    op = Frame(FrameKind.OP, "aten::mm")
    rows = [row(OUTSIDE, often, calls=300), row(OUTSIDE, rarely, calls=20), row(OUTSIDE, op, calls=900)]
    shown = with_exact_counts(run_of(rows), {}, 20)
    assert [each.calls for each in shown.rows] == [18, 2, 900] and samples_in(shown) == 20
    assert with_exact_counts(shown, {}, 20).rows.columns == shown.rows.columns


def test_a_rare_sample_of_a_sampled_run_stays_one() -> None:
    """A line of 5 ms that one recorded pass has is no evidence, though the pass stands for 30 others."""
    step = trainer(Mlp())

    def program() -> None:
        for number in range(700):
            step()
            if number == 17:
                until = time.perf_counter() + 0.02
                while time.perf_counter() < until:
                    pass

    run = profiled(program, warmup_calls=None)
    assert 0 < samples_in(run) < 500 < run.passes[0].count  # some 24 passes of a millisecond, and 20 ms


def test_the_cost_of_events_is_taken_from_the_ranges_around_them() -> None:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "fc"), "Linear")]
    op, inner = Frame(FrameKind.OP, "aten::linear"), Frame(FrameKind.OP, "aten::addmm")
    node = Frame(FrameKind.OP, "autograd::engine::evaluate_function: AddmmBackward0")
    rows = [
        row(OUTSIDE, calls=0, cpu_ns=50_000),
        row(0, calls=10, cpu_ns=30_000),
        row(1, calls=10, cpu_ns=20_000),
        row(1, op, calls=10, cpu_ns=40_000),
        row(1, op, inner, calls=10, cpu_ns=100_000),
        row(OUTSIDE, Frame(FrameKind.OP, AUTOGRAD_ENGINE), phase="backward", calls=0, cpu_ns=20_000),
        row(1, node, phase="backward", calls=10, cpu_ns=40_000),
    ]
    run = run_of(rows, layers=layers, wall_ns=300_000)
    shown = without_profiler(run, 10, 27_100, 1_000)
    event_ns = 300  # (300 - 271 - 20 labels of 1 us) / (20 operators and 10 nodes)
    expected = [40_000, 20_000, 20_000 - 10 * event_ns, 40_000 - 10 * event_ns, 100_000, 20_000 - 10 * event_ns, 40_000]
    assert [each.cost.cpu_ns for each in shown.rows] == expected
    assert shown.meta.wall_ns == sum(expected)
    most = without_profiler(run, 10, 100, 1_000)  # an event costs 0.35 us at most, and no row is below zero
    assert most.rows[2].cost.cpu_ns == 20_000 - 10 * 350
    assert min(each.cost.cpu_ns for each in without_profiler(run, 10, 100, 90_000).rows) == 0
    assert without_profiler(run, 10, 31_000, 1_000) is run


# A Profile


def test_a_profile_may_sample_its_steps(clock: Clock) -> None:
    model, seen = Timed(clock), []
    step = trainer(model)
    with torchprof.Profile(model, schedule=torchprof.sampled()) as prof:
        for number in range(60):
            step()
            seen.append(is_recorded())
            clock.ns += 300_000_000 * (number == 25)
            prof.step()
    run = prof.run
    assert seen == [*map(is_sampled, range(60))]
    [passes] = run.passes
    assert (passes.count, passes.recorded, passes.layer) == (60, 24, 0)
    assert calls(run) == {"Timed": 60, "Timed.fc1": 60, "Timed.act": 60, "Timed.fc2": 60}
    assert run.meta.wall_ns == 60 * 4_000_000 + 300_000_000 and unusual_ns(run) == 300_000_000
    assert steps_of(run).median == 4_000_000 and steps_of(run).count == run.meta.steps == 60
    assert "Shares are estimates from 24 of 60 passes of the loop." in str(prof)
    assert not EngineRanges.after and not hasattr(nn.Linear.forward, "_torchdynamo_inline")


def test_steps_of_a_sampled_profile_are_of_one_kind(clock: Clock) -> None:
    model = Timed(clock)
    step = trainer(model)
    with torchprof.Profile(model, schedule=torchprof.sampled()) as prof:
        for _ in range(5):
            for training in (True, False):
                model.train(training)
                for _ in range(20):
                    step()
                    prof.step()
    [passes] = prof.run.passes
    assert (passes.count, passes.recorded) == (200, 32) and calls(prof.run)["Timed.fc1"] == 200
    assert prof.run.meta.wall_ns == 200 * 4_000_000 and prof.run.meta.steps == 200


@pytest.mark.parametrize("steps", [20, 33, 34, 60, 64, 100, 131])
def test_an_empty_step_at_the_end_does_not_count(steps: int) -> None:
    model = Mlp()
    with torchprof.Profile(model, schedule=torchprof.sampled()) as prof, torch.no_grad():
        for _ in range(steps):
            model(X)
            time.sleep(0.0005)
            prof.step()
    assert calls(prof.run)["Mlp.fc1"] == calls(prof.run)["Mlp"] == steps
    assert [passes.count for passes in prof.run.passes] == [steps] * (steps > 20)


@pytest.mark.parametrize("steps", [33, 34, 60])
def test_a_step_that_is_open_at_the_end_counts_if_it_is_one(clock: Clock, steps: int) -> None:
    model = Timed(clock)
    with torchprof.Profile(model, schedule=torchprof.sampled()) as prof, torch.no_grad():
        for number in range(steps):
            if number:
                prof.step()
            model(X)
    assert prof.run.passes[0].count == calls(prof.run)["Timed.fc1"] == calls(prof.run)["Timed"] == steps


def test_ranges_are_those_of_the_block_however_late_the_run_is_asked_for() -> None:
    step = trainer(model := Mlp())
    profs = [torchprof.Profile(model, schedule=torchprof.sampled()) for _ in range(2)]
    for prof, steps in zip(profs, (50, 30)):
        with prof:
            for _ in range(steps):
                step()
                prof.step()
    for prof, steps in zip(profs, (50, 30)):
        ranges = [line.calls for line in prof.run.rows if line.frames and line.frames[-1].name.endswith("SGD.step")]
        assert sum(ranges) == steps


def test_a_profile_of_few_steps_is_as_without_sampling() -> None:
    model = Mlp()
    step = trainer(model)
    with torchprof.Profile(model, schedule=torchprof.sampled()) as prof:
        for _ in range(10):
            step()
            prof.step()
    assert not prof.run.passes and prof.run.meta.steps == 10 and calls(prof.run)["Mlp.fc1"] == 10
    assert repr(torchprof.sampled()) == "torchprof.sampled()"


def test_a_layer_that_no_recorded_pass_called_may_have_been_called() -> None:
    class Rare(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc1(x)

    step = trainer(Rare())
    run = profiled(lambda: [step() for _ in range(50)], warmup_calls=None)
    [warning] = [str(each) for each in run.warnings if "alled" in each.code]
    assert warning == "Not called in a recorded pass, but perhaps in others: Rare.fc2."


# The values


def test_scaled_columns_add_up() -> None:
    scale = Scale((100, 7), (123_457, 1_000))
    values = [0, 1, 5, 0, 999, 3, 7]
    assert sum(scale.times(values)) == sum(values) * 123_457 // 1_000
    assert list(scale.counts(values)) == [round(value * 100 / 7) for value in values]
    assert all((value == 0) <= (each == 0) for value, each in zip(values, scale.times(values)))
    assert list(Scale((4000, 47), (1, 1)).counts([47, 94, 0])) == [4000, 8000, 0]
    assert scale.single(7_000) == 7_000 * 123_457 * 7 // (1_000 * 100)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_calls": 0},
        {"warmup_calls": 30},
        {"warmup_calls": 100},
        {"passes": range(20, 30)},
        {"passes": None},
        {"profile_memory": True, "with_timeline": True, "with_flops": True},
    ],
)
def test_a_sampled_run_can_be_saved_and_read(options: dict[str, Any], tmp_path: Any) -> None:
    step, other = trainer(Mlp()), torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)

    def program() -> None:
        for _ in range(60):  # steps before the first call of a model, and on another thread
            other.step()
        for number in range(160):
            if number % 10 == 3:
                in_thread(other.step)
            with record_function(f"step {number}"):
                step()

    run = profiled(program, **{"warmup_calls": None, **options})
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run
    number = 10 if options.get("passes") else 160 - (options.get("warmup_calls", 1) or 0)
    assert {calls(run)[name] for name in ("Mlp", "Mlp.fc1", "Mlp.act")} == {number}


def test_a_range_around_a_short_loop_counts_once() -> None:
    step = trainer(Mlp())

    def program(steps: int) -> None:
        with record_function("epoch"):
            for _ in range(steps):
                with record_function("step"):
                    step()

    for steps in (1, 2, 3, 4, 30):
        run = profiled(lambda steps=steps: program(steps), warmup_calls=None)  # type: ignore[misc]
        counted = {"epoch": 0, "step": 0}
        for line in run.rows:
            if line.frames and line.frames[-1].name in counted:
                counted[line.frames[-1].name] += line.calls
        assert counted == {"epoch": 1, "step": steps if steps < 4 else steps - 1 + (counted["step"] == steps)}


def test_passes_are_saved_and_added(tmp_path: Any) -> None:
    step = trainer(Mlp())
    run = profiled(lambda: [step() for _ in range(50)], warmup_calls=None)
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run
    twice = torchprof.merge([run, run], add_cycles=True)
    assert [passes.count for passes in twice.passes] == [98] and calls(twice)["Mlp.fc1"] == 98
    with_line = Passes(0, 0, True, True, 3, 1, 5, None, 0, (Unusual(1, 7, "train.py:3 f"),))
    assert with_line.stripped().unusual == (Unusual(1, 7, ""),)
    assert (with_line + with_line).unusual == (Unusual(1, 7, "train.py:3 f"), Unusual(4, 7, "train.py:3 f"))


def test_a_device_is_not_slower_under_the_profiler() -> None:
    """By hand: 3 of 12 passes were recorded, at twice the time of the CPU: counts are 4 times, its times twice."""
    scale = Scale((12, 3), (2, 1))
    device = DeviceTime("cuda:0", 0, 100, 60, 50, 8, 4, 2, (StreamTime(7, 5, 60, 50, 8, 4),))
    assert device.scaled(scale) == DeviceTime(
        "cuda:0", 0, 400, 240, 200, 32, 16, 8, (StreamTime(7, 20, 240, 200, 32, 16),)
    )
    meta = Meta(("Net",), wall_ns=100, process_cpu_ns=None, busy_ns=(("cpu", 90), ("cuda:0", 60)), steps=3).scaled(
        scale
    )
    assert (meta.wall_ns, meta.process_cpu_ns, meta.steps) == (200, None, 12)
    assert meta.busy_ns == (("cpu", 180), ("cuda:0", 240))
    lines = [row(0, calls=3, cpu_ns=30, device_ns=0), row(0, device="cuda:0", calls=6, device_ns=60, macs=9)]
    cpu, cuda = run_of(lines).scaled(scale).rows
    assert (cpu.calls, cpu.cost.cpu_ns, cuda.calls, cuda.cost.device_ns, cuda.cost.macs) == (12, 60, 24, 240, 36)
    pipeline = Pipeline("cuda:0", 0, "", 2, (), (), 3, (10, 20), (StageAction(0, "F", 0, (4, 6), (1, 2)),))
    assert pipeline.scaled(scale) == replace(pipeline, steps=12)
    lockstep = Lockstep.of(0, [4, 6, 8])
    on_cpu, on_device = lockstep.scaled(scale), lockstep.scaled(scale.on("device"))
    assert (on_cpu.counts, on_cpu.ns, on_cpu.own_ns, on_cpu.times) == ((12,), (36,), (2, 3, 4), (0, 1, 2))
    assert (on_device.counts, on_device.ns, on_device.own_ns) == ((12,), (72,), (4, 6, 8))
    assert on_cpu.is_valid and on_cpu.is_paired


def test_peaks_of_recorded_passes_are_lower_bounds_in_each_view() -> None:
    step = trainer(Mlp())
    run = profiled(lambda: [step() for _ in range(60)], warmup_calls=None, profile_memory=True)
    assert "cpu peak ≥ +" in run.report("overview") and "peak: ≥ +" in run.report("memory")
    assert run.metrics()["lower_bounds/count"] >= 1
    assert "Peaks of memory are of the recorded ones" in "".join(map(str, run.warnings))


def test_times_need_the_same_memory_however_many_there_are() -> None:
    times = PassTimes()
    for number in range(5_000):
        if times.add(number, number * 1_000, 100 if number != 3_000 else 10_000):
            times.add_up()
    times.add_up()
    assert times.spread is not None and (times.spread.count, len(times.spread.sample)) == (5_000, 256)
    assert times.unusual == (Unusual(3_000, 10_000, ""),) and times.unusual_ns == 9_900


@pytest.mark.parametrize(
    "order, known, count",
    [
        ("a" * 50, "", 50),
        ("ab" * 40, "", 40),  # `b` is not known when `a` ends the first step, and has one left at the end
        ("ab" * 40, "ab", 40),
        ("cccccg" * 20, "cg", 20),
        ("a" * 40 + "b" * 40, "", 78),  # one after the other, as in folds: `b` waits for `a` for two steps
        ("a" * 40, "ab", 24),  # one that makes no step is waited for 16 times
        ("", "ab", 0),
    ],
)
def test_a_step_ends_where_all_optimizers_have_made_one(order: str, known: str, count: int) -> None:
    clock, optimizers = StepClock(), {name: Mlp() for name in "abcg"}
    clock.know(optimizers[name] for name in known)
    ended = [clock.add(optimizers[name]) for name in order]
    clock.times.add_up()
    assert clock.count == sum(ended) == count
    assert (clock.times.spread.count if clock.times.spread else 0) == max(count - 1, 0)


def test_ranks_record_the_same_passes_whatever_their_times() -> None:
    def recorded(wait: float) -> list[bool]:
        log, seen = PassLog(is_sampled), []
        for number in range(200):
            log.end()
            seen.append(log.begin(PassKind(0, number % 5 != 4, number % 5 != 4)))
            log.begun()
            if number % 50 == 7:
                time.sleep(wait)
        return seen

    assert recorded(0) == recorded(0.01)

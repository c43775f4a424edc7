"""Remedies that are carried out: what they gain, and that nothing of the user changes."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import comb
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from build.libraries import RELEASE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.advise import advise
from torchprof.profile import remedies, trials
from torchprof.profile.remedies import REMEDIES, Remedy, ToTry
from torchprof.profile.trials import Trials, TryingProgram, of_all_time
from torchprof.run.measures import Trial, median_interval


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_SECONDS", (0.02, 0.02))


NOT_IN_LINEAR_TRAINING = {
    "attention_not_fused",
    "channels_last_missed",
    "autocast_not_used",
    "gradients_never_used",
}


class Clocked(nn.Module):
    """A model whose calls take as long as it says, by a clock of its own; with a layer whose calls do, too."""

    now = 0.0

    def __init__(self, seconds: float = 1.0, randomly: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds, self.randomly, self.calls = seconds, randomly, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Clocked.now += self.seconds
        return self.layer(x) + (torch.rand(()) if self.randomly else 0)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Clocked.now = 0.0
    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: lambda: Clocked.now)
    yield


def faster(model: nn.Module, layers: object, optimizer: object) -> bool:
    model.seconds = 0.25  # type: ignore[assignment]
    return True


def profiled(model: nn.Module, *inputs: Any, backward: bool = True) -> Profile:
    with Profile(model) as prof:
        for _ in range(3):
            output = model(*inputs)
            if backward:
                output.sum().backward()
    return prof


def tried(prof: Profile, rule: str, layers: tuple[str, ...], *inputs: Any, **options: Any) -> Trial:
    [trial] = of(prof, [(rule, layers, "")], *inputs, **options)
    return trial


def of(prof: Profile, findings: list[ToTry], *inputs: Any, **options: Any) -> tuple[Trial, ...]:
    plan = prof._plan
    return Trials(prof.run, plan.models[0], plan.modules_by_name, inputs, {}, **options).of(findings)


@pytest.mark.usefixtures("clocked")
def test_the_gain_is_that_of_the_clock_as_a_share_of_the_recorded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", faster))
    model = Clocked()
    prof = profiled(model, torch.rand(2, 4))
    trial = tried(prof, "mine", ("Clocked",), torch.rand(2, 4))
    assert trial.gain == trial.low == trial.high == 0.75  # of a call
    assert (trial.before_ns, trial.after_ns, trial.how, trial.difference) == (1e9, 0.25e9, "do(it)", 0.0)
    assert trial.has_gained and trial.pairs >= 6 and model.seconds == 1.0


@pytest.mark.usefixtures("clocked")
@pytest.mark.parametrize(("seconds", "gained"), [(1.0, False), (1.5, False), (0.9, True)])
def test_what_is_not_faster_has_not_gained(monkeypatch: pytest.MonkeyPatch, seconds: float, gained: bool) -> None:
    def change(model: nn.Module, layers: object, optimizer: object) -> bool:
        model.seconds = seconds  # type: ignore[assignment]
        return True

    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", change))
    trial = tried(profiled(Clocked(), torch.rand(2, 4)), "mine", ("Clocked",), torch.rand(2, 4))
    assert trial.has_gained == gained and (trial.gain > 0) == gained
    assert trial.result.startswith("Measured: " if gained else "Tried: no gain (")


@pytest.mark.usefixtures("clocked")
def test_outputs_that_differ_are_said_and_random_ones_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module, layers: object, optimizer: object) -> bool:
        with torch.no_grad():
            model.layer.bias.add_(1)  # type: ignore[union-attr, operator]
        return True

    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", change))
    inputs = torch.rand(2, 4)
    model = Clocked()
    trial = tried(profiled(model, inputs), "mine", ("Clocked",), inputs)
    assert trial.difference == pytest.approx(1 / model(inputs).abs().max().item(), rel=1e-3)
    assert "Outputs differ by " in trial.how_it_went
    trial = tried(profiled(Clocked(randomly=True), inputs), "mine", ("Clocked",), inputs)
    assert trial.difference is None and "Outputs were not compared." in trial.how_it_went


@pytest.mark.usefixtures("clocked")
def test_remedies_that_gained_are_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(model: nn.Module, layers: object, optimizer: object) -> bool:
        model.seconds = model.seconds / 2  # type: ignore[assignment, operator]
        return True

    for rule in ("one", "two"):
        monkeypatch.setitem(REMEDIES, rule, Remedy(f"{rule}()", half))
    prof = profiled(Clocked(), torch.rand(2, 4))
    one, two, both = of(prof, [("one", ("Clocked",), ""), ("two", ("Clocked",), "")], torch.rand(2, 4))
    assert (one.gain, two.gain, both.gain) == (0.5, 0.5, 0.75)  # a quarter is left, not nothing
    assert both.rule == "combined" and both.how == "one()\ntwo()"


def test_nothing_of_the_user_changes() -> None:
    """Parameters, buffers, gradients, the optimizer's state, inputs, random states, hooks, threads, modes."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), fused=False, foreach=False)
    inputs = torch.rand(64, 16, requires_grad=True)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with Profile(model) as prof:
        model(inputs).sum().backward()
        optimizer.step()

    def state() -> list[Any]:
        tensors = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters()), inputs]
        states = [value for each in optimizer.state.values() for value in each.values()]
        modes = [module.training for module in model.modules()], list(model[0]._forward_hooks)
        others = random.getstate(), str(np.random.get_state()), torch.get_num_threads(), torch.is_grad_enabled()
        return [*copy.deepcopy([tensors, states, torch.get_rng_state(), inputs.grad]), *modes, *others, len(calls)]

    before = state()
    done = of(prof, [(rule, ("Sequential", "Sequential.2"), "") for rule in REMEDIES], inputs)
    assert {trial.rule for trial in done if trial.why_not} <= {"many_small_operators", *NOT_IN_LINEAR_TRAINING}
    after = state()
    for one, other in zip(before, after, strict=True):
        if isinstance(one, list) and one and isinstance(one[0], Tensor):
            assert all(map(torch.equal, one, other))
        elif isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def test_a_fused_step_is_tried_on_a_copy_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_SECONDS", (2.0, 2.0))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    inputs = torch.rand(4, 8)
    with Profile(model) as prof:
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    trial = tried(prof, "optimizer_step_per_tensor", (), inputs)
    assert trial.how == "torch.optim.AdamW(…, fused=True)" and not trial.why_not
    assert trial.after_ns < trial.before_ns and trial.has_gained
    assert trial.difference is not None and trial.difference < 1e-5  # the parameters after a step from one state
    del optimizer
    why = "the model has no optimizer of torch's, or several"
    assert tried(prof, "optimizer_step_per_tensor", (), inputs).why_not == why


def test_float32_and_autocast_are_tried_on_inputs_of_their_types() -> None:
    model, inputs = nn.Sequential(nn.Linear(64, 64)).double(), torch.rand(32, 64, dtype=torch.double)
    trial = tried(profiled(model, inputs), "double_precision", ("Sequential.0",), inputs)
    assert not trial.why_not and 0 < (trial.difference or 0) < 1e-5
    assert next(model.parameters()).dtype == torch.double


@pytest.mark.parametrize(
    ("rule", "layers", "inputs", "why"),
    [
        ("waiting_for_data", (), (torch.rand(2, 4),), "it changes your code"),
        ("double_precision", (), (torch.rand(2, 5),), "RuntimeError: mat1 and mat2 shapes"),
        ("costly_dropout", ("Clocked.layer",), (torch.rand(2, 4),), "what it changes is not in the model"),
    ],
)
def test_why_a_remedy_was_not_tried(rule: str, layers: tuple[str, ...], inputs: tuple[Tensor, ...], why: str) -> None:
    trial = tried(profiled(Clocked(), torch.rand(2, 4)), rule, layers, *inputs)
    assert trial.why_not.startswith(why) and not trial.has_gained


def test_a_large_model_or_one_that_cannot_be_copied_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Clocked()
    prof = profiled(model, torch.rand(2, 4))
    monkeypatch.setattr(remedies, "_MOST_BYTES", 16)
    assert (
        tried(prof, "double_precision", (), torch.rand(2, 4)).why_not == "a copy of the model takes 160 B"
    )  # with its gradients
    monkeypatch.undo()
    model.lock = (number for number in range(3))  # type: ignore[assignment]
    assert tried(prof, "double_precision", (), torch.rand(2, 4)).why_not.startswith("TypeError: cannot pickle")
    assert tried(prof, "double_precision", (), torch.rand(2, 4), seconds=0).why_not


def test_no_trial_begins_when_the_time_is_spent() -> None:
    trial = tried(profiled(Clocked(), torch.rand(2, 4)), "double_precision", (), torch.rand(2, 4), seconds=0)
    assert trial.why_not == "the time for trials is spent"


# Profile.verify


def test_verify_puts_what_was_measured_in_place_of_what_was_said(
    monkeypatch: pytest.MonkeyPatch, reloaded: Any
) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).double()
    inputs = torch.rand(512, 256, dtype=torch.double)
    prof = profiled(model, inputs)
    [said] = [one for one in advise(prof.run) if one.rule == "double_precision"]
    run = prof.verify(inputs, seconds=10)
    assert run is prof.run and "double_precision" in {trial.rule for trial in run.trials}
    [trial] = [trial for trial in run.trials if trial.rule == "double_precision"]
    [found] = [one for one in advise(run) if one.rule == "double_precision"]
    assert found.trial == trial and trial.layers == said.layers
    assert trial.has_gained and trial.result in str(prof) and trial.result in run.report("findings")
    text = " ".join(run.report("findings").split())
    assert "`model.float(), x.float()`" in text and f"{trial.result}, up to 514.00 KB of memory" in text
    assert found.gain_ns == pytest.approx(trial.gain * run.meta.wall_ns, abs=1)
    assert reloaded(run) == run


def test_a_remedy_that_gained_nothing_is_last() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).double()
    prof = profiled(model, torch.rand(512, 256, dtype=torch.double))
    first, *_ = advise(prof.run)
    in_vain = Trial(0, first.rule, first.layers, how="x", pairs=6, low=-0.1, gain=0.0, high=0.02)
    run = replace(prof.run, trials=(in_vain,))
    *_, last = advise(run)
    assert last.rule == first.rule and last.gain_ns == 0 and "Tried: no gain (-10%–2%)" in run.report("findings")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda prof: prof.verify(), "give it the inputs of a call, as in prof.verify"),
        (lambda prof: prof.verify(torch.rand(2, 4), seconds=0), "seconds must be a number above 0, not 0"),
        (lambda prof: prof.verify(torch.rand(2, 4), seconds="1"), "seconds must be a number above 0, not '1'"),
    ],
)
def test_wrong_calls_of_verify_say_what_to_do(call: Callable[[Profile], object], says: str) -> None:
    prof = profiled(Clocked(), torch.rand(2, 4))
    with pytest.raises(TorchprofError, match=says):
        call(prof)


def test_verify_needs_one_model_and_the_end_of_the_block() -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with Profile(models) as prof:
        models[0](torch.rand(1, 4))
    with pytest.raises(TorchprofError, match="this Profile has 2"):
        prof.verify(torch.rand(1, 4))
    with Profile(models[0]) as prof, pytest.raises(TorchprofError, match="has not ended"):
        prof.verify(torch.rand(1, 4))


# The interval of a median


@pytest.mark.parametrize("n", [6, 8, 9, 12, 20, 57])
def test_the_interval_of_a_median_is_the_narrowest_of_95_percent(n: int) -> None:
    low, high = (int(end) for end in median_interval([*range(n)]))
    assert low == n - 1 - high

    def outside(k: int) -> float:  # the probability that k or fewer of n values are below the median, or above it
        return 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n

    assert outside(low) <= 0.05 < outside(low + 1)


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=40))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= sorted(values)[len(values) // 2] <= high


def test_the_runs_of_all_ranks_keep_their_trials() -> None:
    def of_rank(rank: int) -> Run:
        prof = profiled(nn.Linear(4, 4), torch.rand(1, 4))
        meta = prof.run.meta.__class__(**{**vars(prof.run.meta), "rank": rank})
        trial = Trial(rank, "mine", ("Linear",), why_not="no time")
        rows = prof.run.rows
        rows.columns["rank"][:] = type(rows.columns["rank"])("q", [rank] * len(rows.columns["rank"]))
        samples = {key._replace(rank=rank): spread for key, spread in prof.run.samples.items()}
        return Run((meta,), prof.run.layers, rows, samples, trials=(trial,))

    merged = torchprof.merge([of_rank(0), of_rank(1)])
    assert [trial.rank for trial in merged.trials] == [0, 1]


# torchprof run --try


def a_block() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.dropout = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)
            self.down = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.up(x))
            h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))
            return x + self.down(self.dropout(h))

    return nn.Sequential(*(Block() for _ in range(2)))


def plainly_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(64, 32)).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=False, fused=False)


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(80):  # if some are recorded again, too
        optimizer.zero_grad()
        model(torch.rand(64, 32)).square().mean().backward()
        optimizer.step()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(160):
        (model(torch.rand(64, 32)).square().mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plainly(model, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(80):  # if some are recorded again, too
            model(torch.rand(64, 32))
    model.train()
    plainly(model, optimizer)


def under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(80):  # if some are recorded again, too
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.rand(64, 32)).float().square().mean()
        loss.backward()
        optimizer.step()


def of_two(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A generator and a critic."""
    critic = nn.Linear(32, 1)
    other = torch.optim.Adam(critic.parameters(), foreach=False)
    for _ in range(80):  # if some are recorded again, too
        fake = model(torch.rand(64, 32))
        other.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.rand(64, 32)).mean()).backward()
        other.step()
        optimizer.zero_grad()
        critic(fake).mean().neg().backward()
        optimizer.step()


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler wraps the optimizer's step; gradients are clipped."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(80):
        optimizer.zero_grad()
        model(torch.rand(64, 32)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(80):
        plainly_once(model, optimizer)
        average.update_parameters(model)
    with torch.no_grad():
        for one, other in zip(model.parameters(), average.module.parameters()):
            one.copy_(other)


def checkpointing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    whole = nn.ModuleDict({"whole": model})
    whole.forward = lambda x: checkpoint(model, x, use_reentrant=False)  # type: ignore[method-assign]
    for _ in range(80):
        optimizer.zero_grad()
        whole(torch.rand(64, 32)).square().mean().backward()
        optimizer.step()


def frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.children()).requires_grad_(False)
    plainly(model, optimizer)


def of_two_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(80):
        optimizer.zero_grad()
        output = model(torch.rand(64, 32))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()


TRAININGS = [plainly, accumulating, evaluating, under_autocast, of_two]
TRAININGS += [scheduled, averaging, checkpointing, frozen, of_two_losses]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("train", TRAININGS)
def test_a_training_in_which_remedies_are_tried_computes_the_same(
    train: Callable[[nn.Module, torch.optim.Optimizer], None],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters, buffers, optimizer and random numbers, to the bit. All that can be tried is, in each kind of pass."""
    rules = [rule for rule in REMEDIES if rule != "many_small_operators"]
    wanted = [(rule, ("Sequential", "Sequential.0", "Sequential.1"), "") for rule in rules]
    monkeypatch.setattr(trials, "output", lambda name: lambda run: wanted)

    def result(around: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = a_block()
        optimizer = make(model)
        with around:
            train(model, optimizer)
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        return [*model.state_dict().values(), *state, torch.rand(3)]

    program = TryingProgram(warmup_calls=None, seconds=30)
    plain, tried_ones = result(nullcontext()), result(program)
    assert len(plain) == len(tried_ones) and all(map(torch.equal, plain, tried_ones))
    done = program.run.trials
    assert {trial.rule for trial in done} >= {*rules}
    is_tried = train is not checkpointing  # its forward is replaced
    assert not is_tried or all(
        not trial.why_not for trial in done if trial.rule in ("double_precision", "costly_dropout")
    )
    models = {of_two: ["Sequential", "Linear"], checkpointing: ["ModuleDict"]}.get(train, ["Sequential"])
    found = [layer.name for layer in program.run.layers if len(layer.path) == 1]
    assert found == models, "a copy was taken for a model of the program"


def test_the_time_of_trials_is_in_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "output", lambda name: lambda run: [("mine", ("Clocked",), "")])
    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", lambda *_: bool(time.sleep(0.2)) or True))
    with TryingProgram(warmup_calls=None) as program:
        plainly(model := Clocked32(), sgd(model))
    [passes] = program.run.passes
    assert passes.ns is not None and passes.ns.max < 0.2e9 and program.run.trials


class Clocked32(Clocked):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)


class Draws(nn.Linear):
    """Its noise comes from a generator that is no part of it."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(str(self.draw()))


OF_TORCH, OF_PYTHON = torch.Generator(), random.Random(0)
OF_NUMPY, OLD_OF_NUMPY = np.random.default_rng(0), np.random.RandomState(0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand((), generator=OF_TORCH).item(),
        lambda: OF_PYTHON.random(),
        lambda: OF_NUMPY.random(),
        lambda: OLD_OF_NUMPY.rand(),
        lambda: np.random.rand(),
        lambda: random.random(),
    ],
)
def test_no_generator_is_further_after_a_trial(draw: Callable[[], object]) -> None:
    prof = profiled(Draws(draw).double(), torch.rand(2, 4, dtype=torch.double))
    states = copy.deepcopy((OF_PYTHON.getstate(), OF_NUMPY.bit_generator.state, OLD_OF_NUMPY.get_state()))
    of_torch, globally = OF_TORCH.get_state(), (random.getstate(), str(np.random.get_state()))
    assert tried(prof, "double_precision", (), torch.rand(2, 4, dtype=torch.double)).pairs >= 6
    assert str(states) == str((OF_PYTHON.getstate(), OF_NUMPY.bit_generator.state, OLD_OF_NUMPY.get_state()))
    assert torch.equal(of_torch, OF_TORCH.get_state()) and globally == (random.getstate(), str(np.random.get_state()))


def test_steps_and_ranges_of_trials_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranged(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.profiler.record_function("mine"):
                return super().forward(x)

    monkeypatch.setattr(trials, "output", lambda name: lambda run: [("double_precision", (), "")])
    with TryingProgram(warmup_calls=None) as program:
        plainly(model := Ranged(32, 32), sgd(model))
    run = program.run
    assert run.trials[0].pairs >= 6
    steps = run.rows.total("calls", frames=lambda chain: bool(chain) and "Optimizer.step" in chain[-1].name)
    ranges = run.rows.total("calls", frames=lambda chain: bool(chain) and chain[-1].name == "mine")
    assert (steps, ranges) == (run.rows.forward_calls(0),) * 2


def test_what_cannot_be_tried_in_a_program_is_said() -> None:
    with TryingProgram(warmup_calls=None) as program:
        model = nn.Linear(4, 4)
        for _ in range(5):
            model(torch.rand(1, 4))
    assert "Nothing was tried: `--try` needs a single process" in "\n".join(map(str, program.run.warnings))
    assert program.run.trials == ()


def test_ctrl_c_ends_the_trials_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: nn.Module, layers: object, optimizer: object) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return True

    wanted = [("double_precision", (), ""), ("mine", (), ""), ("costly_dropout", (), "")]
    monkeypatch.setattr(trials, "output", lambda name: lambda run: wanted)
    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", interrupted))
    with TryingProgram(warmup_calls=None) as program:
        plainly(model := Clocked32(), sgd(model))
    assert [(trial.rule, trial.why_not) for trial in program.run.trials] == [
        ("double_precision", ""),
        ("mine", "trials were interrupted"),
    ]
    assert model.calls >= 30


def test_what_cannot_be_copied_is_not_tried() -> None:
    """A cache, a generator, a module as an input: a call of a copy would change the user's own."""
    model, inputs = Clocked(), torch.rand(2, 4)
    prof = profiled(model, inputs)
    model.forward = lambda x, cache=None: model.layer(x)  # type: ignore[method-assign]
    assert tried(prof, "double_precision", (), inputs).why_not == "a forward of Clocked is replaced"
    del model.forward
    for value in (torch.Generator(), nn.Linear(1, 1), (number for number in range(3))):
        why = tried(prof, "double_precision", (), inputs, value).why_not
        assert why == f"an input is of the class {type(value).__name__}, which is not copied"


def test_trials_have_autocast_and_the_default_device_but_no_other_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool, bool, str]] = []

    def look(model: nn.Module, layers: object, optimizer: object) -> bool:
        modes = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        seen.append((*modes, torch.empty(1).device.type))
        return True

    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", look))
    prof = profiled(Clocked(), torch.rand(2, 4))
    with torch.inference_mode():
        assert not tried(prof, "mine", (), torch.rand(2, 4)).why_not
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert not tried(prof, "mine", (), torch.rand(2, 4)).why_not
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        assert not tried(prof, "mine", (), torch.rand(2, 4, device="cpu")).why_not
    assert counter.get_total_flops() == 0
    assert seen == [(False, False, True, "cpu"), (True, False, True, "cpu"), (False, False, True, "meta")]


def test_modes_and_hooks_of_the_user_do_not_see_copies() -> None:
    class Mine(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    called: list[object] = []
    inputs = torch.rand(2, 4, dtype=torch.double)
    prof = profiled(nn.Linear(4, 4).double(), inputs)
    with Mine():
        called.clear()
        trial = tried(prof, "double_precision", (), inputs)
    assert trial.why_not == "a TorchFunctionMode of yours is active"
    if RELEASE >= (2, 6):
        with torch.autograd.graph.saved_tensors_hooks(called.append, lambda saved: saved):
            trial = tried(prof, "double_precision", (), inputs)
        assert trial.why_not == "hooks of yours on saved tensors are active"
    assert nn.functional.linear not in called and not any(isinstance(each, Tensor) for each in called)


def test_two_findings_of_one_rule_are_tried_together_with_the_layers_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def change(model: nn.Module, layers: Any, optimizer: object) -> bool:
        given.append(len(layers))
        model.seconds = 1.0 - 0.25 * len(layers)  # type: ignore[assignment]
        return True

    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: lambda: Clocked.now)
    monkeypatch.setitem(REMEDIES, "mine", Remedy("do(it)", change))
    prof = profiled(Clocked(), torch.rand(2, 4))
    one, two, both = of(prof, [("mine", ("Clocked",), ""), ("mine", ("Clocked.layer",), "")], torch.rand(2, 4))
    assert given == [1, 1, 2] and both.gain == pytest.approx(2 * one.gain) and one.gain == two.gain


def test_why_a_remedy_was_not_tried_is_in_the_report() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).double()
    prof = profiled(model, torch.rand(512, 256, dtype=torch.double))
    prof.verify(torch.rand(2, 5, dtype=torch.double))
    text = " ".join(prof.run.report("findings").split())
    assert "Its remedy was not tried: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert "Saves up to " in text and "Measured" not in str(prof)


def test_a_gain_is_a_share_of_all_time_by_rows_and_by_the_time_of_a_call() -> None:
    """A hand calculation: of a step that was tried, 40 to 60 % are saved, in the middle half of it."""
    model = a_block()
    optimizer = sgd(model)
    with Profile(model) as prof:
        for _ in range(4):
            plainly_once(model, optimizer)
        with torch.no_grad():
            model(torch.rand(64, 32))
    run = prof.run
    whole_ns, rows = run.meta.wall_ns, run.rows.summed(("layer", "phase"), "cpu_ns")
    model_ns = sum(ns for (layer, _), ns in rows.items() if layer >= 0)
    fifth_ns = sum(ns for (layer, phase), ns in rows.items() if layer >= 0 and phase == 0) // 5  # one call of five
    chains = run.rows.summed("frames", "cpu_ns").items()
    step_ns = sum(
        ns for chain, ns in chains if "Optimizer.step#SGD.step" in map(attrgetter("name"), run.rows.frames[chain])
    )

    def of_time(before_ns: int, calls_per_step: int) -> Trial:
        trial = Trial(0, "mine", (), how="x", pairs=6, before_ns=before_ns, gain=0.5, low=0.4, high=0.6)
        [done] = of_all_time(run, "Sequential", calls_per_step, [trial])
        return done

    # As long as in the run: both ways agree. Half as long: the other half was the profiler's, and is not in the whole.
    same_ns = (model_ns + step_ns - fifth_ns) // 4
    share = (model_ns + step_ns) / whole_ns
    done = of_time(same_ns, 1)
    assert (done.gain, done.low, done.high) == pytest.approx((0.5 * share, 0.4 * share, 0.6 * share), rel=1e-3)
    done = of_time(same_ns // 2, 1)
    tried_ns = same_ns * 2 + fifth_ns
    other = tried_ns / (whole_ns - (model_ns + step_ns - tried_ns))
    assert (done.low, done.high) == pytest.approx((0.4 * min(share, other), 0.6 * max(share, other)), rel=1e-3)
    assert done.gain == pytest.approx(0.25 * (share + other), rel=1e-3)
    # Two calls before a step of the optimizer: as many calls, half as many steps.
    assert of_time(2 * same_ns, 2).gain == pytest.approx(of_time(same_ns, 1).gain, rel=1e-3)
    # Without the optimizer, its rows are no part.
    assert of_time((model_ns - fifth_ns) // 4, 0).gain == pytest.approx(0.5 * model_ns / whole_ns, rel=1e-3)


def test_a_loss_is_no_smaller_than_the_share_of_what_was_tried() -> None:
    """Of a remedy that takes longer, the interval has both ends, too."""
    prof = profiled(Clocked(), torch.rand(2, 4))
    trial = Trial(0, "mine", (), how="x", pairs=6, before_ns=10**12, gain=-0.5, low=-0.6, high=0.1)
    [done] = of_all_time(prof.run, "Clocked", 0, [trial])
    assert done.low == -0.6 and done.high == 0.1 and -0.5 < done.gain < 0 and not done.has_gained


@pytest.mark.parametrize(("calls", "evaluated", "per_step"), [(1, 0, 1), (1, 3, 1), (4, 0, 4), (12, 0, 0)])
def test_as_many_calls_come_before_a_step_of_the_optimizer_as_in_the_loop(
    calls: int, evaluated: int, per_step: int
) -> None:
    """Calls without gradients do not count. Where many calls come before a step, it is no part of what is tried."""
    model = nn.Linear(4, 4)
    optimizer = adam(model)
    with Profile(model) as prof:
        for _ in range(3):
            for _ in range(calls):
                model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for _ in range(evaluated):
                    model(torch.rand(2, 4))
    plan = prof._plan
    made = Trials(prof.run, plan.models[0], plan.modules_by_name, (torch.rand(2, 4),), {})
    assert made.calls_per_step == per_step
    [trial] = made.of([("optimizer_step_per_tensor", (), "")])
    assert (not trial.why_not) == bool(per_step)


@pytest.mark.parametrize("make", [torch.optim.Rprop, torch.optim.ASGD, torch.optim.LBFGS])
def test_optimizers_that_a_learning_rate_of_0_does_not_stop_make_no_step(make: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    with Profile(model) as prof:
        for _ in range(3):
            loss = model(torch.rand(2, 4)).sum()
            loss.backward()
            optimizer.step(lambda: loss)  # noqa: B023
    trial = tried(prof, "optimizer_step_per_tensor", (), torch.rand(2, 4))
    assert trial.why_not == "the model has no optimizer of torch's, or several"


def test_hooks_on_all_modules_or_optimizers_are_not_run_for_copies() -> None:
    prof, calls = profiled(Clocked(), torch.rand(2, 4)), []
    hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        why = tried(prof, "double_precision", (), torch.rand(2, 4)).why_not
        assert why == "a hook on all modules, or on all optimizers, would run for copies" and not calls
    finally:
        hook.remove()


# Remedies: what they change, by what the model computes and how


def remedied(rule: str, model: nn.Module, layers: list[nn.Module]) -> Any:
    """The context of a remedy, after its change of the model; None if there was nothing to change."""
    remedy = REMEDIES[rule]
    return remedy.around() if remedy.change(model, layers, None) else None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_without_checkpoints_forward_runs_once_and_gradients_are_the_same(use_reentrant: bool) -> None:
    layer, calls = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.rand(2, 4, requires_grad=True)

    def gradients() -> list[Tensor]:
        layer.zero_grad()
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]

    with_it = gradients()
    assert len(calls) == 2
    with remedied("recomputed_layers", layer, []):
        without = gradients()
    assert len(calls) == 3 and all(map(torch.equal, with_it, without)) and len(without) == 2
    gradients()
    assert len(calls) == 5


def test_attention_without_weights_returns_none_in_their_place() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(2, 3, 8)
    expected, weights = model(x, x, x)
    assert weights is not None and remedied("attention_not_fused", model, [model]) is not None
    output, weights = model(x, x, x, need_weights=True)
    assert weights is None and torch.allclose(output, expected, atol=1e-6)
    assert remedied("attention_not_fused", nn.Linear(2, 2), [nn.Linear(2, 2)]) is None


def test_channels_last_is_the_layout_of_weights_and_outputs() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.rand(2, 3, 8, 8)
    expected = model(x)
    assert remedied("channels_last_missed", model, []) is not None
    assert model(x).is_contiguous(memory_format=torch.channels_last) and torch.allclose(model(x), expected, atol=1e-6)
    assert remedied("channels_last_missed", nn.Linear(2, 2), []) is None


def test_tf32_is_allowed_only_inside() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with remedied("tf32_not_used", nn.Linear(2, 2), []):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_frozen_layers_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert remedied("frozen_layers_with_gradients", model, [model[0]]) is not None
    model(torch.rand(1, 2)).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    assert remedied("frozen_layers_with_gradients", model, [model[0]]) is None


def test_gradients_that_the_program_fills_with_zeros_are_so_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, backward adds to gradients of zeros; with the remedy it writes new ones."""
    seen: list[list[bool]] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen[-1].append(self.weight.grad is None)
            return super().forward(x)

    model = Looks(4, 4)
    optimizer = sgd(model)
    seen.append([])
    with Profile(model) as prof:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
    seen.append([])
    [trial] = of(prof, [("gradients_zeroed", (), "")], torch.rand(2, 4))
    assert not trial.why_not and trial.how == "optimizer.zero_grad(set_to_none=True)" and trial.difference == 0
    # After the first calls, no call is without gradients as it is, and each is with the remedy.
    assert seen[1][3:] and sum(seen[1][3:]) == len(seen[1][3:]) // 2


def test_inference_is_tried_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    prof = profiled(model, torch.rand(2, 16), backward=False)
    trial = tried(prof, "gradients_never_used", ("Sequential",), torch.rand(2, 16))
    assert not trial.why_not and trial.difference == 0 and trial.how == "with torch.no_grad():"

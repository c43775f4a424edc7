"""torch.compile at work while source lines are recorded, which takes gigabytes. Its eager backend will do here."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from build.libraries import HAS_PYTHON_CALLS
from build.models import Layers
from build.warnings import sentences
from torch import Tensor, nn

import torchprof
from torchprof.errors import TorchprofError
from torchprof.record.compiled.dynamo_code import StackWarning, awaiting_compilation, has_code, is_under_compile

pytestmark = pytest.mark.usefixtures("dynamo")


def net() -> nn.Module:
    """Of a class of its own: torch.compile has made nothing of its forward."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x).relu()
            return y

    return Net(fc=nn.Linear(4, 4))


def wrapped() -> tuple[Any, nn.Module]:
    compiled: Any = torch.compile(net(), backend="eager")
    return compiled, compiled


def in_place() -> tuple[Any, nn.Module]:
    model = net()
    model.compile(backend="eager")
    return model, model


def below_another() -> tuple[Any, nn.Module]:
    inner = net()
    inner.compile(backend="eager")
    return nn.Sequential(inner), inner


@pytest.mark.parametrize("make", [wrapped, in_place, below_another])
def test_modules_that_are_still_to_be_compiled(make: Any) -> None:
    """They are no more when they were called; labels change nothing of that."""
    model, waiting = make()
    assert awaiting_compilation([model]) == [waiting]
    with torchprof.annotate(model):
        assert awaiting_compilation([model]) == [waiting]
        model(torch.rand(2, 4))
        assert awaiting_compilation([model]) == []
    assert awaiting_compilation([model, net()]) == []


class Disabled(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class WithoutOps(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(str(x.shape))


class DisabledItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.compiler.disable(self.forward)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", [Disabled, DisabledItself, WithoutOps])
def test_modules_that_torch_compile_leaves_as_they_are(kind: type[nn.Module], in_place: bool) -> None:
    """Nothing will ever be made of them: they are not waited for, once that is known."""
    model = kind()
    compiled: Any = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    if kind is WithoutOps:
        assert awaiting_compilation([compiled]) == [compiled]
    else:
        assert awaiting_compilation([compiled]) == []
    with torchprof.annotate(compiled):
        compiled(torch.rand(2))
        assert awaiting_compilation([compiled]) == []
    assert awaiting_compilation([compiled]) == []


def test_a_module_with_torch_compile_disabled_is_not_under_torch_compile() -> None:
    model = net()
    assert not is_under_compile(model)
    model.compile(disable=True)
    assert not is_under_compile(model)
    assert not is_under_compile(torch.compiler.disable(net()))
    model.compile(backend="eager")
    assert is_under_compile(model)
    assert is_under_compile(torch.compile(net(), backend="eager"))
    by_chance = nn.ModuleDict({"_orig_mod": net()})
    assert not is_under_compile(by_chance)


def test_compiled_code_is_found_through_labels() -> None:
    """Of another profiler, which came before."""
    model: Any = torch.compile(net(), backend="eager")
    assert (has_code(model), has_code(model._orig_mod)) == (False, False)
    with torchprof.annotate(model):
        model(torch.rand(2, 4))
        assert (has_code(model), has_code(model._orig_mod)) == (True, True)


PYTHON_CALLS = pytest.mark.skipif(not HAS_PYTHON_CALLS, reason="this torch gives no Python calls")


def python_calls(prof: torchprof.Profile) -> int:
    assert prof._session is not None
    # Only they have a name with a line number; torch 2.4 cannot be asked.
    names = (raw.name() for raw in prof._session._profiler.kineto_results.events())
    return sum(re.search(r"\(\d+\): ", name) is not None for name in names)


def test_source_lines_are_left_out_if_the_model_is_compiled_inside_the_block() -> None:
    model, _ = wrapped()
    with torchprof.Profile(model, with_stack=True) as prof:
        model(torch.rand(2, 4))
    assert python_calls(prof) == 0
    assert ("with_stack", False) in prof.run.meta.flags
    [said] = [one for one in sentences(prof.run) if "Source lines were not recorded" in one]
    assert "had not compiled Net yet" in said
    with pytest.raises(TorchprofError, match="source lines"):
        prof.run.report("ops", group_by_stack_n=1)


@PYTHON_CALLS
@pytest.mark.parametrize("warmup", [0, 1])
def test_source_lines_are_recorded_if_the_model_was_compiled_before(warmup: int) -> None:
    model, _ = wrapped()
    if not warmup:
        model(torch.rand(2, 4))
    with torchprof.Profile(model, with_stack=True, warmup=warmup) as prof:
        for _ in range(warmup + 1):
            model(torch.rand(2, 4))
    assert 0 < python_calls(prof) < 10_000
    assert ("with_stack", True) in prof.run.meta.flags
    assert not any("Source lines" in one for one in sentences(prof.run))
    stacks = [frame.signature.stack for row in prof.run.rows for frame in row.frames if frame.signature is not None]
    assert any(Path(__file__).name in line for stack in stacks for line in stack)


@PYTHON_CALLS
@pytest.mark.parametrize("in_warmup", [True, False])
def test_a_model_that_is_compiled_in_the_warm_up_of_a_schedule_has_source_lines(in_warmup: bool) -> None:
    """And not where it is compiled in the first step that is recorded."""
    model, _ = wrapped()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torchprof.Profile(model, with_stack=True, schedule=schedule) as prof:
        for step in range(2):
            if step or in_warmup:
                model(torch.rand(2, 4))
            prof.step()
    assert ("with_stack", in_warmup) in prof.run.meta.flags
    assert bool(python_calls(prof)) == in_warmup
    assert any("Source lines" in one for one in sentences(prof.run)) != in_warmup


def test_compiling_during_the_session_gives_one_warning() -> None:
    """As of a function, or of another shape: nobody knows before that it will be."""
    function: Any = torch.compile(lambda x: x + 1, backend="eager")
    watch = StackWarning()
    watch.on()
    with pytest.warns(UserWarning, match="gigabytes"):
        function(torch.rand(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(torch.rand(2, 2))  # again
        watch.off()
        watch.on()
        watch.off()
        function(torch.rand(2, 2, 2))


# What torch.compile did not compile


class Recurrent(Layers):
    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0]


class OnAValue(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:  # the graph ends here
            x = x * 2
        return x + 1


class Reads(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * x.sum().item()


def recorded(model: nn.Module, x: Tensor) -> torchprof.Run:
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x)
    with torchprof.Profile(compiled) as prof:
        compiled(x)
    return prof.run


def test_a_model_in_which_no_compiled_code_ran_is_named() -> None:
    run = recorded(Recurrent(lstm=nn.LSTM(4, 4)), torch.rand(3, 2, 4))
    [warning] = [one for one in run.warnings if one.code == "no_compiled_code"]
    said = "Recurrent is compiled, but no compiled code ran: torch.compile gave up on Recurrent.forward (test_"
    assert str(warning).startswith(said)
    assert str(warning) in run.report("overview").partition("Where the time goes")[0]
    run = recorded(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4))
    assert not [one for one in run.warnings if one.code == "no_compiled_code"]


def test_a_branch_on_a_value_is_the_reason_of_a_graph_break() -> None:
    run = recorded(OnAValue(), torch.rand(4))
    [region] = [one for one in run.meta.regions if one.break_reason]
    line = inspect.getsourcelines(OnAValue.forward)[1] + 1
    assert (region.break_line, region.break_reason.partition(":")[0]) == (line, "Data-dependent branching")
    assert "torch.where" in run.report("findings")


def test_forwards_in_one_file_have_their_own_graph_breaks() -> None:
    run = recorded(nn.Sequential(Reads(), OnAValue()), torch.rand(4))
    breaks = {one.function: (one.break_line, one.break_reason) for one in run.meta.regions if one.break_reason}
    lines = {kind: inspect.getsourcelines(kind.forward)[1] + 1 for kind in (Reads, OnAValue)}
    found = {line: reason.partition(":")[0] for line, reason in breaks.values()}
    assert found[lines[OnAValue]] == "Data-dependent branching"
    assert "item" in found[lines[Reads]]


def test_a_graph_break_has_no_reason_of_an_earlier_program() -> None:
    """Compile IDs start again after a reset."""
    earlier = [one.break_reason for one in recorded(Reads(), torch.rand(4)).meta.regions if one.break_reason]
    assert earlier
    later = [one.break_reason for one in recorded(OnAValue(), torch.rand(4)).meta.regions if one.break_reason]
    assert not {*earlier} & {*later}

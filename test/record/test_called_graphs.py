"""The FLOPs of code that torch.compile compiled before the block, against those of the same model without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from build.architectures import ARCHITECTURES, resnet
from build.inductor import fresh_compiler, train
from build.libraries import RELEASE
from torch import Tensor, nn

from examples.models import MLP, Bert, LeNet5
from torchprof import Profile, Run
from torchprof.run.words import BACKWARD, FORWARD

pytestmark = pytest.mark.compiler
output_code: Any = pytest.importorskip("torch._inductor.output_code")
if "inductor_post_grad_graph_str" not in getattr(output_code.CompiledFxGraph, "__annotations__", {}):
    pytest.skip("graphs of this torch have no text", allow_module_level=True)


_fresh = pytest.fixture(fresh_compiler, autouse=True)


def counted(model: Any, inputs: list[Tensor], **options: Any) -> Run:
    with Profile(model, with_flops=True, **options) as prof:
        for x in inputs:
            train(model, x)
    return prof.run


def compiled_before(model: nn.Module, inputs: list[Tensor], **options: Any) -> Any:
    compiled = torch.compile(model, **options)
    for x in inputs:
        train(compiled, x)
    return compiled


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP": (lambda: MLP(16, 64), torch.rand(4, 16)),
    "LeNet-5": (LeNet5, torch.rand(2, 1, 32, 32)),
    "BERT": (lambda: Bert(50, 16, 1, 2, 32).eval(), torch.randint(0, 50, (2, 8))),
    "ResNet": (partial(resnet, blocks=1), ARCHITECTURES["ResNet"].inputs()[0]),
}


class Counted(NamedTuple):
    """A model, an input, and the runs of two passes: of the model itself, and of its code that was compiled before."""

    model: nn.Module
    x: Tensor
    eager: Run
    compiled: Run


@cache
def counted_twice(name: str) -> Counted:
    make, x = MODELS[name]
    model = make()
    eager = counted(model, [x, x])
    return Counted(model, x, eager, counted(compiled_before(model, [x]), [x, x]))


@pytest.mark.parametrize("name", MODELS)
def test_the_work_of_compiled_code_is_that_of_the_model(name: str) -> None:
    """torch.compile decomposes activations and norms into other arithmetic: the products are equal."""
    _, _, eager, run = counted_twice(name)
    for phase in (FORWARD, BACKWARD):
        ours, wanted = run.tree(phase).total, eager.tree(phase).total
        assert not ours.uncounted
        if (name, phase) == ("BERT", BACKWARD):  # its attention's backward is not that of the eager kernel
            assert 1 <= ours.macs / wanted.macs < 1.05
        else:
            assert ours.macs == wanted.macs > 0
        assert ours.flops == pytest.approx(wanted.flops, rel=0.2)
    assert sum(row.cost.macs for row in run.rows) == sum(run.tree(phase).total.macs for phase in (FORWARD, BACKWARD))


def test_each_call_counts_with_its_own_sizes() -> None:
    model, sizes = MLP(16, 64), [4, 7, 4, 12]
    inputs = [torch.rand(size, 16) for size in sizes]
    compiled = compiled_before(model, inputs[:2], dynamic=True)
    run, eager = counted(compiled, inputs), counted(model, inputs)
    for phase in (FORWARD, BACKWARD):
        assert run.tree(phase).total.macs == eager.tree(phase).total.macs
    products = 2 * 16 * 64
    assert run.tree(FORWARD).total.macs == sum(sizes) * products


def test_only_recorded_steps_count() -> None:
    model = MLP(16, 64)
    inputs = [torch.rand(size, 16) for size in (4, 5, 6, 7)]
    compiled = compiled_before(model, inputs[:2], dynamic=True)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=1, repeat=1)
    with Profile(compiled, with_flops=True, schedule=schedule) as prof:
        for x in inputs:
            train(compiled, x)
            prof.step()
    assert prof.run.tree(FORWARD).total.macs == 7 * 2 * 16 * 64


def test_library_calls_keep_their_rows_and_fused_kernels_are_at_the_region() -> None:
    model, x = MLP(16, 64), torch.rand(4, 16)
    run = counted(compiled_before(model, [x]), [x])
    forward = [row for row in run.rows if row.phase == FORWARD and row.cost.flops and row.layer]
    assert {row.frames[-1].name for row in forward if row.cost.macs} == {"aten::addmm"}
    (rest,) = [row for row in forward if not row.cost.macs]
    assert rest.frames[0].kind == "region"
    assert rest.cost.flops >= 4 * 64, "at least one for each element of the activation"


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch before 2.13 does not tell what this needs")
@pytest.mark.parametrize("name", MODELS)
def test_kernels_at_their_layers_have_the_work_of_their_nodes(name: str) -> None:
    """All work of a graph is in its kernels, and each layer has the products of its own forward and backward."""
    model, x, eager, _ = counted_twice(name)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    with Profile(compiled, with_flops=True, compile_layers=True, warmup=1) as prof:
        for _ in range(3):
            train(compiled, x)
    run, whole = prof.run, counted(compiled, [x, x])
    for phase in (FORWARD, BACKWARD):
        assert not run.tree(phase).total.uncounted
        assert run.tree(phase).total.macs == whole.tree(phase).total.macs
        assert run.tree(phase).total.flops == whole.tree(phase).total.flops
        if (name, phase) != ("BERT", BACKWARD):  # its attention's backward is not that of the eager kernel
            assert macs_of_layers(run, phase) == macs_of_layers(eager, phase)
    assert sum(row.cost.flops for row in run.rows if row.frames and row.frames[-1].name == "CompiledFxGraph") == 0


def macs_of_layers(run: Run, phase: str) -> dict[str, int]:
    return {node.layer.name: node.total.macs for node in run.tree(phase).walk()}


def test_a_graph_that_was_compiled_before_counts_as_a_whole_though_layers_are_asked_for() -> None:
    model, x = MLP(16, 64), torch.rand(4, 16)
    compiled = compiled_before(model, [x])
    run = counted(compiled, [x], compile_layers=True)
    forward = run.tree(FORWARD).total
    assert (forward.macs, forward.uncounted) == (2 * 4 * 16 * 64, 0)


def test_inference_counts_too() -> None:
    """The text of such a graph names its class otherwise."""
    model, x = MLP(16, 64), torch.rand(4, 16)
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)
        with Profile(compiled, with_flops=True) as prof:
            compiled(x)
    total = prof.run.tree(FORWARD).total
    assert (total.macs, total.uncounted) == (2 * 4 * 16 * 64, 0)


@pytest.mark.real_kernels
def test_nothing_is_compiled_again_and_torch_is_restored() -> None:
    model, x = MLP(16, 64), torch.rand(4, 16)
    compiled = compiled_before(model, [x])
    call = output_code.CompiledFxGraph.__call__
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    wanted = compiled(x)
    with Profile(compiled, with_flops=True):
        assert torch.equal(compiled(x), wanted)
        assert output_code.CompiledFxGraph.__call__ is not call
    assert output_code.CompiledFxGraph.__call__ is call
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    with pytest.raises(ZeroDivisionError), Profile(compiled, with_flops=True):
        raise ZeroDivisionError
    assert output_code.CompiledFxGraph.__call__ is call


def test_the_work_is_in_saved_runs_and_reports(reloaded: Any) -> None:
    model, x = MLP(16, 64), torch.rand(4, 16)
    run = counted(compiled_before(model, [x]), [x])
    loaded = reloaded(run)
    assert loaded.tree().total == run.tree().total
    assert "not counted" not in str(loaded)

"""Programs of torch.export: unflattened, they have the layers of the model; as a graph, their layers are unknown."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models import LeNet5, TinyTransformer
from torchprof import Profile, Run, TorchprofError
from torchprof.integrations.flops_profiler import FlopsProfiler
from torchprof.run.words import FORWARD

MODELS: dict[str, tuple[Any, Tensor]] = {
    "LeNet-5": (LeNet5, torch.rand(2, 1, 32, 32)),
    "transformer": (TinyTransformer, torch.randint(1000, (2, 8))),
}


def recorded(model: nn.Module, x: Tensor) -> Run:
    with Profile(model, with_flops=True) as prof, torch.no_grad():
        model(x)
    return prof.run


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, Tensor]:
    make, x = MODELS[request.param]
    model = make().eval()
    return model, torch.export.export(model, (x,)), x


def test_an_unflattened_program_has_the_layers_and_the_work_of_the_model(
    exported: tuple[nn.Module, Any, Tensor],
) -> None:
    model, program, x = exported
    run, eager = recorded(torch.export.unflatten(program), x), recorded(model, x)
    ours = {node.layer.name: (node.layer.kind, node.self.macs) for node in run.tree(FORWARD).walk() if node.calls}
    wanted = {node.layer.name: (node.layer.kind, node.self.macs) for node in eager.tree(FORWARD).walk()}
    worked = {name: found for name, found in wanted.items() if found[1]}
    assert worked and worked.items() <= ours.items()
    assert {*ours} <= {*wanted}


def test_the_layers_of_a_graph_are_unknown_and_not_0(exported: tuple[nn.Module, Any, Tensor]) -> None:
    model, program, x = exported
    run, eager = recorded(program.module(), x), recorded(model, x)
    assert run.tree(FORWARD).total.macs == eager.tree(FORWARD).total.macs
    rows = [line.split("|") for line in run.report("tree").splitlines() if "─ " in line and "_guards_fn" not in line]
    assert rows and {cell.strip() for _, _, *cells in rows for cell in cells} == {"–"}  # but for the parameters
    assert [warning.layers for warning in run.warnings if warning.code == "exported"] == [("GraphModule",)]
    assert "never_called" not in {warning.code for warning in run.warnings}


def test_a_graph_of_torch_fx_calls_its_modules() -> None:
    graph = torch.fx.symbolic_trace(LeNet5())
    run = recorded(graph, torch.rand(2, 1, 32, 32))
    assert "exported" not in {warning.code for warning in run.warnings}
    assert {node.layer.kind for node in run.tree(FORWARD).walk() if node.self.macs} == {"Conv2d", "Linear"}


def test_a_program_itself_is_refused_with_what_to_profile() -> None:
    program: Any = torch.export.export(LeNet5().eval(), (torch.rand(2, 1, 32, 32),))
    with pytest.raises(TorchprofError, match=r"Profile torch\.export\.unflatten\(program\)"), Profile(program):
        pass


def test_the_page_of_flops_profiler_has_the_layers_of_an_unflattened_program() -> None:
    x = torch.rand(2, 1, 32, 32)
    model = LeNet5().eval()
    exported: Any = torch.export.unflatten(torch.export.export(model, (x,)))
    pages = []
    for one in (model, exported):
        profiler = FlopsProfiler(one)
        profiler.start_profile()
        one(x)
        profiler.stop_profile()
        text = io.StringIO()
        with redirect_stdout(text):
            profiler.print_model_profile(top_modules=1)
        layers = re.findall(r"^ +\((\w+)\): ", text.getvalue(), re.MULTILINE)
        pages.append((profiler.get_total_macs(), profiler.get_total_params(), layers))
        profiler.end_profile()
    assert pages[0] == pages[1] and pages[0][2][:2] == ["features", "0"]

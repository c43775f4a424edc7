"""CUDA graphs: what a replay runs is complete, and belongs to the layer that replays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build.machine import Machine, kernels, on_gpu, whole
from torch import Tensor, nn

from examples.large_models import Llama
from torchprof.run.words import REPLAY

pytestmark = on_gpu


class Replays(nn.Module):
    """Runs its layers once as a CUDA graph and from then on replays it. ``options`` are those of torch.cuda.graph."""

    def __init__(self, inner: nn.Module, x: Tensor, **options: Any) -> None:
        super().__init__()
        self.inner = inner
        self.x = x.clone()
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                inner(self.x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph, **options):
            self.y = inner(self.x)

    def forward(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.LayerNorm(512))


def replayed(run: Any) -> dict[str, int]:
    """How often each kernel ran in a replay."""
    found: dict[str, int] = {}
    for row in run.rows:
        in_replay = any(frame.kind == "kernels" and frame.name == REPLAY for frame in row.frames)
        if in_replay and row.frames[-1].kind == "kernel":
            found[row.frames[-1].name] = found.get(row.frames[-1].name, 0) + row.calls
    return found


@pytest.mark.parametrize("options", [{}, {"enable_annotations": True}], ids=["plain", "annotated"])
@torch.no_grad()
def test_a_replay_has_the_kernels_of_the_eager_layers(
    machine: Machine, figure: Callable[..., None], options: dict[str, Any]
) -> None:
    """Annotations of newer versions of torch add no kernel and hide none."""
    if not options.keys() <= inspect.signature(torch.cuda.graph).parameters.keys():
        pytest.skip("this torch has no annotations of graphs")
    inner, x = layers().to(machine.device), torch.rand(64, 512, device=machine.device)
    eager = machine.recorded(inner, lambda: inner(x))
    model = Replays(inner, x, **options)
    prof = machine.recorded(model, lambda: model(x))
    figure("device time of a replay and of the eager layers", machine.adds_up(prof), machine.adds_up(eager), "ns")
    assert sum(replayed(prof.run).values()) == sum(kernels(eager.run).values())
    assert prof.run.tree().calls == 1
    assert prof.run.tree().self.device_ns == whole(prof.run).device_ns  # the copy of the input and the replay


@torch.no_grad()
def test_replays_are_not_counted_and_this_is_said(machine: Machine) -> None:
    model = Replays(layers().to(machine.device), x := torch.rand(64, 512, device=machine.device))
    prof = machine.recorded(model, lambda: model(x), with_flops=True)
    assert any(warning.code == "uncounted_replayed" for warning in prof.run.warnings)
    assert whole(prof.run).uncounted > 0


@torch.no_grad()
def test_a_graph_may_be_captured_inside_the_block(machine: Machine) -> None:
    """Layers that are called while a graph is captured launch nothing; what they record is replayed."""
    inner, x = layers().to(machine.device), torch.rand(64, 512, device=machine.device)
    inner(x)
    machine.wait()
    with machine.profile(inner) as prof:
        model = Replays(inner, x)
        for _ in range(3):
            model(x)
        machine.wait()
    machine.adds_up(prof)
    assert sum(replayed(prof.run).values()) >= 3
    assert torch.allclose(model(x), inner(x), atol=1e-4)


def test_callables_that_torch_makes_of_layers(machine: Machine) -> None:
    """``make_graphed_callables`` replaces a forward: training through two graphs."""
    model = layers().to(machine.device)
    x = torch.rand(64, 512, device=machine.device, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    prof = machine.recorded(graphed, lambda: graphed(x).sum().backward())
    machine.adds_up(prof)
    assert sum(replayed(prof.run).values()) > 0


@torch.no_grad()
def test_a_decoding_step_as_a_graph(machine: Machine, figure: Callable[..., None]) -> None:
    model = Llama(1000, 512, 4, 8, 4, 1376).to(machine.device, torch.bfloat16)
    model.frequencies = model.frequencies.float()
    caches, place = model.empty_caches(1, 128), torch.tensor([5], device=machine.device)
    token = torch.randint(0, 1000, (1, 1), device=machine.device)
    eager = machine.recorded(model, lambda: model(token, caches, place))

    class Decodes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x, caches, place)

    graphed = Replays(Decodes(), token)
    prof = machine.recorded(graphed, lambda: graphed(token))
    figure("a decoding step, eager: wall", eager.run.meta.wall_ns, unit="ns")
    figure("a decoding step, as a graph: wall", prof.run.meta.wall_ns, unit="ns")
    machine.adds_up(prof)
    assert sum(replayed(prof.run).values()) == sum(kernels(eager.run).values())

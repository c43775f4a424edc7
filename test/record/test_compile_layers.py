"""Layers of what torch.compile makes, with the real compiler: Inductor on the CPU, forward and backward.

Kernels are held against three things that know nothing of torchprof: a list by hand, the source lines that Inductor
says each kernel is from, and the ranges in torch's own events.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import json
import linecache
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from build.examples import SHARE
from build.inductor import kernels_of_zeros
from build.libraries import RELEASE, usable_transformers
from build.models import Holder, Layers
from build.phases import in_column_of
from build.warnings import sentences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof.attribute.compiled_graphs import TracedModule
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.errors import TorchprofError
from torchprof.record.compiled import inductor, traced_graph
from torchprof.record.compiled.dynamo_code import TakenTensor, module_of_source
from torchprof.record.compiled.inductor import CalledGraphs, _noting_calls
from torchprof.record.compiled.kept_graph import NotedCalls
from torchprof.run.rows import Row
from torchprof.run.run import Run
from torchprof.run.words import (
    BACKWARD,
    FORWARD,
    LAYERS_NOT_RECORDED,
    NOT_ATTRIBUTABLE,
    OTHER,
    OTHER_MODULE,
    RECOMPUTE,
    Frame,
    FrameKind,
)

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(RELEASE < (2, 13), reason="torch before 2.13 does not tell what this needs"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's kernels for the CPU need a compiler of C++"),
]


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """No kernels of C++, but in tests with the mark ``real_kernels`` and in fixtures of the module."""
    with nullcontext() if request.node.get_closest_marker("real_kernels") else kernels_of_zeros():
        yield


# Models. Each class has a forward of its own, and each call of a module a line of its own: so a line of the source
# tells the module.


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1 = Linear(width, 2 * width)
        self.act = Gelu()
        self.fc2 = Linear(2 * width, width)
        self.norm = LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        y = self.act(y)
        y = self.fc2(y)
        y = self.norm(y)
        return x + y


class Small(Layers):
    def __init__(self) -> None:
        super().__init__(fc=Linear(64, 64), act=Gelu())

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.act(x)


class Net(Layers):
    """Two blocks, which are called by name and held in a list, and a head."""

    def __init__(self) -> None:
        super().__init__(blocks=nn.ModuleList([Mlp(), Mlp()]), head=Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What is recorded


@dataclass
class GraphCall:
    """A call of a compiled graph, in torch's own events: the key of the graph, whether autograd called it, and name and
    duration of each op directly in it."""

    key: str
    backward: bool
    ops: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Recorded:
    """A model with its run, the graphs that Inductor made meanwhile, and their calls."""

    model: nn.Module
    run: Run
    graphs: dict[str, Any]
    calls: list[GraphCall]


def unique_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def no_new_graphs() -> Iterator[None]:
    before = unique_graphs()
    yield
    assert unique_graphs() == before


@contextmanager
def made_graphs() -> Iterator[dict[str, Any]]:
    """All graphs that Inductor makes in here: by their keys, when it ends."""
    from torch._inductor.output_code import CompiledFxGraph

    made: list[Any] = []
    by_key: dict[str, Any] = {}
    original = CompiledFxGraph.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CompiledFxGraph, "__init__", init)
        yield by_key
    by_key.update({str(graph._fx_graph_cache_key): graph for graph in made})


def start_anew() -> None:
    """torch.compile as in a new process. Also numbers of graphs, which are in the names of kernels of C++: with others
    they would be compiled again."""
    from torch._inductor import compile_fx

    torch._dynamo.reset()
    compile_fx._graph_counter = itertools.count()


def graph_calls(prof: torchprof.Profile) -> list[GraphCall]:
    assert prof._session is not None
    raws = prof._session._read().all
    ends: list[tuple[int, GraphCall | None, bool]] = []  # around: when it ends, the graph's call, whether backward
    found: list[GraphCall] = []
    for raw in sorted(raws, key=lambda raw: (raw.start_ns(), -raw.duration_ns())):
        if raw.name() == "[memory]":
            continue
        while ends and ends[-1][0] <= raw.start_ns():
            ends.pop()
        _, call, backward = ends[-1] if ends else (0, None, False)
        inner = None
        if call is not None:
            call.ops.append((raw.name(), raw.duration_ns()))
        elif raw.name().startswith("## Call CompiledFxGraph "):
            inner = GraphCall(raw.name().split()[3], backward)
            found.append(inner)
        ends.append((raw.start_ns() + raw.duration_ns(), inner, backward or "CompiledFunctionBackward" in raw.name()))
    return found


def graphs_without_us(make: Callable[[], nn.Module], use: Callable[[Any], Any], how: Callable[..., Any]) -> int:
    """How many graphs torch.compile makes of an equal model when nobody profiles it; whatever its backend."""
    start_anew()
    before = unique_graphs()
    use(how(make(), backend="eager"))
    return unique_graphs() - before


def recorded(
    make: Callable[[], nn.Module],
    use: Callable[[Any], Any],
    how: Callable[..., Any] = torch.compile,
    compile_layers: bool | str = True,
    **options: Any,
) -> Recorded:
    """Compile a model inside a Profile and use it there: that makes as many graphs as it does without."""
    wanted = graphs_without_us(make, use, how)
    start_anew()
    model = make()
    compiled = how(model, **options)
    before = unique_graphs()
    with made_graphs() as graphs, torchprof.Profile(model, compile_layers=compile_layers, lines=False) as prof:
        use(compiled)
    assert unique_graphs() - before == wanted
    return Recorded(model, prof.run, graphs, graph_calls(prof))


# What is compared


def is_in_kernels(row: Row) -> bool:
    """Whether a row is of what ran in calls of compiled graphs."""
    names = [frame.name for around in row.within for frame in around.frames] + [frame.name for frame in row.frames]
    return "CompiledFxGraph" in names[:-1]


def plain(kernel: str) -> str:
    """A name without what tells of its library or its graph. Inductor names a kernel after the ops in it, up to torch
    2.14 also after those whose gradient it computes: gelu_gelu_backward, since then gelu_backward."""
    name = re.sub(r"^(graph_\d+_|aten::|mkldnn::|extern_kernels\.|torch\.ops\.aten\.|aten\.)", "", kernel)
    return re.sub(r"([a-z_]+)_\1_backward", r"\1_backward", name.partition(".")[0])


def is_fused(row: Row) -> bool:
    return any(frame.kind == "kernels" for frame in row.frames)


Kernels = Counter[tuple[str, str, tuple[str, ...]]]
"""How often each kernel ran: by phase, name, and the layers it is of; ``UNKNOWN`` where these are not known."""
UNKNOWN = ("not attributable",)


def kernels_of(run: Run) -> Kernels:
    found: Kernels = Counter()
    for row in run.rows:
        frames = [frame for around in row.within for frame in around.frames] + [*row.frames]
        at = [number for number, frame in enumerate(frames) if frame.name == "CompiledFxGraph"]
        inside = [frame for frame in frames[at[-1] + 1 :] if frame.kind != "kernels"] if at else []
        if len(inside) == 1:
            shared = row.shared_by or ([row.layer] if row.layer is not None else [])
            layers = tuple(sorted(".".join(layer.path) for layer in shared))
            if any(frame.kind == "kernels" and frame.name.startswith("not attributable") for frame in frames):
                layers = UNKNOWN
            found[in_column_of(row.phase), plain(inside[0].name), layers] += row.calls
    return found


def in_rows(run: Run, *phases: str) -> int:
    return sum(row.cost.cpu_ns for row in run.rows if in_column_of(row.phase) in phases and is_in_kernels(row))


def in_events(calls: list[GraphCall], phase: str) -> int:
    return sum(ns for call in calls if call.backward == (phase == BACKWARD) for _, ns in call.ops)


SUM = "Gradient addition node"
_LINE = re.compile(r'File "(.*?)", line (\d+), in ')


def module_of(trace: str, model: nn.Module) -> tuple[str, ...]:
    """The path of the module in which an op was called, from the lines that lead there, which are checked to be those
    of forwards."""
    path, module = [type(model).__name__], model
    for file, line in _LINE.findall(trace):
        source, first = inspect.getsourcelines(type(module).forward)
        assert file == inspect.getsourcefile(type(module).forward)
        assert first <= int(line) < first + len(source)
        if (called := re.search(r"self\.(\w+)\(", linecache.getline(file, int(line)))) is not None:
            path.append(called[1])
            module = module.get_submodule(called[1])
    return tuple(path)


def told_kernels(graph: Any) -> list[tuple[str, list[str]]]:
    """The kernels of a graph in the order of its generated code, each with the lines of source that Inductor says it is
    from."""
    lines = json.loads(graph.inductor_provenance_stack_traces_str)
    handles = re.findall(r"# \[Provenance debug handles\] (\S+:\d+)\n", graph.source_code)
    return [(plain(handle.rpartition(":")[0]), lines[handle]) for handle in handles]


def kernels_by_source(found: Recorded) -> Kernels:
    """How often each kernel ran, with the modules that Inductor's lines lead to. Of a sum of the gradients of a tensor
    with several uses, lines do not tell the module."""
    kernels: Kernels = Counter()
    for call in found.calls:
        for name, traces in told_kernels(found.graphs[call.key]):
            paths = {".".join(module_of(trace, found.model)) for trace in traces if SUM not in trace}
            kernels[BACKWARD if call.backward else FORWARD, name, tuple(sorted(paths))] += 1
    return kernels


def share_in_one(kernels: Kernels, blocks: list[str]) -> float:
    """The share of the kernels that are of one of these blocks alone."""
    inside = [
        calls
        for (_, _, layers), calls in kernels.items()
        if any(all(f"{layer}.".startswith(f"{block}.") for layer in layers) for block in blocks)
    ]
    return sum(inside) / kernels.total()


def train(compiled: Any) -> None:
    """A step whose input has a gradient, too."""
    compiled(torch.rand(8, 64, requires_grad=True)).sum().backward()


def infer(compiled: Any) -> None:
    with torch.no_grad():
        compiled(torch.rand(8, 64))


def check(found: Recorded, *, unknown: int = 0) -> None:
    """What holds for every run: the kernels in its rows are those of torch's events, and their time is that in them."""
    kernels = kernels_of(found.run)
    assert sum(calls for (_, _, layers), calls in kernels.items() if layers == UNKNOWN) == unknown
    by_name: Counter[tuple[str, str]] = Counter()
    for (phase, name, _), calls in kernels.items():
        by_name[FORWARD if phase == FORWARD else BACKWARD, name] += calls
    assert by_name == Counter(
        (BACKWARD if call.backward else FORWARD, plain(name)) for call in found.calls for name, _ in call.ops
    )
    assert in_rows(found.run, FORWARD) == in_events(found.calls, FORWARD)
    assert in_rows(found.run, BACKWARD, RECOMPUTE) == in_events(found.calls, BACKWARD)


def leads_to(trace: str, model: nn.Module, path: str) -> bool:
    """Whether lines lead through the forwards of all modules on the way to one. Lines in torch's own modules are left
    out: there the line before has to call the module by its name, or by a loop's."""
    frames = [(file, int(line)) for file, line in _LINE.findall(trace)]
    module, at, here = model, -1, ""
    for name in ["", *path.split(".")[1:]]:
        module = module.get_submodule(name) if name else module
        forward: Any = inspect.unwrap(type(module).forward)
        if forward is nn.Module.forward:  # a container
            continue
        file = str(inspect.getsourcefile(forward))
        if Path(torch.__file__).parent in Path(file).parents:
            return name.isdecimal() or f".{name}(" in here
        source, first = inspect.getsourcelines(forward)
        inside = [
            number
            for number, (file_of, line) in enumerate(frames)
            if number > at and file_of == file and first <= line < first + len(source)
        ]
        if not inside:
            return False
        at, here = inside[0], linecache.getline(*frames[inside[0]])
    return True


def check_by_classes(found: Recorded, *, untold: set[str]) -> None:
    """Lines that Inductor says a kernel is from lead through the forwards around each layer that it is of."""
    told: dict[tuple[str, str], list[list[str]]] = {}
    for call in found.calls:
        for name, traces in told_kernels(found.graphs[call.key]):
            told.setdefault((BACKWARD if call.backward else FORWARD, name), []).append(traces)
    for (phase, name, layers), calls in kernels_of(found.run).items():
        if name not in untold:
            explained = [
                traces
                for traces in told[phase, name]
                if all(any(leads_to(trace, found.model, layer) for trace in traces) for layer in layers)
            ]
            assert len(explained) >= calls, (phase, name, layers)


@pytest.mark.parametrize(
    ("source", "root", "path"),
    [
        ("L['self']", "L['self']", ""),
        ("L['self'].layers.0", "L['self']", "layers.0"),
        ("L['self']._modules['fc']", "L['self']", "fc"),
        ("L['self'].__dict__['_modules']['up_blocks'].0.__dict__['_modules']['a-b']", "L['self']", "up_blocks.0.a-b"),
        ("G['models'][1]._modules['fc']._parameters['weight']", "G['models']", "1.fc.weight"),
        ("L['trainer'].models['teacher']", "L['trainer']", "models.teacher"),
        ("getattr(L['x'], 'y')", "getattr(L['x'], 'y')", ""),
    ],
)
def test_what_dynamo_calls_where_a_module_comes_from(source: str, root: str, path: str) -> None:
    assert module_of_source(source, nn.Linear) == TracedModule(root, tuple(filter(None, path.split("."))), "Linear")


# One block


@pytest.fixture(scope="module")
def mlp() -> Recorded:
    return recorded(Mlp, train)


def test_the_kernels_of_a_block_by_hand(mlp: Recorded) -> None:
    """As the generated code has them: the order of its calls, and what each computes."""
    assert kernels_of(mlp.run) == {
        (FORWARD, "addmm", ("Mlp.fc1",)): 1,
        (FORWARD, "cpp_fused_gelu_0", ("Mlp.act",)): 1,
        (FORWARD, "addmm", ("Mlp.fc2",)): 1,
        # The norm, and after it the sum with what the block was given.
        (FORWARD, "cpp_fused_add_native_layer_norm_1", ("Mlp", "Mlp.norm")): 1,
        (BACKWARD, "cpp_fused_native_layer_norm_backward_0", ("Mlp.norm",)): 1,
        # The gradients of its input and of its weight.
        (BACKWARD, "mm", ("Mlp.fc2",)): 2,
        # The gradient of the activation, and beside it that of the bias of fc2.
        (BACKWARD, "cpp_fused_gelu_backward_sum_1", ("Mlp.act", "Mlp.fc2")): 1,
        (BACKWARD, "mm", ("Mlp.fc1",)): 1,
        (BACKWARD, "cpp_fused_sum_2", ("Mlp.fc1",)): 1,
        # The gradient of the input of fc1, onto that from the block's sum.
        (BACKWARD, "addmm", ("Mlp.fc1",)): 1,
    }


def test_the_kernels_of_a_block_by_the_lines_they_are_from(mlp: Recorded) -> None:
    """But for the product that also adds a gradient, of which no line tells."""
    found, told = kernels_of(mlp.run), kernels_by_source(mlp)
    assert found - told == {(BACKWARD, "addmm", ("Mlp.fc1",)): 1}
    assert told - found == {(BACKWARD, "addmm", ()): 1}


def test_a_kernel_of_several_layers_is_a_row_at_their_common_ancestor(mlp: Recorded) -> None:
    check(mlp)
    fused = [row for row in mlp.run.rows if is_fused(row)]
    assert {(row.phase, *(".".join(layer.path) for layer in row.shared_by)) for row in fused} == {
        (FORWARD, "Mlp", "Mlp.norm"),
        (BACKWARD, "Mlp.act", "Mlp.fc2"),
    }
    assert {row.layer.path for row in fused if row.layer} == {("Mlp",)}
    for row in fused:
        (said,) = [frame.name for frame in row.frames if frame.kind == "kernels"]
        assert said.startswith("fused: ")
        assert all(layer.path[-1] in said for layer in row.shared_by if layer is not row.layer)


def test_a_second_profile_of_what_the_first_compiled_knows_its_layers() -> None:
    start_anew()
    model = Mlp()
    compiled: Any = torch.compile(model)
    with torchprof.Profile(compiled, compile_layers=True, lines=False) as first:
        train(compiled)
    with no_new_graphs(), torchprof.Profile(compiled, compile_layers=True, lines=False) as second:
        train(compiled)
    assert kernels_of(second.run) == kernels_of(first.run)
    assert UNKNOWN not in {layers for _, _, layers in kernels_of(first.run)}
    with no_new_graphs(), torchprof.Profile(compiled) as plainly:
        train(compiled)
    assert kernels_of(plainly.run) == kernels_of(first.run)


def test_of_what_was_compiled_before_the_block_only_calls_of_libraries_are_attributable() -> None:
    """Until it is compiled in a block."""
    start_anew()
    model = Mlp()
    compiled: Any = torch.compile(model)
    train(compiled)
    with no_new_graphs(), torchprof.Profile(compiled, compile_layers=True, lines=False) as before:
        train(compiled)
    kernels = kernels_of(before.run)
    # Without ranges of their own, kernels of C++ are no events: what is left are those of libraries.
    assert kernels == {
        (FORWARD, "addmm", ("Mlp.fc1",)): 1,
        (FORWARD, "addmm", ("Mlp.fc2",)): 1,
        (BACKWARD, "mm", ("Mlp.fc2",)): 2,
        (BACKWARD, "mm", ("Mlp.fc1",)): 1,
        (BACKWARD, "addmm", ("Mlp.fc1",)): 1,  # it also adds the gradient of the other branch
    }
    text = "\n".join(sentences(before.run))
    assert "is not attributable to layers" in text
    assert "In code that was compiled before the block, a call of a library is at the layer" in text
    with torchprof.Profile(compiled, compile_layers=True, lines=False) as inside:
        start_anew()
        train(compiled)
    assert UNKNOWN not in {layers for _, _, layers in kernels_of(inside.run)}


# More than one block


@pytest.fixture(scope="module")
def net() -> Recorded:
    with kernels_of_zeros():
        return recorded(Net, train)


NET_BLOCKS = ["Net.blocks.0", "Net.blocks.1", "Net.head"]
OF_BLOCK = {  # what test_the_kernels_of_a_block_by_hand shows of one that is compiled alone, forward
    "addmm": (("fc1",), ("fc2",)),
    "cpp_fused_gelu_0": (("act",),),
    "cpp_fused_add_native_layer_norm_1": (("", "norm"),),
}


def of_block(block: str) -> Kernels:
    return Counter(
        (FORWARD, name, tuple(sorted(f"{block}.{layer}".rstrip(".") for layer in layers)))
        for name, sets in OF_BLOCK.items()
        for layers in sets
    )


def test_a_stack_of_blocks_that_is_compiled_as_one(net: Recorded) -> None:
    check(net)
    kernels = kernels_of(net.run)
    forward = Counter({key: calls for key, calls in kernels.items() if key[0] == FORWARD})
    head: Kernels = Counter({(FORWARD, "addmm", ("Net.head",)): 1})
    assert forward == of_block("Net.blocks.0") + of_block("Net.blocks.1") + head
    # By hand, backward: all kernels that are not of one layer alone.
    shared = {(name, layers) for phase, name, layers in kernels if phase == BACKWARD and len(layers) > 1}
    norms = "cpp_fused_native_layer_norm_backward_sum_"
    assert shared == {
        (f"{norms}1", ("Net.blocks.1.fc2", "Net.blocks.1.norm")),
        (f"{norms}3", ("Net.blocks.0.fc2", "Net.blocks.0.norm", "Net.blocks.1.fc1")),
    }
    assert share_in_one(kernels, NET_BLOCKS) == 24 / 25


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.compile(**options)
    return model


def replace_blocks(model: nn.Module, **options: Any) -> nn.Module:
    blocks: Any = model.get_submodule("blocks")
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, **options)
    return model


@pytest.mark.parametrize("how", [compile_blocks, replace_blocks])
def test_blocks_that_share_one_graph_have_each_their_kernels(mlp: Recorded, how: Callable[..., nn.Module]) -> None:
    """Regional compilation: what is known of one block's graph holds for each, forward and backward."""
    found = recorded(Net, train, how)
    check(found)
    assert len(found.graphs) == 2  # a forward and a backward
    assert [call.key for call in found.calls] == [key for key in found.graphs for _ in range(2)]
    wanted: Kernels = Counter()
    for (phase, name, layers), calls in kernels_of(mlp.run).items():
        for block in NET_BLOCKS[:2]:
            wanted[phase, name, tuple(layer.replace("Mlp", block) for layer in layers)] += calls
    assert kernels_of(found.run) == wanted


def test_blocks_that_share_one_graph_have_each_their_region() -> None:
    found = recorded(Net, train, compile_blocks, compile_layers=False)
    regions = Counter(
        (row.phase, ".".join(row.layer.path) if row.layer else "", row.calls)
        for row in found.run.rows
        if row.frames and (row.frames[-1].kind, row.frames[-1].name) == ("region", "0/0")
    )
    assert regions == {(FORWARD, block, 1): 1 for block in NET_BLOCKS[:2]}
    backward = {
        row.layer.path
        for row in found.run.rows
        if row.layer and row.phase == BACKWARD and any(frame.name == "CompiledFunctionBackward" for frame in row.frames)
    }
    assert backward == {("Net", "blocks", "0"), ("Net", "blocks", "1")}
    known = {layers for _, _, layers in kernels_of(found.run)} - {UNKNOWN}
    assert known == {(f"{block}.{layer}",) for block in NET_BLOCKS[:2] for layer in ("fc1", "fc2")}


def test_two_models_with_one_graph_have_each_their_layers(mlp: Recorded) -> None:
    """The second is of the same class, and torch.compile makes nothing new for it."""
    start_anew()
    models = [Mlp(), Mlp()]
    first, second = (torch.compile(model) for model in models)
    before = unique_graphs()
    with torchprof.Profile(models, compile_layers=True, lines=False) as prof:
        train(first)
        train(second)
    assert unique_graphs() == before + 1
    wanted: Kernels = Counter()
    for (phase, name, layers), calls in kernels_of(mlp.run).items():
        for root in ("Mlp", "Mlp#2"):
            wanted[phase, name, tuple(layer.replace("Mlp", root) for layer in layers)] += calls
    assert kernels_of(prof.run) == wanted


def test_graphs_on_disk_neither_hide_layers_nor_get_to_know_of_us(mlp: Recorded) -> None:
    """An equal model was compiled without the option before; and will be again."""
    hits = torch._dynamo.utils.counters["aot_autograd"]

    def compiled_plainly() -> tuple[int, set[str]]:
        start_anew()
        before = hits["autograd_cache_hit"]
        model: Any = torch.compile(Mlp())
        train(model)
        with no_new_graphs(), torchprof.Profile(model) as prof:
            train(model)
        return hits["autograd_cache_hit"] - before, {call.key for call in graph_calls(prof)}

    compiled_plainly()
    times, keys = compiled_plainly()
    assert times == 1  # it was on disk
    found = recorded(Mlp, train)
    check(found)
    assert kernels_of(found.run) == kernels_of(mlp.run)
    assert compiled_plainly() == (1, keys)


# Whole models


class Convolutions(nn.Module):
    """Two convolutions with batch norms, which training updates, and a pooling whose gradient a library scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm1 = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.norm2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.norm1(x)
        x = self.act(x)
        x = self.pool(x)
        x = self.conv2(x)
        x = self.norm2(x)
        x = x.mean((2, 3))
        return self.fc(x)


@pytest.fixture(scope="module")
def convolutions() -> Recorded:
    with kernels_of_zeros():
        return recorded(Convolutions, lambda compiled: compiled(torch.rand(4, 3, 16, 16)).sum().backward())


def test_convolutions_with_batch_norms(convolutions: Recorded) -> None:
    check(convolutions)
    kernels = kernels_of(convolutions.run)
    for name, layer in (("conv1", "Convolutions.conv1"), ("conv2", "Convolutions.conv2"), ("fc", "Convolutions.fc")):
        products = ["addmm", "mm"] if name == "fc" else ["convolution", "convolution_backward"]
        assert {product for _, product, layers in kernels if layers == (layer,)} >= set(products)
    # Where the processor has no instructions for it, a library scatters the gradient of the pooling.
    scattered = sum(name == "aten::scatter_reduce_" for call in convolutions.calls for name, _ in call.ops)
    assert kernels[BACKWARD, "scatter_reduce_", ("Convolutions.pool",)] == scattered
    # The counters of both batch norms are counted up in one kernel, and weights of both convolutions laid out in one.
    assert {layers for phase, name, layers in kernels if phase == FORWARD and "add_copy_" in name} == {
        ("Convolutions.norm1", "Convolutions.norm2")
    }
    assert kernels[FORWARD, "cpp_fused_0", ("Convolutions.conv1", "Convolutions.conv2")] == 1
    check_by_classes(convolutions, untold={"cpp_fused_0", "scatter_reduce_"})  # those are Inductor's own idea


TOKENS = torch.arange(32).reshape(2, 16) % 20


def train_on_tokens(compiled: Any) -> None:
    torch.manual_seed(0)
    compiled(TOKENS).square().sum().backward()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.first = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.second = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.first(x)
        x = self.second(x)
        return self.head(x)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = usable_transformers()
        config = transformers.BertConfig(
            vocab_size=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,  # the encoder has dropouts: here there is one kernel for all of attention
            attention_probs_dropout_prob=0.0,
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bert(x).last_hidden_state
        return self.head(x)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = usable_transformers()
        config = transformers.LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.llama(x).logits


ENCODER_BLOCKS = ["Encoder.embedding", "Encoder.first", "Encoder.second", "Encoder.head"]
BERT_BLOCKS = ["Bert.bert.embeddings", "Bert.bert.encoder.layer.0", "Bert.bert.encoder.layer.1", "Bert.head"]
LLAMA_BLOCKS = [
    *(f"Llama.llama.model.{name}" for name in ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")),
    "Llama.llama.lm_head",
]


TRANSFORMERS = [(Llama, LLAMA_BLOCKS), (Encoder, ENCODER_BLOCKS), (Bert, BERT_BLOCKS)]


@pytest.mark.parametrize(
    ("model", "blocks"), TRANSFORMERS if SHARE == 1 else TRANSFORMERS[:1], ids=lambda one: getattr(one, "__name__", "")
)
def test_transformers(model: type[nn.Module], blocks: list[str]) -> None:
    found = recorded(model, train_on_tokens)
    check(found)
    check_by_classes(found, untold={"randint"})  # one kernel gives all dropouts their seeds
    kernels = kernels_of(found.run)
    assert share_in_one(kernels, blocks) >= 0.85
    used = {layer for _, _, layers in kernels for layer in layers}
    never = {"Encoder.first.self_attn.out_proj", "Encoder.second.self_attn.out_proj"}  # used, but not called
    for path, module in found.model.named_modules():
        name = ".".join([type(found.model).__name__, *filter(None, [path])])
        if isinstance(module, nn.Linear) and name not in never:
            for phase in (FORWARD, BACKWARD):
                products = ("mm", "addmm")
                assert any(name in layers for of, op, layers in kernels if of == phase and op in products), name
    assert not used - {".".join(layer.path) for layer in found.run.layers}


# Ways to compile

SMALL: Kernels = Counter(
    {
        (FORWARD, "addmm", ("Small.fc",)): 1,
        (FORWARD, "cpp_fused_gelu_0", ("Small.act",)): 1,
        (BACKWARD, "cpp_fused_gelu_backward_0", ("Small.act",)): 1,
        (BACKWARD, "mm", ("Small.fc",)): 2,  # the gradients of its weight and of its input
        (BACKWARD, "cpp_fused_sum_1", ("Small.fc",)): 1,  # that of its bias
    }
)


def layers_by_name(kernels: Kernels) -> dict[str, set[tuple[str, ...]]]:
    found: dict[str, set[tuple[str, ...]]] = {}
    for _, name, layers in kernels:
        found.setdefault(name, set()).add(layers)
    return found


def compile_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


@pytest.mark.parametrize("how", [torch.compile, partial(torch.compile, fullgraph=True), compile_in_place])
def test_ways_to_compile_a_module(how: Callable[..., Any]) -> None:
    found = recorded(Small, train, how)
    check(found)
    assert kernels_of(found.run) == kernels_by_source(found) == SMALL


def test_two_shapes_of_a_dynamic_graph() -> None:
    """What is asked of a size that is no number yet must not make it one: each batch size would be compiled anew."""

    def use(compiled: Any) -> None:
        for batch in (8, 6):
            compiled(torch.rand(batch, 64, requires_grad=True)).sum().backward()

    found = recorded(Small, use, partial(torch.compile, dynamic=True))
    check(found)
    assert len(found.graphs) == 2
    assert layers_by_name(kernels_of(found.run)) == layers_by_name(SMALL)
    assert kernels_of(found.run).total() == 2 * SMALL.total()


def a_model_of_its_own() -> Callable[[], nn.Module]:
    """A class of which there are no modules. A function may be called with any: which is it is known where there is
    one only."""

    class Own(Small):
        pass

    return Own


def compile_function(model: nn.Module, **options: Any) -> Any:
    gc.collect()  # torch.compile leaves models in circles
    return torch.compile(lambda x: model(x).sigmoid() * 3, **options)


def test_a_function_that_calls_the_model() -> None:
    """What the function does itself is of no layer; what its kernels do for the model is."""
    found = recorded(a_model_of_its_own(), train, compile_function)
    check(found)
    kernels = kernels_of(found.run)
    assert kernels[FORWARD, "addmm", ("Own.fc",)] == 1
    assert kernels[BACKWARD, "mm", ("Own.fc",)] == 2
    # The function's sigmoid and product are in one kernel with the activation.
    fused = [row for row in found.run.rows if is_fused(row)]
    assert [(row.phase, row.layer, [".".join(layer.path) for layer in row.shared_by]) for row in fused] == [
        (OTHER, None, ["Own.act"]),
        (BACKWARD, None, ["Own.act"]),
    ]
    assert {row.frames[-2].name for row in fused} == {"fused: (outside) + Own.act"}


def test_a_function_that_calls_one_model_and_then_its_copy() -> None:
    """As a teacher beside its student. torch.compile makes one graph of it for both; backward has one, too."""
    start_anew()
    model = a_model_of_its_own()()
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    function: Any = torch.compile(lambda model, x: model(x))
    before = unique_graphs()
    with torchprof.Profile(models[:2], compile_layers=True, lines=False) as prof:
        for each in (1, 0, 2):
            function(models[each], torch.rand(8, 64)).sum().backward()
        outputs = [function(models[each], torch.rand(8, 64)) for each in (0, 1)]
        outputs[1].sum().backward()
    assert unique_graphs() == before + 1
    kernels = kernels_of(prof.run)
    calls = {  # forward and backward: of the first model, of the second, and of one that is not profiled
        "Own": (2, 1),
        "Own#2": (2, 2),
    }
    for name, (forward, backward) in calls.items():
        assert kernels[FORWARD, "addmm", (f"{name}.fc",)] == forward
        assert kernels[BACKWARD, "mm", (f"{name}.fc",)] == backward
    assert (kernels[FORWARD, "addmm", UNKNOWN], kernels[BACKWARD, "mm", UNKNOWN]) == (1, 1)
    # Not by its warning: whether there is one depends on the share of the time, which is small on a busy machine.
    reasons = {frame.name for chain in prof.run.rows.frames for frame in chain if frame.kind == "kernels"}
    assert f"not attributable: {OTHER_MODULE}" in reasons


@pytest.mark.parametrize("has_weight", [False, True])
def test_a_module_whose_forward_replaces_its_buffer(has_weight: bool) -> None:
    """A running average. The tensor that the function took is no module's any more: the parameters tell the module."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(64))
            self.fc = Linear(64, 64)
            self.weight = nn.Parameter(torch.ones(64)) if has_weight else None

        def forward(self, x: Tensor) -> Tensor:
            self.average = self.average * 0.9 + x.mean(0) * 0.1
            y: Tensor = self.fc(x - self.average)
            return y if self.weight is None else y * self.weight

    start_anew()
    model, other = Average(), Average()  # so that being the only one of its class tells nothing
    function: Any = torch.compile(lambda model, x: model(x))
    with torch.no_grad(), torchprof.Profile(model, compile_layers=True, lines=False) as prof:
        for each in (model, other, model):
            function(each, torch.rand(8, 64))
    kernels = kernels_of(prof.run)
    assert (kernels[FORWARD, "addmm", ("Average.fc",)], kernels[FORWARD, "addmm", UNKNOWN]) == (2, 1)


def ranges_of_calls(function: Callable[[Tensor], Any], inputs: list[Tensor]) -> list[str]:
    """Those that a profiler of the user's has."""
    with torch.profiler.profile() as prof:
        for one in inputs:
            function(one)
    return [event.name for event in prof.events() if event.name.startswith(COMPILED_INPUTS)]


def test_what_a_block_compiled_tells_nothing_after_the_block() -> None:
    """A compiled function lives on: neither the user's traces nor our memory get anything from it."""
    function = _noting_calls(lambda x: x, (TakenTensor(0, "G['m']", ()),))
    kept, fresh = torch.rand(2), [torch.rand(2) for _ in range(5)]
    assert ranges_of_calls(function, [kept, *fresh]) == []
    first, second = CalledGraphs(), CalledGraphs()
    first.on()
    assert ranges_of_calls(function, [kept, fresh[0], kept]) == [f"{COMPILED_INPUTS}{number}" for number in (0, 1, 0)]
    first.off()
    assert ranges_of_calls(function, fresh) == []
    second.on()
    assert ranges_of_calls(function, [kept]) == [f"{COMPILED_INPUTS}0"]
    second.off()
    told = [len(one.calls.given(lambda tensors: [None] * len(tensors))) for one in (first, second)]
    assert told == [2, 1]  # a block's own are read after it, too


def test_calls_with_ever_new_tensors_are_noted_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """From there on, nothing is known of a buffer that is new, and then of a parameter, as of one that is gone."""
    monkeypatch.setattr(NotedCalls, "MOST", 3)
    both = (TakenTensor(0, "G['m']", ()), TakenTensor(1, "G['m']", ("fc",)))
    calls, kept = NotedCalls(), [nn.Parameter(torch.rand(1)) for _ in range(5)]
    passed = [(torch.rand(1), one) for one in [*[kept[0]] * 5, *kept[1:]]]
    assert [calls.number_of(both, each) for each in passed] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    told = calls.given(lambda tensors: [None if one is None else () for one in tensors]).values()
    assert [[one.is_gone for one in call] for call in told] == [*[[False, False]] * 3, *[[True, False]] * 3, [True] * 2]
    calls, taken, other = NotedCalls(), (TakenTensor(0, "G['m']", ()),), (TakenTensor(0, "G['n']", ()),)
    tensors = [torch.rand(1) for _ in range(6)]
    assert [calls.number_of(taken, [one]) for one in (*tensors, *tensors)] == 2 * [0, 1, 2, 3, 3, 3]
    assert calls.number_of(other, tensors[:1]) == calls.number_of(other, tensors[1:2]) == 4
    del tensors[0]
    given = calls.given(lambda tensors: [None if one is None else (("Net",),) for one in tensors])
    assert [(one.root, one.holders, one.is_gone) for call in given.values() for one in call] == [
        ("G['m']", None, True),
        ("G['m']", (("Net",),), False),
        ("G['m']", (("Net",),), False),
        ("G['m']", None, True),
        ("G['n']", None, True),
    ]


def test_a_method_of_an_object_that_has_two_models_of_one_class() -> None:
    """As a trainer with an average of its model: what Dynamo calls them begins with the object, which is no module."""
    kind = a_model_of_its_own()

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.models = {"student": model, "teacher": kind()}

        def step(self, x: Tensor) -> Tensor:
            student: Tensor = self.models["student"](x)
            return student @ self.models["teacher"](x).T

    def how(model: nn.Module, **options: Any) -> Any:
        return torch.compile(Trainer(model).step, **options)

    found = recorded(kind, infer, how)
    check(found, unknown=2)
    assert kernels_of(found.run) == {
        (FORWARD, "addmm", ("Own.fc",)): 1,
        (FORWARD, "addmm", UNKNOWN): 1,
        (FORWARD, "cpp_fused_gelu_0", UNKNOWN): 1,  # one kernel for both
        (FORWARD, "mm", ()): 1,
    }


def test_what_a_function_does_outside_of_the_model() -> None:
    def how(model: nn.Module, **options: Any) -> Any:
        gc.collect()
        return torch.compile(lambda x: model(x) @ x.T, **options)

    found = recorded(a_model_of_its_own(), infer, how)
    check(found)
    assert kernels_of(found.run) == {
        (FORWARD, "addmm", ("Own.fc",)): 1,
        (FORWARD, "cpp_fused_gelu_0", ("Own.act",)): 1,
        (FORWARD, "mm", ()): 1,
    }


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_backend_without_kernels_of_its_own(backend: str) -> None:
    """Its ops are in the region, and nothing is said of layers that nobody can know."""
    found = recorded(Small, train, backend=backend)
    assert not found.calls and not found.graphs and not kernels_of(found.run)
    assert not [row for row in found.run.rows if is_fused(row)]
    in_region = {
        row.frames[-1].name: row.layer.path
        for row in found.run.rows
        if row.layer and row.frames and row.frames[0] == Frame(FrameKind.REGION, "0/0")
    }
    assert in_region["aten::addmm"] == in_region["aten::mm"] == in_region["aten::gelu"] == ("Small",)
    assert not any("ttributable" in warning for warning in sentences(found.run))


class Tied(nn.Module):
    """One linear layer at two paths, called at each; and one activation that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = Linear(64, 64)
        self.left = Holder(shared)
        self.right = Holder(shared)
        self.act = Gelu()

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x)
        x = self.act(x)
        x = self.right(x)
        return self.act(x)


def test_a_shared_module_at_the_path_where_it_is_called() -> None:
    found = recorded(Tied, train)
    check(found)
    kernels = kernels_of(found.run)
    assert kernels[FORWARD, "addmm", ("Tied.left.inner",)] == kernels[FORWARD, "addmm", ("Tied.right.inner",)] == 1
    assert kernels[FORWARD, "cpp_fused_gelu_0", ("Tied.act",)] == 2
    assert kernels[BACKWARD, "mm", ("Tied.right.inner",)] == 2
    # Of the left one, the product for its weight adds to the gradient of the right one.
    assert kernels[BACKWARD, "addmm", ("Tied.left.inner",)] == 1
    assert kernels[BACKWARD, "mm", ("Tied.left.inner",)] == 1
    assert share_in_one(kernels, ["Tied"]) == 1


class Broken(Layers):
    """Its graph breaks inside a child, which prints, and where a branch depends on data: it is the same if a kernel of
    zeros compares."""

    def __init__(self) -> None:
        super().__init__(first=Small(), noisy=Noisy(fc=Linear(64, 64)), head=Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.noisy(x)
        if not x.sum() > 1e9:
            x = self.head(x)
        return x


class Noisy(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        print("a graph break")
        return F.gelu(x)


class Collections(nn.Module):
    """Modules in containers, one of them sliced, one by its key."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([Linear(64, 64) for _ in range(3)])
        self.named = nn.ModuleDict({"act": Gelu()})
        self.chain = nn.Sequential(Linear(64, 64), Gelu())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed[1:]:
            x = layer(x)
        x = self.named["act"](x)
        return self.chain(x)


class Branching(Layers):
    """Its graph has a graph for each branch."""

    def __init__(self) -> None:
        super().__init__(fc=Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_graphs_inside_a_graph_leave_it_unknown() -> None:
    """Which of their kernels run is decided in each call."""
    found = recorded(Branching, infer)
    kernels = kernels_of(found.run)
    check(found, unknown=kernels.total())
    assert kernels[FORWARD, "addmm", UNKNOWN] == 1


class Attention(Layers):
    """It finds its modules as those of diffusers do: torch.compile names each step to them then."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(1, 8, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(query, key, value)
        return self.parts[0](x.transpose(1, 2).reshape(8, 64))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(qkv=Linear(64, 192), parts=nn.ModuleList([Linear(64, 64)]))
        self.second = Small()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)


def test_what_backward_computes_again() -> None:
    """It is in the compiled backward, is recompute, and of the module whose forward it is. Attention is in what saves
    the state of random numbers then, and has another name than its op."""
    found = recorded(Checkpointed, train)
    check(found)
    kernels = kernels_of(found.run)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for phase in (FORWARD, RECOMPUTE):
        assert kernels[phase, "addmm", ("Checkpointed.first.qkv",)] == 1
        assert kernels[phase, attention, ("Checkpointed.first",)] == 1
    assert kernels[FORWARD, "addmm", ("Checkpointed.second.fc",)] == 1
    assert kernels[BACKWARD, f"{attention}_backward", ("Checkpointed.first",)] == 1
    for name in ("first.qkv", "first.parts.0", "second.fc"):
        assert kernels[BACKWARD, "mm", (f"Checkpointed.{name}",)] == 2
    again = {name for phase, name, _ in kernels if phase == RECOMPUTE}
    assert {"addmm", attention} <= again
    assert not any("backward" in name for name in again)
    assert {layers for phase, _, layers in kernels if phase == RECOMPUTE} <= {
        ("Checkpointed.first",),
        ("Checkpointed.first.qkv",),
        ("Checkpointed.first.parts.0",),
    }


def test_backward_that_compiled_autograd_made() -> None:
    """It is backward; which module its operations come from, torch does not record."""
    start_anew()
    model = Small()
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    with torchprof.Profile(model, compile_layers=True) as prof, compiled_autograd._enable(torch.compile()):
        train(model)
    kernels = kernels_of(prof.run)
    assert {(phase, layers) for phase, _, layers in kernels} == {(BACKWARD, UNKNOWN)}
    assert sum(calls for (_, name, _), calls in kernels.items() if name == "mm") == 2
    assert in_rows(prof.run, BACKWARD) == sum(ns for call in graph_calls(prof) for _, ns in call.ops)
    assert any("torch does not record which module" in said for said in sentences(prof.run))


@pytest.mark.real_kernels
def test_kernels_from_templates() -> None:
    """Where weights are frozen, Inductor has products of its own for the CPU, whose ranges have names of their own."""
    config = torch._inductor.config
    options = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with config.patch(options):
        found = recorded(lambda: Mlp().eval(), infer)
    check(found)
    layers = {name.rpartition("_")[0]: layers for _, name, layers in kernels_of(found.run)}
    # The activation is in the first product; in the second, whose result is normalised and added, nothing is.
    assert layers == {
        "gemm_m8n128k64": ("Mlp.act", "Mlp.fc1"),
        "gemm_m8n64k128": ("Mlp.fc2",),
        "cpp_fused_add_addmm_gelu_native_layer_norm": ("Mlp", "Mlp.fc2", "Mlp.norm"),
    }


@pytest.mark.real_kernels
def test_code_that_is_all_of_cpp() -> None:
    """There, ops of libraries have ranges with other names."""
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):  # for a single piece of code they cost more
        found = recorded(Small, infer, options={"cpp_wrapper": True})
    check(found)
    assert kernels_of(found.run) == {
        (FORWARD, "aoti_torch_cpu_addmm_out", ("Small.fc",)): 1,
        (FORWARD, "cpp_fused_gelu_0", ("Small.act",)): 1,
    }


def in_inference_mode(compiled: Any) -> None:
    with torch.inference_mode():
        compiled(torch.rand(8, 64))


INFERENCE: Kernels = Counter({key: calls for key, calls in SMALL.items() if key[0] == FORWARD})
BY_HAND: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], dict[str, Any], Kernels]] = {
    "without gradients": (lambda: Small().eval(), infer, {}, INFERENCE),
    "in inference mode": (lambda: Small().eval(), in_inference_mode, {}, INFERENCE),
    "with max-autotune": (Small, infer, {"mode": "max-autotune"}, INFERENCE),
    "modules in containers": (
        Collections,
        infer,
        {},
        Counter(
            {
                (FORWARD, "addmm", ("Collections.listed.1",)): 1,
                (FORWARD, "addmm", ("Collections.listed.2",)): 1,
                (FORWARD, "cpp_fused_gelu_0", ("Collections.named.act",)): 1,
                (FORWARD, "addmm", ("Collections.chain.0",)): 1,
                (FORWARD, "cpp_fused_gelu_0", ("Collections.chain.1",)): 1,
            }
        ),
    ),
    # Each part is compiled as a function of its own, the rest after a break from wherever that was.
    "graph breaks": (
        Broken,
        train,
        {},
        Counter(
            {
                (FORWARD, "addmm", ("Broken.first.fc",)): 1,
                (FORWARD, "cpp_fused_gelu_0", ("Broken.first.act",)): 1,
                (FORWARD, "addmm", ("Broken.noisy.fc",)): 1,
                (FORWARD, "cpp_fused_gelu_0", ("Broken.noisy",)): 1,
                (FORWARD, "cpp_fused_gt_sum_0", ("Broken",)): 1,
                (FORWARD, "addmm", ("Broken.head",)): 1,
                (BACKWARD, "mm", ("Broken.head",)): 2,
                (BACKWARD, "cpp_fused_sum_0", ("Broken.head",)): 1,
                (BACKWARD, "cpp_fused_gelu_backward_0", ("Broken.noisy",)): 1,
                (BACKWARD, "mm", ("Broken.noisy.fc",)): 2,
                (BACKWARD, "cpp_fused_sum_0", ("Broken.noisy.fc",)): 1,
                (BACKWARD, "cpp_fused_gelu_backward_0", ("Broken.first.act",)): 1,
                (BACKWARD, "mm", ("Broken.first.fc",)): 2,
                (BACKWARD, "cpp_fused_sum_1", ("Broken.first.fc",)): 1,
            }
        ),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_each_kernel_is_of_the_layers_that_it_works_for(name: str) -> None:
    make, use, options, wanted = BY_HAND[name]
    found = recorded(make, use, **options)
    check(found)
    assert kernels_of(found.run) == wanted


def test_the_first_calls_as_warm_up() -> None:
    """What is compiled in a call that is not recorded is known, too; and is compiled once."""
    start_anew()
    compiled: Any = torch.compile(Small())
    before = unique_graphs()
    with torchprof.Profile(compiled, compile_layers=True, warmup=1) as prof:
        train(compiled)
        train(compiled)
    assert unique_graphs() - before == 1
    assert kernels_of(prof.run) == SMALL


def test_a_model_that_another_thread_compiles() -> None:
    start_anew()
    compiled: Any = torch.compile(Small())
    with torchprof.Profile(compiled, compile_layers=True, lines=False) as prof:
        with ThreadPoolExecutor(1) as other:
            other.submit(train, compiled).result(timeout=300)
        with no_new_graphs():
            train(compiled)
    assert kernels_of(prof.run) == SMALL


def test_a_block_that_begins_in_one_context_and_ends_in_another() -> None:
    """As in a notebook's cells, or in callbacks: torch's settings are those of a context."""
    start_anew()
    compiled: Any = torch.compile(Small())
    prof = torchprof.Profile(compiled, compile_layers=True)
    copy_context().run(prof.start)
    train(compiled)
    copy_context().run(prof.stop)
    assert kernels_of(prof.run) == SMALL


@pytest.mark.parametrize("wrong", ["flops", 1.5, None])
def test_an_unknown_value_is_refused(wrong: Any) -> None:
    with pytest.raises(TorchprofError, match="must be True or False"), torchprof.Profile(Small(), compile_layers=wrong):
        pass


# What torch has not, and what goes wrong

PRIVATE = [
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.compile_fx", "_compile_fx_inner"),
    ("torch._inductor.compile_fx", "fx_codegen_and_compile"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen.write_provenance_debug_handle"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen"),
    ("torch._inductor.scheduler", "Scheduler.codegen_extern_call"),
    ("torch._inductor.debug", "_inductor_triton_kernel_to_post_grad_node_info"),
    ("torch._inductor.virtualized", "V"),
    ("torch._inductor.config", "trace.provenance_tracking_level"),
    ("torch._inductor.config", "cpp.enable_kernel_profile"),
    ("torch._functorch.config", "enable_autograd_cache"),
]


@pytest.mark.real_kernels
@pytest.mark.parametrize(("room", "name"), PRIVATE, ids=[name for _, name in PRIVATE])
def test_a_torch_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, room: str, name: str) -> None:
    """One sentence, layers as without the option, and the user's program runs."""
    start_anew()
    model = Small()
    compiled: Any = torch.compile(model)
    prof = torchprof.Profile(compiled, compile_layers=True)
    with monkeypatch.context() as without:  # only while it is looked for: torch itself needs it
        module: Any = import_module(room)
        if room.endswith("config"):
            without.delitem(module._config, name)
        else:
            owner = module
            for step in name.split(".")[:-1]:
                owner = getattr(owner, step)
            without.delattr(owner, name.split(".")[-1])
        prof.start()
    x = torch.rand(8, 64)
    with torch.no_grad():
        result = compiled(x)
        prof.stop()
        torch.testing.assert_close(result, model(x))
    (sentence,) = [one for one in sentences(prof.run) if "does not report them" in one]
    assert "generated are unknown" in sentence and name.split(".")[-1] in sentence
    assert not any("ttributable" in one for one in sentences(prof.run))
    assert {layers for _, _, layers in kernels_of(prof.run)} == {("Small.fc",)}
    said = {frame.name for row in prof.run.rows for frame in row.frames if frame.kind == "kernels"}
    assert said == {f"{NOT_ATTRIBUTABLE}: {LAYERS_NOT_RECORDED}"}


@pytest.mark.parametrize(
    "name", ["called_module", "owner_of", "is_view", "_is_product", "_range_of", "_template", "root_of"]
)
def test_what_goes_wrong_in_reading_a_graph_is_not_the_users(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise LookupError("planted")

    where = next(module for module in (inductor, traced_graph) if hasattr(module, name))
    monkeypatch.setattr(where, name, fails)
    found = recorded(Small, train)
    assert {layers for _, _, layers in kernels_of(found.run)} == {UNKNOWN}
    check(found, unknown=SMALL.total())
    assert not any("planted" in one for one in sentences(found.run))


def test_a_node_that_tells_nothing_leaves_its_kernel_unknown_and_no_other() -> None:
    """A pass of the user's may put one there."""

    def forget(graph: Any) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target) == "aten.addmm.default":
                node.meta = {"val": node.meta["val"]}

    with torch._inductor.config.patch(joint_custom_post_pass=forget):
        found = recorded(Small, infer)
    check(found, unknown=1)
    assert kernels_of(found.run) == {(FORWARD, "addmm", UNKNOWN): 1, (FORWARD, "cpp_fused_gelu_0", ("Small.act",)): 1}


def test_an_error_of_the_compiler_is_the_users() -> None:
    def fails(graph: Any) -> None:
        raise LookupError("in a pass")

    start_anew()
    compiled: Any = torch.compile(Small())
    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=fails),
        torchprof.Profile(compiled, compile_layers=True, lines=False) as prof,
        pytest.raises(Exception, match="in a pass"),
    ):
        compiled(torch.rand(8, 64))
    assert prof.exited


def state_of_inductor() -> dict[str, Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import Scheduler

    functions = {
        "enter": compile_fx.compile_fx,
        "cached": compile_fx._compile_fx_inner,
        "compile": compile_fx.fx_codegen_and_compile,
        "write": PythonWrapperCodegen.write_provenance_debug_handle,
        "call": Scheduler.codegen_extern_call,
    }
    settings = {"inductor": config.get_config_copy(), "functorch": functorch_config.get_config_copy()}
    return {**functions, **settings}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_inductor_is_as_before(error: type[BaseException] | None) -> None:
    start_anew()
    compiled: Any = torch.compile(Small())
    before = state_of_inductor()
    with pytest.raises(error) if error else nullcontext(), torchprof.Profile(compiled, compile_layers=True):
        assert state_of_inductor()["compile"] is not before["compile"]
        infer(compiled)
        assert state_of_inductor()["inductor"] == before["inductor"]
        if error:
            raise error
    assert state_of_inductor() == before


def test_inductor_is_as_before_where_the_block_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_inductor()
    with (
        pytest.raises(RuntimeError, match="schedule"),
        torchprof.Profile(
            Small(), compile_layers=True, schedule=lambda step: (_ for _ in ()).throw(RuntimeError("schedule"))
        ),
    ):
        pass
    assert state_of_inductor() == before


def test_who_replaced_it_since_keeps_it() -> None:
    from torch._inductor import compile_fx

    original = compile_fx._compile_fx_inner
    with torchprof.Profile(Small(), compile_layers=True):
        ours = compile_fx._compile_fx_inner

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        compile_fx._compile_fx_inner = theirs
    try:
        assert compile_fx._compile_fx_inner is theirs
        start_anew()
        compiled: Any = torch.compile(Small())
        with torch._functorch.config.patch(enable_autograd_cache=False):
            infer(compiled)  # through theirs and ours, which does nothing any more
        with no_new_graphs(), torchprof.Profile(compiled) as prof:
            infer(compiled)
        assert [name for _, name, _ in kernels_of(prof.run)] == ["addmm"]
    finally:
        compile_fx._compile_fx_inner = original


def test_what_is_compiled_ahead_of_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges would be in it for good."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    compile_fx: Any = import_module("torch._inductor.compile_fx")
    asked = []
    monkeypatch.setattr(compile_fx, "_compile_fx_inner", lambda: asked.append(config.cpp.enable_kernel_profile))
    with torchprof.Profile(Small(), compile_layers=True):
        compile_fx._compile_fx_inner()
        with V.set_aot_compilation(True):
            compile_fx._compile_fx_inner()
    assert asked == [True, False]


SWITCHED_OFF = """
import sys
import torch, torchprof
model = torch.nn.Linear(2, 2)
with torchprof.Profile(model, compile_layers=True, enabled=False):
    model(torch.rand(1, 2))
with torchprof.Profile(model) as prof:
    model(torch.rand(1, 2))
print(prof)
sys.exit(str([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))] or ""))
"""


def test_what_is_switched_off_imports_nothing_of_the_compiler() -> None:
    ended = subprocess.run([sys.executable, "-c", SWITCHED_OFF], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "") or ended.stderr.strip() == "", ended.stderr

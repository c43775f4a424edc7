"""The layers of compiled code without ``compile_layers``, and of code that was compiled before the block: by the
parameters that calls of libraries work for, against the same model without torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES, resnet
from build.inductor import fresh_compiler, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.models import MLP, Bert, LeNet5
from torchprof import Profile, Run
from torchprof.record.compiled.dynamo_code import TakenTensor
from torchprof.record.compiled.graph_flow import GraphFlow, kernels_by_parameters
from torchprof.record.compiled.kept_graph import KeptGraph, NotedCalls
from torchprof.run.words import (
    BACKWARD,
    BETWEEN,
    COMPILED_BEFORE,
    FORWARD,
    IN_CPP,
    LAYERS_NOT_RECORDED,
    NOT_ATTRIBUTABLE,
    PHASES,
    RECOMPUTE,
)

pytestmark = pytest.mark.compiler
functorch_config: Any = pytest.importorskip("torch._functorch.config")
inductor_config: Any = pytest.importorskip("torch._inductor.config")
output_code: Any = pytest.importorskip("torch._inductor.output_code")
if "inductor_post_grad_graph_str" not in getattr(output_code.CompiledFxGraph, "__annotations__", {}):
    pytest.skip("graphs of this torch have no text", allow_module_level=True)


_fresh = pytest.fixture(fresh_compiler, autouse=True)


class Net(nn.Module):
    """Some layers, and a forward as a function of them and of an input."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def infer(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def recorded(model: Any, step: Callable[[], object], **options: Any) -> Run:
    with Profile(model, with_flops=True, **options) as prof:
        step()
    return prof.run


def products(run: Run, phase: str) -> dict[str, int]:
    """The MACs directly in each layer."""
    return {node.layer.name: node.self.macs for node in run.tree(phase).walk() if node.self.macs}


def both(model: nn.Module, step: Callable[[Any], object], **options: Any) -> tuple[Run, Run]:
    """The run of a model that was compiled before the block, and that of the model itself."""
    eager = recorded(model, lambda: step(model))
    compiled = torch.compile(model, **options)
    for _ in range(2):
        step(compiled)
    return recorded(compiled, lambda: step(compiled)), eager


def have_same_products(run: Run, eager: Run) -> bool:
    """Whether each layer has the products of its own forward and of its own backward."""
    return all(products(run, phase) == products(eager, phase) for phase in (FORWARD, BACKWARD))


def is_exact(run: Run, name: str) -> bool:
    return any(
        line.split("|")[0].strip(" │├└─") == name and "≥" not in line for line in run.report("tree").splitlines()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP": (lambda: MLP(16, 64), torch.rand(4, 16)),
    "LeNet-5": (LeNet5, torch.rand(2, 1, 32, 32)),
    "ResNet": (partial(resnet, blocks=1), ARCHITECTURES["ResNet"].inputs()[0]),
}


KINDS = ("layers_by_parameters", "inside_compiled")


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in MODELS), ("MLP", True), ("LeNet-5", True)])
def test_each_layer_has_its_products(name: str, dynamic: bool) -> None:
    make, x = MODELS[name]
    run, eager = both(make(), lambda model: train(model, x), dynamic=dynamic)
    assert products(eager, FORWARD) and products(eager, BACKWARD)
    for phase in PHASES:
        ours, wanted = products(run, phase), products(eager, phase)
        wrong = {layer: macs for layer, macs in ours.items() if layer != eager.layers[0].name and macs > wanted[layer]}
        assert wrong == {}
        assert sum(ours.values()) == sum(wanted.values())
        found = sum(macs for layer, macs in ours.items() if layer != eager.layers[0].name)
        assert found >= (0.9 if name == "ResNet" else 1) * sum(wanted.values())
    assert [warning.code for warning in run.warnings if warning.code in KINDS] == ["layers_by_parameters"]


def test_compile_layers_knows_no_more_of_what_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.analyze.warnings._SHARE_UNKNOWN", 0)  # they take any share on a busy machine
    model, x = LeNet5(), torch.rand(2, 1, 32, 32)
    compiled = torch.compile(model)
    train(compiled, x)
    runs = [recorded(compiled, lambda: train(compiled, x), compile_layers=asked) for asked in (False, True)]
    for phase in (FORWARD, BACKWARD):
        assert products(runs[0], phase) == products(runs[1], phase)
    rows = [{frame.name for row in run.rows for frame in row.frames if frame.kind == "kernels"} for run in runs]
    assert rows == [{f"{NOT_ATTRIBUTABLE}: {LAYERS_NOT_RECORDED}"}, {f"{NOT_ATTRIBUTABLE}: {COMPILED_BEFORE}"}]
    said = ["\n".join(map(str, run.warnings)) for run in runs]
    assert ["that was compiled before the block" in one for one in said] == [False, True]
    assert ["use compile_layers=True" in one for one in said] == [True, False]
    assert all("not attributable to layers" in one for one in said)
    assert all("kernels of the forward phase" in run.report("compiled") for run in runs)


def test_code_that_is_compiled_in_the_block_without_compile_layers() -> None:
    model, x = LeNet5(), torch.rand(2, 1, 32, 32)
    eager = recorded(model, lambda: train(model, x))
    compiled = torch.compile(model)
    run = recorded(compiled, lambda: train(compiled, x))
    assert have_same_products(run, eager)


def test_a_graph_without_parameters_tells_nothing() -> None:
    model = Net(lambda net, x: net.act(x @ x) @ x, act=nn.Tanh())
    run, _ = both(model, lambda model: model(torch.rand(8, 8)))
    assert products(run, FORWARD) == {"Net": 2 * 8**3}
    assert not any(frame.kind == "kernels" for row in run.rows for frame in row.frames)
    assert [warning.code for warning in run.warnings if warning.code in KINDS] == ["inside_compiled"]


@pytest.mark.parametrize(
    ("name", "known"), [("tied words", 0.2), ("Siamese", 1), ("GPT", 1), ("Perceiver", 0.8), ("recommender", 0.2)]
)
def test_no_layer_has_products_of_another(name: str, known: float) -> None:
    """``known``: at least this share of them is at layers; the rest is at the model itself."""
    architecture = ARCHITECTURES[name]
    inputs = architecture.inputs()

    def step(model: Any) -> None:
        output = model(*inputs)
        while isinstance(output, tuple):
            output = output[0]
        output.sum().backward()

    run, eager = both(architecture.make(), step)
    root = eager.layers[0].name
    for phase in PHASES:
        wanted = products(eager, phase)
        of_layers = {layer: macs for layer, macs in products(run, phase).items() if layer != root}
        assert [layer for layer, macs in of_layers.items() if macs > wanted.get(layer, 0)] == [], phase
        assert sum(of_layers.values()) >= known * sum(wanted.values())
    assert products(eager, FORWARD) and products(eager, BACKWARD)


def test_attention_is_in_the_module_between_whose_layers_it_is() -> None:
    tokens = torch.randint(0, 50, (2, 8))
    run, eager = both(Bert(50, 16, 2, 2, 32).eval(), lambda model: train(model, tokens))
    assert products(run, FORWARD) == products(eager, FORWARD)
    between = [row for row in run.rows if any(frame.name.startswith(BETWEEN) for frame in row.frames)]
    of_attention = {node.layer.name for node in eager.tree(FORWARD).walk() if node.layer.name.endswith(".attention")}
    assert {row.layer.name for row in between if row.layer and row.cost.macs} == of_attention
    assert not is_exact(run, "query") and not is_exact(run, "attention")


def test_what_is_between_two_calls_of_a_module_is_not_in_it() -> None:
    def compute(net: Any, x: Tensor) -> Any:
        x = net.block(x)
        return net.block((x @ x.t()) @ x)

    model, x = Net(compute, block=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), torch.rand(8, 8)
    run, eager = both(model, lambda model: infer(model, x))
    assert products(run, FORWARD) == products(eager, FORWARD)
    assert products(run, FORWARD)["Net"] == 2 * 8**3


def test_what_is_computed_again_does_not_tell_where_gradients_are() -> None:
    """In the text of the backward, ``first`` is computed again after gradients that are computed outside of it."""

    def compute(net: Any, x: Tensor) -> Any:
        return checkpoint(lambda x: net.last(nn.functional.gelu(net.first(x))), x, use_reentrant=False)

    first, last = (nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
    x = torch.rand(4, 16, requires_grad=True)
    with inductor_config.patch({"cpp.enable_kernel_profile": True}):
        run, _ = both(Net(compute, first=first, last=last), lambda model: train(model, x))
    between = [row for row in run.rows if any(frame.name.startswith(BETWEEN) for frame in row.frames)]
    assert between and {row.layer.name for row in between if row.layer} == {"Net"}


def test_recompute_is_the_same_with_and_without_compile_layers() -> None:
    """torch.compile chooses to compute products again to save memory; nobody asked for a checkpoint."""
    model, x = nn.Sequential(MLP(16, 64), MLP(16, 32)), torch.rand(4, 16, requires_grad=True)
    found = []
    for asked in (False, True):
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=0.3):
            compiled = torch.compile(model)
            train(compiled, x)
            if asked:
                torch._dynamo.reset()
            with Profile(compiled, with_flops=True, compile_layers=asked) as prof:
                train(compiled, x)
        found.append({phase: products(prof.run, phase) for phase in PHASES})
    assert found[0][RECOMPUTE] == found[1][RECOMPUTE] != {}
    assert found[0][BACKWARD] == found[1][BACKWARD]


def test_layers_are_lower_bounds_because_generated_kernels_may_be_theirs() -> None:
    x = torch.rand(4, 16)
    run, _ = both(MLP(16, 64), lambda model: train(model, x))
    assert not is_exact(run, "up") and not is_exact(run, "down") and is_exact(run, "MLP")


def test_blocks_that_were_compiled_one_by_one_share_a_graph_and_no_figures() -> None:
    model = nn.Sequential(*(MLP(16, 64) for _ in range(3)))
    x = torch.rand(4, 16)
    eager = recorded(model, lambda: train(model, x))
    for block in model:
        block.compile()
    train(model, x)
    run = recorded(model, lambda: train(model, x))
    assert have_same_products(run, eager)


def test_a_teacher_and_a_student_share_a_graph_and_no_figures() -> None:
    """One compiled function is called with both; each call has its own parameters."""
    student = nn.Linear(16, 8)
    teacher, x = copy.deepcopy(student), torch.rand(4, 16)
    both_of = nn.ModuleDict({"student": student, "teacher": teacher})

    @torch.compile
    def run_one(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).tanh()

    def step() -> None:
        run_one(both_of["student"], x).sum().backward()
        for _ in range(2):
            run_one(both_of["teacher"], x).sum().backward()

    step()
    run = recorded(both_of, step)
    for phase in (FORWARD, BACKWARD):
        assert products(run, phase) == {"ModuleDict.student": 512, "ModuleDict.teacher": 1024}


def with_positions() -> nn.Module:
    """The gradient of a parameter that is added is work of the layer after it."""
    first, last = nn.Linear(16, 16), nn.Linear(16, 8)
    positions = nn.Parameter(torch.rand(4, 16))
    return Net(lambda net, x: net.last(net.first(x) + net.positions), first=first, last=last, positions=positions)


def tied_head() -> nn.Module:
    words, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = words.weight
    return Net(lambda net, tokens: net.head(net.words(tokens).tanh()), words=words, head=head)


def residual_blocks() -> nn.Module:
    """torch.compile makes one product of a residual connection without a bias, and of the sum of its gradients."""
    return nn.Sequential(*(Net(lambda net, x: x + net.fc(x.tanh()), fc=nn.Linear(16, 16, bias=False)) for _ in "12"))


def convolutions_in_channels_last() -> nn.Module:
    """Inductor writes the gradient of the pooling in place, through a view."""
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 10)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train_in_autocast(model: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()


def train_with_two_forwards(model: Any, x: Tensor) -> None:
    (model(x) + model(2 * x)).sum().backward()


SAME_PRODUCTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], None], Tensor]] = {
    "two forwards before a backward": (lambda: MLP(16, 64), train_with_two_forwards, torch.rand(4, 16)),
    "a parameter that is added": (with_positions, train, torch.rand(4, 16)),
    "casts of parameters and of gradients": (lambda: MLP(16, 64), train_in_autocast, torch.rand(4, 16)),
    "a head that is tied to an embedding": (tied_head, train, torch.randint(0, 50, (2, 8))),
    "inference": (lambda: LeNet5().eval(), infer, torch.rand(2, 1, 32, 32)),
    "products that add another branch": (residual_blocks, train, torch.rand(4, 16)),
    "channels last": (
        convolutions_in_channels_last,
        train,
        torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("name", SAME_PRODUCTS)
def test_each_layer_has_its_own_products_alone(name: str) -> None:
    make, step, x = SAME_PRODUCTS[name]
    run, eager = both(make(), lambda model: step(model, x))
    assert products(eager, FORWARD) and have_same_products(run, eager)
    assert products(run, RECOMPUTE) == {}
    if name == "products that add another branch":
        assert any(row.frames and row.frames[-1].name == "aten::addmm" for row in run.rows)


def test_a_checkpoint_around_compiled_blocks() -> None:
    def compute(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model: Any = Net(compute, blocks=nn.ModuleList(MLP(16, 64) for _ in range(3)))
    x = torch.rand(4, 16, requires_grad=True)
    eager = recorded(model, lambda: train(model, x))
    for block in model.blocks:
        block.compile()
    train(model, x)
    run = recorded(model, lambda: train(model, x))
    assert have_same_products(run, eager)
    assert sum(products(run, RECOMPUTE).values()) == sum(products(eager, FORWARD).values())  # whole graphs run again


def test_frozen_weights_are_known_by_their_memory() -> None:
    x = torch.rand(2, 1, 32, 32)
    with inductor_config.patch(freezing=True):
        run, eager = both(LeNet5().eval(), lambda model: infer(model, x))
    ours, wanted = products(run, FORWARD), products(eager, FORWARD)
    assert sum(ours.values()) == sum(wanted.values())
    assert all(macs <= wanted[layer] for layer, macs in ours.items() if layer != eager.layers[0].name)
    assert sum(macs for layer, macs in ours.items() if layer != eager.layers[0].name) > 0


def test_calls_from_cpp_have_no_events() -> None:
    """With ``cpp_wrapper`` the source is C++, in a Python string."""

    class Graph:
        source_code = "module = load(['AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(buf0, arg0_1, arg1_1));'])"
        inductor_post_grad_graph_str = TEXT

    calls = NotedCalls()
    inputs = [nn.Parameter(torch.rand(8, 8)), torch.rand(8, 8)]
    backward = KeptGraph.of(Graph(), inputs)
    assert backward.number_of(Graph(), inputs, calls) is None  # it has tangents
    Graph.inductor_post_grad_graph_str = "def forward(self, arg0_1, arg1_1): pass"
    forward = KeptGraph.of(Graph(), inputs)
    assert forward.number_of(Graph(), inputs, calls) == 0
    assert kernels_by_parameters({"key": backward, "other": forward}, "unknown") == (
        {"key": IN_CPP, "other": IN_CPP},
        set(),
    )


def test_a_parameter_of_two_layers_is_of_neither() -> None:
    one, two = (nn.Linear(8, 8, bias=False) for _ in range(2))
    two.weight = one.weight
    x = torch.rand(4, 8)
    run, _ = both(Net(lambda net, x: net.two(net.one(x).relu()), one=one, two=two), lambda model: train(model, x))
    assert products(run, FORWARD) == {"Net": 2 * 4 * 8 * 8}
    assert any("their parameter is of several layers" in str(warning) for warning in run.warnings)


def test_the_projection_of_torchs_attention_is_its_own_work() -> None:
    mix, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.rand(2, 8, 16)
    model = Net(lambda net, x: net.mix(x, x, x, need_weights=False)[0], mix=mix)
    run, eager = both(model, lambda model: train(model, x))
    ours, wanted = products(run, FORWARD), products(eager, FORWARD)
    assert "Net.mix.out_proj" not in ours
    assert 0 < ours["Net.mix"] <= wanted["Net.mix"]


def test_what_a_checkpoint_computes_again_is_recompute() -> None:
    def compute(net: Any, x: Tensor) -> Any:
        return net.last(checkpoint(net.block, net.first(x), use_reentrant=False))

    model, x = Net(compute, first=nn.Linear(16, 16), block=MLP(16, 64), last=nn.Linear(16, 4)), torch.rand(4, 16)
    run, eager = both(model, lambda model: train(model, x))
    assert have_same_products(run, eager)
    again = products(run, RECOMPUTE)
    assert {*again} <= {"Net.block.up", "Net.block.down"} and again["Net.block.up"] == 4 * 16 * 64


# Calls of libraries and the nodes of the text, by hand

TEXT = """
def forward(self, primals_1: "f32[8, 8]", primals_2: "f32[8, 8]", primals_3: "f32[8, 8]", tangents_1: "f32[8, 8]"):
    cast: "bf16[8, 8]" = torch.ops.prims.convert_element_type.default(primals_1, torch.bfloat16);  primals_1 = None
    mm: "bf16[8, 8]" = torch.ops.aten.mm.default(primals_3, cast);  cast = None
    cast_1: "bf16[8, 8]" = torch.ops.prims.convert_element_type.default(primals_2, torch.bfloat16)
    mm_1: "bf16[8, 8]" = torch.ops.aten.mm.default(mm, cast_1);  cast_1 = None
    {branch}
    mm_3: "bf16[8, 8]" = torch.ops.aten.mm.default(mm_1, tangents_1)
    return (mm_3,)
"""
SOURCE = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'bfloat16*', 'bfloat16*'], r)
def call(args):
    primals_1, primals_2, primals_3, tangents_1 = args
    cpp_fused_0(primals_1, primals_2, buf0, buf1)
    extern_kernels.mm(primals_3, buf0, out=buf2)
    extern_kernels.mm(buf2, buf1, out=buf3)
    {branch}
    extern_kernels.mm(buf3, tangents_1, out=buf5)
    return (buf5, )
"""


TAKEN = (TakenTensor(0, "first", ()), TakenTensor(1, "second", ()))  # primals_1 and primals_2


def matches(text: str = "", source: str = "") -> list[tuple[set[str], bool] | None]:
    """For each product, the parameters that it reads, and whether it takes gradients; None if it is unknown."""
    graph = KeptGraph(SOURCE.format(branch=source), TEXT.format(branch=text), TAKEN)
    flow = GraphFlow(graph)
    nodes = [flow.node_of.get(at) for at, one in enumerate(graph.source.kernels) if one.is_library]
    return [node and (set(flow.reads(node)), node.name in flow.of_gradients) for node in nodes]


CHAIN = [({"primals_1"}, False), ({"primals_2"}, False), (set(), True)]


def test_products_in_a_chain_are_known_though_their_parameters_were_cast_before() -> None:
    assert matches() == CHAIN


def test_products_side_by_side_are_told_apart_by_the_numbers_of_their_buffers() -> None:
    """A third product needs the first only: Inductor may call it before or after the second."""
    text = 'mm_2: "bf16[8, 8]" = torch.ops.aten.mm.default(mm, primals_3)'
    branch = (set(), False)
    assert matches(text, "extern_kernels.mm(buf2, primals_3, out=buf4)") == [*CHAIN[:2], branch, CHAIN[2]]
    as_second = SOURCE.replace("    extern_kernels.mm(buf2, buf1, out=buf3)\n", "")
    later = as_second.format(
        branch="extern_kernels.mm(buf2, primals_3, out=buf4)\n    extern_kernels.mm(buf2, buf1, out=buf3)"
    )
    flow = GraphFlow(KeptGraph(later, TEXT.format(branch=text), TAKEN))
    assert [set(flow.reads(flow.node_of[at])) for at in (1, 2, 3, 4)] == [{"primals_1"}, set(), {"primals_2"}, set()]


def test_if_there_are_more_calls_than_nodes_only_those_are_known_that_alone_read_an_input() -> None:
    assert matches(source="extern_kernels.mm(buf2, buf2, out=buf4)") == [CHAIN[0], None, None, CHAIN[2]]


def test_the_same_if_a_call_reads_what_its_node_does_not_read() -> None:
    text = 'mm_2: "bf16[8, 8]" = torch.ops.aten.mm.default(mm, mm)'
    assert matches(text, "extern_kernels.mm(buf2, primals_3, out=buf4)") == [None, None, None, CHAIN[2]]


def test_a_parameter_that_the_user_replaces_is_followed() -> None:
    model, x = MLP(16, 64), torch.rand(4, 16)
    compiled = torch.compile(model)
    train(compiled, x)
    model.up.weight = nn.Parameter(torch.rand(64, 16))
    train(compiled, x)
    run = recorded(compiled, lambda: train(compiled, x))
    assert products(run, FORWARD) == {"MLP.up": 4 * 16 * 64, "MLP.down": 4 * 16 * 64}


def test_one_product_for_several_parameters_is_of_all_of_them() -> None:
    def compute(net: Any, x: Tensor) -> Tensor:
        weight = torch.cat([net.q.weight, net.k.weight, net.v.weight])
        q, k, v = nn.functional.linear(x, weight).chunk(3, -1)
        return torch.tanh(q * k) * v

    x = torch.rand(16, 64)
    run, _ = both(Net(compute, **{name: nn.Linear(64, 64) for name in "qkv"}), lambda model: train(model, x))
    assert not {"Net.q", "Net.k", "Net.v"} & {*products(run, BACKWARD)}
    shared = {tuple(layer.name for layer in row.shared_by) for row in run.rows if row.cost.macs and row.shared_by}
    assert shared == {("Net.q", "Net.k", "Net.v")}
    assert sum(products(run, BACKWARD).values()) == 16 * 64 * 192


def test_what_runs_inside_an_operator_without_a_formula_takes_nothing_from_others() -> None:
    layers = {"first": nn.Linear(64, 64), "mix": nn.Bilinear(64, 64, 8), "last": nn.Linear(8, 8)}
    x = torch.rand(8, 64)
    run, eager = both(Net(lambda net, x: net.last(net.mix(net.first(x), x)), **layers), lambda model: infer(model, x))
    ours, wanted = products(run, FORWARD), products(eager, FORWARD)
    assert all(ours[layer] == wanted[layer] for layer in ("Net.first", "Net.last"))
    assert sum(ours.values()) == sum(wanted.values())

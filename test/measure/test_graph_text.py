"""The arithmetic of a compiled graph, read from its text, against hand calculations."""

from __future__ import annotations

from typing import Any

import pytest

from torchprof.attribute.compiled_graphs import CompiledGraphs, CompiledKernel
from torchprof.measure.flops.graphs import GraphCall, GraphCalls, read_graph, work_of_nodes
from torchprof.measure.flops.operation import Count, Work
from torchprof.measure.recording import CalledGraph

TEXT = """
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[16, 8][8, 1]cpu", primals_2: "Sym(s0)", primals_3: "f32[s0, 8][8, 1]cuda:0"):
        # File: net.py:3 in forward, code: return self.fc(x).relu()
        permute: "f32[8, 16][1, 8]cpu" = torch.ops.aten.permute.default(primals_1, [1, 0]);  primals_1 = None
        mm: "f32[s0, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_3, permute);  permute = None
        mul_2: "Sym(2*s0)" = primals_2 * 2
        view: "f32[2*s0, 8][8, 1]cpu" = torch.ops.aten.reshape.default(mm, [mul_2, 8]);  mul_2 = None
        relu: "f32[2*s0, 8][8, 1]cpu" = torch.ops.aten.relu.default(view);  view = None
        var_mean = torch.ops.aten.var_mean.correction(relu, [1], correction = 0, keepdim = True)
        getitem: "f32[2*s0, 1][1, 1]cpu" = var_mean[0];  var_mean = None
        le: "b8[2*s0, 8][8, 1]cpu" = torch.ops.aten.le.Scalar(relu, 0)
        return (getitem, primals_3, le)
"""
RANGE = "## Call CompiledFxGraph key ##"


def test_the_nodes_of_a_graph_are_counted_with_the_sizes_of_a_call() -> None:
    """s0 = 3: a product of 3×8 and 8×16, and one FLOP for each of 48 elements in relu and in the comparison."""
    graph = read_graph(TEXT)
    assert [(node.name, node.operator.removeprefix("aten::")) for node in graph.nodes.values() if node.is_call] == [
        ("permute", "permute"),
        ("mm", "mm"),
        ("view", "reshape"),
        ("relu", "relu"),
        ("var_mean", "var_mean"),
        ("le", "le"),
    ]
    symbols = graph.symbols([(16, 8), 3, (3, 8)])
    assert symbols == {"s0": 3}
    work = work_of_nodes(graph, symbols)
    variance = work.pop("var_mean")
    assert work == {"mm": Work(3 * 8 * 16, 2 * 3 * 8 * 16), "relu": Work(0, 48), "le": Work(0, 48)}
    assert variance is not None and 2 * 48 <= variance.flops <= 4 * 48


def test_a_size_that_is_not_known_is_not_counted() -> None:
    assert work_of_nodes(read_graph(TEXT), {}) == dict.fromkeys(("mm", "relu", "var_mean", "le"))


@pytest.mark.parametrize(
    "line",
    [
        "y = torch.ops.nobody.knows.default(x)",
        "y = torch.ops.higher_order.cond(x, self.true_graph_0, self.false_graph_0, ())",
        "y = wrap(x)",
        'y: "f32[7//u0]" = torch.ops.aten.sin.default(z)',
    ],
)
def test_what_is_not_understood_is_not_counted(line: str) -> None:
    text = f'def forward(self, x: "f32[2]", z: "f32[u0]"):\n    {line}\n    return y\n'
    assert [*work_of_nodes(read_graph(text), {}).values()] == [None]


@pytest.mark.parametrize("text", ["", "def forward(:", "x = 1", "def one(): pass\ndef other(): pass"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of"):
        read_graph(text)
    assert GraphCalls({"key": CalledGraph(text, [])}).next(RANGE) is None


def test_each_call_has_its_own_sizes() -> None:
    graphs = GraphCalls({"key": CalledGraph(TEXT, [((16, 8), 3, (3, 8)), ((16, 8), 5, (5, 8))])})
    for size in (3, 5):
        call = graphs.next(RANGE)
        assert call is not None
        ((place, count),), known = call.counts(7, [])
        assert (place, count.macs, count.uncounted, known) == (7, size * 128, 0, set())
    assert graphs.next(RANGE) is None
    assert graphs.next("## Call CompiledFxGraph other ##") is None


# Ops and kernels in a call

NODES = {"mm": Work(100, 200), "relu": Work(0, 10), "norm": Work(0, 30), "sort": None}


def called(layers: Any, *ran: tuple[str, list[tuple[int, Count]]]) -> Any:
    """The counts of a call at place 1, of the operators in it."""
    call = GraphCall("key", NODES, {"aten::sort"}, layers)
    for name, _ in ran:
        call.ran.append((name, 0))
    return call.counts(1, [counts for _, counts in ran])


def test_the_rest_of_a_graph_is_at_its_call() -> None:
    found, known = called(None, ("aten::mm", [(2, Count(100, 205, 0))]), ("x", [(3, Count(0, 0, 1))]))
    assert found == [(2, Count(100, 205, 0)), (1, Count(0, 35, 1))]
    assert known == set()


def test_ops_with_more_work_than_the_graph_are_not_added_to_it() -> None:
    assert called(None, ("aten::mm", [(2, Count(101, 202, 0))]))[0] == [(1, Count(100, 240, 1))]


def test_what_ran_inside_an_operator_of_unknown_work_is_its_own() -> None:
    """A product of 70 MACs inside ``aten::sort``, which has no formula: it is no part of the work of the others."""
    found, _ = called(None, ("aten::mm", [(2, Count(100, 200, 0))]), ("aten::sort", [(3, Count(70, 140, 0))]))
    assert found == [(2, Count(100, 200, 0)), (3, Count(70, 140, 0)), (1, Count(0, 40, 0))]
    found, _ = called(None, ("aten::sort", [(3, Count(70, 140, 0)), (3, Count(0, 0, 1))]))
    assert found == [(3, Count(70, 140, 0)), (3, Count(0, 0, 1)), (1, Count(100, 240, 0))]


def with_layers(*kernels: CompiledKernel) -> CompiledGraphs:
    return CompiledGraphs({"key": kernels})


def test_kernels_have_the_work_of_their_nodes() -> None:
    """relu is computed in both kernels: it counts in the first."""
    layers = with_layers(
        CompiledKernel("mm", (), nodes=("mm",)),
        CompiledKernel("cpp_fused_relu_0", (), nodes=("relu",)),
        CompiledKernel("cpp_fused_norm_relu_1", (), nodes=("relu", "norm")),
    )
    call = GraphCall("key", NODES, {"aten::sort"}, layers)
    call.ran += [("aten::mm", 2), ("cpp_fused_relu_0", 3), ("cpp_fused_norm_relu_1", 4)]
    found, known = call.counts(1, [[(2, Count(100, 200, 0))], [(3, Count(0, 0, 1))], [(4, Count(0, 0, 1))]])
    assert found == [(2, Count(100, 200, 0)), (3, Count(0, 10, 0)), (4, Count(0, 30, 0)), (1, Count(0, 0, 1))]
    assert known == {3, 4}


def test_a_kernel_with_a_node_of_unknown_work_or_of_another_name_is_not_counted() -> None:
    layers = with_layers(CompiledKernel("cpp_fused_relu_sort_0", (), nodes=("relu", "sort")))
    call = GraphCall("key", NODES, {"aten::sort"}, layers)
    call.ran += [("cpp_fused_relu_sort_0", 3), ("cpp_fused_sin_7", 4)]
    found, known = call.counts(1, [[], []])
    assert found == [(3, Count(0, 10, 1)), (4, Count(0, 0, 1)), (1, Count(100, 230, 0))]
    assert known == {3}

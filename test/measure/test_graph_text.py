"""The arithmetic of a compiled graph, read from its text, against hand calculations."""

from __future__ import annotations

import pytest

from torchprof.measure.flops.graph_text import WorkOfGraphs, read_graph, work_of_graph
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


def test_the_operators_of_a_graph_are_counted_with_the_sizes_of_a_call() -> None:
    """s0 = 3: a product of 3×8 and 8×16, and one FLOP for each of 48 elements in relu and in the comparison."""
    graph = read_graph(TEXT)
    assert [op.name.removeprefix("aten::") for op in graph.ops] == [
        *("permute", "mm", "reshape", "relu", "var_mean", "le")
    ]
    symbols = graph.symbols([(16, 8), 3, (3, 8)])
    assert symbols == {"s0": 3}
    without_variance = graph._replace(ops=tuple(op for op in graph.ops if op.name != "aten::var_mean"))
    work, uncounted = work_of_graph(without_variance, symbols)
    assert (work.macs, work.flops - 2 * work.macs, uncounted) == (3 * 8 * 16, 48 + 48, 0)
    whole, uncounted = work_of_graph(graph, symbols)
    assert uncounted == 0 and whole.macs == work.macs
    assert 2 * 48 <= whole.flops - work.flops <= 4 * 48


def test_a_size_that_is_not_known_is_not_counted() -> None:
    work, uncounted = work_of_graph(read_graph(TEXT), {})
    assert (work.macs, uncounted) == (0, 4)


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
    assert work_of_graph(read_graph(text), {})[1] == 1


@pytest.mark.parametrize("text", ["", "def forward(:", "x = 1", "def one(): pass\ndef other(): pass"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of"):
        read_graph(text)
    assert WorkOfGraphs({"key": CalledGraph(text, [])}).of_next_call(RANGE) is None


def test_each_call_has_its_own_sizes() -> None:
    graphs = WorkOfGraphs({"key": CalledGraph(TEXT, [((16, 8), 3, (3, 8)), ((16, 8), 5, (5, 8))])})
    works = [graphs.of_next_call(RANGE) for _ in range(3)]
    assert [None if one is None else one[0].macs for one in works] == [3 * 128, 5 * 128, None]
    assert graphs.of_next_call("## Call CompiledFxGraph other ##") is None

"""In which module a kernel ran of which only the layers before and after are known: cases by hand."""

from __future__ import annotations

import pytest

from torchprof.attribute.compiled_graphs import (
    Block,
    CompiledGraphs,
    CompiledKernel,
    ModuleTensor,
    ProfiledModule,
    Span,
)

PATHS = ["Net", "Net.embed", "Net.a", "Net.a.q", "Net.a.k", "Net.a.o", "Net.a.o.norm", "Net.b", "Net.b.q", "Net.b.o"]
NUMBER = {name: number for number, name in enumerate(PATHS)}


def block_of(*spans: Span, repeated: str = "", around: int = 0, unknown: str = "", **kinds: str) -> Block | None:
    """The module of a kernel. Each layer has one parameter, whose root is the layer's name without the model.
    ``kinds``: the classes of layers, if not Linear."""
    kernel = CompiledKernel("k", (None,), between=frozenset(spans), repeated=roots(repeated))
    modules = {
        tuple(name.split(".")): ProfiledModule(number, kinds.get(name[4:], "Linear")) for name, number in NUMBER.items()
    }
    taken = [
        ModuleTensor(name.removeprefix("Net."), (), (tuple(name.split(".")),))
        for name in PATHS
        if name.removeprefix("Net.") not in unknown.split()
    ]
    taken.append(ModuleTensor("tied", (), (("Net", "a", "q"), ("Net", "a", "k"))))
    graphs = CompiledGraphs({"graph": (kernel,)}, modules, inputs={"call": taken})
    layers = graphs.layers_of("graph", 0, around, "call")
    return layers if isinstance(layers, Block) else None


def roots(names: str) -> frozenset[str]:
    return frozenset(names.split())


def between(before: str, after: str) -> Span:
    return Span(roots(before), roots(after))


def own(names: str) -> Span:
    return Span(roots(names), roots(names), is_own=True)


def block(name: str, *neighbors: str) -> Block:
    return Block(NUMBER[name], tuple(NUMBER[f"Net.{one}"] for one in neighbors))


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([between("a.q", "a.o")], block("Net.a", "a.q", "a.o")),
        ([between("a.q a.k", "a.o")], block("Net.a", "a.q", "a.k", "a.o")),
        ([between("a.o", "b.q")], block("Net", "a.o", "b.q")),
        ([between("a.o", "a.o.norm")], block("Net.a.o", "a.o", "a.o.norm")),
        ([between("embed a.q", "a.o")], block("Net.a", "embed", "a.q", "a.o")),
        ([own("a.o.norm")], block("Net.a.o.norm", "a.o.norm")._replace(is_own=True)),
        ([own("a.o.norm"), between("a.o", "a.o.norm")], block("Net.a.o", "a.o", "a.o.norm")),
        ([own("a.q"), own("b.q")], block("Net", "a.q", "b.q")),
    ],
    ids=["in a block", "two before", "across blocks", "in a layer", "far and near", "its own", "a part", "two layers"],
)
def test_it_is_in_the_innermost_module_around_a_layer_before_and_one_after(spans: list[Span], wanted: Block) -> None:
    assert block_of(*spans) == wanted


def test_between_two_uses_of_one_layer_it_may_be_outside_of_it() -> None:
    assert block_of(between("a.q", "a.q")) == block("Net.a", "a.q")


def test_at_an_end_of_the_graph_it_is_in_the_module_that_runs_the_graph() -> None:
    assert block_of(between("", "a.q")) == block("Net", "a.q")
    assert block_of(between("a.q", ""), around=NUMBER["Net.a"]) == block("Net.a", "a.q")


def test_at_both_ends_it_is_there_too() -> None:
    around = NUMBER["Net.a"]
    assert block_of(between("", ""), own("a.q"), around=around) == block("Net.a", "a.q")
    assert block_of(between("", ""), around=around) is None


def test_a_layer_that_is_known_by_a_shared_parameter_is_none() -> None:
    assert block_of(own("tied"), own("a.q")) == block("Net", "a.q")


def test_if_that_is_no_module_nothing_is_known() -> None:
    assert block_of(between("", "a.q"), around=-1) is None
    assert block_of(between("a.q", "a.o"), around=-1) == block("Net.a", "a.q", "a.o")


def test_a_parameter_of_no_profiled_module_counts_like_none() -> None:
    assert block_of(between("a.q", "a.o"), unknown="a.q") == block("Net", "a.o")
    assert block_of(between("a.q", "a.o"), unknown="a.q a.o") is None


def test_a_module_whose_parameters_are_all_used_again_may_be_called_again() -> None:
    spans = [between("a.q", "a.o"), own("embed")]
    assert block_of(spans[0], repeated="a.q a.o") == block("Net", "a.q", "a.o")
    assert block_of(spans[0], repeated="a.q") == block("Net.a", "a.q", "a.o")


def test_a_list_of_modules_runs_nothing() -> None:
    assert block_of(between("a.q", "a.o"), a="ModuleList") == block("Net", "a.q", "a.o")


def test_an_embedding_that_is_used_again_says_nothing() -> None:
    """Another module may multiply with its parameter."""
    assert block_of(between("a.q", "embed"), embed="Embedding") == block("Net", "embed", "a.q")
    assert block_of(between("a.q", "embed"), embed="Embedding", repeated="embed") == block("Net", "a.q")

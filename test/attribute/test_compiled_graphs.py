"""Hand-made events and graphs of torch.compile: regions, guards, graphs, and the layers that the kernels work for."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest
from build.compiled import (
    ACT,
    ANY,
    BLOCK,
    FC1,
    FC2,
    KINDS,
    MODULES,
    NAMES,
    OWN,
    PATHS,
    SELF,
    SITES,
    Ran,
    call,
    graphs_of,
    in_words,
    layer,
    region,
    spans,
    traced,
    work,
)
from build.events import ENGINE, MAIN, NODE_PREFIX, function, kernel, label, memory, node, op, user_label, walk_of
from build.examples import examples
from build.forests import Forest
from hypothesis import given
from hypothesis import strategies as st

from torchprof.attribute.compiled_graphs import Block, CompiledGraphs, ModuleTensor, Owner, ProfiledModule, TracedModule
from torchprof.attribute.event_names import event_kind
from torchprof.attribute.events import COMPILED_INPUTS, Event, Kind
from torchprof.attribute.rule import Attribution
from torchprof.run.words import (
    AMBIGUOUS_MODULE,
    BACKWARD,
    COMPILED_BEFORE,
    FORWARD,
    NESTED_GRAPHS,
    OTHER_MODULE,
    OUTSIDE,
    RECOMPUTE,
    UNKNOWN_MODULE,
    Frame,
    FrameKind,
)

# A model of two equal blocks, and graphs of it

NET, FIRST, SECOND, HEAD = (NAMES.index(name) for name in ("", "blocks.0", "blocks.1", "head"))


def in_function(name: str, below: str, root: str) -> Owner:
    """The owner of an operation in a module that a compiled function calls: this module is an owner, too."""
    return (TracedModule(root, (), KINDS[below]), *(traced(name, below, root) if name else ()))


# Which kernel an op is


OPS: dict[str, tuple[list[str], list[int | None]]] = {
    "they alone": (["addmm", "cpp_fused_addmm_gelu_0", "addmm", "cpp_fused_add_1"], [0, 1, 2, 3]),
    "among other ops": (
        ["aten::copy_", "addmm", "aten::empty", "cpp_fused_addmm_gelu_0", "addmm", "cpp_fused_add_1", "aten::copy_"],
        [None, 0, None, 1, 2, 3, None],
    ),
    "by their long names": (
        ["aten::addmm", "graph_3_cpp_fused_addmm_gelu_0", "mkldnn::addmm", "graph_12_cpp_fused_add_1"],
        [0, 1, 2, 3],
    ),
    "the last is missing": (["addmm", "cpp_fused_addmm_gelu_0", "addmm"], [0, 1, 2]),
    "one is missing": (["addmm", "cpp_fused_addmm_gelu_0", "cpp_fused_add_1"], [0, 1, 3]),
    "one has another name": (["run_and_save", "cpp_fused_addmm_gelu_0", "addmm", "cpp_fused_add_1"], [None, 1, 2, 3]),
    "the last has another name": (["addmm", "cpp_fused_addmm_gelu_0", "addmm", "cpp_fused_add_2"], [0, 1, 2, None]),
    "one more": (["addmm", "cpp_fused_addmm_gelu_0", "addmm", "addmm", "cpp_fused_add_1"], [0, 1, None, None, 3]),
    "swapped": (["addmm", "addmm", "cpp_fused_addmm_gelu_0", "cpp_fused_add_1"], [None, None, None, 3]),
    "which of two it is": (["addmm", "cpp_fused_add_1"], [None, 3]),
    "none": (["aten::copy_"], [None]),
    "nothing ran": ([], []),
}


@pytest.mark.parametrize("case", OPS)
def test_ops_are_kernels_in_the_order_of_their_graph_and_others_are_unknown(case: str) -> None:
    ran, numbers = OPS[case]
    assert graphs_of().called("block", ran) == numbers


def test_no_op_is_a_kernel_of_an_unknown_graph_or_of_one_without_kernels() -> None:
    assert graphs_of().called("another", ["addmm"]) == [None]
    assert graphs_of(empty=()).called("empty", ["addmm"]) == [None]
    assert CompiledGraphs().called("block", ["addmm"]) == [None]


def test_an_unknown_graph_has_a_reason() -> None:
    graphs = graphs_of(nested=NESTED_GRAPHS)
    reasons = [graphs.why_unknown(graph) for graph in ("block", "nested", "another")]
    assert reasons == ["", NESTED_GRAPHS, COMPILED_BEFORE]
    assert graphs.called("nested", ["addmm"]) == [None]


@examples(100)
@given(st.data())
def test_a_kernel_under_another_name_never_causes_a_wrong_match(data: st.DataObject) -> None:
    """Some kernels leave no op, and some an op of another name. Every other kernel is matched correctly or not at all;
    if all names differ, every other kernel is matched."""
    kinds = st.sampled_from(["mm", "bmm", "cpp_fused_0", "cpp_fused_1", "cpp_fused_2", "cpp_fused_3"])
    names = data.draw(st.lists(kinds, min_size=1, max_size=10, unique=data.draw(st.booleans())))
    ran: list[str] = []
    truth: list[int | None] = []
    for number, name in enumerate(names):
        how = data.draw(st.sampled_from(["as it is", "as it is", "under another name", "no op"]))
        if how != "no op":
            ran.append(name if how == "as it is" else "aten::other")
            truth.append(number if how == "as it is" else None)
    found = graphs_of(any=[work(name, OWN) for name in names]).called("any", ran)
    assert all(one in (None, right) for one, right in zip(found, truth))
    if len(set(names)) == len(names):
        assert found == truth


@examples(100)
@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_only_pairs_in_all_longest_matches_are_known(kernels: list[str], ran: list[str]) -> None:
    """Compared with an enumeration of all longest matches."""

    def matches(at: int, other: int) -> list[frozenset[tuple[int, int]]]:
        if at == len(kernels):
            return [frozenset()]
        found = matches(at + 1, other)
        for later in range(other, len(ran)):
            if ran[later] == kernels[at]:
                found = [*found, *(one | {(at, later)} for one in matches(at + 1, later + 1))]
        return found

    all_matches = matches(0, 0)
    longest = [one for one in all_matches if len(one) == max(map(len, all_matches))]
    certain = {other: at for at, other in frozenset.intersection(*longest)}
    called = graphs_of(any=[work(name, OWN) for name in kernels]).called("any", ran)
    assert called == [certain.get(other) for other in range(len(ran))]


# Which layers a kernel works for


def layers_of(graphs: CompiledGraphs, graph: str, around: int, inputs: str = "") -> list[list[str] | str]:
    """The names of the layers of each kernel if its graph runs in a layer: the layer itself if none is known, otherwise
    the reason."""
    kernels = graphs._graphs[graph]
    found = [graphs.layers_of(graph, number, around, inputs) for number in range(len(kernels))]
    assert not any(isinstance(layers, Block) for layers in found)
    return [
        layers if isinstance(layers, str) else [NAMES[layer] if layer >= 0 else "(outside)" for layer in layers]
        for layers in found
    ]


def test_layers_are_found_below_the_module_that_was_called() -> None:
    """If one graph runs in several equal blocks, its layers are those of the block around each call."""
    graphs = graphs_of()
    for around, block in ((FIRST, "blocks.0"), (SECOND, "blocks.1"), (FIRST, "blocks.0")):
        assert layers_of(graphs, "block", around) == [
            [f"{block}.fc1"],
            [f"{block}.fc1", f"{block}.act"],
            [f"{block}.fc2"],
            [block],
        ]


def test_layers_of_a_whole_model_are_found_below_its_root() -> None:
    """Code of the model's own forward belongs to the model, code of its modules to these."""
    whole = [
        work("a", traced("blocks.0.fc1", "")),
        work("b", traced("blocks.1", ""), traced("head", "")),
        work("c", OWN, traced("head", "")),
        work("d", traced("blocks.1.fc2", ""), traced("blocks.0.fc2", ""), traced("blocks.1.fc2", "")),
    ]
    assert layers_of(graphs_of(whole=whole), "whole", NET) == [
        ["blocks.0.fc1"],
        ["blocks.1", "head"],
        ["", "head"],
        ["blocks.0.fc2", "blocks.1.fc2"],
    ]


def test_a_graph_in_a_layer_without_its_modules_has_no_owner() -> None:
    """If a class or a path differs, the graph belongs to another module."""
    assert layers_of(graphs_of(), "block", HEAD) == [OTHER_MODULE, OTHER_MODULE, OTHER_MODULE, ["head"]]
    for wrong in (TracedModule(SELF, ("fc1",), "Conv2d"), TracedModule(SELF, ("fc3",), "Linear")):
        graphs = graphs_of(wrong=[work("a", (wrong,)), work("b", FC2), work("c", OWN)])
        assert layers_of(graphs, "wrong", FIRST) == [OTHER_MODULE, OTHER_MODULE, ["blocks.0"]]


@pytest.mark.parametrize(
    "way",
    [("_orig_mod",), ("module", "_orig_mod"), ("_orig_mod", "module")],
    ids=["torch.compile", "DDP of torch.compile", "torch.compile of DDP"],
)
def test_below_wrappers_layers_are_found_by_the_wrapped_modules(way: tuple[str, ...]) -> None:
    """A wrapper and the wrapped module are one layer. The compiled module is the wrapped one, or one that this
    wraps."""
    wraps = {"_orig_mod": "OptimizedModule", "module": "DistributedDataParallel"}
    modules = {("Net", *way[:at]): ProfiledModule(NET, wraps[step]) for at, step in enumerate(way)}
    modules |= {("Net", *way, *path[1:]): module for path, module in MODULES.items()}
    whole = [work("a", traced("head", "")), work("b", OWN), work("c", traced("blocks.1.act", ""))]
    assert layers_of(graphs_of(modules, whole=whole), "whole", NET) == [["head"], [""], ["blocks.1.act"]]


def test_names_omit_the_step_into_an_inner_compiled_module() -> None:
    """torch omits this step: ``L['self'].blocks.0.fc1`` is ``blocks.0._orig_mod.fc1``."""
    modules = {}
    for path, module in MODULES.items():
        if path[:3] == ("Net", "blocks", "0"):
            modules[path[:3]] = ProfiledModule(FIRST, "OptimizedModule")
            path = (*path[:3], "_orig_mod", *path[3:])
        modules[path] = module
    graphs = graphs_of(modules, whole=[work("a", traced("blocks.0.fc1", "")), work("b", traced("head", ""))])
    assert layers_of(graphs, "whole", NET) == [["blocks.0.fc1"], ["head"]]
    assert layers_of(graphs, "block", FIRST)[0] == ["blocks.0.fc1"]


def test_a_compiled_function_belongs_to_the_only_module_that_fits() -> None:
    """It runs outside all layers, or in a layer that is not related to the modules that it calls."""
    whole = [
        work("a", in_function("blocks.0.fc1", "", "G['net']")),
        work("b", OWN),
        work("c", OWN, in_function("", "", "G['net']")),
    ]
    graphs = graphs_of(whole=whole)
    assert layers_of(graphs, "whole", OUTSIDE) == [["blocks.0.fc1"], ["(outside)"], ["(outside)", ""]]
    assert layers_of(graphs, "whole", HEAD) == [["blocks.0.fc1"], ["head"], ["", "head"]]


def test_a_compiled_function_that_may_call_several_modules_is_ambiguous() -> None:
    """It is unknown which of two equal blocks it was called with, or which of two models."""
    function = [work("a", in_function("fc1", "blocks.0", "L['block']")), work("b", OWN)]
    assert layers_of(graphs_of(function=function), "function", OUTSIDE) == [AMBIGUOUS_MODULE, ["(outside)"]]
    other = {
        ("Net#2", *path[1:]): ProfiledModule(len(NAMES) + module.layer, module.kind) for path, module in MODULES.items()
    }
    whole = [work("a", in_function("head", "", "G['net']"))]
    assert layers_of(graphs_of(whole=whole), "whole", OUTSIDE) == [["head"]]
    assert layers_of(graphs_of(MODULES | other, whole=whole), "whole", OUTSIDE) == [AMBIGUOUS_MODULE]


def test_all_traced_modules_of_a_graph_identify_its_module() -> None:
    """A Linear alone could be any Linear; a Linear next to another one with this name is unique."""
    alone = [work("a", in_function("", "head", "L['one']"))]
    beside = [*alone, work("b", in_function("", "blocks.1.fc1", "L['two']"), in_function("", "", "L['net']"))]
    both = [work("a", in_function("head", "", "L['net']")), work("b", in_function("blocks", "", "L['net']"))]
    graphs = graphs_of(alone=alone, beside=both, two=beside)
    assert layers_of(graphs, "alone", OUTSIDE) == [AMBIGUOUS_MODULE]
    assert layers_of(graphs, "beside", OUTSIDE) == [["head"], ["blocks"]]
    assert layers_of(graphs, "two", OUTSIDE) == [AMBIGUOUS_MODULE] * 2, "of a kernel all has to be known"


def test_self_is_only_known_by_the_label_around() -> None:
    """Without a label around, another model of the same class ran: a teacher next to its student."""
    graphs = graphs_of(whole=[work("a", traced("head", "")), work("b", OWN)])
    assert layers_of(graphs, "whole", OUTSIDE) == [OTHER_MODULE, ["(outside)"]]
    # Nor in the range of a module that does not fit.
    assert layers_of(graphs, "whole", FIRST) == [OTHER_MODULE, ["blocks.0"]]


def test_a_module_is_ambiguous_if_its_class_has_other_modules() -> None:
    """A compiled function is not compiled again for another module of the class, so it is unknown which one it got."""
    whole = {"whole": [work("a", in_function("head", "", "L['net']"))]}
    asked = []

    def is_alone(path: tuple[str, ...]) -> bool:
        asked.append(path)
        return False

    assert CompiledGraphs(whole, MODULES, is_alone=is_alone).layers_of("whole", 0, OUTSIDE) == AMBIGUOUS_MODULE
    assert asked == [("Net",)]


def test_two_modules_that_may_both_be_called_are_ambiguous() -> None:
    """A compiled function gets two blocks, in the range of a block: this may be either of the two, or neither."""
    first, second = (traced("fc1", root=root) for root in ("L['a']", "L['b']"))
    graphs = graphs_of(two=[work("a", first), work("b", second), work("c", first, second), work("d", OWN)])
    assert layers_of(graphs, "two", FIRST) == [*[AMBIGUOUS_MODULE] * 3, ["blocks.0"]]


def taken(root: str, path: str, *holders: str) -> ModuleTensor:
    """A tensor that a function took from a module, and the names of the modules that have it."""
    return ModuleTensor(root, tuple(path.split(".")), tuple(("Net", *name.split(".")) for name in holders))


def freed(root: str, path: str) -> ModuleTensor:
    return taken(root, path)._replace(holders=None, is_gone=True)


def test_freed_tensors_may_have_been_those_of_another_module() -> None:
    """A freed module cannot be found any more. So it proves nothing that its class has only one module now."""
    function = {"function": [work("a", in_function("head", "", "L['net']"))]}
    inputs = {"freed": [freed("L['net']", "head")], "gathered": [taken("L['net']", "head")._replace(holders=None)]}
    graphs = CompiledGraphs(function, MODULES, inputs=inputs)
    assert layers_of(graphs, "function", OUTSIDE, "freed") == [AMBIGUOUS_MODULE]
    assert layers_of(graphs, "function", OUTSIDE, "gathered") == [["head"]]


def test_the_tensors_that_a_function_took_identify_the_module() -> None:
    """One graph of a function that is called with one block, then with another, then with a block that is not profiled;
    the class has several modules."""
    function = {"function": [work("a", in_function("fc1", "blocks.0", "L['block']")), work("b", OWN)]}
    inputs = {
        "first": [taken("L['block']", "fc1", "blocks.0.fc1"), taken("L['block']", "fc2", "blocks.0.fc2")],
        "second": [taken("L['block']", "fc1", "blocks.1.fc1"), taken("L['block']", "fc2", "blocks.1.fc2")],
        "another": [taken("L['block']", "fc1"), taken("L['block']", "fc2")],
        "crossed": [taken("L['block']", "fc1", "blocks.0.fc1"), taken("L['block']", "fc2", "blocks.1.fc2")],
        "tied": [taken("L['block']", "fc1", "blocks.0.fc1", "blocks.1.fc1")],
        "of another class": [taken("L['block']", "fc1", "head")],
        "gathered": [taken("L['block']", "fc1")._replace(holders=None)],
        "one gathered": [taken("L['block']", "fc1")._replace(holders=None), taken("L['block']", "fc2", "blocks.1.fc2")],
        "one freed": [freed("L['block']", "fc1"), taken("L['block']", "fc2", "blocks.1.fc2")],
    }
    graphs = CompiledGraphs(function, MODULES, is_alone=lambda path: False, inputs=inputs)
    assert {name: layers_of(graphs, "function", OUTSIDE, name)[0] for name in ["", *inputs]} == {
        "": AMBIGUOUS_MODULE,
        "first": ["blocks.0.fc1"],
        "second": ["blocks.1.fc1"],
        "another": OTHER_MODULE,
        "crossed": OTHER_MODULE,
        "tied": AMBIGUOUS_MODULE,
        "of another class": OTHER_MODULE,
        "gathered": AMBIGUOUS_MODULE,
        "one gathered": ["blocks.1.fc1"],
        "one freed": ["blocks.1.fc1"],
    }
    assert layers_of(graphs, "function", OUTSIDE, "another")[1] == ["(outside)"]


def test_modules_that_a_function_takes_from_one_object_are_separate() -> None:
    """A trainer with a student and a teacher of one class; only the student is profiled."""
    student = (
        TracedModule("L['trainer']", ("student",), "Net"),
        TracedModule("L['trainer']", ("student", "head"), "Linear"),
    )
    teacher = (
        TracedModule("L['trainer']", ("teacher",), "Net"),
        TracedModule("L['trainer']", ("teacher", "head"), "Linear"),
    )
    graphs = CompiledGraphs(
        {"step": [work("a", student), work("b", teacher), work("c", student, teacher)]},
        MODULES,
        inputs={"1": [taken("L['trainer']", "student.head", "head"), taken("L['trainer']", "teacher.head")]},
    )
    assert layers_of(graphs, "step", OUTSIDE, "1") == [["head"], OTHER_MODULE, OTHER_MODULE]
    assert layers_of(graphs, "step", OUTSIDE) == [OTHER_MODULE] * 3  # the class of a trainer is unknown


def test_a_second_module_next_to_the_called_one_is_found() -> None:
    """The called block, and a model as an argument: only one module fits each."""
    given_too = in_function("head", "", "L['net']")
    graphs = graphs_of(two=[work("a", FC1), work("b", given_too), work("c", FC2, given_too)])
    assert layers_of(graphs, "two", SECOND) == [["blocks.1.fc1"], ["head"], ["blocks.1.fc2", "head"]]


def test_a_kernel_with_one_unknown_owner_has_no_known_owner() -> None:
    """A kernel of a layer and of an unknown owner is not shown as that layer's. Neither is a kernel without work."""
    graphs = graphs_of(some=[work("a", FC1, None), work("b", None), work("c", FC1), work("d")])
    assert layers_of(graphs, "some", FIRST) == [UNKNOWN_MODULE, UNKNOWN_MODULE, ["blocks.0.fc1"], UNKNOWN_MODULE]


# Kinds of events by name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Torch-Compiled Region: 0/0", Kind.REGION),
        ("Torch-Compiled Region: 12/3_1", Kind.REGION),
        ("Torch-Compiled Region", Kind.REGION),
        ("TorchDynamo Cache Lookup", Kind.GUARDS),
        ("## Call CompiledFxGraph fkx3v5 ##", Kind.GRAPH),
        ("## Call CompiledFxGraph torchprof-7 ##", Kind.GRAPH),
        ("dynamo", Kind.COMPILING),
        ("entire_frame_compile", Kind.COMPILING),
        ("entire_backward_compile", Kind.COMPILING),
        ("_compile.compile_inner (dynamo_timed)", Kind.COMPILING),
        ("Pregraph bytecode", Kind.OP),
        ("AOTDispatcher Runtime Wrapper Prologue", Kind.OP),
        ("CompiledFunction", Kind.OP),
        ("CompiledFunctionBackward", Kind.OP),
        ("autograd::engine::evaluate_function: CompiledFunctionBackward", Kind.NODE),
        ("CompiledFxGraph", Kind.OP),
        ("my dynamo", Kind.OP),
        ("cpp_fused_addmm_gelu_0", Kind.OP),
    ],
)
def test_the_name_of_an_event_of_torch_compile_gives_its_kind(name: str, kind: Kind) -> None:
    assert event_kind(name) is kind


# The owners of regions


def guards(start: int, end: int, thread: int = MAIN) -> Event:
    return Event(Kind.GUARDS, "TorchDynamo Cache Lookup", start, end, thread)


def at_work(start: int, end: int, name: str = "dynamo", thread: int = MAIN) -> Event:
    return Event(Kind.COMPILING, name, start, end, thread)


def block(at: int, graph: str = "block", name: str = "0/0", sequence: int = -1) -> list[Event]:
    """A call of a compiled block from ``at`` on: guards of 10 ns, code up to its graph, and kernels of 10, 20, 30 and 5
    ns."""
    return [
        guards(at, at + 10),
        region(name, at + 12, at + 132),
        op("Pregraph bytecode", at + 14, at + 16),
        op("CompiledFunction", at + 20, at + 130, sequence=sequence),
        call(graph, at + 25, at + 125),
        op("aten::copy_", at + 26, at + 28),
        op("aten::addmm", at + 30, at + 40),
        op("aten::expand", at + 31, at + 33),
        op("cpp_fused_addmm_gelu_0", at + 50, at + 70),
        op("aten::addmm", at + 80, at + 110),
        op("cpp_fused_add_1", at + 115, at + 120),
    ]


IN_GRAPH = "Net.blocks.0 / 0/0 / CompiledFunction / CompiledFxGraph"
AROUND_KERNELS = {
    "Net": 300 - 190,
    "Net.blocks.0": 190 - 10 - 120,
    "Net.blocks.0 / 0/0 / TorchDynamo Cache Lookup": 10,
    "Net.blocks.0 / 0/0": 120 - 2 - 110,
    "Net.blocks.0 / 0/0 / Pregraph bytecode": 2,
    "Net.blocks.0 / 0/0 / CompiledFunction": 110 - 100,
    IN_GRAPH: 100 - 2 - 10 - 20 - 30 - 5,
    f"{IN_GRAPH} / aten::copy_": 2,
    f"{IN_GRAPH} / cpp_fused_add_1": 5,
}
"""Self times of a call of the first block, by place, without the kernels of its layers."""


def test_a_region_is_a_frame_in_the_layer_with_the_compiled_forward() -> None:
    """It contains the code up to the graph and all ops; the guards before it are part of it. If layers of kernels were
    not requested, the kernels are ops of the region, without owners."""
    walked = Ran(label("@", 0, 300), label("@blocks.0", 10, 200), *block(20))
    (place,) = [one.place for one in walked.all if one.event.kind is Kind.REGION]
    assert place.frames == (Frame(FrameKind.REGION, "0/0"),)
    assert walked.self_ns_by_way() == {
        **AROUND_KERNELS,
        f"{IN_GRAPH} / aten::addmm": 10 - 2 + 30,
        f"{IN_GRAPH} / aten::addmm / aten::expand": 2,
        f"{IN_GRAPH} / cpp_fused_addmm_gelu_0": 20,
    }
    assert not any(frame.kind == "kernels" for row in walked.run.rows for frame in row.frames)
    assert [walked.calls(way) for way in ("Net.blocks.0 / 0/0", IN_GRAPH, "Net.blocks.0")] == [1, 1, 1]


def test_a_region_can_be_outside_all_layers() -> None:
    """A compiled function of the user."""
    walked = Ran(guards(0, 5), region("3/0", 6, 20), op("aten::add", 8, 10))
    assert walked.self_ns_by_way() == {
        "(outside) / 3/0": 14 - 2,
        "(outside) / 3/0 / TorchDynamo Cache Lookup": 5,
        "(outside) / 3/0 / aten::add": 2,
    }


def test_each_compile_id_is_a_region() -> None:
    """Two versions of one function, and another function. A second call of the first is one more call."""
    walked = Ran(
        label("@", 0, 100), *(region(name, at, at + 10) for at, name in enumerate_in_tens("0/0", "0/1", "1/0", "0/0"))
    )
    assert {name: walked.calls(f"Net / {name}") for name in ("0/0", "0/1", "1/0")} == {"0/0": 2, "0/1": 1, "1/0": 1}
    assert [frame.name for row in walked.run.rows for frame in row.frames] == ["0/0", "0/1", "1/0"]


def enumerate_in_tens(*names: str) -> list[tuple[int, str]]:
    return list(zip(range(10, 1000, 10), names))


@pytest.mark.parametrize(
    "between",
    [[], [memory(6, 64), memory(6, -64)], [Event(Kind.SAMPLE, "net.py(3): forward", 6, 6, MAIN)]],
    ids=["nothing", "memory", "a sample of Python"],
)
def test_guards_belong_to_the_region_after_them(between: list[Event]) -> None:
    """Events that are not work of the thread may come between, and another thread may run anything."""
    elsewhere = op("aten::mul", 5, 9, thread=ENGINE)
    walked = Ran(label("@", 0, 50), guards(2, 5), *between, elsewhere, region("0/4", 7, 30), op("aten::add", 8, 10))
    assert walked.ways(Kind.GUARDS) == ["Net / 0/4 / TorchDynamo Cache Lookup"]
    assert walked.ways(Kind.REGION) == ["Net / 0/4"]
    assert (walked.calls("Net / 0/4"), walked.calls("Net / 0/4 / TorchDynamo Cache Lookup")) == (1, 1)


@pytest.mark.parametrize(
    "after",
    [
        [at_work(6, 20), region("0/0", 22, 30)],
        [op("aten::add", 6, 10), region("0/0", 12, 30)],
        [label("@blocks.0", 6, 30), region("0/0", 7, 29)],
        [guards(6, 8), op("aten::add", 9, 11)],
        [region("0/0", 6, 30, thread=ENGINE)],
        [],
    ],
    ids=["it compiles", "an op", "a layer", "other guards", "a region elsewhere", "nothing"],
)
def test_guards_without_a_region_after_them_are_in_no_region(after: list[Event]) -> None:
    """They failed: the code is compiled next, or runs without torch.compile."""
    walked = Ran(label("@", 0, 50), guards(2, 5), *after)
    assert set(walked.ways(Kind.GUARDS)) == {"Net / TorchDynamo Cache Lookup"}


def test_a_region_inside_guards_is_not_their_region() -> None:
    """Ranges inside guards are not the region after them."""
    walked = Ran(label("@", 0, 50), guards(2, 10), op("aten::equal", 3, 5), region("0/0", 10, 30))
    assert walked.self_ns_by_way() == {
        "Net": 50 - 8 - 20,
        "Net / 0/0 / TorchDynamo Cache Lookup": 8 - 2,
        "Net / 0/0 / TorchDynamo Cache Lookup / aten::equal": 2,
        "Net / 0/0": 20,
    }


def broken() -> list[Event]:
    """A forward with a graph break: its rest is a region inside the first region, and a layer runs between the two."""
    return [
        label("@", 0, 300),
        guards(2, 4),
        region("0/0", 5, 250),
        op("CompiledFunction", 10, 50, sequence=3),
        label("@blocks.0", 60, 100),
        op("aten::linear", 65, 95, sequence=4),
        guards(110, 120),
        region("1/0", 125, 240),
        op("CompiledFunction", 130, 200, sequence=5),
    ]


def test_after_a_graph_break_the_rest_is_a_region_inside_the_first() -> None:
    """Code between them runs without torch.compile: it has its own layer, inside the region."""
    walked = Ran(*broken())
    assert walked.self_ns_by_way() == {
        "Net": 300 - 2 - 245,
        "Net / 0/0 / TorchDynamo Cache Lookup": 2,
        "Net / 0/0": 245 - 40 - 40 - 10 - 115,
        "Net / 0/0 / CompiledFunction": 40,
        "Net / 0/0 > Net.blocks.0": 10,
        "Net / 0/0 > Net.blocks.0 / aten::linear": 30,
        "Net / 0/0 / 1/0 / TorchDynamo Cache Lookup": 10,
        "Net / 0/0 / 1/0": 115 - 70,
        "Net / 0/0 / 1/0 / CompiledFunction": 70,
    }


@pytest.mark.parametrize("thread", [MAIN, ENGINE])
def test_the_backward_of_a_region_is_in_the_region(thread: int) -> None:
    """Nested as in forward. The backward of the code between the regions belongs to its layer, and to no region."""
    walked = Ran(
        *broken(),
        node("CompiledFunctionBackward", 400, 450, 5, thread=thread),
        function("CompiledFunctionBackward", 405, 445, 5, thread=thread),
        op("aten::mm", 410, 440, thread=thread),
        node("AddmmBackward0", 500, 520, 4, thread=thread),
        node("CompiledFunctionBackward", 600, 650, 3, thread=thread),
        node("torch::autograd::AccumulateGrad", 700, 710, thread=thread),
    )
    backward = "CompiledFunctionBackward"
    assert walked.way("aten::mm") == f"Net / 0/0 / 1/0 / {backward} / {backward} / aten::mm"
    assert walked.way(NODE_PREFIX + "AddmmBackward0") == "Net.blocks.0 / AddmmBackward0"
    assert walked.way(NODE_PREFIX + backward, 1) == f"Net / 0/0 / {backward}"
    accumulate = "torch::autograd::AccumulateGrad"
    assert walked.way(NODE_PREFIX + accumulate) == f"Net / 0/0 / {accumulate}", "as the node before it"
    for name in (NODE_PREFIX + backward, "aten::mm", NODE_PREFIX + "AddmmBackward0", NODE_PREFIX + accumulate):
        assert walked[name].place.phase == BACKWARD
    frames = walked["aten::mm"].place.frames[:2]
    assert frames == (Frame(FrameKind.REGION, "0/0"), Frame(FrameKind.REGION, "1/0"))


def test_a_region_that_runs_again_in_backward_is_recompute() -> None:
    """A checkpoint around a compiled block: its region is in the block's recompute, and its backward in the block's
    backward."""
    walked = Ran(
        label("@", 0, 90),
        op("CheckpointFunction", 1, 80, sequence=2),
        node("CheckpointFunctionBackward", 200, 900, 2),
        label("@blocks.0", 210, 400),
        *block(220, sequence=8),
        node("CompiledFunctionBackward", 500, 600, 8),
    )
    assert walked.owner("Torch-Compiled Region: 0/0", 1) == (FIRST, RECOMPUTE)
    assert walked.owner(NODE_PREFIX + "CompiledFunctionBackward") == (FIRST, BACKWARD)
    (outer, inner) = walked.way(NODE_PREFIX + "CompiledFunctionBackward").split(" > ")
    assert (outer, inner) == ("Net / CheckpointFunctionBackward", "Net.blocks.0 / 0/0 / CompiledFunctionBackward")


def regional() -> list[Event]:
    """Each block is compiled, all with one graph; then their backward, which also has one graph."""
    found = [label("@", 0, 500)]
    for number in range(2):
        at = 10 + 200 * number
        found += [label(f"@blocks.{number}", at, at + 190), *block(at + 10, sequence=number)]
    for number in (1, 0):
        at = 1000 - 200 * number
        found += [
            node("CompiledFunctionBackward", at, at + 150, number, thread=ENGINE),
            function("CompiledFunctionBackward", at + 5, at + 145, number, thread=ENGINE),
            call("back", at + 10, at + 140, ENGINE),
            op("cpp_fused_gelu_0", at + 20, at + 40, thread=ENGINE),
            op("aten::mm", at + 50, at + 57, thread=ENGINE),
        ]
    return found


BACK = (work("cpp_fused_gelu_0", ACT, FC2), work("mm", FC1))


def test_regional_compilation_is_separated_by_block() -> None:
    """All blocks have one region and one graph: each call belongs to the block around it, and so does its backward."""
    walked = Ran(*regional())
    for number in range(2):
        path = f"Net.blocks.{number} / 0/0"
        assert walked.ways(Kind.REGION)[number] == path
        backward = f"{path} / CompiledFunctionBackward / CompiledFunctionBackward / CompiledFxGraph"
        assert walked.way("aten::mm", 1 - number) == f"{backward} / aten::mm"
    by_layer = {(row.layer.name if row.layer else "", row.phase): 0 for row in walked.run.rows}
    for row in walked.run.rows:
        by_layer[row.layer.name if row.layer else "", row.phase] += row.cost.cpu_ns
    assert by_layer == {
        ("Net", FORWARD): 500 - 2 * 190,
        ("Net.blocks.0", FORWARD): 190,
        ("Net.blocks.1", FORWARD): 190,
        ("Net.blocks.0", BACKWARD): 150,
        ("Net.blocks.1", BACKWARD): 150,
    }


# Compilation


def test_compilation_is_one_place() -> None:
    """With everything that runs in it: its own steps, tracing, kernels that it tries, backward that belongs to no
    model."""
    walked = Ran(
        label("@", 0, 1000),
        guards(5, 9),
        at_work(10, 500),
        at_work(20, 490, "entire_frame_compile"),
        memory(25, 64),
        op("bytecode_tracing", 30, 100),
        op("aten::linear", 40, 60, sequence=7),
        user_label("mine", 110, 150),
        op("aten::add", 120, 130),
        label("@head", 160, 200),
        op("aten::linear", 170, 180, sequence=8),
        node("AddmmBackward0", 210, 240, 7),
        function("AddmmBackward0", 215, 235, 7),
        op("aten::mm", 220, 230, sequence=9),
        function("MulBackward0", 240, 245, 8),
        region("0/0", 250, 300),
        guards(302, 305),
        region("0/1", 306, 320),
        call("block", 330, 400),
        op("aten::addmm", 340, 350, correlation=4),
        kernel("gemm", 2000, 2010, 4),
    )
    assert walked["dynamo"].place.frames == (Frame(FrameKind.REGION, "compiling"),)
    assert walked.self_ns_by_way() == {
        "Net": 1000 - 4 - 490,
        "Net / TorchDynamo Cache Lookup": 4,
        "Net / compiling": 490,
    }
    assert (walked.calls("Net / compiling"), walked.calls("Net")) == (1, 1)
    (allocated,) = [one.place for one in walked.all if one.event.kind is Kind.MEMORY]
    assert in_words(allocated) == "Net / compiling"
    assert walked.way("gemm") == "Net / compiling / gemm"
    assert set(walked.attribution.callers) == {(OUTSIDE, NET)}, "no layer was called"


def test_compilation_makes_no_nodes() -> None:
    """Its tracing counts numbers of nodes in other graphs: a node belongs to the op that ran, not to tracing."""
    walked = Ran(
        label("@", 0, 100),
        op("aten::linear", 5, 10, sequence=3),
        at_work(20, 90),
        op("aten::linear", 30, 40, sequence=4),
        label("@head", 110, 200),
        at_work(120, 190),
        op("aten::relu", 130, 140, sequence=5),
        node("ReluBackward0", 300, 310, 5),
        node("AddmmBackward0", 320, 330, 4),
    )
    assert walked.way(NODE_PREFIX + "ReluBackward0") == "Net / ReluBackward0"
    assert walked.way(NODE_PREFIX + "AddmmBackward0") == "Net / AddmmBackward0"


def test_the_backward_of_a_region_may_be_compiled_in_backward() -> None:
    """torch.compile may compile the backward when it is needed: this work is in the region, in the phase backward."""
    walked = Ran(
        label("@", 0, 100),
        region("0/0", 10, 90),
        op("CompiledFunction", 20, 80, sequence=1),
        node("CompiledFunctionBackward", 200, 500, 1, thread=ENGINE),
        function("CompiledFunctionBackward", 210, 490, 1, thread=ENGINE),
        at_work(220, 400, "entire_backward_compile", ENGINE),
        op("aten::mm", 300, 310, thread=ENGINE),
        op("aten::mm", 420, 430, thread=ENGINE),
    )
    inside = "Net / 0/0 / CompiledFunctionBackward / CompiledFunctionBackward"
    assert walked.way("entire_backward_compile") == walked.way("aten::mm", 0) == f"{inside} / compiling"
    assert walked.way("aten::mm", 1) == f"{inside} / aten::mm"
    assert walked["entire_backward_compile"].place.phase == BACKWARD


# The owners of kernels


def of_first(*, graphs: CompiledGraphs, selected: Set[str] | None = None, more: Sequence[Event] = ()) -> Ran:
    """A call of the first block, which is compiled."""
    return Ran(label("@", 0, 300), label("@blocks.0", 10, 200), *block(20), *more, graphs=graphs, selected=selected)


def test_kernels_belong_to_their_layers_within_the_region() -> None:
    """A kernel of one layer belongs to it, a kernel of several layers to their common ancestor, one of the function's
    own code to the block. The owner of another op in the graph is unknown. Nothing else changes place."""
    walked = of_first(graphs=graphs_of())
    assert walked.self_ns_by_way() == {
        **AROUND_KERNELS,
        f"{IN_GRAPH} > Net.blocks.0.fc1 / aten::addmm": 8,
        f"{IN_GRAPH} > Net.blocks.0.fc1 / aten::addmm / aten::expand": 2,
        f"{IN_GRAPH} > Net.blocks.0 / fused: fc1 + act / cpp_fused_addmm_gelu_0": 20,
        f"{IN_GRAPH} > Net.blocks.0.fc2 / aten::addmm": 30,
    }
    fused = walked["cpp_fused_addmm_gelu_0"].place
    assert fused.frames[0] == Frame(FrameKind.KERNELS, "fused: fc1 + act")
    (row,) = [row for row in walked.run.rows if row.frames and row.frames[-1].name == "cpp_fused_addmm_gelu_0"]
    assert [one.name for one in row.shared_by] == ["Net.blocks.0.fc1", "Net.blocks.0.act"]
    assert row.layer is not None and row.layer.name == "Net.blocks.0"
    assert all(not one.shared_by for one in walked.run.rows if one != row)
    assert walked.calls("Net.blocks.0.fc1") == 0, "no call of fc1 was recorded"


def test_kernels_of_equal_blocks_belong_to_the_block_that_runs() -> None:
    """In forward and backward: one graph each, which runs in two blocks."""
    walked = Ran(*regional(), graphs=graphs_of(back=BACK))
    for number in range(2):
        at = f"Net.blocks.{number}"
        forward = f"{at} / 0/0 / CompiledFunction / CompiledFxGraph"
        backward = f"{at} / 0/0 / CompiledFunctionBackward / CompiledFunctionBackward / CompiledFxGraph"
        assert walked.way("aten::addmm", 2 * number) == f"{forward} > {at}.fc1 / aten::addmm"
        assert walked.way("aten::addmm", 2 * number + 1) == f"{forward} > {at}.fc2 / aten::addmm"
        assert walked.way("aten::mm", 1 - number) == f"{backward} > {at}.fc1 / aten::mm"
        fused = f"{backward} > {at} / fused: act + fc2 / cpp_fused_gelu_0"
        assert walked.way("cpp_fused_gelu_0", 1 - number) == fused
        assert walked["cpp_fused_gelu_0", 1 - number].place.phase == BACKWARD


WHOLE = (
    work("k_0", traced("blocks.0.fc1", ""), traced("blocks.1.fc1", "")),
    work("k_1", traced("blocks.0.fc1", ""), traced("head", "")),
    work("k_2", OWN, traced("head", "")),
    work("k_3", traced("blocks.0", ""), traced("blocks.0.act", "")),
    work("k_4", traced("blocks.0.fc1", ""), traced("blocks.0.act", ""), traced("blocks.0.fc2", "")),
)


def test_work_of_several_layers_belongs_to_their_nearest_common_ancestor() -> None:
    """Names are relative to this ancestor. It may be one of the layers, or the block around the graph."""
    walked = Ran(
        label("@", 0, 200),
        region("0/0", 10, 190),
        call("whole", 20, 180),
        *(op(f"k_{number}", at, at + 10) for number, at in enumerate(range(30, 180, 20)) if number < len(WHOLE)),
        graphs=graphs_of(whole=WHOLE),
    )
    inside = "Net / 0/0 / CompiledFxGraph"
    assert [walked.way(f"k_{number}") for number in range(5)] == [
        f"{inside} > Net.blocks / fused: 0.fc1 + 1.fc1 / k_0",
        f"{inside} > Net / fused: blocks.0.fc1 + head / k_1",
        f"{inside} > Net / fused: itself + head / k_2",
        f"{inside} > Net.blocks.0 / fused: itself + act / k_3",
        f"{inside} > Net.blocks.0 / fused: fc1 + act + fc2 / k_4",
    ]
    assert [[NAMES[one] for one in walked[f"k_{number}"].place.shared] for number in range(5)] == [
        ["blocks.0.fc1", "blocks.1.fc1"],
        ["blocks.0.fc1", "head"],
        ["", "head"],
        ["blocks.0", "blocks.0.act"],
        ["blocks.0.fc1", "blocks.0.act", "blocks.0.fc2"],
    ]


def test_with_paths_a_kernel_belongs_to_the_nearest_selected_layer() -> None:
    """If its layer was not selected, it belongs to the nearest selected layer above, otherwise to NOT_SELECTED. The
    names of its layers are shown in any case."""
    walked = of_first(graphs=graphs_of(), selected={"", "blocks.0.fc1"})
    graph = "Net / 0/0 / CompiledFunction / CompiledFxGraph"
    assert walked.way("aten::addmm", 0) == f"{graph} > Net.blocks.0.fc1 / aten::addmm"
    assert walked.way("cpp_fused_addmm_gelu_0") == f"{graph} > Net / fused: fc1 + act / cpp_fused_addmm_gelu_0"
    assert walked.way("aten::addmm", 1) == f"{graph} / aten::addmm"
    assert walked.way("cpp_fused_add_1") == f"{graph} / cpp_fused_add_1"
    walked = of_first(graphs=graphs_of(), selected={"blocks.0.fc1"})
    graph = f"(not selected) / {graph.partition(' / ')[2]}"
    assert walked.way("aten::addmm", 0) == f"{graph} > Net.blocks.0.fc1 / aten::addmm"
    fused = "(not selected) / fused: fc1 + act / cpp_fused_addmm_gelu_0"
    assert walked.way("cpp_fused_addmm_gelu_0") == f"{graph} > {fused}"
    assert walked.way("aten::addmm", 1) == f"{graph} / aten::addmm"
    assert walked.way("cpp_fused_add_1") == f"{graph} / cpp_fused_add_1"


@pytest.mark.parametrize("selected", [{"blocks.0.fc1", "blocks.1.fc1"}, {"", "blocks.0.fc1", "blocks.1.fc1"}])
def test_with_paths_backward_belongs_to_the_same_layers_as_forward(selected: set[str]) -> None:
    """The compiled blocks were not selected: their layers are found in any case."""
    walked = Ran(*regional(), graphs=graphs_of(back=BACK), selected=selected)
    for number in range(2):
        assert walked.owner("aten::addmm", 2 * number) == (layer(f"blocks.{number}.fc1"), FORWARD)
        assert walked.owner("aten::mm", 1 - number) == (layer(f"blocks.{number}.fc1"), BACKWARD)


def test_backward_below_a_selected_layer_does_not_belong_to_it() -> None:
    """The model has an fc1, and so has the compiled block: forward and backward belong to that of the block."""
    kinds = {**KINDS, "fc1": "Linear", "fc2": "Linear", "act": "GELU"}
    paths = [("Net", *filter(None, name.split("."))) for name in kinds]
    modules = {path: ProfiledModule(number, kind) for number, (path, kind) in enumerate(zip(paths, kinds.values()))}
    attribution = Attribution(SITES, paths, {NET, len(NAMES)}, graphs=graphs_of(modules, back=BACK))
    found = walk_of(attribution, sorted(regional(), key=lambda event: event.start_ns))
    owners = {(one.event.name, one.place.phase): one.place.layer for one in found}
    assert owners["aten::addmm", FORWARD] == NET
    assert owners["aten::mm", BACKWARD] == NET


def test_a_kernel_with_an_unknown_part_is_not_attributable() -> None:
    """It stays in its region, with the reason. The other kernels are known."""
    graphs = graphs_of(block=[BLOCK[0], work("cpp_fused_addmm_gelu_0", FC1, None), *BLOCK[2:]])
    walked = of_first(graphs=graphs)
    why = "not attributable: unknown module"
    assert walked.way("cpp_fused_addmm_gelu_0") == f"{IN_GRAPH} / {why} / cpp_fused_addmm_gelu_0"
    assert walked["cpp_fused_addmm_gelu_0"].place.frames[-2] == Frame(FrameKind.KERNELS, why)
    assert walked.way("aten::addmm", 0) == f"{IN_GRAPH} > Net.blocks.0.fc1 / aten::addmm"


@pytest.mark.parametrize("reason", [COMPILED_BEFORE, NESTED_GRAPHS])
def test_everything_in_calls_of_an_unknown_graph_is_not_attributable(reason: str) -> None:
    """Like kernels without ranges; the row has the reason."""
    graphs = CompiledGraphs({} if reason == COMPILED_BEFORE else {"block": reason}, MODULES)
    walked = of_first(graphs=graphs)
    unknown = f"{IN_GRAPH.removesuffix(' / CompiledFxGraph')} / not attributable: {reason} / CompiledFxGraph"
    for name, number in (("aten::addmm", 0), ("cpp_fused_addmm_gelu_0", 0), ("aten::addmm", 1), ("cpp_fused_add_1", 0)):
        assert walked.way(name, number) == f"{unknown} / {name}"
        assert walked.owner(name, number) == (FIRST, FORWARD)


def test_a_kernel_that_ran_under_another_name_makes_only_itself_unknown() -> None:
    """Example: attention inside a checkpoint runs in an op that saves the state of the random number generator."""
    graphs = graphs_of(block=[BLOCK[0], work("run_and_save_rng_state", FC1, ACT), *BLOCK[2:]])
    walked = of_first(graphs=graphs)
    unknown = f"{IN_GRAPH} / not attributable: unknown kernel / cpp_fused_addmm_gelu_0"
    assert walked.way("cpp_fused_addmm_gelu_0") == unknown
    for number, name in enumerate(("blocks.0.fc1", "blocks.0.fc2")):
        assert walked.way("aten::addmm", number) == f"{IN_GRAPH} > Net.{name} / aten::addmm"
    assert walked.way("cpp_fused_add_1") == f"{IN_GRAPH} / cpp_fused_add_1"
    copy = walked.way("aten::copy_")  # it may be that kernel, too; if all kernels are found, it is none
    assert copy == f"{IN_GRAPH} / not attributable: unknown kernel / aten::copy_"


def test_each_call_of_a_graph_is_matched_separately() -> None:
    """A call with other kernels does not affect another call."""
    first = [label("@blocks.0", 0, 200), *block(10)]
    second = [label("@blocks.1", 300, 500), *block(310)]
    walked = Ran(*first, *[one for one in second if one.start_ns not in (360, 425)], graphs=graphs_of())
    assert walked.owner("aten::addmm", 0) == (layer("blocks.0.fc1"), FORWARD)
    assert walked.owner("aten::addmm", 2) == (layer("blocks.1.fc1"), FORWARD)
    fewer = Ran(*first, *[one for one in second if one.start_ns != 340], graphs=graphs_of())
    assert fewer.owner("aten::addmm", 1) == (layer("blocks.0.fc2"), FORWARD)
    assert fewer.owner("aten::addmm", 2) == (layer("blocks.1.fc2"), FORWARD)


def test_kernels_of_backward_that_repeat_forward_are_recompute() -> None:
    """Kernels that only repeat forward, of one layer, of several, and of unknown layers. Not kernels that also compute
    a gradient, and none in forward."""
    again = [work("mm", FC1), work("cpp_1", FC1, ACT), work("cpp_2", None)]
    graphs = graphs_of(back=[*(one._replace(recomputes=True) for one in again), work("cpp_3", ACT, FC1)])
    inside = [call("back", 610, 690), *(op(f"cpp_{at}", 600 + 20 * at, 610 + 20 * at) for at in (1, 2, 3))]
    backward = [node("CompiledFunctionBackward", 600, 700, 8), inside[0], op("aten::mm", 612, 618), *inside[1:]]
    walked = Ran(label("@blocks.0", 0, 200), *block(10, sequence=8), *backward, graphs=graphs)
    assert walked.owner("aten::mm") == (layer("blocks.0.fc1"), RECOMPUTE)
    assert walked.owner("cpp_1") == walked.owner("cpp_2") == (FIRST, RECOMPUTE)
    assert walked.owner("cpp_3") == (FIRST, BACKWARD)
    node_of = "Net.blocks.0 / 0/0 / CompiledFunctionBackward / CompiledFxGraph"
    assert walked.way("aten::mm") == f"{node_of} > Net.blocks.0.fc1 / aten::mm"
    assert walked.way("cpp_2") == f"{node_of} > Net.blocks.0 / not attributable: unknown module / cpp_2"
    assert walked.owner("aten::addmm", 0) == (layer("blocks.0.fc1"), FORWARD)


def test_backward_of_compiled_autograd_is_backward() -> None:
    """It runs in its own regions, without autograd nodes around them, and is compiled in its own range."""
    walked = Ran(
        label("@blocks.0", 0, 200),
        *block(10),
        at_work(300, 400, "compiled_autograd"),
        op("aten::detach", 310, 320),
        *block(410, graph="back", name="!0/0/0"),
        graphs=graphs_of(back=[work(one.name, None) for one in BLOCK]),
    )
    region = "(outside) / !0/0/0"
    assert walked.owner("Torch-Compiled Region: !0/0/0") == (OUTSIDE, BACKWARD)
    assert walked.ways(Kind.GUARDS)[1] == f"{region} / TorchDynamo Cache Lookup"
    assert {one.place.phase for one in walked.all if one.event.start_ns >= 300} == {BACKWARD}
    assert walked.owner("aten::addmm", 2) == (OUTSIDE, BACKWARD)
    assert walked.way("aten::addmm", 2).endswith(" / not attributable: unknown module / aten::addmm")
    assert walked.owner("aten::detach") == (OUTSIDE, BACKWARD)
    assert walked.way("aten::detach") == "(outside) / compiling"
    assert walked.owner("aten::addmm", 0) == (layer("blocks.0.fc1"), FORWARD)


def test_a_function_that_is_called_with_one_module_and_then_another() -> None:
    """The tensors that it took are known from the range around the calls of its graphs. They also hold for backward, on
    any thread."""
    function = [work("addmm", in_function("fc1", "blocks.0", "L['block']"))]
    inputs = {
        f"{COMPILED_INPUTS}{number}": [taken("L['block']", "fc1", f"blocks.{block}.fc1")]
        for number, block in enumerate((1, 0))
    }
    graphs = CompiledGraphs({"function": function, "back": function}, MODULES, is_alone=lambda _: False, inputs=inputs)
    events = []
    for number, at in enumerate((0, 100)):
        events += [
            region("0/0", at, at + 90),
            Event(Kind.COMPILED_INPUTS, f"{COMPILED_INPUTS}{number}", at + 5, at + 80, MAIN),
            op("CompiledFunction", at + 10, at + 70, sequence=number),
            call("function", at + 20, at + 60),
            op("aten::addmm", at + 30, at + 50),
        ]
    for number, at in ((1, 200), (0, 300)):
        events += [
            node("CompiledFunctionBackward", at, at + 90, number, thread=ENGINE),
            call("back", at + 20, at + 60, ENGINE),
            op("aten::addmm", at + 30, at + 50, thread=ENGINE),
        ]
    # No tensors are known here.
    events += [region("0/0", 400, 490), call("function", 420, 460), op("aten::addmm", 430, 450)]
    walked = Ran(*events, graphs=graphs)
    of = [walked.owner("aten::addmm", number) for number in range(5)]
    first, second = (layer(f"blocks.{number}.fc1") for number in range(2))
    assert of == [(second, FORWARD), (first, FORWARD), (first, BACKWARD), (second, BACKWARD), (OUTSIDE, FORWARD)]
    assert walked.way("aten::addmm", 4).endswith(" / not attributable: ambiguous module / aten::addmm")


def test_ops_inside_kernels_are_no_kernels() -> None:
    """A library kernel may call an op that has the name of another kernel of its graph."""
    graphs = graphs_of(one=[work("linear", FC1), work("addmm", FC2)])
    walked = Ran(
        label("@blocks.0", 0, 100),
        call("one", 5, 95),
        op("aten::linear", 10, 40),
        op("aten::addmm", 10, 30),
        op("aten::addmm", 50, 60),
        graphs=graphs,
    )
    assert (
        walked.way("aten::addmm", 0) == "Net.blocks.0 / CompiledFxGraph > Net.blocks.0.fc1 / aten::linear / aten::addmm"
    )
    assert walked.way("aten::addmm", 1) == "Net.blocks.0 / CompiledFxGraph > Net.blocks.0.fc2 / aten::addmm"


def test_an_op_of_length_0_right_before_a_kernel_is_not_the_kernel() -> None:
    """Both begin at the same time. All kernels of the graph are found, and the first op is none of them."""
    graphs = graphs_of(one=[work("addmm", FC1)])
    walked = Ran(
        label("@blocks.0", 0, 100), call("one", 5, 95), op("aten::t", 10, 10), op("aten::addmm", 10, 30), graphs=graphs
    )
    assert walked.way("aten::t") == "Net.blocks.0 / CompiledFxGraph / aten::t"
    assert walked.way("aten::addmm") == "Net.blocks.0 / CompiledFxGraph > Net.blocks.0.fc1 / aten::addmm"


def test_a_kernel_of_a_function_outside_all_layers() -> None:
    """A kernel of a layer, of the function's own code, and of both: the last is outside, with the layer that it works
    for."""
    own = in_function("head", "", "G['net']")
    graphs = graphs_of(function=[work("k_0", own), work("k_1", OWN), work("k_2", OWN, own)])
    walked = Ran(
        region("0/0", 0, 100),
        call("function", 5, 95),
        *(op(f"k_{number}", at, at + 10) for number, at in enumerate((10, 30, 50))),
        graphs=graphs,
    )
    inside = "(outside) / 0/0 / CompiledFxGraph"
    assert walked.way("k_0") == f"{inside} > Net.head / k_0"
    assert walked.way("k_1") == f"{inside} / k_1"
    assert walked.way("k_2") == f"{inside} > (outside) / fused: (outside) + Net.head / k_2"
    assert walked["k_2"].place.shared == (HEAD,)


# Kernels that a device replays


def test_kernels_that_a_device_replays_are_one_row_of_the_region() -> None:
    """They are launched together: by the call itself in a session, or by its number in a trace."""
    for launch, by in ((0, 4), (-9, -9)):
        walked = Ran(
            label("@blocks.0", 0, 200),
            region("0/0", 10, 190),
            op("CompiledFunction", 20, 180, correlation=4),
            op("aten::copy_", 30, 40, correlation=5),
            op("cudaGraphLaunch", 50, 60, correlation=launch),
            kernel("copy", 1000, 1010, 5),
            kernel("gemm", 1010, 1100, by),
            kernel("gemm", 1100, 1150, by),
            kernel("norm", 1150, 1160, by),
            graphs=graphs_of(),
        )
        inside = "Net.blocks.0 / 0/0 / CompiledFunction"
        assert walked.way("gemm") == walked.way("gemm", 1) == f"{inside} / CUDA graph replay / gemm"
        assert walked.way("norm") == f"{inside} / CUDA graph replay / norm"
        assert walked["norm"].place.frames[-2] == Frame(FrameKind.KERNELS, "CUDA graph replay")
        assert walked.way("copy") == f"{inside} / aten::copy_ / copy", "it is launched by itself"


# Any session


@st.composite
def sessions(draw: st.DrawFn) -> Forest:
    threads = draw(st.lists(st.lists(spans(4), max_size=3), min_size=1, max_size=2))
    return Forest(threads, draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 50)), max_size=5)))


@examples(150)
@given(sessions(), st.booleans(), st.none() | st.sets(st.sampled_from(NAMES)))
def test_the_rows_of_any_session_add_up_to_its_events(session: Forest, asked: bool, selected: set[str] | None) -> None:
    """With any nesting of regions, guards, graphs, layers, nodes and compilation: no time is lost or counted twice, and
    no time is negative."""
    graphs = CompiledGraphs(ANY, MODULES) if asked else CompiledGraphs()
    walked = Ran(*session.events(), graphs=graphs, selected=selected)
    rows = list(walked.run.rows)
    everything = list(session.walk())
    assert sum(row.cost.cpu_ns for row in rows) == sum(sum(span.own) for span in everything)
    assert all(row.cost.cpu_ns >= 0 for row in rows)
    assert sum(row.cost.device_ns for row in rows) == sum(ns for _, ns in session.kernels)
    changes = [nbytes for span in everything for nbytes in span.bytes_inside]
    assert sum(row.cost.cpu_allocated - row.cost.cpu_freed for row in rows) == sum(changes)


@examples(100)
@given(sessions(), st.booleans())
def test_events_that_were_read_ahead_come_once_and_in_order(session: Forest, asked: bool) -> None:
    """Each event is passed on unchanged, except for the names of guards and the numbers of nodes."""
    events = session.events()
    attribution = Attribution(SITES, PATHS, graphs=CompiledGraphs(ANY if asked else None, MODULES))
    found = [one.event for one in walk_of(attribution, iter(events))]
    assert len(found) == len(events)
    for before, after in zip(events, found):
        if before.kind is Kind.GUARDS:
            after = after._replace(name=before.name)
        if before.kind is Kind.NODE and before.sequence < 0:
            after = after._replace(sequence=before.sequence, forward_thread=before.forward_thread)
        assert after == before


@examples(100)
@given(sessions())
def test_compilation_in_any_session_is_one_place(session: Forest) -> None:
    """Its inner events have no own rows: its time is that of its outermost ranges."""
    walked = Ran(*session.events(), graphs=CompiledGraphs(ANY, MODULES))
    expected = 0
    waiting = [root for roots in session.threads for root in roots]
    while waiting:
        span = waiting.pop()
        if span.kind is Kind.COMPILING:
            expected += span.duration
        else:
            waiting.extend(span.children)
    compiling = Frame(FrameKind.REGION, "compiling")
    rows = [row for row in walked.run.rows if row.frames and row.frames[-1] == compiling]
    assert sum(row.cost.cpu_ns for row in rows) == expected
    inside = [row for row in walked.run.rows if compiling in row.frames[:-1]]
    assert all(row.frames[-1].kind == "kernel" for row in inside)
    assert not [row for row in walked.run.rows if any(compiling in around.frames for around in row.within)]

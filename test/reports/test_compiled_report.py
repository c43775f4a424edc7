"""The compiled report, and warnings about compiled code, on runs from hand-made events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from build.compiled import call, region
from build.events import MAIN, function, label, node, op, run_of_events
from build.golden import drawn

from torchprof.analyze.compiled_regions import compiled_in
from torchprof.analyze.figures import incomplete_phases
from torchprof.analyze.warnings import about_compiled
from torchprof.attribute.compiled_graphs import CompiledGraphs, CompiledKernel, ProfiledModule, TracedModule
from torchprof.attribute.events import Event, Kind, Site
from torchprof.errors import TorchprofError
from torchprof.run.layers import Layer
from torchprof.run.measures import Cost
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Compilation, CompiledRegion
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD

PATHS = [("Net",), ("Net", "fc"), ("Net", "act"), ("Net", "sub")]
KINDS = ("Net", "Linear", "ReLU", "Sub")
SITES = {"Net": Site((0,)), "sub": Site((3,))}

FIRST = CompiledRegion("0/0", "Net.forward", "/home/me/net.py", 10, 12, "Call to print")
REST = CompiledRegion("1/0", "Net.torch_dynamo_resume_in_forward_at_12", "/home/me/net.py", 12)


def guarded(name: str, start: int, end: int) -> list[Event]:
    """A region with 10 ns of guards right before it."""
    return [Event(Kind.GUARDS, "TorchDynamo Cache Lookup", start, start + 10, MAIN), region(name, start + 10, end)]


# Net.forward has a region from 100 to 400 with guards before it. In the region are a prologue, an autograd function
# with a graph of two kernels, an op outside of the graph, and the region of the rest of the function, from 310 to 390,
# with a graph of one kernel.
FORWARD_EVENTS = [
    label("Net", 0, 1000),
    Event(Kind.COMPILING, "entire_frame_compile", 10, 60, MAIN),
    op("aten::mm", 20, 40),
    *guarded("0/0", 90, 400),
    op("AOTDispatcher Runtime Wrapper Prologue", 100, 120),
    op("CompiledFunction", 120, 270, sequence=7),
    call("graph-a", 120, 260),
    op("aten::mm", 130, 160),
    op("graph_0_cpp_fused_relu_0", 170, 210),
    op("aten::print", 270, 295),
    *guarded("1/0", 300, 390),
    call("graph-b", 320, 380),
    op("aten::mm", 325, 375),
]
BACKWARD_EVENTS = [
    node("CompiledFunctionBackward", 2000, 2100, 7),
    function("CompiledFunctionBackward", 2010, 2090, 7),
    call("graph-c", 2020, 2080),
    op("aten::mm", 2030, 2070),
]


def step(*path: str, kind: str) -> tuple[TracedModule, ...]:
    return (TracedModule("L['self']", path, kind),)


FC, ACT = step("fc", kind="Linear"), step("act", kind="ReLU")
GRAPHS = {
    "graph-a": (CompiledKernel("mm", (FC,)), CompiledKernel("cpp_fused_relu_0", (FC, ACT))),
    "graph-c": (CompiledKernel("mm", (FC,)),),
}
ALL_KNOWN = {**GRAPHS, "graph-b": (CompiledKernel("mm", ((),)),)}


def run_of(
    events: Sequence[Event],
    regions: tuple[CompiledRegion, ...] = (FIRST, REST),
    *,
    by_layers: bool = False,
    device: str | None = None,
    graphs: Mapping[str, tuple[CompiledKernel, ...] | str] = GRAPHS,
) -> Run:
    modules = {path: ProfiledModule(layer, kind) for layer, (path, kind) in enumerate(zip(PATHS, KINDS))}
    known = CompiledGraphs(graphs, modules) if by_layers else None
    layers = tuple(Layer(path, kind, compiled=len(path) > 1) for path, kind in zip(PATHS, KINDS))
    measured = ("cpu_ns", "device_ns") if device else ("cpu_ns",)
    flags = (("compile_layers", by_layers),)
    about = {"device": device, "requested": measured, "measured": measured, "flags": flags, "regions": regions}
    return run_of_events(events, SITES, layers, known, **about)


def cells(table: str, row: int) -> dict[str, str]:
    """A row of the table, by heading."""
    lines = table.splitlines()
    return dict(zip(*([cell.strip() for cell in line.split("|")] for line in (lines[0], lines[2 + row]))))


def test_times_of_a_region_by_hand() -> None:
    first, rest = compiled_in(run_of(FORWARD_EVENTS + BACKWARD_EVENTS)).uses
    assert (first.layer, first.name, first.known, first.calls) == (0, "0/0", FIRST, 1)
    of_first = first.phases[FORWARD]
    # The region lasts 300 ns; its self is that without the prologue, the function, the op, and the second region with
    # its guards.
    assert of_first.guards == Cost(cpu_ns=10)
    assert of_first.overhead == Cost(cpu_ns=10 + (300 - 20 - 150 - 25 - 90) + 20 + (150 - 140))
    assert of_first.graph == Cost(cpu_ns=140)
    assert of_first.beside == Cost(cpu_ns=25)
    backward = first.phases[BACKWARD]
    assert (backward.overhead, backward.graph, backward.guards) == (Cost(cpu_ns=20 + 20), Cost(cpu_ns=60), Cost())
    assert (rest.layer, rest.name, rest.known, rest.calls) == (0, "1/0", REST, 1)
    assert rest.phases[FORWARD].graph == Cost(cpu_ns=60)
    assert rest.phases[FORWARD].overhead == Cost(cpu_ns=10 + 80 - 60)


@pytest.mark.parametrize("by_layers", [False, True])
def test_the_parts_of_all_regions_add_up_to_all_work_in_them(by_layers: bool) -> None:
    """Also if kernels are rows of other layers."""
    uses = compiled_in(run_of(FORWARD_EVENTS + BACKWARD_EVENTS, by_layers=by_layers)).uses
    parts = [part for use in uses for part in use.phases.values()]
    whole = sum((part.overhead + part.graph + part.beside for part in parts), Cost())
    assert whole == Cost(cpu_ns=310 + 100)  # guards and region; the node of backward


def test_a_garbage_collection_between_kernels_changes_no_layer_of_a_kernel() -> None:
    """It takes 6 ns from the graph around it. An op that a finalizer runs in it is no kernel of the graph."""
    collection = [Event(Kind.INTERRUPTION, "torchprof:!gc", 162, 168, MAIN), op("aten::zero_", 163, 165)]
    events = sorted([*FORWARD_EVENTS, *collection], key=lambda one: (one.start_ns, -one.end_ns))

    def costs(run: Run) -> dict[object, int]:
        return {(row.layer, row.phase, row.frames): row.cost.cpu_ns for row in run.rows}

    without, found = (costs(run_of(each, by_layers=True)) for each in (FORWARD_EVENTS, events))
    differ = {key: found.get(key, 0) - without.get(key, 0) for key in {*found, *without}}
    changes = sorted((key[2][-1].name, ns) for key, ns in differ.items() if ns)  # type: ignore[index]
    assert changes == [("CompiledFxGraph", -6), ("aten::zero_", 2), ("garbage collection", 4)]


def test_the_text_of_regions(golden: Callable[..., None]) -> None:
    """test_times_of_a_region_by_hand has the times. A stripped run has lines and no files; without the metadata of a
    region its code is unknown; in a run that records layers, the shares of kernels by layers follow."""
    events, stripped = FORWARD_EVENTS + BACKWARD_EVENTS, (FIRST._replace(file=""), REST._replace(file=""))
    golden(
        drawn(run_of(events), "compiled"),
        drawn(run_of(FORWARD_EVENTS, stripped), "compiled"),
        drawn(run_of(FORWARD_EVENTS, ()), "compiled"),
        drawn(run_of(events, by_layers=True), "compiled"),
        drawn(run_of([label("Net", 0, 100), op("aten::mm", 10, 50)]), "compiled"),
    )


def test_the_shares_of_kernel_time_by_layers() -> None:
    """One kernel belongs to fc, one to fc and act, and one is in a graph whose kernels are unknown."""
    run = run_of(FORWARD_EVENTS + BACKWARD_EVENTS, by_layers=True)
    shares = compiled_in(run).shares
    forward = shares[FORWARD]
    assert (forward.of_one.cpu_ns, forward.of_several.cpu_ns) == (30, 40)
    assert {reason: cost.cpu_ns for reason, cost in forward.unknown.items()} == {"compiled before": 60}
    assert shares[BACKWARD].times(run) == (40, 0, {})
    table = run.report("compiled")
    shares = "23.1% are of one layer each, 30.8% of several at once or between layers, and 46.2% not attributable."
    assert f"Of 0.130us in kernels of the forward phase {shares}" in table
    [sentence] = [one for one in map(str, about_compiled(run)) if "ttributable" in one]
    assert sentence.startswith(
        "35% of the time in kernels of compiled graphs (0.060us) is not attributable to layers: they "
        "were compiled before the block."
    )


def test_why_kernels_are_not_attributable() -> None:
    """Each reason has its sentence, with its share of the time of all kernels: 60 of 170 ns, 40, 40 and 30."""
    unknown = CompiledKernel("mm", (None,))
    elsewhere = CompiledKernel("cpp_fused_relu_0", (step("head", kind="Linear"),))
    graphs = {"graph-a": (elsewhere, elsewhere._replace(name="bmm")), "graph-b": "nested graphs", "graph-c": (unknown,)}
    run = run_of(FORWARD_EVENTS + BACKWARD_EVENTS, by_layers=True, graphs=graphs)
    shares = {"nested graphs": 60, "other module": 40, "unknown module": 40, "unknown kernel": 30}
    assert compiled_in(run).unknown_times(run) == {reason: (ns, ns / 170) for reason, ns in shares.items()}
    said = [one.partition("layers: ")[2] for one in map(str, about_compiled(run)) if "not attributable" in one]
    assert [one.split()[:4] for one in said] == [
        ["they", "are", "in", "graphs"],
        ["they", "belong", "to", "modules"],
        ["torch", "does", "not", "record"],
        ["their", "names", "are", "in"],
    ]


def test_a_run_with_layers_inside_compiled_code_says_how_to_record_them() -> None:
    """Not if they were recorded, and not if each of them was called."""

    def said(run: Run) -> bool:
        return any("use compile_layers=True" in sentence for sentence in map(str, about_compiled(run)))

    run = run_of(FORWARD_EVENTS + BACKWARD_EVENTS)
    assert said(run)
    assert not said(run_of(FORWARD_EVENTS + BACKWARD_EVENTS, by_layers=True))
    eager = tuple(replace(layer, compiled=False) for layer in run.layers)
    assert not said(replace(run, layers=eager, rows=replace(run.rows, layers=eager)))
    assert not said(run_of([one for one in FORWARD_EVENTS if one.kind is not Kind.GRAPH])), "of another backend"


def test_kernels_of_a_device_are_measured_by_device_time() -> None:
    launch = op("triton_relu", 325, 375, correlation=5)
    kernel = Event(Kind.KERNEL, "triton_relu", 340, 1340, 0, correlation=5, device="cuda:0")
    events = [launch if one.start_ns == 325 else one for one in FORWARD_EVENTS]
    table = run_of([*events, kernel], device="cuda").report("compiled")
    assert (cells(table, 1)["Kernels"], cells(table, 1)["Graph"]) == ("1.000us", "0.060us")
    assert cells(table, 0)["Kernels"] == "0.000us"


def test_kernels_of_a_missing_device_are_unknown() -> None:
    run = run_of(FORWARD_EVENTS, device="cuda")
    run = replace(run, metas=(replace(run.meta, measured=("cpu_ns",)),))
    assert cells(run.report("compiled"), 0)["Kernels"] == "–"


def test_compiling_has_a_sentence_and_is_no_region() -> None:
    run = run_of(FORWARD_EVENTS)
    found = compiled_in(run)
    assert (found.compiled, found.compiling) == (1, Cost(cpu_ns=50))
    assert [use.name for use in compiled_in(run).uses] == ["0/0", "1/0"]
    [sentence] = [one for one in map(str, about_compiled(run)) if "compilation by" in one]
    assert "include 0.050us of" in sentence
    assert "call the model once before the block, or use warmup=1." in sentence
    [sentence] = [
        one for one in map(str, about_compiled(run_of(FORWARD_EVENTS, by_layers=True))) if "compilation by" in one
    ]
    assert "call the model once before" not in sentence  # its layers would be unknown


def test_graph_breaks_under_every_table() -> None:
    run = run_of(FORWARD_EVENTS)
    said = '1 graph break of torch.compile: net.py:12. The report "compiled" shows the reasons.'
    assert said in map(str, about_compiled(run))
    assert said in run.report("tree")
    assert said not in run.report("compiled")  # with the reason


def test_a_graph_break_that_did_not_occur_is_not_listed() -> None:
    other = FIRST._replace(name="5/0")
    assert not any("graph break" in one for one in map(str, about_compiled(run_of(FORWARD_EVENTS, (REST, other)))))


def test_equal_graph_breaks_are_one() -> None:
    """Four blocks of one class break at the same line: one entry."""
    events = [*FORWARD_EVENTS, label("sub", 1100, 1500), *guarded("0/0", 1110, 1400)]
    run = run_of(events)
    assert '1 graph break of torch.compile: net.py:12. The report "compiled" shows the reasons.' in map(
        str, about_compiled(run)
    )
    said = "Graph break in Net, Net.sub at net.py:12, after region 0/0, 2 times: Call to print"
    assert said in run.report("compiled").splitlines()


def test_regions_of_one_name_with_different_code_on_ranks_have_unknown_code() -> None:
    """Each process counts its compile IDs: one ID with two different codes has none."""
    run = run_of(FORWARD_EVENTS)
    other = replace(run.meta, rank=1, regions=(FIRST._replace(function="Stage.forward"), REST))
    both = replace(run, metas=(run.meta, other))
    assert [use.known for use in compiled_in(both).uses] == [None, REST]


def test_regions_of_one_name_with_different_code_in_cycles_have_unknown_code() -> None:
    one, other = run_of(FORWARD_EVENTS), run_of(FORWARD_EVENTS, (FIRST._replace(line=99), REST))
    assert add_cycle(one, other).meta.regions == (REST,)


SECOND = 1_000_000_000


def compilation(name: str, step: int | None, phase: str = FORWARD, **changes: Any) -> Compilation:
    code = ("Net.forward", "/home/me/net.py", 10)
    parts = (10 * SECOND, SECOND, 2 * SECOND, 3 * SECOND, 4 * SECOND)
    one = Compilation(name, phase, *code, step, "", "", *parts, False, 77 if step is None else 100 + step)
    return one._replace(**changes)


def with_compilations(run: Run, *compilations: Compilation, steps: int = 5) -> Run:
    return replace(run, metas=(replace(run.meta, compilations=compilations, steps=steps),))


def test_the_table_of_compilations(golden: Callable[..., None]) -> None:
    """Of several ranks, and of a run without steps, too."""
    run = with_compilations(
        run_of(FORWARD_EVENTS),
        compilation("0/0", None, from_cache=True),
        compilation("0/0", 0, BACKWARD),
        compilation("0/1", 3, reason="k == 1.5", kernels_ns=None),
        compilation("0/2", 4, failure="too much", reason="k == 2.5"),
        compilation("0/3", 4),
    )
    one = with_compilations(run_of(FORWARD_EVENTS), compilation("0/0", 0), steps=0)
    golden(run.report("compiled"), replace(one, metas=(one.meta, replace(one.meta, rank=1))).report("compiled"))


def test_cycles_have_each_compilation_once_with_its_step_among_all() -> None:
    """The second cycle, after five steps of the first, also knows the compilations before it."""
    first = with_compilations(run_of(FORWARD_EVENTS), compilation("0/0", None), compilation("0/1", 3))
    second = with_compilations(
        run_of(FORWARD_EVENTS),
        compilation("0/0", None),
        compilation("0/1", None, began_ns=103),
        compilation("0/2", 1, began_ns=200),
    )
    found = add_cycle(first, second).meta.compilations
    assert [(one.name, one.step) for one in found] == [("0/0", None), ("0/1", 3), ("0/2", 6)]


def test_a_saved_run_has_its_compilations_and_a_stripped_one_no_files(reloaded: Any) -> None:
    run = with_compilations(run_of(FORWARD_EVENTS), compilation("0/0", None), compilation("0/1", 3, kernels_ns=None))
    assert reloaded(run).meta.compilations == run.meta.compilations
    assert [one.file for one in reloaded(run, strip=True).meta.compilations] == ["", ""]


def test_the_rows_of_the_tree(golden: Callable[..., None]) -> None:
    """The self of a region is its overhead; its total includes all work in it, of any layer. Groups of kernels have no
    calls. The shares of fc and act in their common kernel are unknown: fc has at least its own, act any amount."""
    golden(run_of(FORWARD_EVENTS + BACKWARD_EVENTS, by_layers=True).report("tree"))


def test_a_kernel_of_two_blocks_leaves_both_with_a_lower_bound() -> None:
    """Also all layers between them and their nearest common ancestor."""
    run = run_of(FORWARD_EVENTS, by_layers=True, graphs=ALL_KNOWN)
    assert incomplete_phases(run) == {("Net", "fc"): ({FORWARD}, {FORWARD}), ("Net", "act"): ({FORWARD}, {FORWARD})}
    layers = tuple(
        replace(one, path=("Net", "a", *one.path[1:])) if one.kind == "Linear" else one for one in run.layers
    )
    layers = (*layers, Layer(("Net", "a"), "Block"))
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    fused = incomplete_phases(run)
    assert set(fused) == {("Net", "a"), ("Net", "a", "fc"), ("Net", "act")}
    assert fused["Net", "a"] == ({FORWARD}, set())  # its self is known


def test_a_kernel_of_unknown_layers_leaves_all_possible_owners_with_a_lower_bound() -> None:
    """The possible owners are the layers below the graph's layer that were not called, in the same model."""
    fc = CompiledKernel("mm", (FC,))
    kernels = {"unknown": None, "of another model": step("head", kind="Linear")}
    runs = {
        name: run_of(
            FORWARD_EVENTS + BACKWARD_EVENTS,
            by_layers=True,
            graphs={"graph-a": (fc, CompiledKernel("cpp_fused_relu_0", (part,))), "graph-b": (fc,), "graph-c": (fc,)},
        )
        for name, part in kernels.items()
    }
    assert incomplete_phases(runs["of another model"]) == {}
    below = {("Net", name): ({FORWARD}, {FORWARD}) for name in ("fc", "act", "sub")}
    assert incomplete_phases(runs["unknown"]) == below
    run = runs["unknown"]
    layers = tuple(replace(layer, compiled=layer.kind == "Linear") for layer in run.layers)  # the others were called
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    assert set(incomplete_phases(run)) == {("Net", "fc")}
    line = next(line for line in run.report("tree").splitlines() if "fc" in line)
    assert [cell.strip() for cell in line.split("|")[1:]] == ["≥ 0.080us", "≥ 0.080us", "–", "0.040us"]


def test_cycles_add_up_and_keep_the_regions_of_both() -> None:
    one, other = run_of(FORWARD_EVENTS, (FIRST,)), run_of(FORWARD_EVENTS, (REST,))
    both = add_cycle(one, other)
    assert both.meta.regions == (FIRST, REST)
    assert [use.calls for use in compiled_in(both).uses] == [2, 2]


def test_formats() -> None:
    assert run_of(FORWARD_EVENTS).report("compiled", tablefmt="github").startswith("| Region")
    with pytest.raises(TorchprofError, match="no format 'nonsense'"):
        run_of(FORWARD_EVENTS).report("compiled", tablefmt="nonsense")


def test_the_json_without_file_names_has_none_in_its_warnings() -> None:
    run = run_of(FORWARD_EVENTS)
    for strip, place in ((False, "net.py:12"), (True, "line 12")):
        text = run.report("json", strip=strip)
        breaks = [one for one in json.loads(text)["warnings"] if one["code"] == "graph_breaks"]
        assert [one["facts"] for one in breaks] == [{"places": [place]}]
        assert ("net.py" in text) is not strip

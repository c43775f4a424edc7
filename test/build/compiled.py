"""A small hand-made compiled model: its layers, its graphs and kernels, and events of its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from build.events import MAIN, NODE_PREFIX, Walked, walk_of
from build.forests import Span
from hypothesis import strategies as st

from torchprof.attribute.compiled_graphs import CompiledGraphs, CompiledKernel, Owner, ProfiledModule, TracedModule
from torchprof.attribute.events import Event, Kind, Place, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.flops.estimate import Estimate
from torchprof.measure.fold import fold
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED, OUTSIDE, Signature

KINDS = {
    "": "Net",
    "blocks": "ModuleList",
    "blocks.0": "Block",
    "blocks.0.fc1": "Linear",
    "blocks.0.act": "GELU",
    "blocks.0.fc2": "Linear",
    "blocks.1": "Block",
    "blocks.1.fc1": "Linear",
    "blocks.1.act": "GELU",
    "blocks.1.fc2": "Linear",
    "head": "Linear",
}

NAMES = list(KINDS)

PATHS = [("Net", *filter(None, name.split("."))) for name in NAMES]

MODULES = {path: ProfiledModule(number, kind) for number, (path, kind) in enumerate(zip(PATHS, KINDS.values()))}

SITES = {f"@{name}": Site((number,)) for number, name in enumerate(NAMES)}

SELF, FN = "L['self']", "L['fn']"


def layer(name: str) -> int:
    return NAMES.index(name)


def traced(name: str, below: str = "blocks.0", root: str = SELF) -> Owner:
    """The owner of an operation in a module of the model, if the module ``below`` was compiled: all modules on the way,
    without ``below`` itself."""
    steps = name.split(".")
    base = [below] if below else []
    return tuple(
        TracedModule(root, tuple(steps[:end]), KINDS[".".join([*base, *steps[:end]])])
        for end in range(1, len(steps) + 1)
    )


def work(name: str, *owners: Owner | None) -> CompiledKernel:
    """A kernel with these owners."""
    return CompiledKernel(name, owners)


FC1, ACT, FC2, OWN = traced("fc1"), traced("act"), traced("fc2"), ()

BLOCK = (work("addmm", FC1), work("cpp_fused_addmm_gelu_0", FC1, ACT), work("addmm", FC2), work("cpp_fused_add_1", OWN))


def graphs_of(
    modules: Mapping[tuple[str, ...], ProfiledModule] = MODULES, **graphs: Sequence[CompiledKernel] | str
) -> CompiledGraphs:
    return CompiledGraphs({"block": BLOCK, **graphs}, modules)


def region(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    return Event(Kind.REGION, f"Torch-Compiled Region: {name}", start, end, thread)


def call(graph: str, start: int, end: int, thread: int = MAIN) -> Event:
    return Event(Kind.GRAPH, f"## Call CompiledFxGraph {graph} ##", start, end, thread)


def in_words(place: Place) -> str:
    """The way to a place as text, from the outermost layer's range inward: layers, each with the frames in it."""
    layer = {OUTSIDE: "(outside)", NOT_SELECTED: "(not selected)"}.get(place.layer, ".".join(PATHS[place.layer]))
    own = " / ".join([layer, *(frame.name.removeprefix(NODE_PREFIX) for frame in place.frames)])
    return own if place.within is None else f"{in_words(place.within)} > {own}"


class Ran(Walked):
    """A walk over events of the model of two blocks, and the run that it gives."""

    def __init__(
        self,
        *events: Event,
        graphs: CompiledGraphs | None = None,
        selected: Set[str] | None = None,
        flops: Sequence[Signature] | None = None,
    ) -> None:
        chosen = None if selected is None else {layer(name) for name in selected}
        self.attribution = Attribution(SITES, PATHS, chosen, graphs=graphs)
        attributed = walk_of(self.attribution, iter(sorted(events, key=lambda event: event.start_ns)))
        self.estimate = Estimate(flops or ())
        self.all = list(attributed if flops is None else self.estimate.observe(attributed))
        rows, samples, busy = fold(
            self.all,
            self.attribution.places.all,
            tuple(Layer(path, kind) for path, kind in zip(PATHS, KINDS.values())),
            counts=self.estimate.counts,
            signatures=flops or ((Signature((), ()),) * 2),
        )
        self.run = Run((Meta(("Net",), busy_ns=tuple(busy.items())),), rows.layers, rows, samples)
        self.assert_rows_add_up(events)

    def assert_rows_add_up(self, events: Sequence[Event]) -> None:
        """Σ rows = Σ events: the time of the outermost ranges and ops of each thread."""
        ranges = [one for one in events if one.kind not in (Kind.KERNEL, Kind.MEMORY, Kind.SAMPLE)]
        outermost = [
            one
            for one in ranges
            if not any(
                other is not one
                and other.thread == one.thread
                and other.start_ns <= one.start_ns
                and one.end_ns <= other.end_ns
                for other in ranges
            )
        ]
        lasted = sum(one.end_ns - one.start_ns for one in outermost)
        assert sum(row.cost.cpu_ns for row in self.run.rows) == lasted
        assert all(row.cost.cpu_ns >= 0 for row in self.run.rows)
        kernels = sum(one.end_ns - one.start_ns for one in events if one.kind is Kind.KERNEL)
        assert sum(row.cost.device_ns for row in self.run.rows) == kernels

    def way(self, name: str, number: int = 0) -> str:
        return in_words(self[name, number].place)

    def ways(self, kind: Kind) -> list[str]:
        return [in_words(one.place) for one in self.all if one.event.kind is kind]

    def self_ns_by_way(self) -> dict[str, int]:
        """The self time of the CPU by the way to a place; without places that took no time."""
        found: dict[str, int] = {}
        for _, place, around, _, ns, _ in (one for one in self.all if one.event.kind is not Kind.KERNEL):
            for each, signed in ((place, ns), (around, -ns)):
                if each is not None:
                    found[in_words(each)] = found.get(in_words(each), 0) + signed
        return {way: ns for way, ns in found.items() if ns}

    def calls(self, way: str) -> int:
        return sum(one.calls for one in self.all if in_words(one.place) == way)


KERNELS = ("k_0", "k_1", "k_2", "k_3")

ANY = {
    "all": (work("k_0", FC1), work("k_1", FC1, ACT, FC2), work("k_2", None), work("k_3", OWN, FC2)),
    "whole": (work("k_1", traced("blocks.0.fc1", ""), traced("head", "")), work("k_0", OWN)),
}

COMPILED = (Kind.REGION, Kind.GUARDS, Kind.GRAPH, Kind.COMPILING)


@st.composite
def spans(draw: st.DrawFn, depth: int) -> Span:
    """A random event of a session with a compiled model, with random events inside. A graph often contains its own
    kernels."""
    kind = draw(
        st.sampled_from((*COMPILED, *COMPILED, Kind.OP, Kind.LABEL, Kind.USER_LABEL, Kind.NODE, Kind.BACKWARD_FUNCTION))
    )
    sequence = -1
    children = draw(st.lists(spans(depth - 1), max_size=3)) if depth else []
    if kind is Kind.REGION:
        name = f"Torch-Compiled Region: {draw(st.integers(0, 1))}/0"
    elif kind is Kind.GRAPH:
        graph = draw(st.sampled_from(("all", "whole", "unknown")))
        name = f"## Call CompiledFxGraph {graph} ##"
        called = [one.name for one in ANY.get(graph, ())]
        children = [draw(kernels(one, depth - 1)) for one in called if draw(st.integers(0, 19))] + children[:1]
    elif kind is Kind.LABEL:
        name = f"@{draw(st.sampled_from(NAMES))}"
    elif kind is Kind.OP:
        name = draw(st.sampled_from(("aten::copy_", "cudaGraphLaunch", *KERNELS)))
    else:
        name = {Kind.GUARDS: "TorchDynamo Cache Lookup", Kind.COMPILING: "dynamo"}.get(kind, f"{kind.name} Backward")
    if kind in (Kind.OP, Kind.NODE, Kind.BACKWARD_FUNCTION):
        sequence = draw(st.integers(-1, 6))
    return written(draw, kind, name, children, sequence)


@st.composite
def kernels(draw: st.DrawFn, name: str, depth: int) -> Span:
    inside = draw(st.lists(spans(depth - 1), max_size=1)) if depth > 0 else []
    return written(draw, Kind.OP, name, inside, -1)


def written(draw: st.DrawFn, kind: Kind, name: str, children: list[Span], sequence: int) -> Span:
    durations = [draw(st.integers(0, 9)) for _ in children]
    changes = draw(st.lists(st.integers(-64, 64), max_size=1))
    return Span(kind, name, children, [*durations, draw(st.integers(1, 9))], sequence, 0, changes)

"""Sums of events into rows, and of cycles into one run, against calculations by hand."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from build.events import kernel as kernel_event
from build.events import memory, step, walk_of
from build.hand_made import python_line

from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.measure.recording import Observations
from torchprof.run.collectives import collective_of
from torchprof.run.layers import Layer
from torchprof.run.measures import Cost, Spread
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.rows import SIGNATURES as MOST
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.timeline import Held, Memory, Timeline
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, Frame, FrameKind, Signature

LAYERS = (Layer(("Net",), "Net"), Layer(("Net", "a"), "Linear"), Layer(("Net", "b"), "Linear"))
SITES = {layer.name: Site((number,)) for number, layer in enumerate(LAYERS)}
SIGNATURES = (Signature((), ()), Signature(((2, 3),), ("float",)), Signature(((4, 3),), ("float",)))


def ran(name: str, start: int, end: int, **fields: Any) -> Event:
    """An event on thread 1: the range of a layer if a layer has this name, a node if the name ends in "Backward", a
    label if it begins with "#", otherwise an op."""
    kind = Kind.OP
    if name in SITES:
        kind = Kind.LABEL
    elif name.endswith("Backward"):
        kind = Kind.NODE
    elif name.startswith("#"):
        kind = Kind.USER_LABEL
    return Event(kind, name, start, end, 1, **fields)


def kernel(start: int, end: int, device: str = "cuda:0") -> Event:
    return kernel_event("gemm", start, end, 0, device)


def run_of(*events: Event, layers: tuple[Layer, ...] = LAYERS, meta: Meta | None = None, **options: Any) -> Run:
    attribution = Attribution(SITES, [layer.path for layer in layers])
    found = walk_of(attribution, events)
    rows, samples, busy = fold(found, attribution.places.all, layers, signatures=SIGNATURES, **options)
    return Run((meta or Meta(("Net",), busy_ns=tuple(busy.items())),), layers, rows, samples)


def self_ns_by_row(run: Run) -> dict[tuple[str, str, str], int]:
    """Self time by the name of the layer, the places around its range, and the frames."""

    def words(frames: Sequence[Frame]) -> str:
        return " ".join(frame.name for frame in frames)

    return {
        (
            row.layer.name if row.layer else "",
            " / ".join(f"{layers_name(around)}: {words(around.frames)}" for around in row.within),
            words(row.frames),
        ): row.cost.cpu_ns
        for row in run.rows
    }


def layers_name(around: Around) -> str:
    return LAYERS[around.layer].name if around.layer >= 0 else ""


# fold


def test_rows_keep_the_places_around_their_layer() -> None:
    """Net calls ``a`` inside its label, and ``a`` calls ``b`` inside an op: the row has both, outer to inner."""
    run = run_of(
        ran("Net", 0, 100),
        ran("#mine", 10, 90),
        ran("Net.a", 20, 80),
        ran("mul", 30, 70),
        ran("Net.b", 40, 60),
        ran("add", 45, 55),
    )
    assert self_ns_by_row(run) == {
        ("Net", "", ""): 20,
        ("Net", "", "#mine"): 20,
        ("Net.a", "Net: #mine", ""): 20,
        ("Net.a", "Net: #mine", "mul"): 20,
        ("Net.b", "Net: #mine / Net.a: mul", ""): 10,
        ("Net.b", "Net: #mine / Net.a: mul", "add"): 10,
    }
    inner = list(run.rows)[-1]
    assert inner.within == (
        Around(0, FORWARD, (Frame(FrameKind.LABEL, "#mine"),)),
        Around(1, FORWARD, (Frame(FrameKind.OP, "mul"),)),
    )


def test_layers_and_nodes_inside_a_backward_node_have_it_around_them() -> None:
    """A layer recomputed in the node of a checkpoint, and a node inside the node."""
    run = run_of(
        ran("Net", 0, 50),
        ran("#cp", 10, 20, sequence=7, forward_thread=1),
        ran("OuterBackward", 60, 160, sequence=7, forward_thread=1),
        ran("Net.a", 70, 110),
        ran("MulBackward", 120, 150),
    )
    rows = {(row.layer.name if row.layer else "", row.phase): row for row in run.rows if row.phase != FORWARD}
    node = (Around(OUTSIDE, BACKWARD, (Frame(FrameKind.OP, "OuterBackward"),)),)
    assert (rows["Net.a", RECOMPUTE].within, rows["Net.a", RECOMPUTE].cost.cpu_ns) == (node, 40)
    inner = next(row for row in run.rows if row.frames == (Frame(FrameKind.OP, "MulBackward"),))
    assert (inner.within, inner.phase, inner.cost.cpu_ns) == (node, BACKWARD, 30)
    (op, _) = run.ops(BACKWARD)["(outside)",]
    assert (op.name, op.self.cpu_ns, op.total.cpu_ns) == ("OuterBackward", 30, 100)


def test_one_op_on_two_shapes_has_two_rows() -> None:
    """The ops inside it also have a row for each shape. Calls without a recorded signature have one row."""
    events = [
        ran("Net", 0, 100),
        ran("mul", 10, 20, signature=1),
        ran("copy", 12, 15),
        ran("mul", 30, 50, signature=2),
        ran("copy", 32, 42),
        ran("mul", 60, 61, signature=1),
    ]
    run = run_of(*events)
    found = {row.frames: (row.calls, row.cost.cpu_ns, row.signature) for row in run.rows if row.frames}
    first, second, copy = (
        Frame(FrameKind.OP, "mul", SIGNATURES[1]),
        Frame(FrameKind.OP, "mul", SIGNATURES[2]),
        Frame(FrameKind.OP, "copy"),
    )
    assert found == {
        (first,): (2, 7 + 1, SIGNATURES[1]),
        (first, copy): (1, 3, None),
        (second,): (1, 10, SIGNATURES[2]),
        (second, copy): (1, 10, None),
    }
    assert [(op.name, op.calls, op.total.cpu_ns) for op in run.ops()["Net",]][1:] == [("mul", 3, 31), ("copy", 2, 13)]
    plain = run_of(*(event._replace(signature=0) for event in events))
    assert [row.calls for row in plain.rows if row.frames] == [3, 2]


MANY = (Signature((), ()), *(Signature(((size, 3), ()), ("float", "Scalar"), (None, size)) for size in range(1, 301)))


def on_lengths(lengths: Sequence[int]) -> Run:
    """One call for each length: a product with this number of rows and FLOPs, and a copy inside it."""
    events = [ran("Net", 0, 1_000_000)]
    for at, length in enumerate(lengths):
        start = 1_000 * at
        events += [ran("mul", start, start + 100, signature=length), ran("copy", start + 10, start + 20)]
    attribution = Attribution(SITES, [layer.path for layer in LAYERS])
    places = attribution.places.all
    found = [*walk_of(attribution, events)]
    counts = {
        place.index: (0, lengths.count(place.signature) * place.signature, 0) for place in places if place.signature
    }
    rows, samples, busy = fold(found, places, LAYERS, signatures=MANY, counts=counts)
    return Run((Meta(("Net",), busy_ns=tuple(busy.items())),), LAYERS, rows, samples)


def products(run: Run) -> dict[Any, tuple[int, int, int]]:
    """By the shapes of their inputs: calls, FLOPs, and the number of copies inside."""
    found: dict[Any, list[int]] = {}
    for row in run.rows:
        if row.frames:
            sums = found.setdefault(row.frames[0].signature and row.frames[0].signature.shapes, [0, 0, 0])
            if len(row.frames) == 1:
                sums[0] += row.calls
                sums[1] += row.cost.flops
            else:
                sums[2] += row.calls
    return {shapes: (calls, flops, copies) for shapes, (calls, flops, copies) in found.items()}


def test_calls_beyond_the_limit_of_signatures_are_one_row() -> None:
    """The first 64 lengths have their own rows. All others have one, with the sum of their FLOPs."""
    run = on_lengths([*range(1, 301), 1, 300])
    found = products(run)
    assert len(found) == MOST + 1
    assert found[(1, 3), ()] == (2, 2, 2)
    assert found[(64, 3), ()] == (1, 64, 1)
    assert found[None, ()] == (302 - 65, sum(range(65, 301)) + 300, 302 - 65)
    assert sum(calls for calls, _, _ in found.values()) == 302
    (other,) = {row.signature for row in run.rows if row.signature and row.signature.shapes[0] is None}
    assert other == Signature((None, ()), ("float", "Scalar"), (None, None))
    assert sum(row.cost.cpu_ns for row in run.rows) == 1_000_000
    named = replace(run, metas=(replace(run.meta, flags=(("record_shapes", True),)),))
    assert "| 237   | [?]" in named.report("ops", group_by_input_shape=True)


def test_the_limit_of_signatures_holds_over_many_cycles() -> None:
    run = None
    for first in range(1, 301, 50):
        run = add_cycle(run, on_lengths(range(first, first + 50)))
    assert run is not None
    found = products(run)
    assert len(found) == MOST + 1
    assert found[None, ()] == (300 - 64, sum(range(65, 301)), 300 - 64)
    again = add_cycle(run, on_lengths([7, 299]))
    assert products(again) == {
        **found,
        ((7, 3), ()): (2, 14, 2),
        (None, ()): (300 - 63, sum(range(65, 301)) + 299, 237),
    }


def test_the_recorded_facts_of_a_collective_stay_beyond_the_limit_of_signatures() -> None:
    recorded = ("collective", "alltoall", "7", "mesh_ep", 4, "[0, 1, 2, 3]")
    signatures = [Signature((), ()), *(Signature(((n,), (n,)), ("Float", "Float"), recorded) for n in range(1, 100))]
    attribution = Attribution(SITES, [layer.path for layer in LAYERS])
    events = [ran("record_param_comms", 10 * at, 10 * at + 5, signature=at) for at in range(1, 100)]
    rows, _, _ = fold(walk_of(attribution, events), attribution.places.all, LAYERS, signatures=signatures)
    (row,) = [row for row in rows if row.signature and row.signature.shapes == (None, None)]
    found = collective_of(row.frames)
    assert found is not None
    assert (found.name, found.description, found.size, found.bytes_in, row.calls) == (
        "all_to_all",
        "mesh_ep",
        4,
        None,
        35,
    )


def test_sampled_lines_of_python_are_counted_and_take_no_time() -> None:
    """Three in Net itself, one in its label, one outside. The one inside an op inside `mul` counts in `mul`."""
    seen = [Event(Kind.SAMPLE, "net.py(3): forward", at, at, 1) for at in (5, 15, 25, 35, 45, 105)]
    ranges = [ran("Net", 0, 100), ran("mul", 10, 20), ran("copy", 14, 16), ran("#mine", 40, 50)]
    run = run_of(*sorted([*ranges, *seen], key=lambda event: event.start_ns))
    line = python_line("net.py(3): forward")
    found = {(row.layer is None, row.frames): (row.calls, row.cost) for row in run.rows if line in row.frames}
    assert found == {
        (False, (line,)): (3, Cost()),
        (False, (Frame(FrameKind.OP, "mul"), line)): (1, Cost()),
        (False, (Frame(FrameKind.LABEL, "#mine"), line)): (1, Cost()),
        (True, (line,)): (1, Cost()),
    }
    assert run.tree().calls == 1
    assert {op.name: (op.calls, op.self.cpu_ns) for op in run.ops()["Net",]} == {
        "(between ops)": (0, 80),
        "mul": (1, 8),
        "copy": (1, 2),
        "#mine": (1, 10),
    }


def test_the_cpu_is_busy_while_the_thread_that_began_is_in_any_op_or_range() -> None:
    """100 ns in Net and 7 in an op beside it. Overlapping work of other threads adds no time."""
    began = step(0)
    elsewhere = ran("mm", 15, 90)._replace(thread=2)
    events = [began, ran("Net", 10, 110), elsewhere, ran("mul", 20, 30), ran("sum", 120, 127)]
    assert dict(run_of(*events).meta.busy_ns) == {"cpu": 107}
    assert dict(run_of(*events, timed=False).meta.busy_ns) == {}


def test_without_times_there_are_calls_and_memory() -> None:
    """No times were measured: there are no times, and no durations of calls."""
    run = run_of(ran("Net", 0, 100), ran("mul", 10, 20), memory(12, 64), timed=False)
    assert run.samples == {}
    assert {row.frames: (row.calls, row.cost) for row in run.rows} == {
        (): (1, Cost()),
        (Frame(FrameKind.OP, "mul"),): (1, Cost(cpu_allocated=64)),
    }


# add_cycle


def test_the_first_cycle_is_the_run() -> None:
    cycle = run_of(ran("Net", 0, 10))
    assert add_cycle(None, cycle) is cycle


def test_the_layers_of_cycles_are_matched_by_path() -> None:
    """The second cycle has them in another order, one more and one less. Its time of a and b counts for a and b."""
    first = run_of(ran("Net", 0, 10), ran("Net.a", 2, 5))
    other = [Layer(("Net",), "Net"), Layer(("Net", "c"), "ReLU"), Layer(("Net", "a"), "Linear")]
    second = run_of(ran("Net", 20, 30), ran("Net.a", 21, 25)).on_layers(other)
    both = add_cycle(first, second)
    assert both.layers == (*LAYERS, other[1])
    calls = {row.layer.name: (row.calls, row.cost.cpu_ns) for row in both.rows if row.layer is not None}
    assert calls == {"Net": (2, 7 + 6), "Net.a": (2, 3 + 4)}


def test_the_observations_of_cycles_are_added_and_equal_warnings_are_kept_once() -> None:
    """Layer 0 of the second cycle is layer 1 of the sum. -1 stands for no layer in all cycles."""
    early, late = (
        RunWarning.of("calls_not_recorded", ["Net"], calls=1),
        RunWarning.of("calls_not_recorded", ["Net"], calls=2),
    )
    seen = Observations()
    seen.add(Observations(Counter({(-1, 0): 5}), {0, 1}, warnings=[early, late]))
    seen.add(Observations(Counter({(-1, 0): 7, (0, 1): 2}), {0}, warnings=[late, early]), [1, 0])
    assert seen.callers == {(-1, 0): 5, (-1, 1): 7, (1, 0): 2}
    assert (seen.callable_layers, seen.warnings) == ({0, 1}, [early, late])


def test_rows_with_equal_signatures_of_two_cycles_are_added() -> None:
    """Frames are equal if their signatures are equal; these are different objects in each session."""
    one = run_of(ran("mul", 0, 10, signature=1), ran("mul", 20, 50, signature=2))
    two = run_of(ran("mul", 0, 5, signature=2))
    fresh = Frame(FrameKind.OP, "mul", Signature(((4, 3),), ("float",)))
    two = replace(two, rows=replace(two.rows, frames=((), (fresh,))))
    found = {row.signature: (row.calls, row.cost.cpu_ns) for row in add_cycle(one, two).rows}
    assert found == {SIGNATURES[1]: (1, 10), SIGNATURES[2]: (2, 35)}


def test_times_and_steps_of_cycles_are_added() -> None:
    """Wall time, cycles, steps and busy times. Other facts of the run stay as they were."""
    meta = Meta(("Net",), rank=3, device="cuda", wall_ns=100, steps=2, busy_ns=(("cuda:0", 40),), machine="here")
    later = replace(meta, wall_ns=10, cycles=2, steps=1, busy_ns=(("cuda:1", 3), ("cuda:0", 4)))
    summed = add_cycle(run_of(meta=meta), run_of(meta=later)).meta
    assert summed == replace(meta, wall_ns=110, cycles=3, steps=3, busy_ns=(("cuda:0", 44), ("cuda:1", 3)))


def test_layers_keep_the_shapes_of_their_first_call() -> None:
    """A layer that the first cycle called keeps its facts. The others, and all parameters, are as in the last cycle."""
    seen = replace(LAYERS[1], input_shapes=((1, 2),), output_shapes=((1, 3),), output_bytes=12, training=False)
    new = tuple(
        replace(layer, input_shapes=((5, 2),), output_shapes=((5, 3),), output_bytes=60, params=7) for layer in LAYERS
    )
    summed = add_cycle(run_of(layers=(LAYERS[0], seen, LAYERS[2])), run_of(layers=new))
    assert summed.layers == (new[0], replace(seen, params=7), new[2])
    assert summed.rows.layers == summed.layers


def test_the_higher_peak_stays_with_its_live_memory() -> None:
    """For each device separately; of two equal peaks, the first."""
    held = [Held(at, FORWARD, "activations", 10 + at, 1) for at in range(3)]
    first = (Memory("cpu", 0, 100, 5, (held[0],)), Memory("cuda:0", 0, 10, 6, (held[1],)))
    second = (Memory("cpu", 0, 100, 7, (held[2],)), Memory("cuda:0", 0, 11, 8), Memory("cuda:1", 0, 1, 1))
    summed = add_cycle(replace(run_of(), memory=first), replace(run_of(), memory=second))
    assert summed.memory == (first[0], second[1], second[2])
    assert add_cycle(summed, run_of()).memory == summed.memory


def test_the_timeline_is_that_of_the_last_cycle() -> None:
    one, two = (Timeline(("cpu",), {name: array("q", [size]) for name in Timeline.COLUMNS}) for size in (0, 1))
    runs = [replace(run_of(), timeline=timeline) for timeline in (one, two, None)]
    assert add_cycle(runs[0], runs[1]).timeline is two
    assert add_cycle(runs[0], runs[2]).timeline is None


def test_a_run_does_not_grow_with_its_cycles() -> None:
    """A thousand cycles of the same work need as much memory as one: rows, frames, places around, and samples up to
    their limit."""
    events = [ran("Net", 0, 100), ran("#mine", 10, 90), ran("Net.a", 20, 80), ran("mul", 30, 70, signature=1)]
    cycles = [
        run_of(*(event._replace(start_ns=event.start_ns + at, end_ns=event.end_ns + at) for event in events))
        for at in range(0, 1_000_000, 1_000)
    ]
    run = None
    for cycle in cycles:
        run = add_cycle(run, cycle)
    assert run is not None
    first = cycles[0].rows
    assert len(run.rows) == len(first) == 4
    assert (len(run.rows.frames), len(run.rows.within)) == (len(first.frames), len(first.within))
    assert [row.calls for row in run.rows] == [1_000] * 4
    (spread, _) = run.samples.values()
    assert (spread.count, spread.sum, len(spread.sample)) == (1_000, 100_000, Spread.SIZE)

"""Operators summed from columns, against the plain definition: row by row, as the docstrings say it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from build.examples import examples
from build.hand_made import NET, kernel, label, op, python_line, row, run_of
from build.phases import in_column_of
from hypothesis import given
from hypothesis import strategies as st

from torchprof.analyze.operators import Operator, layers_of_operator, operators
from torchprof.run.measures import Cost
from torchprof.run.operators import Op
from torchprof.run.rows import Around, Row
from torchprof.run.run import Run
from torchprof.run.words import BETWEEN_OPS, NOT_SELECTED, OUTSIDE, PHASES, Frame, FrameKind

Path = tuple[str, ...]
Sum = tuple[int, Cost, Cost]  # calls, self, total


def path_of(one: Row) -> Path:
    if one.layer is not None:
        return one.layer.path
    return ("(outside)",) if one.selected else ("(not selected)",)


def work_of(one: Row) -> tuple[Frame, ...]:
    """The ops and labels around the work of a row; the layer's own time is an op, too."""
    return tuple(frame for frame in one.frames if frame.kind != "kernel") or (op(BETWEEN_OPS),)


def is_call(one: Row) -> bool:
    return bool(one.frames) and one.frames[-1].kind != "kernel"


def is_sample(one: Row) -> bool:
    return bool(one.frames) and one.frames[-1].kind == "python"


def places(layer: Path, frames: Sequence[Frame]) -> Iterator[tuple[Any, ...]]:
    """The keys of the ops on the way: layer, labels around the op in the layer, kind and name."""
    labels: tuple[str, ...] = ()
    for frame in frames:
        yield layer, labels, frame.kind, frame.name
        if frame.kind == "label":
            labels = (*labels, frame.name)


def ops_by_definition(run: Run, phase: str | None) -> dict[tuple[Any, ...], Sum]:
    found: dict[tuple[Any, ...], Sum] = {}
    for one in run.rows:
        if is_sample(one):
            continue
        here = phase in (None, in_column_of(one.phase))
        touched = []
        for around in one.within:
            # What runs in a label is in it in whatever phase; what runs in an op is in it in the phase of that op.
            frames = around.frames
            if phase not in (None, around.phase):
                frames = tuple(frame for frame in frames if here and frame.kind == "label")
            for place in places(run.layers.path_of(around.layer), frames):
                found.setdefault(place, (0, Cost(), Cost()))
                if here or place[2] == "op":
                    touched.append(place)
        if here:
            touched += places(path_of(one), work_of(one))
            calls, own, total = found.get(touched[-1], (0, Cost(), Cost()))
            found[touched[-1]] = calls + one.calls * is_call(one), own + one.cost, total
        for place in dict.fromkeys(touched):
            calls, own, total = found.get(place, (0, Cost(), Cost()))
            found[place] = calls, own, total + one.cost
    return found


def flat(layer: Path, ops: Sequence[Op], labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Sum]]:
    for one in ops:
        yield (layer, labels, one.kind, one.name), (one.calls, one.self, one.total)
        yield from flat(layer, one.inside, (*labels, one.name))


def check_ops(run: Run) -> None:
    for phase in (*PHASES, None):
        found = [pair for layer, ops in run.ops(phase).items() for pair in flat(layer, ops)]
        assert dict(found) == ops_by_definition(run, phase) and len(dict(found)) == len(found)


def operators_by_definition(run: Run, phase: str | None, layers: set[int] | None) -> dict[Operator, Sum]:
    found: dict[Operator, Sum] = {}
    for one in run.rows:
        if is_sample(one):
            continue
        own_layer = -1 if one.layer is None else run.layers.index(one.layer)
        way_in = [
            (around.layer, in_column_of(one.phase) if frame.kind == "label" else around.phase, frame)
            for around in one.within
            for frame in around.frames
        ]
        way_in += [(own_layer, in_column_of(one.phase), frame) for frame in work_of(one)]
        keys = [
            Operator(frame.name, frame.kind)
            if phase in (None, of_phase) and (layers is None or layer in layers)
            else None
            for layer, of_phase, frame in way_in
        ]
        for key in dict.fromkeys(keys):
            if key is not None:
                calls, own, total = found.get(key, (0, Cost(), Cost()))
                found[key] = calls, own, total + one.cost
        if keys[-1] is not None:
            calls, own, total = found[keys[-1]]
            found[keys[-1]] = calls + one.calls * is_call(one), own + one.cost, total
    return found


def check_operators(run: Run) -> None:
    names = [layer.name for layer in run.layers]
    for phase in (None, *PHASES):
        for layer in (None, names[0], names[2]):
            below = None if layer is None else {at for at, one in enumerate(names) if f"{one}.".startswith(f"{layer}.")}
            found = {
                key: (sums.calls, sums.self, sums.total)
                for key, sums in operators(run, layer=layer, phase=phase).items()
            }
            assert found == operators_by_definition(run, phase, below)
    for operator in operators(run):
        everywhere = layers_of_operator(run, operator.name)
        same_name = [sums for other, sums in operators(run).items() if other.name == operator.name]
        assert sum(sums.calls for sums in everywhere.values()) == sum(sums.calls for sums in same_name)
        own = sum((sums.self for sums in everywhere.values()), Cost())
        assert own == sum((sums.self for sums in same_name), Cost())


frames = st.lists(st.sampled_from([op("a"), op("b"), op("c"), label("a"), label("m")]), max_size=4).map(tuple)
chains = st.builds(
    lambda inner, last: inner + last, frames, st.sampled_from([(), (), (kernel("k"),), (python_line("x.py:1"),)])
)
arounds = st.builds(Around, st.sampled_from([OUTSIDE, 0, 1]), st.sampled_from(PHASES), frames.filter(bool))
costs = st.fixed_dictionaries(
    {"cpu_ns": st.integers(0, 50), "flops": st.sampled_from([0, 0, 7]), "device_freed": st.sampled_from([0, 3])}
)
rows = st.builds(
    lambda layer, chain, phase, within, calls, device, cost: row(
        layer, *chain, phase=phase, within=tuple(within), calls=calls, device=device, **cost
    ),
    st.sampled_from([NOT_SELECTED, OUTSIDE, *range(len(NET))]),
    chains,
    st.sampled_from(PHASES),
    st.lists(arounds, max_size=2),
    st.integers(0, 3),
    st.sampled_from(["cpu", "cuda:0"]),
    costs,
)


@examples(150)
@given(st.lists(rows, min_size=1, max_size=12))
def test_sums_of_random_rows_are_those_of_the_definition(lines: list[tuple[Any, ...]]) -> None:
    run = run_of(lines)
    check_ops(run)
    check_operators(run)


@examples(100)
@given(st.lists(rows, min_size=1, max_size=12))
def test_rows_are_summed_by_any_of_their_columns(lines: list[tuple[Any, ...]]) -> None:
    table = run_of(lines).rows
    asked: list[tuple[Frame, ...]] = []

    def is_call_of_op(frames: tuple[Frame, ...]) -> bool:
        asked.append(frames)
        return bool(frames) and frames[-1].kind == "op"

    columns = table.columns
    wanted = [
        number
        for number, (phase, chain) in enumerate(zip(columns["phase"], columns["frames"]))
        if PHASES[phase] == "forward" and is_call_of_op(table.frames[chain])
    ]
    by_device: dict[tuple[int, int], tuple[int, int]] = {}
    by_layer: dict[int, int] = {}
    for number in wanted:
        layer, calls, cpu_ns = (columns[name][number] for name in ("layer", "calls", "cpu_ns"))
        before = by_device.get((layer, columns["device"][number]), (0, 0))
        by_device[layer, columns["device"][number]] = before[0] + calls, before[1] + cpu_ns
        if columns["flops"][number]:
            by_layer[layer] = by_layer.get(layer, 0) + columns["flops"][number]
    asked.clear()
    chosen: dict[str, Any] = {"phase": "forward", "frames": is_call_of_op, "device": None}
    summed = table.summed(("layer", "device"), ("calls", "cpu_ns"), **chosen)
    assert asked == [*table.frames], "a predicate is called once for each value"
    assert [*summed.items()] == [*by_device.items()]
    assert [*table.summed("layer", "flops", **chosen).items()] == [*by_layer.items()]
    assert table.total("calls", **chosen) == sum(columns["calls"][number] for number in wanted)
    assert [*table.only(**chosen)] == [table[number] for number in wanted]


def test_parts_are_the_calls_inside_counted_operators() -> None:
    lines = [
        row(1, op("linear"), op("addmm"), calls=3, flops=8),
        row(1, op("linear"), op("addmm"), op("copy"), calls=2),
        row(1, op("linear"), op("t"), calls=4),
        row(1, op("copy"), calls=5),
        row(2, op("linear"), op("addmm"), op("copy"), calls=9),
    ]
    found = {operator.name: (sums.calls, sums.parts) for operator, sums in operators(run_of(lines)).items()}
    # Only the copies in the addmm of layer 1, which has FLOPs, are part of it: those of layer 2 are in one without.
    assert found == {"linear": (0, 0), "addmm": (3, 0), "copy": (16, 2), "t": (4, 0)}


def test_operators_are_in_the_order_of_first_use() -> None:
    lines = [row(1, op("b"), op("a")), row(0, op("c")), row(1, op("a")), row(1), row(0, op("b"))]
    assert [operator.name for operator in operators(run_of(lines))] == ["b", "a", "c", BETWEEN_OPS]
    assert {layer: [one.name for one in ops] for layer, ops in run_of(lines).ops().items()} == {
        ("Net", "a"): ["b", "a", BETWEEN_OPS],
        ("Net",): ["c", "b"],
    }


def test_the_kind_of_a_frame_is_written_as_its_text() -> None:
    kind = FrameKind.KERNELS
    assert kind == "kernels" and {kind: 1}["kernels"] == 1
    texts = (str(kind), f"{kind}", f"{kind:>9}", repr(Frame(kind, "a").kind), json.dumps(kind))
    assert texts == ("kernels", "kernels", "  kernels", "'kernels'", '"kernels"')
    assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
    assert sorted([FrameKind.OP, FrameKind.GC]) == ["gc", "op"]

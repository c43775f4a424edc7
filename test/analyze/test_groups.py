"""Layers added up by class and by pattern."""

from __future__ import annotations

from dataclasses import replace

import torch
from build.hand_made import FORWARD, row, run_of
from torch import nn

import torchprof
from torchprof import Run
from torchprof.analyze.layer_reports import UNKNOWN_CLASS, Group, by_class
from torchprof.analyze.report import pattern_of
from torchprof.run.formats import Bound, Figure
from torchprof.run.layers import Layer
from torchprof.run.words import BACKWARD

LAYERS = [
    Layer(tuple(path.split(".")), kind)
    for path, kind in [
        ("Net", "Net"),
        ("Net.layers", "Sequential"),
        *(
            (f"Net.layers.{block}{below}", kind)
            for block in range(3)
            for below, kind in [("", "Block"), (".mlp", "Linear")]
        ),
        ("Net.head", "Sequential"),
        ("Net.head.0", "Sequential"),
        ("Net.head.0.0", "Linear"),
    ]
]
INDEX = {layer.name: index for index, layer in enumerate(LAYERS)}


def blocks() -> Run:
    """Block n takes 10 ns itself and its Linear n + 1 ns; the head's Linear 100 ns, and 7 ns in backward."""
    rows = [row(INDEX["Net"], cpu_ns=1), row(INDEX["Net.layers"], cpu_ns=2), row(INDEX["Net.head"], cpu_ns=3)]
    rows += [row(INDEX[f"Net.layers.{block}"], cpu_ns=10) for block in range(3)]
    rows += [row(INDEX[f"Net.layers.{block}.mlp"], cpu_ns=block + 1) for block in range(3)]
    rows += [row(INDEX["Net.head.0"], cpu_ns=4), row(INDEX["Net.head.0.0"], cpu_ns=100)]
    rows += [row(INDEX["Net.head.0.0"], phase=BACKWARD, calls=0, cpu_ns=7)]
    return run_of(rows, layers=LAYERS)


def figures(groups: list[Group], phase: str = FORWARD) -> dict[str, tuple[int, int, int]]:
    """By name: self and total in ns, and calls."""
    return {
        one.name: (one.figures.cost(phase, True).cpu_ns, one.figures.cost(phase).cpu_ns, one.figures.calls)
        for one in groups
    }


def test_a_class_is_the_sum_of_its_layers_and_what_is_nested_in_itself_counts_once() -> None:
    groups = by_class(blocks())
    assert figures(groups) == {
        "Net": (1, 146, 1),
        # layers: 2 + 36 = 38; head: 3 + 104 = 107, with head.0 in it.
        "Sequential": (2 + 3 + 4, 38 + 107, 3),
        "Block": (30, 36, 3),
        "Linear": (106, 106, 4),
    }
    assert figures(groups, BACKWARD)["Linear"] == (7, 7, 4)
    assert [one.layers for one in groups] == [1, 3, 3, 4]


def test_a_pattern_is_the_same_layer_of_every_block() -> None:
    layers = blocks().layers
    named = {layer.name: number for layer, number in zip(layers, layers.alike)}
    for below in ("", ".mlp"):
        assert len({named[f"Net.layers.{block}{below}"] for block in range(3)}) == 1
    assert len({*named.values()}) == len(layers) - 4
    # Numbers that do not differ stay.
    assert pattern_of([("a", "0", "b", "1"), ("a", "2", "b", "1")]) == "a.*.b.1"


def test_the_self_of_all_groups_is_that_of_all_layers() -> None:
    run = blocks()
    assert sum(one.figures.cost(FORWARD, True).cpu_ns for one in by_class(run)) == sum(run.rows.columns["cpu_ns"]) - 7


def test_a_layer_that_was_never_called_adds_nothing_and_alone_is_unknown() -> None:
    layers = [*LAYERS, Layer(("Net", "unused"), "Linear"), Layer(("Net", "never"), "Dropout")]
    run = run_of([row(INDEX["Net.head.0.0"], cpu_ns=100)], layers=layers)
    found = {one.name: one.figures for one in by_class(run)}
    assert found["Linear"].cost(FORWARD).cpu_ns == 100 and not found["Linear"].unknown
    assert found["Dropout"].unknown


def test_a_layer_that_may_have_run_in_a_compiled_region_makes_the_sum_a_lower_bound() -> None:
    inlined = [replace(layer, compiled=layer.name == "Net.layers.1.mlp") for layer in LAYERS]
    run = run_of([row(INDEX["Net.layers.0.mlp"], cpu_ns=5)], layers=inlined)
    [group] = [one for one in by_class(run) if one.name == "Linear"]
    assert FORWARD in group.figures.incomplete and FORWARD in group.figures.incomplete_self
    assert group.figures.number_of_calls() == Figure(1, Bound.AT_LEAST)


def test_the_calls_of_layers_inside_compiled_code_are_unknown_together_too() -> None:
    """Their kernels are theirs, but nobody called them."""
    inlined = [replace(layer, compiled=layer.name.endswith(".mlp")) for layer in LAYERS]
    run = run_of([row(INDEX[f"Net.layers.{at}.mlp"], cpu_ns=5, calls=0) for at in range(3)], layers=inlined)
    [group] = [one for one in by_class(run) if one.name == "Linear"]
    assert group.figures.cost(FORWARD).cpu_ns == 15
    assert group.figures.number_of_calls().bound is Bound.UNKNOWN


def test_layers_of_a_trace_without_classes_are_one_group() -> None:
    run = run_of([row(1, cpu_ns=5)], layers=[Layer(("a",), ""), Layer(("a", "b"), "")])
    assert [(one.name, one.layers) for one in by_class(run)] == [(UNKNOWN_CLASS, 2)]


def test_classes_of_a_recorded_model_by_torchs_own_count() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(5)))
    with torchprof.Profile(model) as prof:
        model(torch.rand(2, 4))
    groups = {one.name: one for one in by_class(prof.run)}
    for kind in ("Linear", "BatchNorm1d", "ReLU"):
        count = sum(type(module).__name__ == kind for module in model.modules())
        assert (groups[kind].layers, groups[kind].figures.calls) == (count, count)

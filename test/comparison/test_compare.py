"""Comparison of two runs: matching of layers, differences, and verdicts on noise."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from build.golden import drawn
from build.hand_made import cells, label, op, row, run_of
from build.models import Layers, Recursive
from build.pairs import BACKWARD, COUNTED, FC, FORWARD, MEMORY, calls, layer, made, simple, stepped
from build.phases import in_column_of
from build.places import DATA
from build.processes import run_fresh
from build.warnings import run_warnings
from torch import nn

import torchprof
from torchprof.comparison.budget import check, limit_of
from torchprof.comparison.diff import (
    ALPHA,
    FEWEST,
    Change,
    Diff,
    Noise,
    Pair,
    false_discovery_rates,
    noise_of,
    rank_test,
)
from torchprof.comparison.table import changes_of_layers, changes_of_run
from torchprof.errors import TorchprofError
from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, SampleKey
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.timeline import Memory
from torchprof.run.words import NOT_SELECTED, OUTSIDE, PHASES


def pair_of(diff: Diff, path: str) -> Pair:
    (found,) = [pair for pair in diff.walk() if ".".join(pair.path) == path]
    return found


def change(diff: Diff, path: str, key: str) -> Change:
    return pair_of(diff, path).changes[key]


def figures(diff: Diff, path: str, key: str) -> tuple[float | None, float | None, float | None, float | None]:
    found = change(diff, path, key)
    return found.before, found.after, found.difference, found.ratio


def shown(text: str) -> list[list[str]]:
    """The cells of the table, under the sentence."""
    return cells(text.split("\n\n", 1)[1])


# The figures


def test_self_and_total_before_and_after_by_hand() -> None:
    after = run_of(
        [
            row(0, cpu_ns=10, calls=2),
            row(1, cpu_ns=50, calls=2),
            row(2, cpu_ns=5, calls=5),
            row(3, cpu_ns=20, calls=2),
            row(1, op("aten::y"), phase=BACKWARD, cpu_ns=14),
            row(OUTSIDE, op("aten::loss"), cpu_ns=1),
        ]
    )
    diff = torchprof.compare(simple(), after)
    assert figures(diff, "Net", "cpu_total") == (75, 85, 10, 85 / 75)
    assert figures(diff, "Net", "self_cpu_total") == (10, 10, 0, 1)
    assert figures(diff, "Net.a", "cpu_total") == (20, 50, 30, 2.5)
    assert figures(diff, "Net.b", "cpu_total") == (45, 25, -20, 25 / 45)
    assert figures(diff, "Net.b", "self_cpu_total") == (5, 5, 0, 1)
    assert figures(diff, "Net.b", "calls") == (4, 5, 1, 1.25)
    assert figures(diff, "Net.b.0", "self_cpu_total") == (40, 20, -20, 0.5)
    assert figures(diff, "Net.a", "backward_cpu_total") == (7, 14, 7, 2)
    assert figures(diff, "Net", "backward_cpu_total") == (7, 14, 7, 2)
    assert figures(diff, "Net", "backward_self_cpu_total") == (0, 0, 0, None)
    assert figures(diff, "(outside)", "cpu_total") == (3, 1, -2, 1 / 3)
    assert "calls" not in pair_of(diff, "(outside)").changes
    assert (diff.unit, diff.counts, diff.counted) == (None, (2, 2), "call")
    assert change(diff, "Net.b", "calls").verdict == "more"
    assert change(diff, "Net", "self_cpu_total").verdict == "same"
    assert change(diff, "Net.a", "cpu_total").verdict == "unknown"  # no samples: nobody knows the noise
    assert diff.notes == () == diff.warnings


def test_keys_are_those_of_the_tree_report() -> None:
    run = simple(requested=(*COUNTED, *MEMORY[1:]), measured=(*COUNTED, *MEMORY[1:]))
    diff = torchprof.compare(run, run)
    for quantity in diff.quantities:
        if not quantity.is_self or (quantity.is_time or quantity.unit.value == "bytes"):
            run.report("tree", sort_by=quantity.key, show_events=True)  # raises for a column that is not there
    assert [one.key for one in diff.quantities if one.phase == FORWARD and not one.is_self] == [
        "params",
        "cpu_total",
        "cpu_mem",
        "macs",
        "flops",
        "calls",
    ]


def test_runs_with_different_numbers_of_calls_are_compared_per_call() -> None:
    after = run_of([row(0, cpu_ns=30, calls=6), row(1, cpu_ns=66, calls=6), row(3, cpu_ns=120, calls=12)])
    diff = torchprof.compare(simple(), after)
    assert (diff.unit, diff.counts) == ("call", (2, 6))
    assert figures(diff, "Net", "cpu_total") == (37.5, 36, -1.5, 0.96)
    assert figures(diff, "Net.a", "cpu_total") == (10, 11, 1, 1.1)
    assert figures(diff, "Net.b.0", "calls") == (1, 2, 1, 2)
    assert figures(diff, "(outside)", "cpu_total") == (1.5, 0, -1.5, 0)
    assert "different numbers of forward calls of Net: 2 before, 6 after" in diff.notes[0]
    assert "per forward call" in diff.report()


def test_parameters_and_peaks_are_not_divided_among_calls() -> None:
    peak = SampleKey(0, FORWARD, 0, "cpu", "peak_bytes")
    layers = [layer("Net", params=7)]
    before = made(layers, [row(0, calls=2)], {peak: calls(100, 300)})
    after = made([layer("Net", params=9)], [row(0, calls=3)], {peak: calls(200, 90, 10)})
    diff = torchprof.compare(before, after)
    assert figures(diff, "Net", "params") == (7, 9, 2, 9 / 7)
    assert figures(diff, "Net", "cpu_peak") == (300, 200, -100, 200 / 300)
    assert change(diff, "Net", "cpu_peak").verdict == "less"


def test_a_layer_that_allocated_nothing_has_a_peak_of_0_if_memory_was_recorded() -> None:
    layers = [layer("Net"), layer("Net.a"), layer("Net.b")]
    peak, kept = (SampleKey(0, FORWARD, 0, "cpu", measure) for measure in ("peak_bytes", "kept_bytes"))
    samples = {peak: calls(9), peak._replace(phase=BACKWARD): calls(4), kept._replace(layer=1): calls(0)}
    rows = [row(at, cpu_ns=1) for at in range(3)] + [row(0, op("aten::x"), phase=BACKWARD, cpu_ns=1)]
    diff = torchprof.compare(*[made(layers, rows, samples)] * 2)
    assert [change(diff, path, "cpu_peak").before for path in ("Net", "Net.a", "Net.b")] == [9, 0, None]
    assert [change(diff, path, "backward_cpu_peak").before for path in ("Net", "Net.a")] == [4, 0]  # a did nothing


def test_models_with_different_ratios_of_calls_are_reported() -> None:
    layers = [layer("G"), layer("D")]
    before = made(layers, [row(0, calls=2), row(1, calls=4, cpu_ns=8)])
    twice = made(layers, [row(0, calls=4), row(1, calls=8, cpu_ns=20)])
    other = made(layers, [row(0, calls=4), row(1, calls=4, cpu_ns=20)])
    assert len(torchprof.compare(before, twice).notes) == 1
    assert figures(torchprof.compare(before, twice), "D", "cpu_total") == (4, 5, 1, 1.25)
    notes = torchprof.compare(before, other).notes
    assert notes[1] == "D was called 4 times before and 4 times after. Its number of calls per call of G differs."


def test_without_calls_of_the_model_figures_are_per_step() -> None:
    before = run_of([row(1, cpu_ns=20)], steps=2)
    after = run_of([row(1, cpu_ns=50)], steps=4)
    diff = torchprof.compare(before, after)
    assert (diff.unit, diff.counts) == ("step", (2, 4))
    assert figures(diff, "Net.a", "cpu_total") == (10, 12.5, 2.5, 1.25)
    assert "2 before, 4 after" in diff.notes[0] and "steps" in diff.notes[0]


def test_calls_after_the_last_step_are_in_no_step() -> None:
    """20 steps of 100 ns, then as many calls of 300 ns: a median of 100 would cover only half of the calls."""
    layers = [layer("Net")]
    ours = {SampleKey(0, FORWARD, 0, "cpu", "step_cpu_ns"): calls(*[100] * 20, start=1000)}
    ours |= {SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"): calls(*[150] * 20, start=1000)}
    in_steps = {**ours, SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): calls(*[100] * 20)}
    behind = {**ours, SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): calls(*[100] * 20, *[300] * 20)}
    before = made(layers, [row(0, calls=20, cpu_ns=2_000)], in_steps, steps=20)
    after = made(layers, [row(0, calls=40, cpu_ns=8_000)], behind, steps=20)
    found = change(torchprof.compare(before, after), "Net", "cpu_total")
    assert (found.before, found.after) == (100, 200)
    assert found.noise is not None and found.noise.medians == (100, 200)
    assert change(torchprof.compare(before, before), "Net", "cpu_total").noise.counts == (20, 20)  # steps are used


def test_without_calls_or_steps_figures_are_totals_with_a_note() -> None:
    paths = (("Net", "a"),)
    one, ten = (run_of([row(1, calls=calls, cpu_ns=5 * calls)], paths=paths) for calls in (1, 10))
    diff = torchprof.compare(one, ten)
    assert (diff.counted, figures(diff, "Net.a", "cpu_total")) == (None, (5, 50, 45, 10))
    assert diff.notes[0].startswith(
        "Figures are totals of the runs: the number of calls of a model, or of steps, is unknown."
    )
    assert not any("Figures are totals" in note for note in torchprof.compare(simple(), simple()).notes)


def test_calls_of_layers_that_were_not_selected_are_unknown() -> None:
    everything = run_of([row(0, calls=6, cpu_ns=9), row(1, calls=6, cpu_ns=9)])
    some = run_of([row(0, calls=6, cpu_ns=9), row(NOT_SELECTED, cpu_ns=9)], paths=(("Net",),))
    diff = torchprof.compare(everything, some)
    assert figures(diff, "Net.a", "calls") == (6, None, None, None)
    assert figures(diff, "Net", "calls") == (6, 6, 0, 1)


def recursing(depth: int, outermost: int = 3, mark: bool = False) -> Run:
    model = Recursive()
    with torchprof.Profile(model, with_flops=True) as prof:
        for _ in range(outermost):
            model(torch.rand(2, 4), depth)
            if mark:
                prof.step()
    assert prof.run is not None
    return prof.run


def test_calls_of_a_recursive_model_are_not_used_as_unit(reloaded: Any) -> None:
    """Inner calls count as calls: per call, a model that computes more would seem to compute the same."""
    one, two, five = (recursing(depth) for depth in (1, 2, 5))
    assert [run.layers[0].recursive for run in (one, two, five)] == [False, True, True]
    assert reloaded(two) == two
    diff = torchprof.compare(two, five)
    assert diff.counted is None and figures(diff, "Recursive", "flops")[3] == 2.5
    steps = torchprof.compare(recursing(2, 3, mark=True), recursing(5, 4, mark=True))
    assert (steps.unit, steps.counts) == ("step", (3, 4))
    assert figures(steps, "Recursive", "flops")[3] == 2.5


def test_unknown_figures_are_not_the_same() -> None:
    one = [row(0, calls=1, flops=4), row(1, calls=1, flops=3, uncounted=1)]
    diff = torchprof.compare(*[run_of(one, measured=COUNTED)] * 2)
    text = diff.report()
    assert "Not shown: 1 row with unknown changes." in text.replace("3 rows", "1 row")
    assert "without a change" not in text


def test_a_figure_unknown_in_one_run_has_an_unknown_difference() -> None:
    before = run_of([row(0, calls=1, cpu_ns=1), row(1, op("aten::f"), uncounted=1, flops=3), row(1)], measured=COUNTED)
    after = run_of([row(0, calls=1, cpu_ns=2), row(1, flops=9, cpu_ns=5), row(3, flops=1)], measured=COUNTED)
    diff = torchprof.compare(before, after)
    assert figures(diff, "Net.a", "flops") == (None, 9, None, None)  # a lower bound before
    assert figures(diff, "Net", "flops") == (None, 10, None, None)
    assert figures(diff, "Net", "self_flops") == (0, 0, 0, None)
    assert figures(diff, "Net.b.0", "cpu_total") == (None, 0, None, None)  # never called before
    assert figures(diff, "Net.b.0", "calls") == (0, 1, 1, None)
    assert change(diff, "Net.a", "flops").verdict == "unknown"
    assert {one[0]: one[1:4] for one in shown(diff.report(sort_by="flops"))}["Net.a"] == ["≥ 3", "9", "–"]
    assert change(diff, "Net.a", "flops").at_least == (3, None)


def test_a_measure_of_only_one_run_is_a_note_and_not_compared() -> None:
    before = run_of([row(0, cpu_ns=1)], measured=COUNTED, requested=COUNTED, flags=(("with_flops", True),))
    after = run_of([row(0, cpu_ns=1)], flags=(("with_flops", False),))
    diff = torchprof.compare(before, after)
    assert diff.quantity("flops") is None and diff.quantity("cpu_total") is not None
    assert "FLOPs is not compared: it was measured only before." in diff.notes
    assert any("with_flops was on only before" in note for note in diff.notes)
    with pytest.raises(TorchprofError, match="Not measured in both runs: 'flops'"):
        diff.report(sort_by="flops")


def test_layers_that_were_not_selected_are_unknown_and_their_work_is_compared() -> None:
    rows = [row(1, cpu_ns=4), row(NOT_SELECTED, op("aten::x"), cpu_ns=6)]
    diff = torchprof.compare(run_of(rows, paths=(("Net", "a"),)), run_of(rows, paths=(("Net", "a"),)))
    assert figures(diff, "Net.a", "cpu_total") == (4, 4, 0, 1)
    assert figures(diff, "Net", "cpu_total") == (None, None, None, None)
    assert figures(diff, "(not selected)", "cpu_total") == (6, 6, 0, 1)


def test_a_compiled_layer_that_was_never_called_has_unknown_calls() -> None:
    layers = [layer("Net"), layer("Net.a", compiled=True)]
    run = made(layers, [row(0, cpu_ns=4)])
    assert figures(torchprof.compare(run, run), "Net.a", "calls") == (None, None, None, None)


def test_net_memory_below_zero_has_no_ratio() -> None:
    before = run_of([row(0, cpu_allocated=10, cpu_freed=30)], measured=MEMORY)
    after = run_of([row(0, cpu_allocated=10)], measured=MEMORY)
    assert figures(torchprof.compare(before, after), "Net", "cpu_mem") == (-20, 10, 30, None)


def test_ranks_are_summed_and_their_largest_peak_taken() -> None:
    def of_ranks(times: Sequence[int], peaks: Sequence[int]) -> Run:
        run = run_of([row(0, cpu_ns=ns) for ns in times])
        run.rows.columns["rank"][:] = type(run.rows.columns["rank"])("q", range(len(times)))
        samples = {SampleKey(0, FORWARD, rank, "cpu", "peak_bytes"): calls(peak) for rank, peak in enumerate(peaks)}
        return replace(run, metas=tuple(replace(run.meta, rank=rank) for rank in range(len(times))), samples=samples)

    two, three = of_ranks([10, 30], [5, 9]), of_ranks([20, 30, 40], [5, 6, 7])
    same = torchprof.compare(two, of_ranks([20, 40], [8, 1]))
    assert figures(same, "Net", "cpu_total") == (40, 60, 20, 1.5)
    assert figures(same, "Net", "cpu_peak") == (9, 8, -1, 8 / 9)
    more = torchprof.compare(two, three)  # each rank called the model once
    assert figures(more, "Net", "cpu_total") == (20, 30, 10, 1.5)
    assert any("ranks: 2 before, 3 after" in note for note in more.notes)


@pytest.mark.parametrize("seed", range(20))
def test_differences_of_all_layers_and_outside_add_up_to_that_of_all_rows(seed: int) -> None:
    rng = random.Random(seed)

    def some_run() -> Run:
        paths = ["Net"]
        for number in range(rng.randint(3, 12)):
            paths.append(f"{rng.choice(paths)}.{rng.choice('abc')}{number if rng.random() < 0.3 else ''}")
        paths = sorted(set(paths))
        layers = [layer(path, rng.choice("XY"), rng.randint(0, 3)) for path in paths]
        where = [*range(len(layers)), OUTSIDE, NOT_SELECTED]
        names = [name for name in FIELDS if name != "uncounted"]
        rows = [row(at, phase=rng.choice(PHASES), **{rng.choice(names): rng.randint(1, 99)}) for at in where * 3]
        rows += [row(at, calls=1) for at in range(len(layers))]
        return made(layers, [*rows, row(0, calls=rng.randint(1, 3))], measured=FIELDS, requested=FIELDS, device="cuda")

    before, after = some_run(), some_run()
    diff = torchprof.compare(before, after)
    counts = diff.counts if diff.unit else (1, 1)
    for quantity in diff.quantities:
        if quantity.is_self and quantity.what != "params":
            measure = quantity.measure
            sums = [
                sum(measure.of(one.cost) for one in run.rows if in_column_of(one.phase) == quantity.phase) / count
                for run, count in zip((before, after), counts)
            ]
            found = sum(pair.changes[quantity.key].difference or 0 for pair in diff.walk())
            assert found == pytest.approx(sums[1] - sums[0])
    # Every layer of both is there just once.
    assert sorted(pair.before.path for pair in diff.walk() if pair.before) == sorted(one.path for one in before.layers)
    assert sorted(pair.after.path for pair in diff.walk() if pair.after) == sorted(one.path for one in after.layers)


# Which layer is which


def matched(before: Sequence[Layer], after: Sequence[Layer]) -> dict[str, tuple[str, str | None]]:
    """By path after (with "-" in front of a removed one): how it matched, and the path before."""
    diff = torchprof.compare(made(before, []), made(after, []))
    found = {}
    for pair in diff.walk():
        path = "" if pair.after else "-"
        found[path + ".".join(pair.path)] = pair.how, pair.before.name if pair.before else None
    return found


CONV = {"kind": "Conv2d", "params": 100, "settings": "3, 64"}
POOL = {"kind": "MaxPool2d", "settings": "4", "input_shapes": ((1, 32, 8),)}
CONTENTS: dict[str, dict[str, Any]] = {
    "": {},
    "linear": FC,
    "linear-7": {**FC, "params": 7},
    "linear-80": {**FC, "params": 80},
    "linear-without-settings": {**FC, "settings": ""},
    "conv": CONV,
    "conv-200": {**CONV, "params": 200},
    "pool": POOL,
    "pool-of-64": {**POOL, "input_shapes": ((1, 64, 8),)},
    "relu": {"kind": "ReLU"},
    "relu-x": {"kind": "ReLU", "settings": "x"},
    "norm": {"kind": "BatchNorm2d", "params": 8},
    "other": {"kind": "Other"},
    **{f"{kind}{params}": {"kind": kind, "params": params} for kind in "pq" for params in (1, 2, 3)},
}


def net_with(layers: str) -> list[Layer]:
    """Net with layers such as ``path=content``; without a path they are items of a list: 0, 1, …"""
    found = [layer("Net")]
    for number, word in enumerate(layers.split()):
        path, _, content = f"{number}={word}".partition("=") if word in CONTENTS else word.partition("=")
        found.append(layer(f"Net.{path}", **CONTENTS[content]))
    return found


def changed_layers(before: str, after: str) -> str:
    """How each layer matched, but for those that are the same at the same path."""
    said = []
    for pair in torchprof.compare(made(net_with(before), []), made(net_with(after), [])).walk():
        path = ".".join(pair.path[1:])
        was = ".".join(pair.before.path[1:]) if pair.before else None
        if pair.how in ("added", "removed"):
            said.append(f"{pair.how} {path}")
        elif (pair.how, was) != ("same", path):
            said.append(f"{pair.how} {was}>{path}")
    return ", ".join(said)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # A layer is found by its content; settings that only one run has do not count.
        ("fc=linear", "head=linear", "renamed fc>head"),
        ("fc=linear-without-settings", "head=linear", "renamed fc>head"),
        # A moved subtree is reported only at its top.
        (
            "x x.block x.block.fc=linear y",
            "x y y.block y.block.fc=linear",
            "moved x.block>y.block, same x.block.fc>y.block.fc",
        ),
        (
            "features features.0=conv",
            "backbone=other backbone.features backbone.features.0=conv",
            "added backbone, moved features>backbone.features, same features.0>backbone.features.0",
        ),
        # Two equal layers are not matched by guess, but by name.
        ("a=linear b=linear", "c=linear d=linear", "added c, added d, removed a, removed b"),
        (
            "x x.q=linear x.k=linear",
            "y=other y.k=linear y.q=linear",
            "added y, moved x.k>y.k, moved x.q>y.q, removed x",
        ),
        # Layers without parameters match by name or place, but not by a number for a name.
        ("x x.act=relu y", "x y y.relu=relu", "removed x.act, added y.relu"),
        ("x x.act=relu y", "x y y.act=relu", "moved x.act>y.act"),
        ("x x.act=relu y", "x x.relu=relu y", "renamed x.act>x.relu"),
        ("x x.0=relu y", "x y y.0=relu", "removed x.0, added y.0"),
        # An item inserted into a list shifts the items after it.
        ("conv relu linear relu", "conv norm relu linear relu", "added 1, renamed 1>2, renamed 2>3, renamed 3>4"),
        ("conv norm relu linear relu", "conv relu linear relu", "renamed 2>1, renamed 3>2, renamed 4>3, removed 1"),
        ("linear linear linear", "linear linear linear linear", "added 3"),
        # Items that are not equal match by number and kind; between equal items, those of one kind match.
        ("conv linear", "conv-200 linear", ""),
        ("conv linear", "conv-200 linear-80 relu", "added 2"),
        (
            "conv relu pool linear",
            "conv-200 norm other pool-of-64 linear",
            "added 1, added 2, renamed 2>3, renamed 3>4, removed 1",
        ),
        # Similar items are not matched by guess, nor at different numbers.
        (
            "conv norm relu relu linear",
            "conv relu-x other linear",
            "added 1, added 2, renamed 4>3, removed 1, removed 2, removed 3",
        ),
        (
            "conv norm relu relu linear",
            "conv other relu-x linear",
            "added 1, added 2, renamed 4>3, removed 1, removed 2, removed 3",
        ),
        (
            "conv linear relu relu",
            "conv norm linear relu-x other",
            "added 1, renamed 1>2, added 3, added 4, removed 2, removed 3",
        ),
        # Between matched items, equal items match.
        (
            "p1 q1 p2 q1 p3",
            "linear p1 q2 q1 p2 q2 q1 p3 conv",
            "added 0, renamed 0>1, added 2, renamed 1>3, renamed 2>4, added 5, renamed 3>6, renamed 4>7, added 8",
        ),
        # Of two items that changed places one keeps its order; the other is found by its content.
        ("conv linear linear-7", "conv linear-7 linear relu", "renamed 2>1, renamed 1>2, added 3"),
    ],
)
def test_which_layer_is_which(before: str, after: str, expected: str) -> None:
    assert changed_layers(before, after) == expected


def test_parts_of_a_model_that_are_models_of_their_own_after_are_moved() -> None:
    before = [layer("Net"), layer("Net.body", **CONV), layer("Net.head", **FC)]
    found = matched(before, [layer("Body", **CONV), layer("Head", **FC)])
    assert found == {"Body": ("moved", "Net.body"), "Head": ("moved", "Net.head"), "-Net": ("removed", "Net")}


def test_added_and_removed_layers_count_in_full(golden: Callable[..., None]) -> None:
    """Of an added subtree only the top is reported."""
    before = made([layer("Net"), layer("Net.old", **FC)], [row(0, cpu_ns=1), row(1, cpu_ns=5)])
    layers = [layer("Net"), layer("Net.new", **CONV), layer("Net.new.a"), layer("Net.new.b")]
    diff = torchprof.compare(before, made(layers, [row(0, cpu_ns=1), row(1, cpu_ns=9)]))
    assert figures(diff, "Net.old", "cpu_total") == (5, None, -5, None)
    assert figures(diff, "Net.new", "cpu_total") == (None, 9, 9, None)
    assert figures(diff, "Net", "cpu_total") == (6, 10, 4, 10 / 6)
    golden(drawn(diff, "table"), drawn(diff, "markdown"))


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({}, "renamed"),
        ({"kind": "Conv1d"}, "added"),
        ({"settings": "4, 9"}, "added"),
        ({"params": 41}, "added"),
        ({"input_shapes": ((8, 4),)}, "added"),
        ({"output_shapes": ((8, 8),)}, "added"),
    ],
)
def test_which_attributes_are_part_of_the_content(change: dict[str, Any], how: str) -> None:
    old = {**FC, "input_shapes": ((2, 4),), "output_shapes": ((2, 8),)}
    found = matched([layer("Net"), layer("Net.fc", **old)], [layer("Net"), layer("Net.head", **{**old, **change})])
    assert found["Net.head"][0] == how


def test_shapes_do_not_count_if_the_model_was_called_on_different_shapes() -> None:
    before = [layer("Net", input_shapes=((2, 4),)), layer("Net.fc", input_shapes=((2, 4),), **FC)]
    after = [layer("Net", input_shapes=((9, 4),)), layer("Net.head", input_shapes=((9, 4),), **FC)]
    assert matched(before, after)["Net.head"] == ("renamed", "Net.fc")


def test_models_of_different_classes_are_matched_in_order_with_a_note() -> None:
    before = made([layer("Net"), layer("Net.fc", **FC)], [row(0, cpu_ns=2), row(1, cpu_ns=3)])
    after = made([layer("Net2"), layer("Net2.fc", **FC)], [row(0, cpu_ns=4), row(1, cpu_ns=3)])
    diff = torchprof.compare(before, after)
    assert figures(diff, "Net2", "cpu_total") == (5, 7, 2, 1.4)
    assert pair_of(diff, "Net2.fc").how == "same"
    assert "The models differ: Net before, Net2 after." in diff.notes


def test_models_match_by_name_first_and_an_extra_model_is_not_guessed() -> None:
    assert matched([layer("G"), layer("D")], [layer("D"), layer("G2")]) == {"D": ("same", "D"), "G2": ("same", "G")}
    assert matched([layer("G")], [layer("D"), layer("E")]) == {
        "D": ("added", None),
        "E": ("added", None),
        "-G": ("removed", "G"),
    }


def test_a_layer_of_another_kind_at_the_same_path_matches_and_is_reported() -> None:
    before, after = [layer("Net"), layer("Net.fc", **FC)], [layer("Net"), layer("Net.fc", "Lora", 50)]
    diff = torchprof.compare(made(before, []), made(after, []))
    assert pair_of(diff, "Net.fc").differs == (("kind", "Linear", "Lora"), ("parameters", "40", "50"))


def test_a_removed_layer_is_below_its_moved_parent() -> None:
    before = [layer("Net"), layer("Net.a", **FC), layer("Net.a.gone", **CONV)]
    after = [layer("Other"), layer("Other.a", **FC)]
    diff = torchprof.compare(made(before, []), made(after, []))
    assert [one.how for one in pair_of(diff, "Other.a").children] == ["removed"]


def test_models_deeper_than_pythons_recursion() -> None:
    paths = [("Net", *["x"] * depth) for depth in range(1500)]
    old = [Layer(path, "Deep", 1) for path in paths]
    new = [Layer(("Net",), "Deep", 1), *(Layer(("Net", "y", *path[2:]), "Deep", 1) for path in paths[1:])]
    diff = torchprof.compare(made(old, [row(1499, cpu_ns=5)]), made(new, [row(1499, cpu_ns=7)]))
    moved = [pair for pair in diff.walk() if pair.how != "same"]
    assert [(pair.how, pair.path) for pair in moved] == [("renamed", ("Net", "y"))]
    for report in ("table", "json", "markdown"):
        diff.report(report)


# Noise


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (3, 3), (4, 4), (2, 6), (5, 4), (6, 6)])
@pytest.mark.parametrize("values", [1000, 4, 2, 1])
def test_the_p_of_few_values_equals_a_count_of_all_assignments(n: int, m: int, values: int) -> None:
    rng = random.Random(n * 100 + m * 10 + values)
    for _ in range(5):
        both = [rng.randrange(values) for _ in range(n + m)]

        def u(chosen: Sequence[int], both: Sequence[int] = both) -> float:
            ones = [both[at] for at in chosen]
            others = [value for at, value in enumerate(both) if at not in chosen]
            return sum((one > other) + (one == other) / 2 for one in ones for other in others)

        seen = abs(u(range(n)) - n * m / 2)
        ways = [abs(u(chosen) - n * m / 2) >= seen for chosen in combinations(range(n + m), n)]
        assert rank_test(sorted(both[:n]), sorted(both[n:])) == pytest.approx(sum(ways) / len(ways))


def test_the_p_of_many_values_by_hand() -> None:
    # n = m = 21, no ties, all of one side above: U = 441, mean 220.5, variance 21·21·43/12 = 1580.25.
    # z = (220.5 - 0.5) / 39.752 = 5.5343; 2·(1 - Φ(5.5343)) = 3.1247e-8
    first, second = list(range(21)), list(range(21, 42))
    assert rank_test(first, second) == pytest.approx(3.1247e-8, rel=1e-3)
    # Ties: 21 zeros against 20 zeros and a one. U differs from its mean by 10.5; the variance is corrected by a tie of
    # 41 and of 1: 36.75·(43 - (41³ - 41)/(42·41)) = 36.75·(43 - 40) = 110.25; z = 10/10.5; p = 0.34090
    assert rank_test([0] * 21, [0] * 20 + [1]) == pytest.approx(0.34090, rel=1e-3)
    assert rank_test([5] * 30, [5] * 30) == 1


def test_the_p_of_forty_values_by_hand() -> None:
    # All of one side above: one way of C(40, 20) and its mirror image. One pair the other way round: two ways of each.
    assert rank_test(range(20), range(20, 40)) == 2 / math.comb(40, 20)
    assert rank_test([*range(19), 20], [19, *range(21, 40)]) == 4 / math.comb(40, 20)
    assert rank_test(range(13), range(13, 40)) == rank_test(range(27, 40), range(27)) == 2 / math.comb(40, 13)


def test_false_discovery_rates_by_hand() -> None:
    # Sorted: 0.01·4/1 = 0.04, 0.02·4/2 = 0.04, 0.04·4/3 = 0.0533, 0.5·4/4 = 0.5
    assert false_discovery_rates([0.5, 0.01, 0.04, 0.02]) == pytest.approx([0.5, 0.04, 0.16 / 3, 0.04])
    assert false_discovery_rates([0.04, 0.05]) == pytest.approx([0.05, 0.05])  # never less than a smaller p's
    assert false_discovery_rates([]) == []


def test_how_many_calls_a_significant_test_needs() -> None:
    def sides(n: int) -> Noise:
        return noise_of(range(n), range(100, 100 + n))

    assert not sides(FEWEST - 1).could_tell(1) and sides(FEWEST).could_tell(1)
    assert not sides(4).could_tell(2)  # 2 / 70 is above 0.05 / 2
    assert sides(8).could_tell(100) and not sides(7).could_tell(100)  # 2/12870 and 2/3432 against 0.0005


def normal(rng: random.Random, n: int) -> list[float]:
    return [1 + 0.05 * rng.gauss(0, 1) for _ in range(n)]


def heavy(rng: random.Random, n: int) -> list[float]:
    """Times with rare long outliers: a distribution without a finite variance."""
    return [1 + 0.05 * rng.paretovariate(1.5) for _ in range(n)]


def drifting(correlation: float) -> Callable[[random.Random, int], list[float]]:
    """Each call resembles the one before it: a first-order autoregressive process."""

    def draw(rng: random.Random, n: int) -> list[float]:
        state, values = rng.gauss(0, 1), []
        for _ in range(n):
            values.append(1 + 0.05 * state)
            state = correlation * state + (1 - correlation**2) ** 0.5 * rng.gauss(0, 1)
        return values

    return draw


def net_of(*net: int, **times: Sequence[int]) -> Run:
    """Net, whose calls took these times, or unknown ones; and layers in it, whose calls took these times."""
    samples = {
        SampleKey(at, FORWARD, 0, "cpu", "cpu_ns"): calls(*values) for at, values in enumerate(times.values(), 1)
    }
    samples |= {SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): calls(*net)} if net else {}
    rows = [row(at, calls=len(values), cpu_ns=sum(values)) for at, values in enumerate(times.values(), 1)]
    layers = [layer("Net"), *(layer(f"Net.{name}") for name in times)]
    return made(layers, [row(0, calls=max(map(len, times.values()))), *rows], samples)


def told(samples: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[bool]:
    """The layers that a comparison reports as slower or faster, given the times of their single calls."""
    diff = torchprof.compare(
        *(
            net_of(**{f"l{at}": [round(value * 1e6) for value in both[side]] for at, both in enumerate(samples)})
            for side in (0, 1)
        )
    )
    return [change(diff, f"Net.l{at}", "cpu_total").verdict in ("slower", "faster") for at in range(len(samples))]


@pytest.mark.parametrize(
    ("draw", "n", "most"),
    [
        (normal, 5, ALPHA),
        (normal, 30, ALPHA),
        (heavy, 10, ALPHA),
        (heavy, 100, ALPHA),
        (drifting(0.5), 30, ALPHA),
        (drifting(0.8), 100, ALPHA),
        # Drift that is longer than the recording cannot be told from a difference: docs/compare.md says so.
        (drifting(0.9), 30, 0.4),
    ],
    ids=["normal 5", "normal 30", "heavy 10", "heavy 100", "drift 0.5", "drift 0.8", "drift 0.9"],
)
def test_false_alarms_of_equal_runs_are_few(draw: Any, n: int, most: float) -> None:
    rng = random.Random(7)
    alarms = [alarm for _ in range(15) for alarm in told([(draw(rng, n), draw(rng, n)) for _ in range(20)])]
    assert sum(alarms) / len(alarms) <= most


@pytest.mark.parametrize(("draw", "n"), [(normal, 10), (normal, 100), (heavy, 30), (drifting(0.5), 30)])
def test_a_planted_shift_of_a_fifth_is_found(draw: Any, n: int) -> None:
    rng, found = random.Random(11), 0
    for _ in range(20):
        samples = [(draw(rng, n), draw(rng, n)) for _ in range(20)]
        samples[3] = samples[3][0], [1.2 * value for value in samples[3][1]]
        found += told(samples)[3]
    assert found >= 18


def test_verdicts_need_a_significant_rank_test_and_a_large_difference() -> None:
    def verdict(before: Sequence[int], after: Sequence[int]) -> str:
        return change(torchprof.compare(timed(*before), timed(*after)), "Net", "cpu_total").verdict

    tight = list(range(100, 110))
    assert verdict(tight, [value + 50 for value in tight]) == "slower"
    assert verdict([value + 50 for value in tight], tight) == "faster"
    assert verdict(tight, [value + 1 for value in tight]) == "within noise"
    assert verdict(tight, tight) == "same"
    wide = [100, 200, 300, 400, 500, 600, 700, 800]
    # The ranks alone are sure of it (p < 0.001), but the medians differ by less than the middle half of the calls does.
    assert verdict(wide * 8, [value + 230 for value in wide * 8]) == "within noise"
    assert verdict([*tight[:-1], 9000], [value + 50 for value in tight]) == "within noise"  # one call made the sum
    assert verdict([100, 101, 102], [900, 901, 902]) == "unknown"  # three calls cannot tell
    assert verdict([100], [900]) == "unknown"


def test_too_few_calls_with_many_layers_give_unknown() -> None:
    def verdicts(layers: int) -> set[str]:
        key = SampleKey(0, FORWARD, 0, "cpu", "cpu_ns")
        paths = [layer("Net"), *(layer(f"Net.l{number}") for number in range(layers - 1))]
        runs = []
        for shift in (0, 500):
            spreads = {key._replace(layer=at): calls(*range(100, 104)) for at in range(layers)}
            spreads[key] = calls(*range(100 + shift, 104 + shift))
            runs.append(
                made(paths, [row(at, calls=4, cpu_ns=400 + (at == 0) * shift) for at in range(layers)], spreads)
            )
        return {change(torchprof.compare(*runs), "Net", "cpu_total").verdict}

    assert verdicts(1) == {"slower"}
    assert verdicts(30) == {"unknown"}


QUIET, NOISY = list(range(1000, 1010)), list(range(10_000, 20_000, 1000))


def test_changes_within_noise_come_last() -> None:
    before = net_of(noisy=NOISY, slower=QUIET)
    after = net_of(noisy=[ns + 2000 for ns in NOISY], slower=[ns + 300 for ns in QUIET])
    text = torchprof.compare(before, after).report()
    assert [line[0] for line in shown(text)] == ["Net", "Net.slower", "Net.noisy"]
    assert text.splitlines()[0].endswith("The largest part beyond noise: Net.slower (+3.000us).")  # of 23 us


def test_one_call_on_a_busy_machine_is_not_the_largest_change() -> None:
    """Of differences that are all beyond noise, the medians say which is the larger."""
    before = net_of(*QUIET, slower=QUIET, hiccup=QUIET)
    slower, net = [ns + 300 for ns in QUIET], [ns * 10 for ns in QUIET]
    once = torchprof.compare(before, net_of(*net, slower=slower, hiccup=[*QUIET[:-1], 50_000]))
    assert change(once, "Net.hiccup", "cpu_total").difference == 50_000 - 1009
    assert change(once, "Net.slower", "cpu_total").difference == 3000
    assert once.report("headline").endswith("The largest part beyond noise: Net.slower (+3.000us).")
    more = torchprof.compare(before, net_of(*net, slower=slower, hiccup=[*(ns + 100 for ns in QUIET[:-1]), 90_000]))
    assert change(more, "Net.hiccup", "cpu_total").verdict == "slower"
    for diff in (once, more):
        assert [line[0] for line in shown(diff.report())] == ["Net", "Net.slower", "Net.hiccup"]


def test_steps_give_the_noise_of_self_times() -> None:
    own, child = [1000 + at for at in range(12)], [5000 + 400 * (at % 3) for at in range(12)]
    diff = torchprof.compare(stepped(own, child), stepped([value + 90 for value in own], child))
    # The child's noise hides it in the total, but not in what the layer took itself, step by step.
    assert change(diff, "Net", "cpu_total").verdict == "within noise"
    assert change(diff, "Net", "self_cpu_total").verdict == "slower"
    noise = change(diff, "Net", "self_cpu_total").noise
    assert noise is not None and noise.medians == (1005.5, 1095.5) and noise.counts == (12, 12)
    assert change(diff, "Net.a", "self_cpu_total").verdict == "same"
    assert diff.whole["step"].difference == 180


def test_steps_give_the_noise_of_device_times() -> None:
    own, child = [1000] * 8, [5000] * 8
    fast, slow = [300 + at for at in range(8)], [600 + at for at in range(8)]
    diff = torchprof.compare(stepped(own, child, fast), stepped(own, child, slow))
    assert change(diff, "Net.a", "cuda_total").verdict == "slower"
    assert change(diff, "Net", "self_cuda_total").verdict == "same"
    assert change(diff, "Net", "cuda_total").noise == noise_of(fast, slow)
    assert diff.report().startswith("Net: CUDA total 2.428us → 4.828us (+98.8%), slower")


def test_the_devices_of_a_step_are_added_up() -> None:
    own, first, second = [1000] * 8, [300 + at for at in range(8)], [7 * at for at in range(8)]
    run = stepped(own, own, first)
    key = SampleKey(1, FORWARD, 0, "cuda:1", "step_device_ns")
    both = replace(run, samples={**run.samples, key: calls(*second)})
    noise = change(torchprof.compare(both, both), "Net.a", "cuda_total").noise
    assert noise is not None and noise.medians[0] == 303.5 + 24.5


def test_times_of_steps_with_several_calls_are_per_call() -> None:
    run = stepped([100] * 8, [300 + at for at in range(8)])
    columns = {name: column[:] for name, column in run.rows.columns.items()}
    columns["calls"][0] = 16  # two calls of the model in a step, that took no longer
    twice = replace(run, rows=replace(run.rows, columns=columns))
    noise = change(torchprof.compare(run, twice), "Net", "cpu_total").noise
    assert noise is not None and noise.medians == (403.5, 403.5 / 2)


def test_a_layer_that_is_called_more_often_is_slower() -> None:
    key = SampleKey(1, FORWARD, 0, "cpu", "cpu_ns")
    layers = [layer("Net"), layer("Net.a")]
    times = [100 + at for at in range(10)]
    once = made(layers, [row(0, calls=10), row(1, calls=10, cpu_ns=sum(times))], {key: calls(*times)})
    twice = made(layers, [row(0, calls=10), row(1, calls=20, cpu_ns=2 * sum(times))], {key: calls(*times * 2)})
    found = change(torchprof.compare(once, twice), "Net.a", "cpu_total")
    assert found.verdict == "slower" and found.noise is not None and found.noise.medians == (104.5, 209)


def test_steps_of_a_file_without_hashes_are_not_paired() -> None:
    run = stepped([100 + at for at in range(8)], [300] * 8)
    old = replace(run, samples={key: replace(one, hashes=(0,) * len(one.hashes)) for key, one in run.samples.items()})
    assert change(torchprof.compare(old, old), "Net", "self_cpu_total").noise is None


# Real models


class Slow(Layers):
    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds, fc=nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.fc(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, seconds: float = 0.0, wide: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, wide), nn.ReLU(), nn.Linear(wide, 16))
        self.slow = Slow(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slow(self.features(x))  # type: ignore[no-any-return]


def profiled(model: nn.Module, *, steps: bool = False, times: int = 12, **options: Any) -> Run:
    x = torch.rand(4, 16)
    model(x)
    with torchprof.Profile(model, **options) as prof:
        for _ in range(times):
            model(x).sum().backward()
            if steps:
                prof.step()
    return prof.run


def first_layer(text: str) -> str:
    """The row below that of the model."""
    table = text.split("\n\n")[1].splitlines()
    return table[3].split("|")[0].strip()


SLEEP = 0.15
"""Seconds: far longer than a call waits for a processor where other tests run at the same time."""


@pytest.mark.parametrize("steps", [False, True])
def test_a_planted_sleep_is_found_and_named_first(steps: bool) -> None:
    before, after = profiled(Net(), steps=steps), profiled(Net(SLEEP), steps=steps)
    diff = torchprof.compare(before, after)
    found = change(diff, "Net.slow", "self_cpu_total")
    assert found.before is not None and found.after is not None and found.after >= 12 * SLEEP * 1e9
    assert found.ratio == found.after / found.before
    assert change(diff, "Net.slow", "cpu_total").verdict == "slower"
    assert change(diff, "Net", "cpu_total").verdict == "slower"
    if steps:
        assert found.verdict == "slower" and found.noise is not None and found.noise.medians[1] >= SLEEP * 1e9
        assert diff.whole["step"].verdict == "slower"
    text = diff.report()
    assert first_layer(text) == "Net.slow"
    assert "Most of it in Net.slow (" in text.splitlines()[0]


def test_a_planted_wider_layer_has_the_flops_of_its_width() -> None:
    diff = torchprof.compare(profiled(Net(), with_flops=True), profiled(Net(wide=48), with_flops=True, times=5))
    # Linear 16 → wide on 4 rows: 2·4·16·wide and a bias of 4·wide; ReLU 4·wide; wide → 16: 2·4·wide·16 + 4·16
    assert figures(diff, "Net.features.0", "flops") == (2112, 6336, 4224, 3)
    assert figures(diff, "Net.features.1", "flops") == (64, 192, 128, 3)
    assert figures(diff, "Net.features.2", "flops") == (2048 + 64, 6144 + 64, 4096, 6208 / 2112)
    assert figures(diff, "Net.features.0", "params") == (272, 816, 544, 3)
    assert figures(diff, "Net.slow", "flops") == (2112, 2112, 0, 1)
    assert change(diff, "Net.features.0", "flops").verdict == "more"
    settings = ("settings", "in_features=16, out_features=16, bias=True", "in_features=16, out_features=48, bias=True")
    assert settings in pair_of(diff, "Net.features.0").differs


def test_the_times_of_a_step_equal_those_of_its_layers() -> None:
    """With one step, the value in the noise test is the figure itself, in every layer and phase, self and total."""
    before, after = profiled(Net(), steps=True, times=1), profiled(Net(), steps=True, times=1)
    diff = torchprof.compare(before, after)
    seen = 0
    for pair in diff.walk():
        for quantity in diff.quantities:
            found = pair.changes.get(quantity.key)
            if quantity.is_time and found is not None and pair.is_layer:  # what follows the last step is outside
                assert found.noise is not None and found.noise.medians == (found.before, found.after)
                seen += 1
    assert seen == 7 * 4  # forward and backward, self and total


def test_a_run_does_not_differ_from_itself() -> None:
    run = profiled(Net(), profile_memory=True, with_flops=True)
    diff = torchprof.compare(run, run)
    assert {one.verdict for pair in diff.walk() for one in pair.changes.values()} <= {"same", "unknown"}
    assert all(one.difference in (0, None) for pair in diff.walk() for one in pair.changes.values())
    assert diff.notes == ()
    assert "Not shown: 7 rows without a change." in diff.report()


# Notes and warnings


def test_different_conditions_are_notes(golden: Callable[..., None]) -> None:
    def meta(torch_version: str, threads: str, **more: Any) -> dict[str, Any]:
        return {
            "environment": (("torch", torch_version), ("threads", threads)),
            "switches": (("cudnn_tf32", more.pop("tf32")),),
            **more,
        }

    shapes = {"input_shapes": ((8, 3),), "dtype_bytes": (("float32", 4),), "training": True}
    other = {"input_shapes": ((16, 3),), "dtype_bytes": (("float16", 2),), "training": False}
    before = made([layer("Net", **shapes)], [row(0)], **meta("2.4.1", "2", tf32="True", machine="one"))
    after = made(
        [layer("Net", **other)],
        [row(0), row(0, op("aten::x"), phase=BACKWARD, cpu_ns=1)],
        **meta("2.13.0", "8", tf32="False", machine="two", device="cuda"),
    )
    golden("\n".join(torchprof.compare(before, after).notes))


def test_the_warnings_of_the_runs_are_in_the_diff() -> None:
    before, after = (
        run_of([row(0)], warnings=run_warnings("one", "both")),
        run_of([row(0)], warnings=run_warnings("both", "two")),
    )
    assert torchprof.compare(before, after).warnings == ("Before: one", "Both runs: both", "After: two")


def test_a_saved_file_is_compared() -> None:
    saved = DATA / "run-schema-1.json"
    diff = torchprof.compare(saved, simple())
    assert diff.quantity("cpu_total") is not None
    for report in ("table", "json", "markdown"):
        diff.report(report)
    same = torchprof.compare(saved, str(saved))
    assert all(one.difference in (0, None) for pair in same.walk() for one in pair.changes.values())


def test_a_run_without_environment_has_a_note() -> None:
    known, unknown = (
        run_of([row(0)], environment=words, versions=(("torch", "2.13.0"),)) for words in ((("torch", "2.13.0"),), ())
    )
    assert "The environment of the run before was not recorded." in torchprof.compare(unknown, known).notes


def counts(*flops: int, own: int = 0, params: int = 0) -> Run:
    """Net with layers l0, l1, … with these FLOPs, and its own."""
    layers = [layer("Net", params=params), *(layer(f"Net.l{number}") for number in range(len(flops)))]
    rows = [row(0, calls=1, flops=own), *(row(at, calls=1, flops=one) for at, one in enumerate(flops, 1))]
    return made(layers, rows, measured=COUNTED, requested=COUNTED)


@pytest.mark.parametrize(
    ("after", "own", "words"),
    [
        ((20, 20, 20, 20, 20, 20), 0, "The largest parts: Net.l0 (+10), Net.l1 (+10), Net.l2 (+10)."),  # 30 of 60
        ((21, 20, 20, 20, 20, 20), 0, "Most of it in Net.l0 (+11), Net.l1 (+10), Net.l2 (+10)."),  # 31 of 61
        ((70, 10, 0, 10, 10, 10), 0, "Most of it in Net.l0 (+60)."),
        ((40, 10, 10, 10, 10, 10), 40, "Most of it in Net (+40), Net.l0 (+30)."),
        # What became less holds nothing of what became more, and the difference of both is not what is shared.
        ((20, 20, 20, 20, 20, 20, 0, 0), 1, "The largest parts: Net.l0 (+10), Net.l1 (+10), Net.l2 (+10)."),
        ((0, 0, 0, 0, 0, 9), 0, "Most of it in Net.l0 (-10), Net.l1 (-10), Net.l2 (-10)."),  # 30 of 51
    ],
)
def test_most_of_it_is_more_than_half(after: tuple[int, ...], own: int, words: str) -> None:
    before = counts(*[10] * 6, *[20] * (len(after) - 6))
    text = torchprof.compare(before, counts(*after, own=own)).report("headline", sort_by="flops")
    assert text.endswith(f"%). {words}")


def test_a_layer_that_moved_away_is_part_of_the_difference_only() -> None:
    before = [layer("Net"), layer("Net.x"), layer("Net.x.fc", **FC), layer("Net.x.a"), layer("Net.y")]
    after = [layer("Net"), layer("Net.x"), layer("Net.x.a"), layer("Net.y"), layer("Net.y.fc", **FC)]
    meta = {"measured": COUNTED, "requested": COUNTED}
    diff = torchprof.compare(
        made(before, [row(2, flops=90), row(3, flops=20), *(row(at, calls=1) for at in range(5))], **meta),
        made(after, [row(4, flops=90), row(2, flops=10), *(row(at, calls=1) for at in range(5))], **meta),
    )
    flops = diff.quantity("flops")
    assert flops is not None and figures(diff, "Net.x", "flops")[2] == -100
    parts, hold_most, _ = diff.largest_parts(pair_of(diff, "Net.x"), flops)
    assert [one.name for one, _ in parts] == ["a"] and not hold_most


def test_peaks_do_not_add_up_so_none_holds_most_of_them() -> None:
    layers, key = [layer("Net"), layer("Net.a")], SampleKey(0, FORWARD, 0, "cpu", "peak_bytes")
    runs = [
        made(layers, [row(0, calls=1), row(1, calls=1)], {key: calls(by), key._replace(layer=1): calls(by)})
        for by in (1000, 3000)
    ]
    text = torchprof.compare(*runs).report("headline", sort_by="cpu_peak")
    assert text == "Net: CPU Peak 1000 B → 2.93 KB (+200.0%). The largest part: Net.a (+1.95 KB)."


def test_the_sentence_is_on_the_column_that_is_shown() -> None:
    """What a layer does by itself has no parts below."""
    diff = torchprof.compare(counts(10, 20), counts(10, 50, params=3))
    own = torchprof.compare(counts(10, own=1), counts(30, own=2))
    sentence = "Net: FLOPs 30 → 60 (+100.0%). Most of it in Net.l1 (+30)."
    for report, by in (("headline", "flops"), ("table", "flops"), ("markdown", "flops"), ("table", "FLOPs")):
        assert diff.report(report, sort_by=by).splitlines()[0] == sentence
    for one, by, said in (
        (diff, "params", "Net: Params 0 → 3. Most of it in Net (+3)."),
        (diff, "self_flops", "Net: Self FLOPs is the same, 0."),
        (own, "self_flops", "Net: Self FLOPs 1 → 2 (+100.0%)."),
    ):
        assert one.report("headline", sort_by=by) == said
    with pytest.raises(TorchprofError, match="Not measured in both runs: 'cuda_total'"):
        diff.report("headline", sort_by="cuda_total")


def test_changes_of_the_run_follow_the_sentence(golden: Callable[..., None]) -> None:
    quiet, slow = [1000 + at for at in range(10)], [3000 + at for at in range(10)]
    runs = [
        replace(stepped(own, quiet), memory=(Memory("cpu", 0, peak), Memory("cuda:0", 5, 7)))
        for own, peak in ((quiet, 1024), (slow, 3072))
    ]
    few = [stepped(own[:3], quiet[:3]) for own in (quiet, slow)]
    noisy = [stepped([value + add * at for at, value in enumerate(quiet)], quiet) for add in (900, 901)]
    on_cuda = [replace(one, metas=(replace(one.meta, device="cuda"),)) for one in runs]
    pairs = {"slower": runs, "faster": runs[::-1], "same": runs[:1] * 2, "few": few, "noisy": noisy, "cuda": on_cuda}
    golden(
        drawn(torchprof.compare(*runs), "table"),
        drawn(torchprof.compare(*runs), "markdown"),
        {title: "\n".join(changes_of_run(torchprof.compare(*both))) for title, both in pairs.items()},
    )
    assert changes_of_run(torchprof.compare(simple(), simple())) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("16, 24, bias=True", "16, 48, bias=True", "24 → 48"),
        (
            "in_features=16, out_features=24",
            "in_features=8, out_features=48",
            "in_features=16 → 8, out_features=24 → 48",
        ),
        (
            "3, 64, kernel_size=(7, 7), stride=(2, 2)",
            "3, 64, kernel_size=(3, 7), stride=(2, 2)",
            "kernel_size=(7, 7) → (3, 7)",
        ),
        ("x=[1, {2, 3}], y=4", "x=[1, {2, 5}], y=4", "x=[1, {2, 3}] → [1, {2, 5}]"),
        ("a=1, b=2", "b=2, a=1", "a=1, b=2 → b=2, a=1"),  # other names in that place
        ("a=1", "a=1, b=2", "a=1 → a=1, b=2"),
        ("1, 2", "1, a=2", "1, 2 → 1, a=2"),
        ("a=1,b=2", "a=1, b=2", "a=1,b=2 → a=1, b=2"),  # it differs in blanks alone
        ("x=(1, 2", "x=(1, 3", "x=(1, 2 → (1, 3"),
        ("1), 2", "1), 3", "2 → 3"),
        ("a=b=1, 2", "a=b=3, 2", "a=b=1 → b=3"),
        ("a, b", "a, \x1b|", "b → \\x1b|"),
    ],
)
def test_only_the_differing_settings_are_shown(before: str, after: str, words: str) -> None:
    runs = [
        made([layer("Net", settings="same"), layer("Net.fc", "Linear", settings=one)], []) for one in (before, after)
    ]
    diff = torchprof.compare(*runs)
    assert dict(changes_of_layers(diff)) == {"Changed": [f"Net.fc: settings {words}"]}
    assert pair_of(diff, "Net.fc").differs == (("settings", before, after),)  # in full for other programs


def test_the_list_of_changed_layers_is_cut_and_the_rest_is_counted(golden: Callable[..., None]) -> None:
    def kinds(kind: str, others: int) -> Run:
        return made([layer("Net"), *(layer(f"Net.l`{at}", kind) for at in range(others)), layer("Net.<b>", "A")], [])

    diff = torchprof.compare(kinds("A", 11), kinds("B", 11))
    golden(drawn(diff, "table"), drawn(diff, "markdown"))
    more = torchprof.compare(kinds("A", 30), kinds("B", 30))
    assert [*changes_of_layers(more)][1] == ("", ["Changed: 20 more layers, not shown."])
    assert [what for what, _ in changes_of_layers(torchprof.compare(kinds("A", 10), kinds("B", 10)))] == ["Changed"]


@pytest.mark.parametrize("bad", [None, 3, [simple()], {"a": 1}, Meta(("Net",))])
def test_arguments_that_are_no_runs_raise(bad: Any) -> None:
    with pytest.raises(TorchprofError, match=r"not a run\. compare takes"):
        torchprof.compare(simple(), bad)
    with pytest.raises(TorchprofError, match=r"before is .*compare takes"):
        torchprof.compare(bad, simple())


# Reports

HOSTILE = (
    "<script>alert(1)</script>",
    "a|b",
    "line\nbreak",
    "\x1b[31mred",
    "`code`",
    "\udc80",
    'quo"te',
    "semi;colon",
    "",
)


def hostile(ns: int) -> Run:
    layers = [layer("Net"), *(Layer(("Net", name), f"K{name}", 1, settings=f"s{name}{ns}") for name in HOSTILE)]
    rows = [row(at, cpu_ns=ns + at) for at in range(len(layers))]
    return made(
        layers, [*rows, row(OUTSIDE, label("x|y"), cpu_ns=ns)], warnings=run_warnings(f"doubt {HOSTILE[0]}\n|{ns}")
    )


def test_hostile_names_stay_text() -> None:
    diff = torchprof.compare(hostile(5), hostile(9))
    table = diff.report()
    assert "\x1b" not in table and "line\\nbreak" in table
    lines = table.split("\n\n")[1].splitlines()
    assert len(lines) == 2 + 1 + len(HOSTILE) + 1  # headings and dashes, the model, its layers, outside
    markdown = diff.report("markdown")
    assert "\x1b" not in markdown and "\udc80" not in markdown
    rows = [one for one in markdown.splitlines() if one.startswith("|")]
    bars = {len([at for at, char in enumerate(one) if char == "|" and one[at - 1] != "\\"]) for one in rows}
    assert len(bars) == 1 and len(rows) == 2 + 1 + len(HOSTILE) + 1
    document = json.loads(diff.report("json"))
    assert [one["path"][1] for one in document["layers"][1 : 1 + len(HOSTILE)]] == list(HOSTILE)


def test_the_table_shows_top_depth_and_order(golden: Callable[..., None]) -> None:
    """In the order of the change by itself: +50, +5 and -7, -3, 0; at a depth, with what is below: +50."""
    after = run_of(
        [row(0, cpu_ns=10, calls=2), row(1, cpu_ns=25, calls=2), row(2, cpu_ns=5, calls=9), row(3, cpu_ns=90, calls=2)]
    )
    diff = torchprof.compare(simple(), after)
    golden(*(drawn(diff, "table", **each) for each in ({}, {"top": 1}, {"top": 3}, {"depth": 1}, {"sort_by": "calls"})))


@pytest.mark.parametrize(
    ("report", "options", "words"),
    [
        ("table", {"sort_by": "cpu_totl"}, "Choose from .*'cpu_total'"),
        ("table", {"top": -1}, "top is a number of rows"),
        ("table", {"depth": "x"}, "depth is a number"),
        ("table", {"tablefmt": "nope"}, "no format"),
        ("table", {"colour": 1}, "has no option"),
        ("tree", {}, "no report 'tree' of a diff"),
    ],
)
def test_bad_options(report: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TorchprofError, match=words):
        torchprof.compare(simple(), simple(2)).report(report, **options)


def test_cells_show_the_share_and_the_verdict(golden: Callable[..., None]) -> None:
    """Slower by 5 us beyond noise; within noise; of unknown noise."""
    tight = list(range(1000, 1010))
    runs = [
        stepped([value + 500 * side for value in tight], [300 + at * 50 + side for at in range(10)]) for side in (0, 1)
    ]
    golden(drawn(torchprof.compare(*runs), "table"), drawn(torchprof.compare(simple(), simple(2)), "table"))


def test_json_has_all_of_the_diff(tmp_path: Path) -> None:
    diff = torchprof.compare(simple(), simple(2))
    diff.export(tmp_path / "diff.json")
    document = json.loads((tmp_path / "diff.json").read_text(encoding="utf-8"))
    assert (document["format"], document["schema"]) == ("torchprof-diff", 1)
    assert [tuple(one["path"]) for one in document["layers"]] == [pair.path for pair in diff.walk()]
    for one, pair in zip(document["layers"], diff.walk()):
        above = None if one["parent"] is None else document["layers"][one["parent"]]["path"]
        assert above == (list(pair.path[:-1]) or None)
        for key, found in pair.changes.items():
            assert one["changes"][key]["before"] == found.before and one["changes"][key]["after"] == found.after
            assert one["changes"][key]["ratio"] == found.ratio and one["changes"][key]["verdict"] == found.verdict
    assert {one["key"] for one in document["quantities"]} == set(document["layers"][0]["changes"])


def test_lower_bounds_are_shown_in_every_view() -> None:
    """3 FLOPs counted in two calls before, 14 in four after, so 7 in two: both are lower bounds."""

    def run(flops: int, calls: int) -> Run:
        return run_of([row(0, calls=calls), row(1, op("aten::f"), uncounted=1, flops=flops)], measured=COUNTED)

    diff = torchprof.compare(run(3, 2), run(14, 4))
    assert figures(diff, "Net", "flops") == (None, None, None, None)
    assert change(diff, "Net", "flops").at_least == (1.5, 3.5) and change(diff, "Net", "flops").verdict == "unknown"
    assert shown(diff.report(sort_by="flops"))[0][1:6] == ["≥ 1.50", "≥ 3.50", "–", "", "unknown"]
    assert "the change of FLOPs is unknown: ≥ 1.50 before, ≥ 3.50 after" in diff.report("headline", sort_by="flops")
    assert "| ≥ 1.50 | ≥ 3.50 | – |" in diff.report("markdown", sort_by="flops")
    told = json.loads(diff.report("json"))["layers"][0]["changes"]["flops"]
    assert (told["before"], told["after"], told["before_at_least"], told["after_at_least"]) == (None, None, 1.5, 3.5)
    added = torchprof.compare(made([layer("Net")], [row(0)], measured=COUNTED), run(3, 1))
    assert {one[0]: one[1:4] for one in shown(added.report(sort_by="flops"))}["Net.a (added)"] == ["", "≥ 3", "–"]


def test_noise_is_in_the_json() -> None:
    own = [1000 + at for at in range(12)]
    document = json.loads(torchprof.compare(stepped(own, own), stepped(own, own)).report("json"))
    noise = document["layers"][0]["changes"]["cpu_total"]["noise"]
    assert noise["counts"] == [12, 12] and noise["p"] == 1 and noise["medians"] == [2011, 2011]


def test_every_report_of_a_diff_handles_odd_runs() -> None:
    from torchprof.reports import known

    empty = made([layer("Net")], [])
    several = made([layer("A"), layer("A.x"), layer("B")], [row(0, cpu_ns=1), row(2, cpu_ns=4, calls=3)])
    fewer = made([layer("B")], [row(0, cpu_ns=1)])
    counts_only = made([layer("Net")], [row(0, flops=4)], measured=("macs", "flops"), requested=("macs", "flops"))
    for before, after in (
        (empty, empty),
        (several, fewer),
        (fewer, several),
        (counts_only, empty),
        (hostile(1), empty),
    ):
        diff = torchprof.compare(before, after)
        assert str(diff) == diff.report("table")
        for name in known("diff"):
            diff.report(name)
    assert "No model" not in repr(torchprof.compare(empty, several))


def test_a_file_with_any_number_changed_is_compared_or_raises(tmp_path: Path) -> None:
    sound = profiled(nn.Sequential(nn.Linear(16, 2)), steps=True, times=5, profile_memory=True, with_flops=True)
    document = json.loads(sound.report("json"))
    limits = [limit_of("cpu_total > +1%"), limit_of("peak > 1B"), limit_of("0: cpu_peak > +1%"), limit_of("flops > 1")]
    rng, compared = random.Random(5), 0
    for _ in range(200):
        damaged, way = copy.deepcopy(document), []
        here: Any = damaged
        while isinstance(here, (dict, list)) and here:  # down to any one value
            way.append(rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here)))
            above, here = here, here[way[-1]]
        above[way[-1]] = (
            rng.choice([0, 1, -1, 2**62, -(2**62)]) if isinstance(here, int) else rng.choice(["", "x", None])
        )
        (tmp_path / "run.json").write_text(json.dumps(damaged), encoding="utf-8")
        try:
            run = torchprof.load(tmp_path / "run.json")
        except TorchprofError:
            continue
        for pair in ((sound, run), (run, sound)):
            diff = torchprof.compare(*pair)
            for report in ("table", "markdown", "json", "headline"):
                diff.report(report)
            with contextlib.suppress(TorchprofError):
                check(diff, limits)
            compared += 1
    assert compared > 50


# The command


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    simple().save(tmp_path / "a.json")
    simple(2).save(tmp_path / "b.json.gz")
    code = (
        "import sys\n"
        "from torchprof.cli import main\n"
        f"files = [{str(tmp_path / 'a.json')!r}, {str(tmp_path / 'b.json.gz')!r}]\n"
        f"assert main(['compare', *files, '-o', {str(tmp_path / 'd.md')!r}, '-o', {str(tmp_path / 'd.json')!r}]) == 0\n"
        "import torchprof; torchprof.assert_budget(files[1], {'calls': 1}, files[0])\n"
        "print('torch' in sys.modules)"
    )
    lines = run_fresh(code).splitlines()
    assert lines[0].startswith("Net: forward CPU total 0.075us → 0.150us (+100.0%), noise unknown.")
    assert lines[-1] == "False"
    assert (tmp_path / "d.md").read_text(encoding="utf-8").startswith("Net: forward CPU total")
    assert json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))["format"] == "torchprof-diff"


def timed(*values: int, waited: float = 0.0) -> Run:
    """A run of one layer whose calls took these times, while the main thread waited for a share of the time."""
    samples = {SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): calls(*values)}
    run = made([layer("Net")], [row(0, calls=len(values), cpu_ns=sum(values))], samples)
    return replace(run, metas=(replace(run.meta, wall_ns=1000, run_delay_ns=round(1000 * waited)),))


def test_what_waiting_for_a_processor_may_explain_is_unclear() -> None:
    usual, slower, much_slower = range(100, 110), range(150, 160), range(300, 310)
    assert change(torchprof.compare(timed(*usual), timed(*slower)), "Net", "cpu_total").verdict == "slower"
    busy = torchprof.compare(timed(*usual), timed(*slower, waited=0.4))
    assert change(busy, "Net", "cpu_total").verdict == "unclear: the machine was busy"
    assert "unclear: the machine was busy" in busy.report() and "? and unclear" in busy.report()
    back = torchprof.compare(timed(*slower, waited=0.4), timed(*usual))
    assert change(back, "Net", "cpu_total").verdict == "unclear: the machine was busy"
    assert change(torchprof.compare(timed(*usual, waited=0.4), timed(*slower)), "Net", "cpu_total").verdict == "slower"
    far = torchprof.compare(timed(*usual), timed(*much_slower, waited=0.4))
    assert change(far, "Net", "cpu_total").verdict == "slower"


def test_a_limit_that_only_waiting_exceeds_passes() -> None:
    usual, busy = timed(*range(100, 110)), timed(*range(150, 160), waited=0.4)
    for limit, baseline in (({"cpu_total": "+10%"}, usual), ({"cpu_total": "120ns"}, None)):
        with pytest.warns(UserWarning, match="unclear, so it passes: .* for 40% of the time"):
            torchprof.assert_budget(busy, limit, baseline)
    with pytest.raises(AssertionError, match="Limit exceeded"):
        torchprof.assert_budget(timed(*range(300, 310), waited=0.4), {"cpu_total": "+10%"}, usual)


def test_the_headline_names_what_is_beyond_noise_in_a_run_within_noise() -> None:
    before = net_of(*NOISY, noisy=NOISY, slower=QUIET)
    after = net_of(*(ns + 300 for ns in NOISY), noisy=NOISY, slower=[ns + 300 for ns in QUIET])
    headline = torchprof.compare(before, after).report("headline")
    assert "within noise" in headline and headline.endswith(" Beyond noise: Net.slower (+3.000us).")

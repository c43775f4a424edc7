"""Pictures of runs as SVG: where blocks, spans, bars, points and edges are, against the figures of the run."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
from build.all_kinds import KINDS
from build.charted_runs import STEPS, roofline_run, trained, with_memory
from build.hand_made import op, row, run_of
from build.page import data_in
from build.texts import format_time
from torch import nn

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.comparison.diff import FASTER, SLOWER, WITHIN_NOISE, Change
from torchprof.reports import icicle
from torchprof.reports.charts import Axis, fitted
from torchprof.reports.icicle import color_of_change
from torchprof.reports.over_time import course_of
from torchprof.reports.roofline import last_peaks, points_of, traffic_bytes
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Peak
from torchprof.run.timeline import DeviceTime, Lane, Memory, Spans, StreamTime, Timeline
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, PHASES, RECOMPUTE

if TYPE_CHECKING:
    from playwright.sync_api import Page

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = {
    **{name: f"{name}.svg" for name in ("step", "icicle", "timeline", "roofline")},
    **{f"{name}-chart": f"{name}.svg" for name in ("memory", "ranks", "pipeline")},
}
Element = ElementTree.Element
HOSTILE = ("<script>alert(1)</script>", 'a "b"\n', "line\nbreak", "\x1b[31mred", "\ud800", "a&b;|c", "模", "\u2028")


def parsed(text: str) -> Element:
    """A picture, which is well-formed, loads nothing, and has its style in it without variables."""
    root = ElementTree.fromstring(text.encode())
    assert root.tag == f"{SVG}svg" and "var(" not in text
    assert not re.search(r"(href|src|url\()", text.replace("http://www.w3.org/2000/svg", ""))
    numbers = [value for one in root.iter() for name, value in one.attrib.items() if name in ("x", "y", "width", "cx")]
    assert all(math.isfinite(float(number)) for number in numbers)
    return root


def drawn(run: Run, name: str, **options: Any) -> Element:
    return parsed(run.report(name, **options))


def all_of(root: Element, name: str, class_: str | None = None) -> list[Element]:
    return [one for one in root.iter(f"{SVG}{name}") if class_ is None or class_ in one.get("class", "").split()]


def place(one: Element, *names: str) -> list[float]:
    return [float(one.attrib[name]) for name in names]


def texts(root: Element) -> dict[str, tuple[float, float]]:
    """The place of each text."""
    return {"".join(one.itertext()): (float(one.attrib["x"]), float(one.attrib["y"])) for one in all_of(root, "text")}


def blocks(root: Element) -> dict[str, list[float]]:
    """The left end, the top, and the width with the gap of each block, by the first line under the mouse."""
    found = {}
    for group in all_of(root, "g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None:
            left, top, width = place(rect, "x", "y", "width")
            found[(title.text or "").splitlines()[0]] = [left, top, width + 1]
    return found


# All pictures


@pytest.mark.parametrize("name", KINDS)
def test_each_picture_of_each_kind_of_run_is_drawn_or_says_what_is_missing(name: str, tmp_path: Path) -> None:
    run = KINDS[name]()
    drawn_ones = 0
    for picture, file in PICTURES.items():
        try:
            text = run.report(picture)
        except TorchprofError as error:
            assert any(
                words in str(error)
                for words in (
                    *("record it with", "no blocks to draw", "No loop was recorded", "memory traffic"),
                    *("merge the runs of all ranks", "no pipeline with times"),
                )
            )
            continue
        drawn_ones += 1
        assert all_of(parsed(text), "text", "title")
        run.export(tmp_path / f"of-{file}")
        assert (tmp_path / f"of-{file}").read_text(encoding="utf-8") == text
    assert drawn_ones or not len(run.rows)


def test_hostile_names_stay_text() -> None:
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", name), name) for name in HOSTILE if name)]
    rows = [row(number, op(layer.kind), cpu_ns=1000) for number, layer in enumerate(layers)]
    root = drawn(run_of(rows, layers=layers), "icicle")
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {"svg", "style", "rect", "text", "g", "title", "tspan"}
    assert len(blocks(root)) == len(layers)


def test_ticks_are_round_and_inside_the_axis() -> None:
    axis = Axis(0, 1_257_000_000, 0, 1000)
    assert axis.ticks(8) == [200_000_000.0 * number for number in range(7)]
    assert [axis(value) for value in (0, 1_257_000_000, 2e9, -5)] == [0, 1000, 1000, 0]
    assert Axis(-800, 900, 0, 100).ticks(6, binary=True) == [-512, 0, 512]
    logarithmic = Axis(0.3, 40, 0, 300, log=True)
    assert logarithmic.ticks(9) == pytest.approx([0.1, 1, 10, 100]) and logarithmic(1) == pytest.approx(100)
    assert Axis(5, 5, 0, 10).ticks(3)[0] == 5  # all values are equal


def test_a_text_is_shortened_to_its_room() -> None:
    assert fitted("layers", 100) == "layers" and fitted("a_long_name_of_a_layer", 64) == "a_long_na…"
    assert fitted("layers", 10) == ""
    assert fitted("模型模型模型", 64) == "模型模型…" and fitted("\x1b[31m", 100) == r"\x1b[31m"


# The icicle


def test_blocks_of_the_icicle_are_as_wide_as_their_shares() -> None:
    """Net is 10,000 ns: its own 100, a with x and y 5,000, b with x 4,900."""
    own = {"Net": 100, "Net.a": 1000, "Net.a.x": 3000, "Net.a.y": 1000, "Net.b": 500, "Net.b.x": 4400}
    layers = [Layer(tuple(path.split(".")), "Module") for path in own]
    run = run_of([row(at, cpu_ns=ns) for at, ns in enumerate(own.values())], layers=layers)
    root = drawn(run, "icicle")
    found = blocks(root)
    width = found["Net"][2]
    rounded = 0.06
    assert found["Net.a"] == pytest.approx([0, 22, width * 0.5], abs=rounded)
    assert found["Net.b"] == pytest.approx([width * 0.5, 22, width * 0.49], abs=rounded)
    assert found["Net.a.y"] == pytest.approx([width * 0.3, 44, width * 0.1], abs=rounded)
    assert found["Net.b.x"] == pytest.approx([width * 0.5, 44, width * 0.44], abs=rounded)
    assert "Width: CPU time, forward; the whole is 10.000us." in texts(root)
    assert {"49.0%", "44.0%"} <= texts(root).keys()


def test_equal_layers_in_a_row_are_one_block_unless_one_takes_longer() -> None:
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", str(number)), "Linear") for number in range(5))]
    for times, names in (((10, 11, 12, 10, 10), {"0–4"}), ((10, 10, 10, 40, 10), {"0–2", "3", "4"})):
        run = run_of([row(number, cpu_ns=ns * 1000) for number, ns in enumerate(times, 1)], layers=layers)
        shown = {text.split(" ")[0].split("Linear")[0].strip() for text in texts(drawn(run, "icicle"))}
        assert names <= shown


def test_the_icicle_has_the_phase_that_is_asked_for() -> None:
    rows = [row(1, cpu_ns=1000), row(2, phase=BACKWARD, cpu_ns=3000)]
    run = run_of(rows, layers=[Layer(("Net",), "Net"), Layer(("Net", "a"), "A"), Layer(("Net", "b"), "B")])
    assert blocks(drawn(run, "icicle", phase=FORWARD)).keys() == {"Net", "Net.a"}
    assert blocks(drawn(run, "icicle", phase=BACKWARD)).keys() == {"Net", "Net.b"}
    both = blocks(drawn(run, "icicle"))
    assert both["Net.b"][2] == pytest.approx(3 * both["Net.a"][2], abs=0.2)


# The parts of a step


def test_parts_of_a_step_are_as_wide_as_their_means_and_add_up_to_it() -> None:
    run = trained(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), 512, 64, steps=5)
    root = drawn(replace(run, timeline=None), "step")
    widths = {name: block[2] for name, block in blocks(root).items()}

    def whole(measure: str, layer: int = OUTSIDE, phase: str = FORWARD) -> int:
        return run.samples[SampleKey(layer, phase, 0, "cpu", measure)].sum

    step_ns = whole("step_ns")
    assert SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_overlap_ns") not in run.samples
    for name, ns in (
        ("Sequential, forward", whole("step_cpu_ns", 0)),
        ("Sequential, backward", whole("step_cpu_ns", 0, BACKWARD)),
        ("loss and other ops", whole("step_other_ns")),
    ):
        assert widths[f"mean: {name}"] == pytest.approx(1160 * ns / step_ns, abs=0.6)
    assert sum(widths.values()) == pytest.approx(1160, abs=1)
    (caption,) = [words for words in texts(root) if words.startswith("A step takes")]
    assert caption.startswith(f"A step takes {format_time(round(step_ns / 5))} in the mean of 5: median ")


def test_the_steps_of_the_timeline_have_a_bar_each() -> None:
    """Two steps of 100 and 200 ns: 40 and 50 of forward, 30 and 100 of backward, 10 of that in the first step computed
    again, 20 of the optimizer in the second. A layer inside another one counts once, and the backward of the first step
    that ends in the second counts for both. A second thread: while it runs backward, the first one waits in forward."""
    spans = [
        (0, 40, 0, 0, FORWARD, -1),
        (10, 20, 0, 1, FORWARD, -1),  # inside
        (70, 120, 0, 0, BACKWARD, -1),
        (80, 90, 0, 1, RECOMPUTE, -1),  # inside it
        (120, 170, 0, 0, FORWARD, -1),
        (170, 250, 0, 0, BACKWARD, -1),
        (255, 290, 0, OUTSIDE, FORWARD, 0),
        (280, 290, 1, 0, BACKWARD, -1),
        (291, 295, 0, OUTSIDE, FORWARD, 1),
    ]
    columns = {name: array("q") for name in Spans.COLUMNS}
    for span in spans:
        for name, value in zip(Spans.COLUMNS, span):
            columns[name].append(PHASES.index(value) if isinstance(value, str) else value)
    timeline = Timeline(
        ("cpu",),
        {name: array("q") for name in Timeline.COLUMNS},
        spans=Spans(
            (Lane("cpu", 1), Lane("cpu", 2)),
            ("Optimizer.step#SGD.step", "enumerate(DataLoader)#next"),
            columns,
            (0, 100, 300),
        ),
    )
    samples = {SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"): Spread.of([(0, 100), (100, 200)])}
    run = replace(run_of([row(0, cpu_ns=10), row(1, cpu_ns=10)], steps=2), samples=samples, timeline=timeline)
    room = 1160 - 70
    widths = {name: block[2] for name, block in blocks(drawn(run, "step")).items()}
    wanted = {"forward": 40, "backward": 20, "recompute": 10, "other": 30}
    assert {name: widths[f"step 1: {name}"] for name in wanted} == {
        name: pytest.approx(room * ns / 200, abs=0.11) for name, ns in wanted.items()
    }
    lost = replace(run, timeline=replace(timeline, spans=replace(timeline.spans, dropped=1)))
    assert not any(name.startswith("step 2") for name in blocks(drawn(lost, "step")))  # it goes on after the last span
    wanted = {"forward": 50, "backward": 110, "optimizer": 25, "data loading": 4, "other": 11}
    assert {name: widths[f"step 2: {name}"] for name in wanted} == {
        name: pytest.approx(room * ns / 200, abs=0.11) for name, ns in wanted.items()
    }


def test_each_rank_has_a_bar_and_the_slowest_one_the_legend() -> None:
    """Rank 0 works 10 and 20 us in a step, rank 1 30 and 20."""
    rows = [row(0, calls=2, cpu_ns=1000, rank=rank) for rank in (0, 1)]
    run = run_of(rows, steps=2)
    run = replace(run, metas=(run.meta, replace(run.meta, rank=1)))
    parts = {0: (10_000, 20_000), 1: (30_000, 20_000)}
    samples = {}
    for rank, (forward, other) in parts.items():
        for layer, measure, ns in (
            (0, "step_cpu_ns", forward),
            (-1, "step_other_ns", other),
            (-1, "step_ns", forward + other),
        ):
            samples[SampleKey(layer, FORWARD, rank, "cpu", measure)] = Spread.of([(0, ns), (1, ns)])
    root = drawn(replace(run, samples=samples), "step")
    assert {"rank 0", "rank 1", "Net, forward 30us (60.0%)", "loss and other ops 20us (40.0%)"} <= texts(root).keys()
    rects = [place(rect, "x", "y", "width") for group in all_of(root, "g") for rect in group.findall(f"{SVG}rect")]
    room = 1160 - 70
    wanted = [
        (70, 0, room * 0.2),
        (70 + room * 0.2, 0, room * 0.4),
        (70, 26, room * 0.6),
        (70 + room * 0.6, 26, room * 0.4),
    ]
    assert [(x, y, width + 1) for x, y, width in rects] == [pytest.approx(one, abs=0.11) for one in wanted]


# The timeline


def test_the_device_has_a_bar_whose_parts_add_up_to_its_time_in_a_step() -> None:
    """Of 20 us in two steps it computes 5 and communicates 6, 1 of these while it computes; it copies 1 more."""
    samples = {SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"): Spread.of([(0, 12_000), (1, 12_000)])}
    streams = (StreamTime(7, 1, 10_000, 5_000, 6_000, 1_000),)
    time = DeviceTime("cuda:0", 0, 20_000, 11_000, 5_000, 6_000, 1_000, 1_000, streams)
    run = replace(run_of([row(0, cpu_ns=10)], steps=2, device="cuda"), samples=samples, device_times=(time,))
    widths = {name: block[2] for name, block in blocks(drawn(run, "step")).items()}
    wanted = {
        "computing": 2,
        "overlapped communication": 0.5,
        "exposed communication": 2.5,
        "copying only": 0.5,
        "idle": 4.5,
    }
    room = (1160 - 70) / 10
    assert {name: widths[f"cuda:0: {name}"] for name in wanted} == {
        name: pytest.approx(room * us, abs=0.11) for name, us in wanted.items()
    }
    assert "cuda:0: exposed communication 2.5us (25.0%)" in texts(drawn(run, "step"))
    longer = replace(run, metas=(replace(run.meta, wall_ns=30_000),))  # what the device did outside of steps is unknown
    assert not any(name.startswith("cuda:0") for name in blocks(drawn(longer, "step")))


def test_spans_are_where_they_ran() -> None:
    run = trained(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), 512, 64)
    assert run.timeline is not None and run.timeline.spans is not None
    spans = run.timeline.spans
    root = drawn(run, "timeline")
    ends = max(max(spans.columns["end_ns"]), *spans.steps)
    starts = [float(one.attrib["x1"]) for one in all_of(root, "line", "mark")]
    assert starts == pytest.approx([1160 * step / ends for step in spans.steps], abs=0.06)
    wanted = {
        (round(1160 * start / ends, 1), round(1160 * (end - start) / ends, 1))
        for start, end in zip(spans.columns["start_ns"], spans.columns["end_ns"])
    }
    rects = [place(one, "x", "width") for group in all_of(root, "g") for one in group.findall(f"{SVG}rect")]
    assert len(rects) > 10
    for left, width in rects:
        assert any(abs(left - x) < 0.11 and abs(width + 0.5 - wide) < 0.61 for x, wide in wanted)
    assert {"forward, thread 1", "step 1", "step 3"} <= texts(root).keys()


# Memory over time


def corners(path: Element) -> list[tuple[float, float]]:
    """The corners of a path of lines, of which only what changes is written."""
    found: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MHV])([-\d. ]+)", path.attrib["d"]):
        values = [float(number) for number in numbers.split()]
        x = found[-1][0] if command == "V" else values[0]
        found.append((x, found[-1][1] if command == "H" else values[-1]))
    return found


def upper_edge(path: Element) -> list[tuple[float, float]]:
    """Those from left to right: then the path goes back along its lower edge."""
    of_path = corners(path)
    last = max(range(len(of_path)), key=lambda at: (of_path[at][0], -at))
    return of_path[: last + 1]


def check_upper_edge(run: Run) -> None:
    """The chart is the running total as a step function: each interval of time has its maximum and its last level."""
    timeline, memory = run.timeline, run.memory[0]
    assert timeline is not None
    times, sizes = timeline.columns["time_ns"], timeline.columns["nbytes"]
    length = max(times[-1] // 600, 1)
    highest: dict[int, int] = {}
    left: dict[int, int] = {}
    total = 0
    for at, nbytes in zip(times, sizes):
        highest[at // length] = max(highest.get(at // length, total), total + nbytes)
        total += nbytes
        left[at // length] = total
    assert max(highest.values()) == memory.peak_bytes
    course = course_of(timeline, "cpu")
    assert course is not None and course.times_ns == sorted(course.times_ns)
    levels = [*zip(course.times_ns, course.levels)]
    for stretch in highest:
        before = [level for at, level in levels[1:] if at // length < stretch][-1:] or [0]
        here = [level for at, level in levels[1:] if at // length == stretch]
        assert max([*before, *here]) == highest[stretch]
        assert [*before, *here][-1] == left[stretch]
    root = drawn(run, "memory-chart")
    zero = place(all_of(root, "line", "zero")[0], "y1", "x1", "x2")
    top = upper_edge(all_of(root, "path", "band")[-1])
    per_byte = (zero[0] - min(y for _, y in top)) / memory.peak_bytes
    for (at, level), (following, _) in zip(levels, [*levels[1:], (course.last_ns, 0)]):
        x = zero[1] + (zero[2] - zero[1]) * at / course.last_ns
        y = zero[0] - per_byte * level
        if following > at:
            assert any(abs(corner[0] - x) < 0.6 and abs(corner[1] - y) < 0.12 for corner in top)


@pytest.mark.parametrize("make", [KINDS["memory"], lambda: trained(nn.Linear(64, 64), 256, 64)])
def test_upper_edge_of_memory_is_its_running_maximum(make: Callable[[], Run]) -> None:
    run = make()
    if run.timeline is not None and run.timeline.devices:
        check_upper_edge(run)


def test_memory_over_time_by_hand() -> None:
    """300 bytes of parameters, 100 of activations, 500 of unknown kind, and a free of memory from before the start."""
    run = with_memory(run_of([row(0, cpu_ns=10)]), STEPS, Memory("cpu", peak_bytes=900, peak_ns=50))
    root = drawn(run, "memory-chart")
    assert {"parameters", "activations", "unknown", "peak 900 B", "512 B", "0 B"} <= texts(root).keys()
    zero, peak = all_of(root, "line", "zero")
    (y0, left, right), (at,) = place(zero, "y1", "x1", "x2"), place(peak, "x1")
    assert at == pytest.approx((left + right) / 2, abs=0.06)
    per_byte = (y0 - (texts(root)["512 B"][1] - 4)) / 512
    x = [left + (right - left) * ns / 100 for ns in (0, 25, 50, 75, 100)]
    # From 75 on 800 bytes are freed that were there at the start.
    of_kinds = [(300, 300, 300, -500), (300, 400, 400, -500), (300, 400, 900, 0)]
    for path, levels in zip(all_of(root, "path", "band"), of_kinds, strict=True):
        edge = upper_edge(path)
        for start, level in zip(x, levels):
            y = y0 - per_byte * level
            assert any(abs(at - start) < 0.6 and abs(height - y) < 0.12 for at, height in edge)
        assert min(y for _, y in edge) == pytest.approx(y0 - per_byte * max(levels), abs=0.12)


def test_memory_stays_at_its_level_until_the_next_step() -> None:
    """A peak that is freed at once, then no event for a long time: the chart has no slope and does not stay at the
    peak."""
    steps = [(0, 50, 2), (10_000, 342, 5), (10_001, -342, 5), (10_002, -50, 2), (100_000, 18, 2), (200_000, -18, 2)]
    run = with_memory(run_of([row(0, cpu_ns=10)]), steps, Memory("cpu", peak_bytes=392, peak_ns=10_000))
    assert run.timeline is not None
    course = course_of(run.timeline, "cpu")
    assert course is not None
    levels = [*zip(course.times_ns, course.levels)]
    assert levels == [(0, 0), (0, 50), (10_000, 392), (10_002, 0), (100_000, 18), (200_000, 0)]
    for path in all_of(drawn(run, "memory-chart"), "path", "band"):
        assert re.fullmatch(r"M[-\d. ]+([HV][-\d.]+)+Z", path.attrib["d"])  # no slope
    check_upper_edge(run)


# The roofline


def test_traffic_of_a_call_by_hand() -> None:
    layer = Layer(
        ("Net",), "Linear", param_bytes=96, input_shapes=((2, 4),), output_shapes=((2, 4), (3,)), output_bytes=44
    )
    assert traffic_bytes(layer) == 96 + 44 + 4 * 8  # outputs: 11 elements of 4 bytes; inputs: 8 elements
    assert traffic_bytes(replace(layer, input_shapes=((2, 4), (5,)))) == 96 + 44 + 4 * 13
    assert traffic_bytes(replace(layer, param_bytes=0)) == 44 + 4 * 8
    assert traffic_bytes(replace(layer, input_shapes=((),))) == 96 + 44 + 4  # a scalar
    unknown: list[dict[str, Any]] = [
        {"param_bytes": None},
        {"output_bytes": None},
        {"output_bytes": 45},  # no whole number of bytes per element: outputs of several types
        {"output_bytes": 0},
        {"input_shapes": ()},
        {"output_shapes": ()},
        {"input_shapes": ((-1, 4),)},
        {"output_shapes": ((2, -1),)},
        {"output_shapes": ((0, 4),)},
    ]
    for change in unknown:
        assert traffic_bytes(replace(layer, **change)) is None


def test_tied_parameters_count_elsewhere_so_bytes_are_unknown() -> None:
    """A head that shares the weight of the embedding reads it, but has no parameters of its own."""
    embed, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Linear(16, 16), head)
    run = torchprof.flops(model, torch.randint(50, (4, 7)))
    assert [layer.tied for layer in run.layers] == [False, False, False, True]
    assert [traffic_bytes(layer) for layer in run.layers[2:]] == [4 * (16 * 16 + 16 + 2 * 4 * 7 * 16), None]


def test_layers_called_on_different_shapes_are_not_in_the_roofline() -> None:
    """The bytes are those of the first call: if other calls had other shapes, the intensity would be wrong."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    for sizes, points in (((32, 32), 2), ((32, 32, 32, 16), 0)):
        with Profile(model, with_flops=True) as prof:
            for size in sizes:
                model(torch.rand(size, 64))
        assert prof.run is not None and len(points_of(prof.run)) == points


def test_roofline_by_hand() -> None:
    root = drawn(roofline_run(), "roofline")
    shown = texts(root)
    across = {value: shown[str(value)][0] for value in (1, 10)}
    up = {value: shown[value][1] - 4 for value in ("1 G", "10 G", "100 G")}
    decade = across[10] - across[1]
    points = {(one.findtext(f"{SVG}title") or "").splitlines()[0]: one for one in all_of(root, "circle")}
    assert place(points["Net.a"], "cx", "cy", "r") == pytest.approx([across[10], up["10 G"], 12], abs=0.06)
    assert place(points["Net.b.0"], "cx", "cy", "r") == pytest.approx([across[1], up["1 G"], 3 + 9 / 2], abs=0.06)
    assert "10.00 G FLOP/s, 10.00 FLOP/byte" in (points["Net.a"].findtext(f"{SVG}title") or "")
    # The last peak of the CPU: 50 GFLOP/s at 1 FLOP/byte, flat at 100 GFLOP/s from 2 FLOP/byte on.
    (roof,) = all_of(root, "polyline", "roof")
    found = [[float(number) for number in pair.split(",")] for pair in roof.attrib["points"].split()]
    per_decade = up["10 G"] - up["100 G"]
    wanted = [
        [across[1], up["100 G"] + per_decade * math.log10(2)],
        [across[1] + decade * math.log10(2), up["100 G"]],
        [across[10], up["100 G"]],
    ]
    assert found == [pytest.approx(pair, abs=0.06) for pair in wanted]
    assert {"100.00 G FLOP/s, float32 on cpu", "50 GB/s", "a", "b.0"} <= shown.keys()


def test_a_peak_that_is_not_finite_is_no_roof() -> None:
    """A run file may have any numbers."""
    run = roofline_run()
    wrong = [Peak("cpu", "float32", 1, *pair) for pair in ((math.inf, 1e9), (1e9, math.nan), (0.0, 1e9), (1e9, 0.0))]
    for peak in wrong:
        other = replace(run, metas=(replace(run.meta, peaks=(peak,)),))
        root = drawn(other, "roofline")
        assert last_peaks(other) == [] and len(all_of(root, "circle")) == 2
        assert all_of(root, "polyline") == []


def test_equal_layers_of_several_blocks_have_one_name_and_no_two_names_overlap() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]

    run = trained(nn.Sequential(*(Block() for _ in range(4))), 16, 32)
    root = drawn(run, "roofline")
    names = {"".join(one.itertext()): place(one, "x", "y") for one in all_of(root, "text", "name")}
    assert {"*.up (4)", "*.down (4)", "*.act (4)"} >= names.keys() != set()
    lines = sorted((y, right - 6 * len(name), right) for name, (right, y) in names.items())
    for (y, left, right), (below, other_left, other_right) in pairwise(lines):
        assert below - y >= 12 or other_left > right or other_right < left


def test_each_of_ten_layers_at_one_place_has_its_name() -> None:
    """Those without room next to their point have a line to it."""
    layers = 10
    counted = ("cpu_ns", "macs", "flops")
    size = {"input_shapes": ((8,),), "output_shapes": ((16,),), "output_bytes": 64, "param_bytes": 0}
    named = [Layer(("Net",), "Net"), *(Layer(("Net", f"layer_{at}"), f"Class {at}", **size) for at in range(layers))]  # type: ignore[arg-type]
    rows = [row(at, op("aten::add"), calls=1, cpu_ns=1000, flops=960 + at) for at in range(1, layers + 1)]
    rows += [row(at, calls=1) for at in range(1, layers + 1)]
    root = drawn(run_of(rows, layers=named, requested=counted, measured=counted), "roofline")
    names = {"".join(one.itertext()): place(one, "x", "y") for one in all_of(root, "text", "name")}
    assert names.keys() == {f"layer_{at}" for at in range(layers)}
    lines = sorted((y, right - 5 * len(name), right) for name, (right, y) in names.items())
    for (y, left, right), (below, other_left, other_right) in combinations(lines, 2):
        assert below - y >= 12 or other_left > right or other_right < left
    leaders = all_of(root, "line", "mark")
    assert layers - 4 <= len(leaders) < layers
    circles = [place(one, "cx", "cy") for one in all_of(root, "circle")]
    assert all(place(line, "x1", "y1") in circles for line in leaders)


def test_layers_above_the_roof_are_explained() -> None:
    """Net.a has 10 GFLOP/s at 10 FLOP/byte."""
    run = roofline_run()
    for bandwidth, peak, is_above in ((1e12, 1e12, False), (1e12, 9e9, True), (9e8, 1e12, True)):
        roof = replace(run.meta, peaks=(Peak("cpu", "float32", 1, peak, bandwidth),))
        words = " ".join(texts(drawn(replace(run, metas=(roof,)), "roofline")))
        assert ("A layer above the roof was faster" in words) == is_above


def test_classes_have_the_same_colors_in_all_pictures() -> None:
    """Also those that have no FLOPs, and so no point in the roofline."""
    counted = ("cpu_ns", "macs", "flops")
    size = {"input_shapes": ((8,),), "output_shapes": ((16,),), "output_bytes": 64, "param_bytes": 0}
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "Copy"), Layer(("Net", "b"), "Linear", **size)]  # type: ignore[arg-type]
    rows = [row(1, calls=1, cpu_ns=9000), row(2, calls=1), row(2, op("aten::add"), calls=1, cpu_ns=1000, flops=960)]
    run = run_of(rows, layers=layers, requested=counted, measured=counted)
    (point,) = all_of(drawn(run, "roofline"), "circle")
    (block,) = (one for one in all_of(drawn(run, "icicle"), "g") if one.findtext(f"{SVG}title", "").startswith("Net.b"))
    assert point.get("class") == "band class-1" == f"band {block.findall(f'{SVG}rect')[0].get('class')}"
    assert data_in(run.report("html"))["classes"][:2] == ["Copy", "Linear"]


def test_points_of_the_roofline_are_links(look: Callable[..., Page]) -> None:
    page = look(roofline_run())
    page.locator("#roofline circle").first.hover()
    page.locator("#roofline circle").first.click()
    assert page.inner_text(".panel h3") == "Net.a"


# Comparisons


def of_layers(own: Mapping[str, int], calls: int = 1) -> Run:
    layers = [Layer(tuple(path.split(".")), f"Class of {path}") for path in own]
    rows = [row(at, calls=calls, cpu_ns=ns * calls) for at, ns in enumerate(own.values())]
    return run_of(rows, layers=layers)


BEFORE = {"Net": 1000, "Net.a": 4000, "Net.b": 3000, "Net.c": 2000}
AFTER = {"Net": 1000, "Net.a": 1000, "Net.b": 3500, "Net.d": 6500}


def rect_of(root: Element, name: str) -> Element:
    """The bar of a layer."""
    return next(one for one in all_of(root, "rect") if (one.findtext(f"{SVG}title") or "").splitlines()[:1] == [name])


@pytest.mark.parametrize("calls", [1, 4])
def test_bars_of_changes_are_as_long_as_these_and_the_largest_is_first(calls: int) -> None:
    """With more calls after than before, figures are for one call, and so are the widths."""
    diff = torchprof.compare(of_layers(BEFORE), of_layers(AFTER, calls))
    root = parsed(diff.report("picture"))
    changes = {"Net.d": 6500, "Net.c": -2000, "Net.a": -3000, "Net.b": 500}  # last those that one call does not test
    bars = {name: place(rect_of(root, name), "x", "y", "width") for name in changes}
    assert [*bars] == sorted(bars, key=lambda name: bars[name][1])
    per_ns = bars["Net.d"][2] / 6500
    zero = bars["Net.d"][0]
    for name, (left, _, width) in bars.items():
        assert width == pytest.approx(per_ns * abs(changes[name]), abs=0.11)
        assert (left if changes[name] > 0 else left + width) == pytest.approx(zero, abs=0.11)
    assert rect_of(root, "Net.c").get("class") == "removed" and rect_of(root, "Net.d").get("class") == "more"
    shown = texts(root)
    assert {"2.000us, removed", "6.500us, added", "4.000us → 1.000us (0.25×)"} <= shown.keys()


def test_bars_of_changes_are_of_all_phases() -> None:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "A")]
    rows = [[row(1, cpu_ns=1000), row(1, phase=BACKWARD, cpu_ns=backward)] for backward in (2000, 9000)]
    runs = [run_of(of_run, layers=layers) for of_run in rows]
    root = parsed(torchprof.compare(*runs).report("picture"))
    assert {"Net.a, backward", "2.000us → 9.000us (4.50×)"} <= texts(root).keys()
    assert any("Bars: change of self, forward and backward." in words for words in texts(root))
    with pytest.raises(StopIteration):
        rect_of(root, "Net.a, forward")


def test_the_color_of_a_change_is_that_of_the_phases_beyond_noise() -> None:
    [pair] = [pair for pair in torchprof.compare(of_layers({"Net": 1}), of_layers({"Net": 2})).walk() if pair.is_layer]
    slower, larger = Change(5, 7, 2, SLOWER), Change(9, 4, -5, WITHIN_NOISE)
    assert color_of_change(pair, [slower, larger]) == color_of_change(pair, [slower]) == "more"
    assert color_of_change(pair, [larger]) == color_of_change(pair, [Change(1, None, None, "unknown")]) == "quiet"
    assert color_of_change(pair, [larger, Change(3, 2, -1, FASTER)]) == "less"


def test_layers_before_and_after_are_on_one_scale() -> None:
    root = parsed(torchprof.compare(of_layers(BEFORE), of_layers(AFTER)).report("picture"))
    tops = [one for one in all_of(root, "g") if (one.findtext(f"{SVG}title") or "").startswith("Net\n")]
    widths = [place(one.findall(f"{SVG}rect")[0], "width")[0] + 1 for one in tops]
    assert widths[1] == pytest.approx(1160, abs=0.06) and widths[0] == pytest.approx(1160 * 10 / 12, abs=0.06)


def test_work_of_no_layer_has_the_color_of_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[row(0, cpu_ns=1000), row(OUTSIDE, cpu_ns=ns)] for ns in (500, 900)]
    runs = [run_of(of_run, layers=[Layer(("Net",), "Net")]) for of_run in rows]

    def color_of(pair: Any, changes: Any) -> str:
        return "more" if pair.name == "(outside)" and changes[0].difference == 400 else "quiet"

    monkeypatch.setattr(icicle, "color_of_change", color_of)
    root = parsed(torchprof.compare(*runs).report("picture"))
    groups = [one for one in all_of(root, "g") if (one.findtext(f"{SVG}title") or "").startswith("(outside)")]
    assert [place.get("class") for one in groups for place in one.findall(f"{SVG}rect")] == ["more", "more"]
    assert rect_of(root, "(outside)").get("class") == "more"


def test_equal_runs_have_no_bars(tmp_path: Path) -> None:
    diff = torchprof.compare(of_layers(BEFORE), of_layers(BEFORE))
    diff.export(tmp_path / "diff.svg")
    root = parsed((tmp_path / "diff.svg").read_text(encoding="utf-8"))
    assert any("No layer changed." in words for words in texts(root))


# Pictures of the page


def test_the_page_has_the_pictures_of_the_run(look: Callable[..., Page]) -> None:
    run = trained(nn.Linear(16, 16), 8, 16)
    page = look(run)
    for where, report in (("#memory", "memory-chart"), ("#roofline", "roofline")):
        of_page = page.locator(f"{where} svg.chart text").all_text_contents()
        assert of_page == ["".join(one.itertext()) for one in all_of(drawn(run, report), "text")]
    diff = torchprof.compare(of_layers(BEFORE), of_layers(AFTER))
    page = look(diff)
    assert page.locator("svg.chart rect.removed").count() >= 1


SAVED: Sequence[tuple[str, str]] = (
    ("linear-layers", "Linear: layers"),
    ("linear-timeline", "Linear: timeline"),
    ("linear-roofline", "Linear: roofline"),
    ("linear-memory-on-cpu", "Linear: memory on cpu"),
)


def test_pictures_of_the_page_are_saved_as_files_of_their_own(look: Callable[..., Page], tmp_path: Path) -> None:
    page = look(trained(nn.Linear(16, 16), 8, 16))
    for name, title in SAVED:
        for kind, button in (("svg", "Save as SVG"), ("png", "Save as PNG")):
            with page.expect_download(timeout=30_000) as download:
                page.get_by_role("button", name=f"{button}: {title}", exact=True).click()
            assert download.value.suggested_filename == f"{name}.{kind}"
            download.value.save_as(tmp_path / f"{name}.{kind}")
        root = parsed((tmp_path / f"{name}.svg").read_text(encoding="utf-8"))
        assert title in texts(root)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        # The size of a PNG is in its first block, big-endian: PNG specification, third edition, 11.2.2.
        width = int.from_bytes((tmp_path / f"{name}.png").read_bytes()[16:20], "big")
        assert width == pytest.approx(2 * float(root.attrib["width"]), abs=2)


def test_what_is_live_at_the_end_stays_so_in_the_timeline() -> None:
    """100 bytes are allocated in the first tenth of the time, in which 3,000 others come and go, and stay."""
    spans = {name: array("q", [0]) for name in Spans.COLUMNS}
    spans["end_ns"][0], spans["name"][0] = 100_000, -1
    steps = [(0, 100, 2)]
    for at in range(3, 9000, 6):
        steps += [(at, 50, 5), (at + 3, -50, 5)]
    run = with_memory(run_of([row(0, cpu_ns=10)]), steps, Memory("cpu", peak_bytes=150, peak_ns=3))
    assert run.timeline is not None
    run = replace(run, timeline=replace(run.timeline, spans=Spans((Lane("cpu", 1),), (), spans)))
    (path,) = all_of(drawn(run, "timeline"), "path", "class-1")
    edge = corners(path)
    top, level, zero = sorted({y for _, y in edge})
    assert (zero - level) / (zero - top) == pytest.approx(100 / 150, abs=0.01)
    assert max(x for x, y in edge if y == top) == pytest.approx(1160 * 9000 / 100_000, abs=1.1)
    assert max(x for x, y in edge if y == level) == pytest.approx(1160, abs=0.1)


def test_a_layer_that_was_not_selected_has_no_share() -> None:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "A"), Layer(("Net", "b"), "B")]
    rows = [row(1, cpu_ns=6000), row(2, cpu_ns=2000), row(NOT_SELECTED, cpu_ns=2000)]
    run = run_of(rows, layers=layers, paths=(("Net", "a"), ("Net", "b")))
    root = drawn(run, "icicle")
    assert "80.0%" not in texts(root) and {"60.0%", "20.0%"} <= texts(root).keys()
    assert any(title.text == "Net\nNet\nnot selected" for title in all_of(root, "title"))
    assert blocks(root)["Net"][2] == pytest.approx(0.8 * 1160, abs=0.1)


def test_a_whole_that_is_a_lower_bound_has_no_shares() -> None:
    counted = ("macs", "flops", "uncounted")
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "A")]
    rows = [row(1, op("aten::mm"), flops=6000), row(0, op("aten::svd"), uncounted=1)]
    root = drawn(run_of(rows, layers=layers, requested=counted, measured=counted), "icicle")
    assert not any("%" in words for words in texts(root))
    assert "Width: FLOPs, forward; the whole is ≥ 6.00 K." in texts(root)


def test_a_peak_of_another_cycle_is_not_drawn_in_this_one() -> None:
    run = with_memory(run_of([row(0, cpu_ns=10)]), [(0, 100, 2), (50, -100, 2)], Memory("cpu", 0, 5000, 20))
    shown = texts(drawn(run, "memory-chart"))
    assert "peak 100 B" in shown
    assert any("the peak of all, 4.88 KB, is not in it" in words for words in shown)


def test_layers_that_are_too_narrow_are_one_block() -> None:
    """Of 3,000 different layers one takes half of the time, after 1,000 others."""
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", f"l{at}"), f"Class {at}") for at in range(3000))]
    rows = [row(at + 1, cpu_ns=2999 if at == 1000 else 1) for at in range(3000)]
    root = drawn(run_of(rows, layers=layers), "icicle")
    rest = [place(one, "x", "width") for one in all_of(root, "rect", "rest")]
    assert {"1000 smaller layers", "1999 smaller layers"} <= {title.text for title in all_of(root, "title")}
    (left, width), (after, other) = sorted(rest)
    assert (left, width + 1) == pytest.approx((0, 1160 / 6), abs=0.2)
    assert (after, other + 1) == pytest.approx((1160 * (1 / 6 + 1 / 2), 1160 / 3), abs=0.2)
    deep = [Layer(tuple(f"l{step}" for step in range(depth + 1)), "Module") for depth in range(150)]
    root = drawn(run_of([row(149, cpu_ns=10)], layers=deep), "icicle")
    assert len(blocks(root)) == 40


def test_names_of_roofs_that_are_as_high_do_not_overlap() -> None:
    run = roofline_run()
    peaks = tuple(
        Peak("cpu", dtype, 2, 7.5e8 + at, 5e8 + at) for at, dtype in enumerate(("bfloat16", "float16", "half"))
    )
    root = drawn(replace(run, metas=(replace(run.meta, peaks=peaks),)), "roofline")
    lines = [y for words, (_, y) in texts(root).items() if "FLOP/s, " in words]
    assert len(lines) == 3 and all(below - above > 12 for above, below in pairwise(sorted(lines)))


def test_memory_below_that_of_the_start_is_a_line() -> None:
    run = with_memory(run_of([row(0, cpu_ns=10)]), [(0, -300, 2), (50, -400, 2)], Memory("cpu"))
    root = drawn(run, "memory-chart")
    (line,) = all_of(root, "path", "roof")
    heights = sorted({y for _, y in corners(line)})
    zero = place(all_of(root, "line", "zero")[0], "y1")[0]
    assert heights[0] == pytest.approx(zero, abs=0.1)
    assert (heights[2] - zero) / (heights[1] - zero) == pytest.approx(700 / 300, abs=0.02)


def test_pictures_of_several_ranks_say_so() -> None:
    run = run_of([row(0, cpu_ns=1000), row(0, cpu_ns=3000, rank=1)])
    run = replace(run, metas=(run.meta, replace(run.meta, rank=1)))
    assert any("the sum of 2 ranks; the whole is 4.000us." in words for words in texts(drawn(run, "icicle")))


def test_the_values_at_the_mouse_are_those_of_the_axes(look: Callable[..., Page]) -> None:
    """At the grid lines of both axes, as they are written there; and none outside of the plot."""
    memory = with_memory(run_of([row(0, cpu_ns=1)]), STEPS, Memory("cpu", peak_bytes=900))
    for run, where, tick_of_x, tick_of_y in ((memory, "#memory", 1, 0), (roofline_run(), "#roofline", 0, 1)):
        page = look(run)
        picture = page.locator(f"{where} .chart")
        picture.scroll_into_view_if_needed()
        boxes: list[dict[str, float]] = [line.bounding_box() for line in picture.locator("line.grid").all()]  # type: ignore[misc]
        x = sorted(box["x"] for box in boxes if box["width"] < 2)[tick_of_x]
        y = sorted(box["y"] for box in boxes if box["height"] < 2)[tick_of_y]
        written = []
        for text in picture.locator("text").all():
            box = text.bounding_box() or {}
            is_below = abs(box["x"] + box["width"] / 2 - x) < 4 and box["y"] > max(each["y"] for each in boxes)
            is_left = abs(box["y"] + box["height"] / 2 - y) < 4 and box["x"] < min(each["x"] for each in boxes)
            words = text.text_content() or ""
            written += [(is_left, words)] if words[:1].isdigit() and (is_below or is_left) else []
        page.mouse.move(x + 1, y)
        shown = (picture.locator(".cross text").text_content() or "").split(", ")
        for part, (_, tick) in zip(shown, sorted(written), strict=True):
            assert number_of(part) == pytest.approx(number_of(tick), rel=0.05), (shown, written)
        page.mouse.move(1, 1)
        assert picture.locator(".cross").count() == 0


def number_of(words: str) -> float:
    """Of "1.50 KB", "2 G", "50ns"."""
    found = re.match(r"([0-9.]+) ?([A-Za-z]*)", words)
    assert found is not None, words
    scales = {"KB": 2**10, "MB": 2**20, "K": 1e3, "M": 1e6, "G": 1e9, "us": 1e3, "ms": 1e6}
    return float(found[1]) * scales.get(found[2], 1)

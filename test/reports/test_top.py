"""The reports "top" and "python" on hand-made runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from build import hand_made
from build.events import run_of_events
from build.golden import drawn
from build.hand_made import op, python_line, row
from build.warnings import run_warnings

from torchprof import Run
from torchprof.analyze.top import Where, most_sampled, parts_of, source_lines
from torchprof.attribute.events import Event, Kind, Site
from torchprof.run.layers import Layer
from torchprof.run.words import BETWEEN_OPS, FORWARD, NOT_SELECTED, OUTSIDE, SourceLine

MS = 1_000_000
THREAD = 1
LAYERS = (
    Layer(("Net",), "Net"),
    Layer(("Net", "conv"), "Conv2d", dtype_bytes=(("float64", 800),)),
    Layer(("Net", "fc"), "Linear", dtype_bytes=(("bfloat16", 2), ("float32", 400))),
)
SITES = {"net": Site((0,)), "conv": Site((1,)), "fc": Site((2,))}


def event(kind: Kind, name: str, start_ms: float, end_ms: float = 0, **more: Any) -> Event:
    start = round(start_ms * MS)
    name = SourceLine.of_file(name) if kind is Kind.SAMPLE else name
    return Event(kind, name, start, round(end_ms * MS) or start, more.pop("thread", THREAD), **more)


EVENTS = [
    event(Kind.STEP, "", 0),
    event(Kind.SAMPLE, "train.py:3 main", 1),
    event(Kind.SAMPLE, "train.py:3 main", 2),
    event(Kind.LABEL, "net", 10, 60),
    event(Kind.LABEL, "conv", 12, 42),
    event(Kind.OP, "aten::conv2d", 12, 40, sequence=1),
    event(Kind.OP, "aten::slow_conv2d", 13, 38),
    event(Kind.SAMPLE, "train.py:9 forward", 20),  # inside an operator, so not between operators
    event(Kind.USER_LABEL, "MASK", 44, 56),
    event(Kind.OP, "aten::item", 44, 45),
    event(Kind.SAMPLE, "net.py:7 forward", 47),
    event(Kind.SAMPLE, "net.py:7 forward", 48),
    event(Kind.SAMPLE, "net.py:8 forward", 49),
    event(Kind.LABEL, "fc", 50, 55),
    event(Kind.OP, "aten::linear", 50, 54, sequence=2),
    event(Kind.SAMPLE, "net.py:5 forward", 58),
    event(Kind.NODE, "evaluate: Addmm", 70, 77, sequence=2, forward_thread=THREAD),
    event(Kind.OP, "aten::mm", 71, 75),
    event(Kind.NODE, "evaluate: Conv", 80, 90, sequence=1, forward_thread=THREAD),
    event(Kind.SAMPLE, "train.py:5 main", 95),
]
WALL_MS = 100
# By hand, in ms: the self of each part.
PARTS = {
    ("Net", FORWARD, "", BETWEEN_OPS): 50 - 30 - 12,
    ("Net", FORWARD, "MASK", "aten::item"): 1,
    ("Net", FORWARD, "MASK", BETWEEN_OPS): 12 - 1 - 5,
    ("Net.conv", FORWARD, "", BETWEEN_OPS): 2,
    ("Net.conv", FORWARD, "", "aten::conv2d"): 28 - 25,
    ("Net.conv", FORWARD, "", "aten::slow_conv2d"): 25,
    ("Net.fc", FORWARD, "", BETWEEN_OPS): 1,
    ("Net.fc", FORWARD, "", "aten::linear"): 4,
    ("Net.fc", "backward", "", "evaluate: Addmm"): 7 - 4,
    ("Net.fc", "backward", "", "aten::mm"): 4,
    ("Net.conv", "backward", "", "evaluate: Conv"): 10,
    ("(outside)", FORWARD, "", BETWEEN_OPS): 100 - 50 - 7 - 10,
}


def run_of(events: list[Event], **meta: Any) -> Run:
    return run_of_events(events, SITES, LAYERS, **{"wall_ns": WALL_MS * MS, **meta})


@pytest.fixture
def run() -> Run:
    return run_of(EVENTS)


def parts(run: Run, field: str = "cpu_ns") -> dict[tuple[str, str, str, str], float]:
    found = {}
    for (layer, work), ns in parts_of(run, field).items():
        name = run.layers[layer].name if layer >= 0 else "(outside)"
        found[name, ("forward", "backward")[work.phase], work.label, work.name] = ns / MS
    return found


def test_parts_by_hand_add_up_to_all_recorded_time(run: Run) -> None:
    assert parts(run) == PARTS
    assert sum(parts(run).values()) == WALL_MS


def test_work_on_other_threads_adds_to_the_whole() -> None:
    """Another thread works for 10 ms while the first one is in operators."""
    more = event(Kind.OP, "aten::add", 15, 25, thread=2)
    found = parts(run_of(sorted([*EVENTS, more], key=lambda one: one.start_ns)))
    assert found == {**PARTS, ("(outside)", FORWARD, "", "aten::add"): 10}


def test_time_that_another_thread_works_is_not_between_operators() -> None:
    """While the first thread waits in ``backward()`` for the thread that runs it, there is no gap."""
    backward = [
        event(Kind.STEP, "", 0),
        event(Kind.OP, "aten::rand", 0, 20),
        event(Kind.NODE, "evaluate: Addmm", 30, 90, thread=2),
        event(Kind.SAMPLE, "train.py:6 main", 95),
    ]
    run = run_of(backward)
    assert parts(run)["(outside)", FORWARD, "", BETWEEN_OPS] == 100 - 20 - 60
    assert source_lines(run) == {Where(OUTSIDE, 0, ""): {"train.py:6 main": 1}}


def test_source_lines_are_counted_where_no_operator_ran(run: Run) -> None:
    assert source_lines(run) == {
        Where(OUTSIDE, 0, ""): {"train.py:3 main": 2, "train.py:5 main": 1},
        Where(0, 0, "MASK"): {"net.py:7 forward": 2, "net.py:8 forward": 1},
        Where(0, 0, ""): {"net.py:5 forward": 1},
    }


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if " | " in line]


def test_the_text_of_parts_and_of_time_between_operators(run: Run, golden: Callable[..., None]) -> None:
    """The largest come first and name layer, type and line: PARTS has the times by hand. A layer has its source lines
    below it; of 33 ms outside of layers, two of three samples are in line 3."""
    warned = replace(run, metas=(replace(run.meta, warnings=run_warnings("One thing.", "Another.")),))
    golden(
        drawn(warned, "top", top=5),
        drawn(run, "top", top=len(PARTS)),
        drawn(run, "top", top=0),
        drawn(run, "python"),
        drawn(run, "python", top=2, lines=1),
        drawn(run, "python", lines=0),
    )


def test_a_device_has_its_own_table_and_idle_time(golden: Callable[..., None]) -> None:
    """Two kernels at once work for 20 + 20 - 10 + 10 ms."""
    kernels = [
        event(Kind.OP, "aten::copy", 20, 21, correlation=7),
        *EVENTS[-1:],
        event(Kind.KERNEL, "gemm_kernel", 30, 60, correlation=7, device="cuda:0"),
        event(Kind.KERNEL, "copy_kernel", 50, 70, correlation=7, device="cuda:0"),
    ]
    run = run_of([EVENTS[0], *kernels], device="cuda", measured=("cpu_ns", "device_ns"))
    assert parts(run, "device_ns") == {("(outside)", FORWARD, "", "aten::copy"): 50}
    golden(run.report("top"))


def test_a_device_on_which_nothing_ran(run: Run) -> None:
    idle = run_of(EVENTS, device="cuda", measured=("cpu_ns", "device_ns"))
    assert idle.report("top") == "Nothing ran on CUDA.\n\n" + run.report("top")


def test_without_samples_lines_are_unknown() -> None:
    run = run_of([one for one in EVENTS if one.kind is not Kind.SAMPLE])
    assert parts(run) == PARTS
    assert {row[-1] for row in cells(run.report("python"))[1:]} == {"–"}
    assert "samples" not in run.report("top")


def test_runs_without_times_and_parts_in_short(golden: Callable[..., None]) -> None:
    """Layers that are alike rank by their sum, and the slower ones are named; a line whose share is shown as zero is
    left out."""
    counted, memory = ("macs", "flops", "uncounted"), ("cpu_allocated",)
    runs = {}
    for uncounted in (0, 2):
        rows = [
            row(1, op("aten::mm"), flops=6_000, macs=3_000),
            row(2, op("aten::add"), flops=2_000, phase="backward"),
            row(2, op("aten::odd"), uncounted=uncounted),
        ]
        runs[f"{uncounted} calls are not counted"] = hand_made.run_of(rows, requested=counted, measured=counted)
    runs["only memory"] = hand_made.run_of(rows, requested=memory, measured=memory)
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", str(at), name), "Linear") for at in range(4) for name in "ab")]
    times = {("0", "a"): 9, ("1", "a"): 9, ("0", "b"): 30}
    rows = [
        row(at, op("aten::addmm"), cpu_ns=times.get(layer.path[1:], 8 if layer.path[-1] == "a" else 6))
        for at, layer in enumerate(layers)
        if at
    ]
    runs["alike: 34 ns of a, 48 of b"] = hand_made.run_of(rows, layers=layers)
    line = python_line("a.py:3 f")
    for ns in (1, 10_000):
        rows = [row(0, cpu_ns=ns), row(0, line, calls=9), row(1, op("aten::mm"), cpu_ns=100_000)]
        runs[f"a line of {ns} of 100,000 ns"] = hand_made.run_of(rows)
    golden({title: run.report("top") for title, run in runs.items()})


def test_an_empty_run() -> None:
    run = run_of([], wall_ns=0)
    assert parts_of(run, "cpu_ns") == {}
    assert len(cells(run.report("top"))) == len(cells(run.report("python"))) == 1


def test_all_that_torch_compile_does_around_its_graphs_is_one_part() -> None:
    own = [("Pregraph bytecode", 1, 3), ("CompiledFunction", 3, 8), ("TorchDynamo Cache Lookup", 20, 21)]
    events = [
        event(Kind.LABEL, "net", 0, 50),
        *(event(Kind.OP, *one) for one in own),
        event(Kind.OP, "aten::mm", 30, 34),
    ]
    parts = parts_of(run_of_events(events, SITES, LAYERS, 50 * MS), "cpu_ns")
    assert {work.name: ns // MS for (layer, work), ns in parts.items() if layer == 0} == {
        "(torch.compile's own work)": 2 + 5 + 1,
        "aten::mm": 4,
        BETWEEN_OPS: 38,
    }


def test_the_names_of_work_of_no_layer(run: Run) -> None:
    assert Where(OUTSIDE, 0, "").name(run) == "(outside)" and Where(NOT_SELECTED, 0, "").name(run) == "(not selected)"


def most_of(samples: dict[str, int]) -> tuple[str, float] | None:
    """Of lines, as text, with so many samples each."""
    return most_sampled(Counter({SourceLine.of_file(text): times for text, times in samples.items()}))


def test_the_line_with_most_samples_has_its_own_share() -> None:
    assert most_of({"a.py:1 f": 6, "a.py:2 f": 2, "b.py:9 g": 2}) == ("a.py:1 f", 0.6)
    assert most_of({"a.py:1 f": 4, "b.py:2 f": 4, "b.py:9 g": 4}) is None
    assert most_of({f"a.py:{line} f": 4 for line in range(9)}) == ("a.py f", 1.0)
    two = {"a.py:1 f → dumps": 3, "a.py:1 f → loads": 3}
    assert most_of({**two, "a.py:2 f": 4}) == ("a.py:1 f", 0.6)
    assert most_of({"a.py:1 f → dumps": 9, "a.py:1 f": 1}) == ("a.py:1 f → dumps", 1.0)
    assert most_of({"a.py:1 f": 2, "a.py:2 f": 2}) == ("a.py f", 1.0)
    assert most_of({"a.py:1 f": 2, "b.py:2 g": 2}) is None
    assert most_of({"a.py:1 <module>": 1}) is None
    assert most_of({}) is None

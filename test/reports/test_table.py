"""The tree table: its text and its figures by hand, on hand-made runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from build import hand_made
from build.hand_made import headings
from build.models import profiled
from build.warnings import run_warnings, sentences
from tabulate import tabulate_formats
from torch import nn

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.analyze.report import ReportTable
from torchprof.reports.text import text_of
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED, OUTSIDE, PHASES, Frame, FrameKind

FORWARD, BACKWARD, RECOMPUTE = 0, 1, 2
CPU_MEMORY = ("cpu_allocated", "cpu_freed")
DEVICE_MEMORY = ("device_allocated", "device_freed")


def row(
    layer: int,
    phase: int = FORWARD,
    ops: str = "",
    *,
    calls: int = 1,
    device: int = 0,
    within: tuple[Around, ...] = (),
    **cost: int,
) -> tuple:
    """A row of the run. ``ops``: frames from the outermost inward; the prefixes ``kernel:`` and ``label:`` set the
    kind."""
    devices = ("cpu", "cuda:0")
    of_row = {"phase": PHASES[phase], "within": within, "device": devices[device], "calls": calls}
    return hand_made.row(layer, *frames_of(ops), **of_row, **cost)


def frames_of(ops: str) -> tuple[Frame, ...]:
    kinds = [name.partition(":") for name in ops.split()]
    return tuple(
        Frame(kind, name) if kind in ("kernel", "label") else Frame(FrameKind.OP, kind + colon + name)
        for kind, colon, name in kinds
    )


def run_of(paths: Sequence[str], lines: Sequence[tuple], /, **meta: Any) -> Run:
    layers = [Layer(tuple(path.split(".")), "Module") for path in paths]
    return hand_made.run_of(lines, layers=layers, **{"measured": Meta(()).measured, **meta})


NET = ["Net", "Net.a", "Net.b", "Net.b.0", "Net.b.1"]
NET_LINES = [
    row(0, calls=1, cpu_ns=1_000),
    row(1, calls=2, cpu_ns=500),
    row(1, ops="aten::linear", calls=2, cpu_ns=2_000),
    row(2, calls=1, cpu_ns=100),
    row(3, calls=1, cpu_ns=1_500_000),
    row(4, calls=3, cpu_ns=2_000_000_000),
]


def names(table: str) -> list[str]:
    """The text of the first column below the headings."""
    lines = table.split("\n\n")[0].splitlines()
    width = lines[0].index(" | ")
    return [line[:width].rstrip() for line in lines[2:]]


def cells(table: str, name: str) -> list[str]:
    """The cells after the name, in the only row of that name."""
    (line,) = [
        line for line in table.split("\n\n")[0].splitlines()[2:] if line.split(" | ")[0].strip("│├└─ |").strip() == name
    ]
    return [cell.strip() for cell in line.split("|")[1:]]


def column(table: str, heading: str) -> list[str]:
    at = headings(table).index(heading)
    return [[cell.strip() for cell in line.split("|")][at] for line in table.split("\n\n")[0].splitlines()[2:]]


# The look of the table


def test_the_text_of_the_table_of_a_small_run() -> None:
    # b: 100 ns + 1.5 ms + 2 s = 2.0015001 s; Net: 1 us + 2.5 us + b = 2.0015036 s.
    assert run_of(NET, NET_LINES).report("tree") == "\n".join(
        [
            "Module | Self CPU total | CPU total | Number of Calls",
            "-------|----------------|-----------|----------------",
            "Net    | 1.000us        | 2.002s    | 1",
            "├── a  | 2.500us        | 2.500us   | 2",
            "└── b  | 0.100us        | 2.002s    | 1",
            " ├── 0 | 1.500ms        | 1.500ms   | 1",
            " └── 1 | 2.000s         | 2.000s    | 3",
        ]
    )


IN_LABEL = (Around(0, "forward", frames_of("label:mine")),)
LABELLED = [
    row(0, calls=1, cpu_ns=1_000),
    row(0, ops="label:mine", calls=1, cpu_ns=100),
    row(0, ops="label:mine aten::relu", calls=1, cpu_ns=20),
    row(0, ops="label:mine label:deep", calls=2, cpu_ns=3),
    row(0, ops="label:mine label:deep aten::add", calls=2, cpu_ns=40),
    row(1, calls=1, cpu_ns=50_000, within=IN_LABEL),
    row(1, ops="aten::mm", calls=1, cpu_ns=7_000_000, within=IN_LABEL),
    row(1, BACKWARD, ops="label:back", calls=1, cpu_ns=100),
    row(1, BACKWARD, ops="label:back aten::mm", calls=1, cpu_ns=500),
    row(-1, ops="label:loss", calls=4, cpu_ns=9),
]


def test_of_equal_layers_top_shows_those_that_come_first() -> None:
    run = run_of(["Net", "Net.a", "Net.b", "Net.c"], [row(index, calls=1, cpu_ns=1_000) for index in (1, 2, 3)])
    assert names(run.report("tree", top=2)) == ["Net", "├── a", "└── b"]


def test_the_text_of_a_table_with_labels() -> None:
    """Between the layer and its ops. mine: 100 + 20 + 3 + 40 ns + 50 us + 7 ms (the layer in it) = 7.050163 ms."""
    run = run_of(["Net", "Net.fc"], LABELLED)
    assert run.report("tree") == "\n".join(
        [
            "Module                      | Self CPU total | CPU total | Number of Calls | Backward CPU total",
            "----------------------------|----------------|-----------|-----------------|-------------------",
            "Net                         | 1.163us        | 7.051ms   | 1               | 0.600us",
            "├── mine (label)            | 0.100us        | 7.050ms   | 1               |",
            "│└── deep (label)           | 0.003us        | 0.043us   | 2               |",
            "└── fc                      | 7.050ms        | 7.050ms   | 1               | 0.600us",
            " └── back (label, backward) |                |           | 1               | 0.600us",
            "(outside)                   | 0.009us        | 0.009us   |                 | 0.000us",
            "└── loss (label)            | 0.009us        | 0.009us   | 4               |",
            "",
            "The total of a label holds the layers called in it, which have rows of their own, too.",
        ]
    )
    assert names(run.report("tree", depth=0)) == [
        "Net",
        "└── mine (label)",
        " └── deep (label)",
        "(outside)",
        "└── loss (label)",
    ]
    assert names(run.report("tree", top=1)) == [
        "Net",
        "├── mine (label)",
        "│└── deep (label)",
        "└── fc",
        " └── back (label, backward)",
        "(outside)",
        "└── loss (label)",
    ]


def test_ops_in_labels_are_rows_below_them() -> None:
    run = run_of(["Net", "Net.fc"], LABELLED)
    assert names(run.report("tree", show_events=True)) == [
        "Net",
        "├── mine (label)",
        "│├── aten::relu",
        "│└── deep (label)",
        "│ └── aten::add",
        "├── (between ops)",
        "└── fc",
        " ├── aten::mm",
        " ├── (between ops)",
        " └── back (label, backward)",
        "  └── aten::mm (backward)",
        "(outside)",
        "└── loss (label)",
    ]


def test_rows_in_labels_are_sorted_too() -> None:
    run = run_of(["Net", "Net.fc"], LABELLED)
    ordered = names(run.report("tree", show_events=True, sort_by="cpu_total"))
    assert ordered[1:5] == ["├── mine (label)", "│├── deep (label)", "││└── aten::add", "│└── aten::relu"]


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("└── ≥ 3µs", 9), ("卷积", 4), ("ｆｃ", 4), ("컨볼루션", 8), ("\033[38;5;196m卷积\033[0m", 4)],
)
def test_columns_leave_room_for_wide_letters_and_none_for_colors(text: str, width: int) -> None:
    first, line, row_of_text, other = text_of(
        ReportTable.of_cells(["A", "B"], [[text, "1"], ["x" * 9, "2"]])
    ).splitlines()
    assert (first, line, other) == ("A         | B", "----------|--", "x" * 9 + " | 2")
    assert row_of_text == text + " " * (9 - width) + " | 1"


def test_the_lines_of_the_tree() -> None:
    paths = ["Net", "Net.a", "Net.a.x", "Net.a.x.y", "Net.a.z", "Net.b", "Net.b.u", "Net.b.u.v", "Net.b.u.w", "Other"]
    run = run_of(paths, [row(at, cpu_ns=1) for at in range(len(paths))])
    assert names(run.report("tree")) == [
        "Net",
        "├── a",
        "│├── x",
        "││└── y",
        "│└── z",
        "└── b",
        " └── u",
        "  ├── v",
        "  └── w",
        "Other",
    ]


@pytest.mark.parametrize("tablefmt", tabulate_formats)
def test_every_format_of_tabulate_has_every_figure(tablefmt) -> None:
    text = run_of(NET, NET_LINES).report("tree", tablefmt=tablefmt)
    for word in ("Module", "Self CPU total", "Number of Calls", "Net", "1.500ms", "2.000s", "2.500us"):
        assert word in text, word
    assert "├── a" in text or "\\u251c" in text


def test_the_text_of_a_format_of_tabulate() -> None:
    assert run_of(NET[:3], NET_LINES[:4]).report("tree", tablefmt="github") == "\n".join(
        [
            "| Module   | Self CPU total   | CPU total   | Number of Calls   |",
            "|----------|------------------|-------------|-------------------|",
            "| Net      | 1.000us          | 3.600us     | 1                 |",
            "| ├── a    | 2.500us          | 2.500us     | 2                 |",
            "| └── b    | 0.100us          | 0.100us     | 1                 |",
        ]
    )


# Which columns


ALL = ("cpu_ns", *CPU_MEMORY, "device_ns", *DEVICE_MEMORY)


CPU = ["Self CPU total", "CPU total"]
CUDA = ["Self CUDA total", "CUDA total"]
MEMORY = ["Self CPU Mem", "CPU Mem"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("cpu_ns",), CPU),
        (("cpu_ns", *CPU_MEMORY), [*CPU, *MEMORY]),
        (("cpu_ns", "device_ns"), [*CPU, *CUDA]),
        (ALL, [*CPU, *CUDA, *MEMORY, "Self CUDA Mem", "CUDA Mem"]),
    ],
    ids=["cpu", "memory", "cuda", "cuda and memory"],
)
def test_the_headings_and_their_order(fields, expected) -> None:
    device = "cuda" if "device_ns" in fields else None
    run = run_of(["Net"], [row(0, cpu_ns=1)], device=device, requested=fields, measured=fields)
    assert headings(run.report("tree")) == ["Module", *expected, "Number of Calls"]


def test_backward_and_recompute_follow_after_the_calls() -> None:
    lines = [
        row(0, FORWARD, calls=1, cpu_ns=1_000, cpu_allocated=100),
        row(0, FORWARD, "aten::mm kernel:gemm", device=1, device_ns=2_000),
        row(0, BACKWARD, "MmBackward0", calls=1, cpu_ns=3_000, cpu_allocated=5_000, cpu_freed=7_048),
        row(0, BACKWARD, "MmBackward0 kernel:gemm", device=1, device_ns=4_000),
        row(0, RECOMPUTE, calls=1, cpu_ns=5_000, cpu_allocated=1_024),
        row(0, RECOMPUTE, "aten::mm kernel:gemm", device=1, device_ns=6_000),
    ]
    run = run_of(["Net"], lines, device="cuda", requested=ALL, measured=ALL)
    table = run.report("tree")
    of_phase = ["CPU total", "CUDA total", "CPU Mem", "CUDA Mem"]
    assert headings(table)[10:] == [f"{phase} {name}" for phase in ("Backward", "Recompute") for name in of_phase]
    assert cells(table, "Net") == [
        *["1.000us", "1.000us", "2.000us", "2.000us", "100 B", "100 B", "0 B", "0 B"],
        "1",  # a recomputed call is no forward call
        *["3.000us", "4.000us", "-2.00 KB", "0 B"],
        *["5.000us", "6.000us", "1.00 KB", "0 B"],
    ]


def test_recompute_columns_need_no_backward_and_the_other_way_round() -> None:
    only = run_of(["Net"], [row(0, cpu_ns=1), row(0, BACKWARD, "X", cpu_ns=1)])
    assert headings(only.report("tree"))[4:] == ["Backward CPU total"]


@pytest.mark.parametrize(("device", "heading"), [("cuda", "CUDA"), ("xpu", "XPU"), ("mps", "MPS")])
def test_the_device_is_named_in_the_headings(device, heading) -> None:
    fields = ("cpu_ns", "device_ns")
    run = run_of(["Net"], [row(0, cpu_ns=1)], device=device, requested=fields, measured=fields)
    assert headings(run.report("tree"))[3:5] == [f"Self {heading} total", f"{heading} total"]


# Figures


def test_memory_is_allocated_minus_freed_bytes() -> None:
    fields = ("cpu_ns", *CPU_MEMORY)
    lines = [
        row(0, cpu_ns=10, cpu_allocated=1_024, cpu_freed=4_096),
        row(1, cpu_ns=10, cpu_allocated=3 * 1024**3, cpu_freed=1024**3),
        row(2, cpu_ns=10, cpu_allocated=1_023, cpu_freed=0),
        row(3, cpu_ns=10, cpu_allocated=0, cpu_freed=1536 * 1024),
    ]
    table = run_of(["Net", "Net.a", "Net.b", "Net.c"], lines, requested=fields, measured=fields).report("tree")
    assert column(table, "Self CPU Mem") == ["-3.00 KB", "2.00 GB", "1023 B", "-1.50 MB"]
    # 2 GiB - 3072 + 1023 - 1572864 bytes
    assert 2 * 1024**3 - 3072 + 1023 - 1_572_864 == 2_145_908_735
    assert column(table, "CPU Mem")[0] == "2.00 GB"


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0.000us"), (1, "0.001us"), (999_999, "999.999us"), (1_000_000, "1.000ms"), (2_500_000_000, "2.500s")],
)
def test_times_in_torchs_units(ns, text) -> None:
    assert cells(run_of(["Net"], [row(0, cpu_ns=ns)]).report("tree"), "Net")[0] == text


def test_kernel_time_counts_for_the_layer_that_launched_it() -> None:
    fields = ("cpu_ns", "device_ns")
    lines = [
        row(0, cpu_ns=5_000),
        row(1, ops="aten::mm", cpu_ns=7_000),
        row(1, ops="aten::mm kernel:gemm", device=1, device_ns=9_000),
        row(0, ops="aten::add kernel:add", device=1, device_ns=1_000),
    ]
    table = run_of(["Net", "Net.a"], lines, device="cuda", requested=fields, measured=fields).report("tree")
    assert cells(table, "Net") == ["5.000us", "12.000us", "1.000us", "10.000us", "1"]
    assert cells(table, "a")[2:4] == ["9.000us", "9.000us"]


def test_a_layer_that_was_never_called_has_unknown_figures() -> None:
    table = run_of(["Net", "Net.a", "Net.b"], [row(0, cpu_ns=1_000), row(1, cpu_ns=1_000)]).report("tree")
    assert cells(table, "b") == ["–", "–", "0"]


def test_a_container_without_calls_of_its_own_has_the_total_of_its_children() -> None:
    table = run_of(["Net", "Net.list", "Net.list.0"], [row(0, cpu_ns=1_000), row(2, cpu_ns=2_000)]).report("tree")
    assert cells(table, "list") == ["0.000us", "2.000us", "0"]
    assert cells(table, "Net") == ["1.000us", "3.000us", "1"]


def test_figures_that_were_requested_and_not_measured_are_unknown_and_never_zero() -> None:
    run = run_of(
        ["Net", "Net.a"],
        [row(0, cpu_ns=1_000, cpu_allocated=2), row(1, BACKWARD, "X", cpu_ns=1_000)],
        device="cuda",
        requested=ALL,
        measured=("cpu_ns", *CPU_MEMORY),
        warnings=run_warnings("No CUDA here."),
    )
    table = run.report("tree")
    assert cells(table, "Net")[:9] == ["1.000us", "1.000us", "–", "–", "2 B", "2 B", "–", "–", "1"]
    assert cells(table, "Net")[9:] == ["1.000us", "–", "0 B", "–"]
    assert table.split("\n\n")[1] == "No CUDA here."


def test_warnings_are_below_the_table() -> None:
    table = run_of(["Net"], [row(0, cpu_ns=1)], warnings=run_warnings("One thing.", "Another.")).report("tree")
    assert table.split("\n")[-3:] == ["", "One thing.", "Another."]
    assert not run_of(["Net"], [row(0, cpu_ns=1)]).report("tree").endswith("\n")


# Rows of work of no layer


def test_work_of_no_layer_is_the_last_row() -> None:
    lines = [*NET_LINES, row(OUTSIDE, ops="aten::sum", cpu_ns=4_000), row(OUTSIDE, BACKWARD, "SumBackward0", cpu_ns=7)]
    table = run_of(NET, lines).report("tree")
    assert names(table)[-1] == "(outside)"
    assert cells(table, "(outside)") == ["4.000us", "4.000us", "", "0.007us"]
    assert names(run_of(NET, NET_LINES).report("tree"))[-1] == " └── 1"


def test_layers_that_were_not_selected_are_blank_and_their_work_has_a_row() -> None:
    lines = [
        row(NOT_SELECTED, calls=1, cpu_ns=6_000),
        row(NOT_SELECTED, ops="aten::relu", cpu_ns=1_000),
        row(1, calls=2, cpu_ns=2_500),
        row(OUTSIDE, ops="aten::sum", cpu_ns=4_000),
    ]
    run = run_of(NET, lines, paths=(("Net", "a"),))
    assert run.report("tree") == "\n".join(
        [
            "Module         | Self CPU total | CPU total | Number of Calls",
            "---------------|----------------|-----------|----------------",
            "Net            |                |           |",
            "├── a          | 2.500us        | 2.500us   | 2",
            "└── b          |                |           |",
            " ├── 0         |                |           |",
            " └── 1         |                |           |",
            "(not selected) | 7.000us        | 7.000us   |",
            "(outside)      | 4.000us        | 4.000us   |",
        ]
    )


def test_a_selected_layer_that_was_never_called_is_not_blank() -> None:
    table = run_of(NET, [row(0, cpu_ns=1_000)], paths=(("Net",), ("Net", "b"))).report("tree")
    assert cells(table, "b") == ["–", "–", "0"]
    assert cells(table, "a") == ["", "", ""]


# depth, sort_by, top, percent


@pytest.mark.parametrize(
    ("depth", "shown"),
    [
        (0, ["Net"]),
        (1, ["Net", "├── a", "└── b"]),
        (2, ["Net", "├── a", "└── b", " ├── 0", " └── 1"]),
        (9, ["Net", "├── a", "└── b", " ├── 0", " └── 1"]),
    ],
)
def test_depth_hides_rows_and_keeps_totals(depth, shown) -> None:
    run = run_of(NET, [*NET_LINES, row(OUTSIDE, ops="aten::sum", cpu_ns=4_000)])
    table = run.report("tree", depth=depth)
    assert names(table) == [*shown, "(outside)"]
    whole = run.report("tree")
    assert cells(table, "Net") == cells(whole, "Net") == ["1.000us", "2.002s", "1"]
    if depth:
        assert cells(table, "b") == cells(whole, "b")


@pytest.mark.parametrize("by", ["CPU total", "cpu_total"])
def test_siblings_are_sorted_by_a_column_the_largest_first(by) -> None:
    run = run_of(NET, [*NET_LINES, row(OUTSIDE, ops="aten::sum", cpu_ns=9_000_000_000)])
    assert names(run.report("tree", sort_by=by)) == ["Net", "├── b", "│├── 1", "│└── 0", "└── a", "(outside)"]


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("self_cpu_total", "abc"),
        ("Self CPU total", "abc"),
        ("calls", "bca"),
        ("Number of Calls", "bca"),
        ("number_of_calls", "bca"),
    ],
)
def test_sorting_by_self_and_by_calls(by, order) -> None:
    lines = [row(0, cpu_ns=1), row(1, calls=1, cpu_ns=9), row(2, calls=5, cpu_ns=5), row(3, calls=2, cpu_ns=2)]
    run = run_of(["Net", "Net.a", "Net.b", "Net.c"], lines)
    assert "".join(name[-1] for name in names(run.report("tree", sort_by=by))[1:]) == order


def test_rows_with_equal_figures_keep_the_order_of_the_model() -> None:
    run = run_of(["Net", "Net.a", "Net.b", "Net.c"], [row(at, cpu_ns=5) for at in range(4)])
    assert names(run.report("tree", sort_by="cpu_total")) == names(run.report("tree"))


def test_sorting_by_backward() -> None:
    lines = [row(1, cpu_ns=9), row(2, cpu_ns=5), row(1, BACKWARD, "X", cpu_ns=1), row(2, BACKWARD, "Y", cpu_ns=7)]
    run = run_of(["Net", "Net.a", "Net.b"], lines)
    for by in ("Backward CPU total", "backward_cpu_total"):
        assert names(run.report("tree", sort_by=by)) == ["Net", "├── b", "└── a"]


@pytest.mark.parametrize(
    ("options", "shown", "hidden"),
    [
        ({"top": 1}, ["Net", "└── b", " └── 1"], 2),
        ({"top": 2}, ["Net", "└── b", " ├── 0", " └── 1"], 1),
        ({"top": 3}, ["Net", "├── a", "└── b", " ├── 0", " └── 1"], 0),
        # By self of the column, though the totals of Net and b are the largest.
        ({"top": 1, "sort_by": "cpu_total"}, ["Net", "└── b", " └── 1"], 2),
        ({"top": 2, "sort_by": "cpu_total"}, ["Net", "└── b", " ├── 1", " └── 0"], 1),
        ({"top": 1, "sort_by": "calls"}, ["Net", "└── b", " └── 1"], 2),
        ({"top": 2, "sort_by": "calls"}, ["Net", "├── a", "└── b", " └── 1"], 1),
        # A layer at the depth stands for all below it: b, with a self of 100 ns, for the two seconds of b.1.
        ({"top": 1, "depth": 1}, ["Net", "└── b"], 3),
        ({"top": 1, "depth": 1, "sort_by": "self_cpu_total"}, ["Net", "└── b"], 3),
        ({"top": 2, "depth": 1}, ["Net", "├── a", "└── b"], 2),
        ({"top": 1, "depth": 0}, ["Net"], 4),
        ({"top": 1, "depth": 2}, ["Net", "└── b", " └── 1"], 2),
    ],
)
def test_top_shows_the_largest_by_self_with_those_above_them(options, shown, hidden) -> None:
    table = run_of(NET, NET_LINES).report("tree", **options)
    assert names(table) == shown
    assert f"{hidden} row" in table.split("\n\n")[1] and "hidden" in table.split("\n\n")[1]


def test_a_note_says_how_top_ranks_layers() -> None:
    run = run_of(NET, NET_LINES)
    assert "shown is the largest by Self CPU total, at depth 1 with all below, with the layers above." in run.report(
        "tree", depth=1, top=1
    )
    assert "shown is the largest by Self CPU total, with the layers above." in run.report("tree", depth=2, top=1)


def test_percent_is_the_share_of_all_recorded_time() -> None:
    lines = [
        row(0, cpu_ns=1_000),
        row(1, cpu_ns=3_000),
        row(OUTSIDE, ops="aten::sum", cpu_ns=1_000),
        row(1, BACKWARD, "X", cpu_ns=2_000),
        row(OUTSIDE, BACKWARD, "Y", cpu_ns=6_000),
    ]
    assert run_of(["Net", "Net.a"], lines).report("tree", percent=True) == "\n".join(
        [
            "Module    | Self CPU total  | CPU total       | Number of Calls | Backward CPU total",
            "----------|-----------------|-----------------|-----------------|-------------------",
            "Net       | 1.000us (20.0%) | 4.000us (80.0%) | 1               | 2.000us (25.0%)",
            "└── a     | 3.000us (60.0%) | 3.000us (60.0%) | 1               | 2.000us (25.0%)",
            "(outside) | 1.000us (20.0%) | 1.000us (20.0%) |                 | 6.000us (75.0%)",
        ]
    )


def test_percent_of_nothing_is_no_division_by_zero() -> None:
    assert "0.000us" in run_of(["Net"], [row(0, cpu_ns=0)]).report("tree", percent=True)


# The operators


EVENT_LINES = [
    row(0, calls=1, cpu_ns=100),
    row(1, calls=2, cpu_ns=50),
    row(1, ops="aten::linear", calls=2, cpu_ns=300),
    row(1, ops="aten::linear aten::t", calls=2, cpu_ns=20),
    row(1, ops="aten::linear aten::addmm", calls=2, cpu_ns=1_000),
    row(0, ops="aten::relu", calls=1, cpu_ns=200),
    row(OUTSIDE, ops="aten::sum", calls=1, cpu_ns=70),
    row(1, BACKWARD, "AddmmBackward0", calls=2, cpu_ns=400),
    row(1, BACKWARD, "AddmmBackward0 aten::mm", calls=4, cpu_ns=2_000),
]


def test_the_text_of_a_table_with_operators() -> None:
    # a: 50 + 300 + 20 + 1000 = 1370; Net: 100 + 200 = 300 self, 1670 total; linear: 300 + 20 + 1000 = 1320.
    assert run_of(["Net", "Net.a"], EVENT_LINES).report("tree", show_events=True) == "\n".join(
        [
            "Module                         | Self CPU total | CPU total | Number of Calls "
            "| Backward Self CPU total | Backward CPU total",
            "-------------------------------|----------------|-----------|-----------------"
            "|-------------------------|-------------------",
            "Net                            | 0.300us        | 1.670us   | 1               "
            "| 0.000us                 | 2.400us",
            "├── aten::relu                 | 0.200us        | 0.200us   | 1               |                         |",
            "├── (between ops)              | 0.100us        | 0.100us   |                 |                         |",
            "└── a                          | 1.370us        | 1.370us   | 2               "
            "| 2.400us                 | 2.400us",
            " ├── aten::linear              | 0.300us        | 1.320us   | 2               |                         |",
            " ├── aten::t                   | 0.020us        | 0.020us   | 2               |                         |",
            " ├── aten::addmm               | 1.000us        | 1.000us   | 2               |                         |",
            " ├── (between ops)             | 0.050us        | 0.050us   |                 |                         |",
            " ├── AddmmBackward0 (backward) |                |           | 2               "
            "| 0.400us                 | 2.400us",
            " └── aten::mm (backward)       |                |           | 4               "
            "| 2.000us                 | 2.000us",
            "(outside)                      | 0.070us        | 0.070us   |                 "
            "| 0.000us                 | 0.000us",
            "└── aten::sum                  | 0.070us        | 0.070us   | 1               |                         |",
        ]
    )


def test_an_operator_at_several_depths_is_one_row() -> None:
    lines = [
        row(0, cpu_ns=1),
        row(0, ops="aten::empty", calls=3, cpu_ns=30),
        row(0, ops="aten::zeros", calls=1, cpu_ns=10),
        row(0, ops="aten::zeros aten::empty", calls=1, cpu_ns=5),
        # An operator nested in one of the same name, with another between them: the total counts the outermost only.
        row(0, ops="aten::to", calls=1, cpu_ns=2),
        row(0, ops="aten::to aten::copy_", calls=1, cpu_ns=4),
        row(0, ops="aten::to aten::copy_ aten::to", calls=1, cpu_ns=8),
    ]
    table = run_of(["Net"], lines).report("tree", show_events=True)
    assert cells(table, "aten::empty") == ["0.035us", "0.035us", "4"]
    assert cells(table, "aten::zeros") == ["0.010us", "0.015us", "1"]
    assert cells(table, "aten::to") == ["0.010us", "0.014us", "2"]
    assert cells(table, "aten::copy_") == ["0.004us", "0.012us", "1"]


def test_kernels_and_memory_of_operators() -> None:
    lines = [
        row(0, cpu_ns=100),
        row(0, ops="aten::linear", calls=1, cpu_ns=10),
        row(0, ops="aten::linear aten::mm", calls=1, cpu_ns=20, cpu_allocated=2_048),
        row(0, ops="aten::linear aten::mm", calls=0, device=1, device_allocated=4_096, device_freed=1_024),
        row(0, ops="aten::linear aten::mm kernel:gemm", calls=2, device=1, device_ns=5_000),
    ]
    run = run_of(["Net"], lines, device="cuda", requested=ALL, measured=ALL)
    table = run.report("tree", show_events=True)
    assert cells(table, "aten::linear") == [
        *["0.010us", "0.030us", "0.000us", "5.000us", "0 B", "2.00 KB", "0 B", "3.00 KB", "1"]
    ]
    assert cells(table, "aten::mm") == [
        *["0.020us", "0.020us", "5.000us", "5.000us", "2.00 KB", "2.00 KB", "3.00 KB", "3.00 KB", "1"]
    ]
    assert "gemm" not in table


def test_operators_of_hidden_layers_are_hidden_with_them() -> None:
    run = run_of(["Net", "Net.a"], EVENT_LINES)
    assert "aten::addmm" not in run.report("tree", show_events=True, depth=0)
    assert names(run.report("tree", show_events=True, top=1))[-4:] == [
        " ├── AddmmBackward0 (backward)",
        " └── aten::mm (backward)",
        "(outside)",
        "└── aten::sum",
    ]


def test_memory_outside_of_every_operator_and_layer() -> None:
    fields = ("cpu_ns", *CPU_MEMORY)
    lines = [row(0, cpu_ns=1_000), row(OUTSIDE, calls=0, cpu_freed=512)]
    table = run_of(["Net"], lines, requested=fields, measured=fields).report("tree", show_events=True)
    assert cells(table, "(outside)")[2:4] == ["-512 B", "-512 B"]
    assert [line for line in table.splitlines() if "(between ops)" in line and "-512 B" in line]


# Live


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Tanh(), nn.Linear(4, 2))
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x)))


def test_file_gets_the_returned_text_and_a_newline() -> None:
    model = nn.Sequential(nn.ReLU())
    prof = profiled(model, torch.rand(2))
    file = io.StringIO()
    text = prof.display(show_events=True, file=file)
    assert file.getvalue() == text + "\n"
    prof.display(depth=0, file=file)
    assert file.getvalue() == text + "\n" + prof.display(depth=0) + "\n"
    before = io.StringIO()
    Profile(model).display(file=before)
    assert before.getvalue() == "<unfinished torchprof.profile>\n"


def test_display_passes_its_options_to_the_report() -> None:
    model = Net()
    x = torch.rand(3, 4)
    prof = profiled(model, x)
    assert [line.split()[0] for line in prof.display(depth=0).split("\n\n")[0].splitlines()[2:]] == ["Net", "(outside)"]
    assert prof.display(percent=True) == prof.run.report("tree", percent=True)
    assert prof.display(tablefmt="html").startswith("<table>")
    assert "hidden" in prof.display(top=1)
    sorted_rows = names(prof.display(sort_by="calls"))
    assert sorted_rows[-2:] == ["└── unused", "(outside)"]


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_a_device_that_is_not_there_has_unknown_figures_and_one_warning(device: str) -> None:
    if device != "mps" and getattr(torch, device).is_available():
        pytest.skip(f"there is a {device} device here")
    model = nn.Sequential(nn.ReLU())
    x = torch.rand(2)
    with Profile(model, use_device=device, profile_memory=True) as prof:
        model(x).sum()
    table, name = prof.display(), device.upper()
    assert headings(table)[3:5] == [f"Self {name} total", f"{name} total"]
    for heading in (f"Self {name} total", f"{name} total", f"Self {name} Mem", f"{name} Mem"):
        assert set(column(table, heading)) == {"–"}, heading
    assert "–" not in column(table, "Self CPU total")
    assert len([sentence for sentence in sentences(prof.run) if name in sentence]) == 1


def test_sorting_by_a_measure_that_was_not_measured_is_refused() -> None:
    prof = profiled(nn.Linear(2, 2), torch.rand(1, 2), use_device="mps")
    for options in ({"sort_by": "mps_total"}, {"sort_by": "self_mps_total", "top": 1}):
        with pytest.raises(TorchprofError, match="MPS total' was not measured"):
            prof.display(**options)


def test_how_often_a_layer_inside_a_script_module_ran_is_unknown() -> None:
    prof = profiled(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), torch.rand(1, 2))
    row = next(line for line in prof.display().splitlines() if line.startswith("└── 0"))
    assert [cell.strip() for cell in row.split(" | ")][1:] == ["–", "–", "–"]


def test_top_without_times_ranks_by_flops() -> None:
    """Without times, the layers with the largest self FLOPs; containers have none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 64), nn.ReLU()))
    run = torchprof.flops(model, torch.rand(2, 4))
    text = run.report("tree", top=1)
    assert "shown is the largest by self of FLOPs" in text
    assert [line.split(" | ")[0].rstrip() for line in text.splitlines()[2:5]] == ["Sequential", "└── 1", " └── 0"]
    by_params = run.report("tree", top=1, sort_by="params")
    assert "shown is the largest by self of Params" in by_params
    assert " └── 0" in by_params


def test_str_of_a_run_is_its_overview_and_repr_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    run = torchprof.flops(nn.Linear(2, 2), torch.rand(1, 2))
    assert str(run) == run.report("overview", width=100, whole='run.report("tree") shows all.')
    assert repr(run) == f"<Run of Linear: 1 layer, {len(run.rows)} rows>"

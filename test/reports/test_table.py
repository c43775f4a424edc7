"""The tree table: its text and its figures by hand, on hand-made runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from build import hand_made
from build.golden import drawn
from build.hand_made import headings
from build.models import Layers, profiled
from build.warnings import sentences
from tabulate import tabulate_formats
from torch import nn

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.reports.documents import _own_table
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE, PHASES, Frame, FrameKind

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


def test_the_tree_and_its_options(golden: Callable[..., None]) -> None:
    """b: 100 ns + 1.5 ms + 2 s = 2.0015001 s; Net: 1 us + 2.5 us + b = 2.0015036 s. ``top`` ranks by self, or at a
    depth by all that is below it."""
    run = run_of(NET, [*NET_LINES, row(OUTSIDE, ops="aten::sum", cpu_ns=9_000_000_000)])
    options = [
        {},
        {"depth": 0},
        {"depth": 1},
        {"sort_by": "cpu_total"},
        {"top": 1, "depth": 1},
        {"top": 1, "depth": 2},
        {"top": 2, "sort_by": "cpu_total"},
        {"top": 2, "sort_by": "calls"},
        {"tablefmt": "github"},
    ]
    golden(*(drawn(run, "tree", **each) for each in options))


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


def test_labels_are_between_a_layer_and_its_operators(golden: Callable[..., None]) -> None:
    """mine: 100 + 20 + 3 + 40 ns + 50 us + 7 ms (the layer in it) = 7.050163 ms."""
    run = run_of(["Net", "Net.fc"], LABELLED)
    options = [{}, {"depth": 0}, {"top": 1}, {"show_events": True}, {"show_events": True, "sort_by": "cpu_total"}]
    golden(*(drawn(run, "tree", **each) for each in options))


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("└── ≥ 3µs", 9), ("卷积", 4), ("ｆｃ", 4), ("컨볼루션", 8), ("\033[38;5;196m卷积\033[0m", 4)],
)
def test_columns_leave_room_for_wide_letters_and_none_for_colors(text: str, width: int) -> None:
    first, line, row_of_text, other = _own_table(["A", "B"], [[text, "1"], ["x" * 9, "2"]]).splitlines()
    assert (first, line, other) == ("A         | B", "----------|--", "x" * 9 + " | 2")
    assert row_of_text == text + " " * (9 - width) + " | 1"


def test_the_lines_of_the_tree(golden: Callable[..., None]) -> None:
    paths = ["Net", "Net.a", "Net.a.x", "Net.a.x.y", "Net.a.z", "Net.b", "Net.b.u", "Net.b.u.v", "Net.b.u.w", "Other"]
    golden(run_of(paths, [row(at, cpu_ns=1) for at in range(len(paths))]).report("tree"))


@pytest.mark.parametrize("tablefmt", tabulate_formats)
def test_every_format_of_tabulate_has_every_figure(tablefmt) -> None:
    text = run_of(NET, NET_LINES).report("tree", tablefmt=tablefmt)
    for word in ("Module", "Self CPU total", "Number of Calls", "Net", "1.500ms", "2.000s", "2.500us"):
        assert word in text, word
    assert "├── a" in text or "\\u251c" in text


# Which columns


ALL = ("cpu_ns", *CPU_MEMORY, "device_ns", *DEVICE_MEMORY)


def test_backward_and_recompute_follow_after_the_calls(golden: Callable[..., None]) -> None:
    """A recomputed call is no forward call."""
    lines = [
        row(0, FORWARD, calls=1, cpu_ns=1_000, cpu_allocated=100),
        row(0, FORWARD, "aten::mm kernel:gemm", device=1, device_ns=2_000),
        row(0, BACKWARD, "MmBackward0", calls=1, cpu_ns=3_000, cpu_allocated=5_000, cpu_freed=7_048),
        row(0, BACKWARD, "MmBackward0 kernel:gemm", device=1, device_ns=4_000),
        row(0, RECOMPUTE, calls=1, cpu_ns=5_000, cpu_allocated=1_024),
        row(0, RECOMPUTE, "aten::mm kernel:gemm", device=1, device_ns=6_000),
    ]
    golden(run_of(["Net"], lines, device="cuda", requested=ALL, measured=ALL).report("tree"))


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


def test_a_layer_that_was_never_called_has_unknown_figures() -> None:
    table = run_of(["Net", "Net.a", "Net.b"], [row(0, cpu_ns=1_000), row(1, cpu_ns=1_000)]).report("tree")
    assert cells(table, "b") == ["–", "–", "0"]


def test_a_container_without_calls_of_its_own_has_the_total_of_its_children() -> None:
    table = run_of(["Net", "Net.list", "Net.list.0"], [row(0, cpu_ns=1_000), row(2, cpu_ns=2_000)]).report("tree")
    assert cells(table, "list") == ["0.000us", "2.000us", "0"]
    assert cells(table, "Net") == ["1.000us", "3.000us", "1"]


# Rows of work of no layer


def test_a_selected_layer_that_was_never_called_is_not_blank() -> None:
    table = run_of(NET, [row(0, cpu_ns=1_000)], paths=(("Net",), ("Net", "b"))).report("tree")
    assert cells(table, "b") == ["–", "–", "0"]
    assert cells(table, "a") == ["", "", ""]


# depth, sort_by, top, percent


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("self_cpu_total", "abc"),
        ("Self CPU total", "abc"),
        ("calls", "bca"),
        ("Number of Calls", "bca"),
        ("number_of_calls", "bca"),
        ("Backward CPU total", "cba"),
        ("backward_cpu_total", "cba"),
    ],
)
def test_siblings_are_sorted_by_a_column_the_largest_first(by: str, order: str) -> None:
    lines = [row(0, cpu_ns=1), row(1, calls=1, cpu_ns=9), row(2, calls=5, cpu_ns=5), row(3, calls=2, cpu_ns=2)]
    backward = [row(layer, BACKWARD, "X", cpu_ns=layer) for layer in (1, 2, 3)]
    run = run_of(["Net", "Net.a", "Net.b", "Net.c"], [*lines, *backward])
    assert "".join(name[-1] for name in names(run.report("tree", sort_by=by))[1:]) == order


def test_rows_with_equal_figures_keep_the_order_of_the_model() -> None:
    run = run_of(["Net", "Net.a", "Net.b", "Net.c"], [row(at, cpu_ns=5) for at in range(4)])
    assert names(run.report("tree", sort_by="cpu_total")) == names(run.report("tree"))


def test_percent_is_the_share_of_all_recorded_time(golden: Callable[..., None]) -> None:
    """Of 5 us of forward and 8 us of backward."""
    lines = [
        row(0, cpu_ns=1_000),
        row(1, cpu_ns=3_000),
        row(OUTSIDE, ops="aten::sum", cpu_ns=1_000),
        row(1, BACKWARD, "X", cpu_ns=2_000),
        row(OUTSIDE, BACKWARD, "Y", cpu_ns=6_000),
    ]
    golden(run_of(["Net", "Net.a"], lines).report("tree", percent=True))


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


def test_the_text_of_a_table_with_operators(golden: Callable[..., None]) -> None:
    """a: 50 + 300 + 20 + 1000 = 1370; Net: 100 + 200 = 300 self, 1670 total; linear: 300 + 20 + 1000 = 1320."""
    run = run_of(["Net", "Net.a"], EVENT_LINES)
    golden(*(drawn(run, "tree", show_events=True, **each) for each in ({}, {"depth": 0}, {"top": 1})))


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


def test_memory_outside_of_every_operator_and_layer() -> None:
    fields = ("cpu_ns", *CPU_MEMORY)
    lines = [row(0, cpu_ns=1_000), row(OUTSIDE, calls=0, cpu_freed=512)]
    table = run_of(["Net"], lines, requested=fields, measured=fields).report("tree", show_events=True)
    assert cells(table, "(outside)")[2:4] == ["-512 B", "-512 B"]
    assert [line for line in table.splitlines() if "(between ops)" in line and "-512 B" in line]


# Live


class Net(Layers):
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
    model = Net(first=nn.Linear(4, 4), second=nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), unused=nn.Linear(1, 1))
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

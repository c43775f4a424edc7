"""Heat colors and the hottest path: figures by hand, and the output to a real terminal and to a pipe."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.colors import luminance
from build.hand_made import label, names, op, row, run_of
from build.places import ROOT
from build.warm import WarmPython, run_warm
from build.warnings import run_warnings
from tabulate import tabulate_formats

import torchprof
from torchprof import TorchprofError
from torchprof.reports.documents import heat
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, OUTSIDE

ESCAPE = re.compile(r"\033\[([\d;]*)m")

# Self: Net 100, a 300, b 100, b.0 500. Total of b: 600.
LINES = [row(0, cpu_ns=100), row(1, cpu_ns=300), row(2, cpu_ns=100), row(3, cpu_ns=500)]


def colors(table: str, name: str) -> list[str | None]:
    """The color of each cell in the row of that name; None: no color."""
    [line] = [line for line in table.splitlines() if re.search(rf"(^|[├└]── ){re.escape(name)}( ◄)?\s", plain(line))]
    found = [ESCAPE.match(cell.strip()) for cell in line.split(" | ")[1:]]
    return [match and match[1] for match in found]


def plain(text: str) -> str:
    return ESCAPE.sub("", text)


# The hottest path


def test_siblings_are_sorted_by_total_and_the_path_is_marked(golden: Callable[..., None]) -> None:
    golden(run_of(LINES).report("tree", hot=True))


def marked(run: Run, **options: Any) -> list[str]:
    return [name for name in names(run.report("tree", hot=True, **options)) if name.endswith(" ◄")]


def test_the_path_ends_at_a_layer_whose_self_exceeds_any_child() -> None:
    # The self of b is 600, more than the 500 of b.0.
    assert marked(run_of([*LINES, row(2, cpu_ns=500)])) == ["Net ◄", "├── b ◄"]
    assert marked(run_of([*LINES, row(2, cpu_ns=400)])) == ["Net ◄", "├── b ◄"], "as much is not more"
    assert marked(run_of([*LINES, row(2, cpu_ns=399)])) == ["Net ◄", "├── b ◄", "│└── 0 ◄"]
    assert marked(run_of([*LINES, row(0, cpu_ns=1_000)])) == ["Net ◄"]


def test_work_of_no_layer_is_on_no_path() -> None:
    table = run_of([*LINES, row(OUTSIDE, op("aten::sum"), cpu_ns=9_000)]).report("tree", hot=True)
    assert names(table)[0] == "Net ◄" and names(table)[-1] == "(outside)"


def test_the_path_follows_device_time_if_there_is_any() -> None:
    lines = [*LINES, row(1, op("aten::mm"), device="cuda:0", device_ns=50)]
    both = ("cpu_ns", "device_ns")
    assert marked(run_of(lines, requested=both, measured=both, device="cuda")) == ["Net ◄", "├── a ◄"]
    assert len(marked(run_of(LINES, requested=both, measured=both, device="cuda"))) == 3
    assert len(marked(run_of(lines, requested=both, measured=("cpu_ns",), device="cuda"))) == 3


def test_the_path_follows_flops_without_times() -> None:
    counts = ("macs", "flops", "uncounted")
    lines = [row(1, flops=50, macs=10), row(2, flops=20, macs=20)]
    assert marked(run_of(lines, requested=counts, measured=counts)) == ["Net ◄", "├── a ◄"]


def test_the_path_follows_the_requested_column() -> None:
    run = run_of([*LINES, row(1, phase=BACKWARD, cpu_ns=7), row(3, phase=BACKWARD, cpu_ns=3)])
    assert marked(run, sort_by="backward_cpu_total") == ["Net ◄", "├── a ◄"]
    assert "hottest path by Backward CPU total" in run.report("tree", hot=True, sort_by="backward_cpu_total")
    assert marked(run, sort_by="self_cpu_total") == marked(run), "of self, it is the total that leads there"
    with pytest.raises(TorchprofError, match=r"'Number of Calls' has no total .* cpu_total, backward_cpu_total"):
        run.report("tree", hot=True, sort_by="calls")


def test_hidden_layers_hide_the_rest_of_the_path() -> None:
    assert marked(run_of(LINES), depth=1) == ["Net ◄", "├── b ◄"]
    assert marked(run_of(LINES), top=1) == ["Net ◄", "└── b ◄", "└── 0 ◄"]


def test_an_empty_run_has_no_path_and_no_note_on_it() -> None:
    run = run_of([row(0)])
    assert run.report("tree", hot=True) == run.report("tree")


def test_display_has_the_option_hot() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    with torchprof.Profile(model) as prof:
        model(torch.rand(9, 64))
    assert prof.display(hot=True) == prof.run.report("tree", hot=True) != prof.display()


# Colors


def test_a_table_in_color_has_the_same_text_in_the_same_columns() -> None:
    run = run_of([*LINES, row(1, label("mine"), cpu_ns=10), row(OUTSIDE, op("aten::sum"), cpu_ns=9)])
    for options in ({}, {"percent": True}, {"show_events": True}, {"hot": True, "depth": 1}):
        colored = run.report("tree", color=True, **options)
        assert colored != run.report("tree", **options) and plain(colored) == run.report("tree", **options)


def test_the_color_of_a_figure_depends_on_its_share_of_the_column() -> None:
    table = run_of(LINES).report("tree", color=True)
    # 10 %, 100 %; 30 %, 30 %; 10 %, 60 %; 50 %, 50 %; calls have no color.
    assert colors(table, "Net") == [heat(0.1), heat(1), None]
    assert colors(table, "a") == [heat(0.3), heat(0.3), None]
    assert colors(table, "b") == [heat(0.1), heat(0.6), None]
    assert colors(table, "0") == [heat(0.5), heat(0.5), None]
    assert len({heat(0.1), heat(0.3), heat(0.6)}) == 3


@pytest.mark.parametrize("least", [0.5, 0.25, 0.1, 0.05, 0.01])
def test_the_smallest_share_of_each_color(least: float) -> None:
    assert heat(least) == heat(least * 1.01) != heat(least * 0.99)


def test_memory_and_counts_have_colors_and_unknown_figures_have_none() -> None:
    fields = ("cpu_ns", "device_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")
    lines = [
        row(0),
        row(1, op("aten::x"), cpu_allocated=3_000, flops=80),
        row(2, op("aten::x"), cpu_allocated=1_000, flops=20),
        row(2, op("aten::y"), uncounted=1),
    ]
    run = run_of(lines, requested=fields, measured=tuple(set(fields) - {"device_ns"}), device="cuda")
    table = run.report("tree", color=True)
    # Params, Self CPU, CPU, Self CUDA, CUDA, Self CPU Mem, CPU Mem, MACs, FLOPs, FLOP/s, Calls.
    assert colors(table, "a") == [None] * 5 + [heat(0.75), heat(0.75), None, heat(0.8), None, None]
    assert colors(table, "b") == [None] * 5 + [heat(0.25), heat(0.25), None, heat(0.2), None, None]


def test_parameters_have_colors() -> None:
    run = run_of(LINES, requested=("flops", "macs"), measured=("flops", "macs"))
    counts = [0, 30, 20, 50]
    layers = tuple(replace(layer, params=count) for layer, count in zip(run.layers, counts))
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    table = run.report("tree", color=True)
    assert [colors(table, name)[0] for name in ("Net", "a", "b", "0")] == [heat(1), heat(0.3), heat(0.7), heat(0.5)]


@pytest.mark.parametrize("tablefmt", ["github", "html", "latex", "tsv", "grid"])
def test_formats_for_other_programs_have_no_colors(tablefmt: str) -> None:
    assert tablefmt in tabulate_formats
    run = run_of(LINES)
    assert run.report("tree", color=True, tablefmt=tablefmt) == run.report("tree", tablefmt=tablefmt)


def rgb_of(color: int) -> Sequence[int]:
    """Red, green and blue of one of xterm's 256 colors from 16 on."""
    steps = [0, 95, 135, 175, 215, 255]
    cube = color - 16
    return [8 + 10 * (color - 232)] * 3 if color >= 232 else [steps[cube // 36], steps[cube // 6 % 6], steps[cube % 6]]


@pytest.mark.parametrize("share", [0, 0.01, 0.05, 0.1, 0.25, 0.5])
def test_every_color_is_readable_on_light_and_dark_backgrounds(share: float) -> None:
    own = luminance(rgb_of(int(heat(share).rpartition(";")[2]))) + 0.05
    white, black, dark = 1.05, 0.05, luminance(rgb_of(234)) + 0.05
    assert white / own >= 3.4 and own / black >= 3.4 and own / dark >= 3.4


def test_escape_sequences_in_names_are_written_out() -> None:
    run = run_of([*LINES, row(3, op("evil\x1b[2J"), cpu_ns=1)], warnings=run_warnings("Never called: x\x1b[31m\ny."))
    layers = tuple(
        replace(layer, path=tuple(step.replace("b", "b\x1b[31m\r") for step in layer.path)) for layer in run.layers
    )
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    for color in (False, True):
        table = plain(run.report("tree", color=color, show_events=True, hot=True))
        assert "\x1b" not in table and "\r" not in table and "x\\x1b[31m\\ny." in table
        assert "── b\\x1b[31m\\r ◄" in table and "evil\\x1b[2J" in table


# The command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hot") / "run.json"
    run_of(LINES).save(file)
    return file


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **more}


def in_terminal(folder: Path, *command: str, **more: str) -> str:
    """The output of a command of torchprof to a pseudo terminal."""
    pty = pytest.importorskip("pty", reason="no pseudo terminals here")
    ours, theirs = pty.openpty()

    def read() -> bytes:
        written = b""
        with suppress(OSError):  # Linux raises this when the other end is closed
            while part := os.read(ours, 65_536):
                written += part
        return written

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(read)
        try:
            arguments = ["-m", "torchprof", *command]
            WarmPython(arguments, folder, environment(**more), os.ttyname(theirs)).wait(time.monotonic() + 120)
        finally:
            os.close(theirs)
    os.close(ours)
    return written.result().decode().replace("\r\n", "\n")


def test_a_terminal_gets_colors_and_a_pipe_gets_none(saved: Path) -> None:
    command = ("show", str(saved), "--hot")
    colored = in_terminal(saved.parent, *command)
    expected = run_of(LINES).report("tree", hot=True, color=True)
    assert colored == expected + "\n"
    assert run_warm(["-m", "torchprof", *command], saved.parent).stdout == plain(expected) + "\n"


@pytest.mark.parametrize(
    ("more", "has"),
    [({"NO_COLOR": "1"}, False), ({"NO_COLOR": "0"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
    ids=str,
)
def test_environment_variables_switch_colors_off(saved: Path, more: dict[str, str], has: bool) -> None:
    assert ("\x1b" in in_terminal(saved.parent, "show", str(saved), **more)) == has


def test_reports_by_name(saved: Path) -> None:
    def show(*options: str) -> str:
        return in_terminal(saved.parent, "show", str(saved), *options)

    assert show("--report", "tree", "--hot") == show("--hot")
    assert "\x1b" not in show("--report", "ops")
    assert "\x1b" not in show("--summary")
    assert "The summary has no --hot" in show("--summary", "--hot")
    assert "\x1b" not in show("--tablefmt", "github")


def test_a_whole_script_has_its_headline_first_and_its_tree_in_color(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.ReLU())\nnet(torch.rand(2, 9))\n"
    )
    file = tmp_path / "run.json"
    command = ("run", "--hot", "-o", str(file), str(tmp_path / "script.py"))
    written = in_terminal(tmp_path, *command)
    assert "\x1b[1mSequential ◄\x1b[0m" in written and "◄ marks the hottest path by CPU total" in written
    piped = run_warm(["-m", "torchprof", *command], tmp_path).stdout
    assert "Sequential ◄" in piped and "\x1b" not in piped
    lines = [line for line in piped.splitlines() if line]
    assert lines[0].startswith("torchprof: ") and lines[1].startswith("1 forward call of Sequential: ")
    assert lines[3] == torchprof.load(file).report("headline")


@pytest.mark.parametrize("command", ["profile", "flops"])
def test_commands_that_make_a_model(command: str, tmp_path: Path) -> None:
    model = [f"{ROOT / 'examples' / 'models.py'}:LeNet5", "--input", "1,1,32,32"]
    written = in_terminal(tmp_path, command, *model, "--hot")
    assert "\x1b[1mLeNet5 ◄\x1b[0m" in written and "◄ marks the hottest path by" in written


def test_csv_on_a_terminal_commands_nothing(tmp_path: Path) -> None:
    """In a file, names are as they are."""
    run_of([row(0, label("red\x1b[31m"), cpu_ns=1)], layers=[Layer(("Net\x1b[2J",), "Net")]).save(tmp_path / "run.json")
    shown = in_terminal(tmp_path, "show", "run.json", "--report", "csv")
    assert "\x1b" not in shown and r"Net\x1b[2J," in shown.replace("\r\n", "\n").split("\n")[1]

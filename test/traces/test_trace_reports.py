"""The run of a trace in reports, exports, comparisons, and on the command line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from build.models import Mlp
from build.places import TRACES
from build.trace_files import trace_event, write
from build.traced_runs import (
    A100,
    MI250,
    NEEDS_TRACES,
    X,
    annotated,
    names_of,
    of_two_ranks,
    rows_of,
    settle,
    training,
    with_ranges,
)

import torchprof
from torchprof import reports
from torchprof.cli import main
from torchprof.run.run import Run

HALF = "\ud800x"
"""Half of a surrogate pair, which JSON can escape: it is no character, and UTF-8 cannot encode it."""


@pytest.mark.parametrize("suffix", [".html", ".json", ".json.gz", ".md", ".csv", ".trace.json"])
def test_half_a_surrogate_pair_in_a_name_can_be_saved_and_exported(suffix: str, trace: Path, tmp_path: Path) -> None:
    events = [
        trace_event("user_annotation", HALF, 0.5, 50),
        trace_event("cpu_op", f"aten::{HALF}", 10, 20, External_id=2),
        trace_event("kernel", HALF, 40, 8, External_id=2, device=0, stream=7),
    ]
    assert "\\ud800x" in write(trace, {"traceEvents": events}).read_text()
    run = torchprof.from_trace(trace, with_timeline=True)
    assert names_of(run) == ["?x"]
    assert {tuple(frame.name for frame in row.frames) for row in run.rows} == {(), ("aten::?x",), ("aten::?x", "?x")}
    run.export(tmp_path / f"run{suffix}")
    if suffix.startswith(".json"):
        run.save(tmp_path / f"saved{suffix}")
        assert torchprof.load(tmp_path / f"saved{suffix}") == run


def kinds_of_runs(trace: Path) -> dict[str, Run]:
    model = Mlp()
    step = settle(training(model, X))
    annotated(model, step, trace)
    runs = {
        "with the model": torchprof.from_trace(trace, model, with_timeline=True),
        "without": torchprof.from_trace(trace, with_timeline=True),
        "times alone": torchprof.from_trace(with_ranges(trace)),
    }
    if TRACES.is_dir():
        runs["A100"] = torchprof.from_trace(A100, with_timeline=True)
        runs["MI250"] = torchprof.from_trace(MI250)
    return runs


_NO_RANKS = {"ranks-chart", "pipeline-chart"}
_NO_DEVICE = {"kernels", "device", "steps", "step", "roofline", *_NO_RANKS}
REFUSED = {
    "with the model": _NO_DEVICE,
    "without": _NO_DEVICE,
    "times alone": _NO_DEVICE | {"chrome-trace", "timeline", "memory", "memory-chart"},
    "A100": {"memory", "memory-chart", "roofline", *_NO_RANKS},
    "MI250": {"memory", "memory-chart", "roofline", "chrome-trace", "timeline", *_NO_RANKS},
}
"""The reports that need something that was not recorded."""


# Reports, files, comparisons


def test_every_report_and_every_format_works(trace: Path, tmp_path: Path) -> None:
    for name, run in kinds_of_runs(trace).items():
        some_op = next(frame.name for row in run.rows for frame in row.frames if frame.kind == "op")
        refused = set()
        for report, one in reports.known().items():
            try:
                assert run.report(report, **({"op": some_op} if report == "layers" else {}))
                if one.suffix is not None:
                    run.export(tmp_path / f"{name}{one.suffix}")
                    assert (tmp_path / f"{name}{one.suffix}").stat().st_size > 0
            except torchprof.TorchprofError:
                refused.add(report)
        assert refused == REFUSED[name], name


def test_any_values_of_inputs_can_be_saved_and_loaded(trace: Path, reloaded: Any) -> None:
    kinds = ["text", 5, {"a": 1}, [["a"]], [[1.5]], [[2**70]], [[2**61, 2**61]], [[-1]], [None]]
    events = [
        trace_event(
            "cpu_op", name, 10 * number, 2, Input_Dims=dims * 2 if isinstance(dims, list) else dims, Input_type=types
        )
        for number, (name, dims, types) in enumerate(
            itertools.product(["aten::mm", "nccl:all_reduce"], kinds, [["float", "float"], "float", [3], None])
        )
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert sum(row.calls for row in run.rows if row.frames) == len(events)
    assert reloaded(run) == run


def test_a_run_of_a_trace_is_saved_and_loaded(trace: Path, tmp_path: Path) -> None:
    for run in kinds_of_runs(trace).values():
        run.save(tmp_path / "run.json.gz")
        assert torchprof.load(tmp_path / "run.json.gz") == run


def test_a_comparison_with_the_live_run_shows_no_change(trace: Path) -> None:
    model = Mlp()
    step = settle(training(model, X))
    live = annotated(model, step, trace)
    for before, after in ((live, torchprof.from_trace(trace, model)), (torchprof.from_trace(trace),) * 2):
        diff = torchprof.compare(before, after)
        pairs = [pair for pair in diff.walk() if pair.is_layer]
        assert [(pair.how, pair.differs) for pair in pairs] == [("same", ())] * 4
        # A session of torch.profiler is longer in its trace: the time in which nothing ran differs.
        changes = [change for pair in diff.walk() if pair.is_layer for change in pair.changes.values()]
        assert len(changes) > 40
        assert {change.difference for change in changes} <= {0, None}
        assert all(change.before == change.after for change in changes)
        assert not [note for note in diff.notes if "it was read from a trace" not in note]


# The command line


def test_the_command_prints_the_table_and_writes_files(trace: Path, tmp_path: Path, cli: Any) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    files = ["report.html", "run.json", "t.trace.json", "table.md", "rows.csv.gz"]
    given = [part for file in files for part in ("-o", str(tmp_path / file))]
    out, err = cli("show", str(trace), *given)
    run = torchprof.from_trace(trace)
    assert run.report("headline") in out and "\nThe layers\n" in out
    assert str(trace) in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["Written"] * len(files)
    assert rows_of(torchprof.load(tmp_path / "run.json")) == rows_of(run)
    assert all((tmp_path / file).stat().st_size > 0 for file in files)


def test_the_command_reads_several_ranks(tmp_path: Path, cli: Any) -> None:
    out, _ = cli("show", *map(str, of_two_ranks(tmp_path)))
    assert "cuda:0 of rank 1" in out


def test_the_command_prints_nothing_if_an_option_is_wrong(trace: Path, cli: Any) -> None:
    out, err = cli("show", str(with_ranges(trace)), "--sort-by", "nosuch", code=2)
    assert "nosuch" in err
    assert "Where the time goes" not in out


NET = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(width, 2)
"""


@pytest.fixture
def spec(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (here / "some_net.py").write_text(NET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "some_net", raising=False)
    return "some_net.py:Mlp"


def test_the_command_takes_a_model(spec: str, trace: Path, cli: Any) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    cli("show", str(trace), "--model", spec, "--paths", "fc1", "-o", "run.json")
    run = torchprof.load("run.json")
    assert [layer.params for layer in run.layers] == [0, 40, 0, 18]
    assert run.meta.paths == (("Mlp", "fc1"),)
    cli("show", str(trace), "--model", spec, "--kwargs", '{"width": 3}', "-o", "run.json")
    assert [layer.params for layer in torchprof.load("run.json").layers] == [0, 15, 0, 8]
    assert "aten::addmm" in cli("show", str(trace), "--report", "ops").out


@NEEDS_TRACES
def test_the_command_reads_the_trace_of_a_ddp_job(cli: Any) -> None:
    assert "cuda:0" in cli("show", str(A100), "--report", "device").out
    out = cli("show", str(A100), "--depth", "1").out
    assert "## forward ##" in out and "CUDA total" in out and "Params" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.json"], "There is no file nothing.json"),
        (["empty_folder"], "is a folder without traces"),
        (["text.json"], "torch.profiler"),
        (["empty.json"], "is empty"),
        (["trace.json", "--paths", "fc1"], "say which with --model"),
        (["trace.json", "--kwargs", "{}x"], "--kwargs"),
        (["trace.json", "--kwargs", '{"a": 1}'], "say which with --model"),
        (["trace.json", "-o", "report.pdf"], "which format"),
        (["trace.json", "--report", "tre"], "tree"),
        (["trace.json", "--model", "some_net.py:Mpl"], "Mlp"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_the_command_refuses_bad_arguments(
    arguments: Sequence[str], message: str, spec: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_ranges(trace)
    Path("text.json").write_text("no trace")
    Path("empty.json").write_text("")
    Path("empty_folder").mkdir(exist_ok=True)
    capsys.readouterr()
    try:
        code = main(["show", *arguments])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2
    assert message in err
    assert not out

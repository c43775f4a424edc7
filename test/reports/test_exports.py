"""Exports: every number against the run, and every format read by a program for it."""

from __future__ import annotations

import csv
import gzip
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from build.browser import Tab, missing
from build.hand_made import FORWARD, kernel, label, op, python_line, row, run_of
from build.models import Checkpointed, Layers
from build.places import ROOT
from build.warnings import run_warnings, sentences
from torch import Tensor, nn
from torch.profiler import record_function

import torchprof
from torchprof import TorchprofError, reports
from torchprof.analyze.operators import operators
from torchprof.analyze.records import Table, records_of
from torchprof.analyze.report import REPORTS, report
from torchprof.reports.viewers import stacks
from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, SampleKey, Spread
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import PHASES, Frame, phase_of, range_in_words

BACKWARD, RECOMPUTE = PHASES[1:]
EVERYTHING = tuple(name for name in FIELDS if name != "collective_ns")  # it is in no export
HOSTILE = (
    "=cmd|' /C calc'!A0",
    "+1",
    "-2",
    "@sum(A1)",
    "'quoted",
    "a,b\"c'd",
    "two\r\nlines",
    "tab\there",
    "<script>alert(1)</script>",
    "a|b\\|c",
    "``tick`",
    "*bold* _x_ [a](http://b) &amp; #1 @you",
    "semi;colon",
    "ends in 5",
    "ends in 5.25",
    "\x1b[31mred",
    "lone \ud800 surrogate",
    " blanks ",
)


def checkpointed_run() -> Run:
    """A step with a label around it and one inside, a reentrant checkpoint, and a layer that is never called."""

    class Labelled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with record_function("trunk"):
                x = self.inner(x)
            return self.head(x)

    model = Labelled(inner=Checkpointed(use_reentrant=True), head=nn.Linear(4, 2), idle=nn.Linear(4, 4))
    with torchprof.Profile(model, profile_memory=True, with_flops=True, record_shapes=True) as prof:
        for _ in range(2):
            with record_function("step"):
                model(torch.rand(3, 4, requires_grad=True)).sum().backward()
    return prof.run


def device_run() -> Run:
    """By hand: kernels, labels, a layer inside an operator of another layer, uncounted FLOPs."""
    inside = (Around(0, FORWARD, (label("part"), op("aten::scan"))),)
    around = (Around(-1, FORWARD, (label("step"),)),)
    return run_of(
        [
            row(0, within=around, cpu_ns=100, calls=2),
            row(1, op("aten::mm", (2, 3)), within=around, cpu_ns=70, flops=12, macs=6, calls=4),
            row(1, op("aten::mm", (2, 3)), kernel("gemm<float, 4>"), within=around, device="cuda:0", device_ns=500),
            row(2, within=inside, cpu_ns=30),
            row(3, op("aten::strange"), within=inside, cpu_ns=20, uncounted=3),
            row(
                3,
                op("aten::mul"),
                within=inside,
                cpu_ns=5,
                flops=8,
                device_allocated=64,
                device_freed=16,
                device="cuda:0",
            ),
            row(0, label("part"), cpu_ns=11),
            row(0, label("part"), op("aten::add"), cpu_ns=7),
            row(1, op("MmBackward"), phase=BACKWARD, cpu_ns=40, flops=24, macs=12),
            row(-1, label("step"), op("aten::sum"), cpu_ns=9, cpu_allocated=8),
            row(-1, kernel("copy"), device="cuda:0", device_ns=33),
            row(-2, op("aten::relu"), cpu_ns=3),
        ],
        requested=EVERYTHING,
        measured=EVERYTHING,
        device="cuda",
    )


def two_ranks() -> Run:
    """The device run on rank 0, and three times its figures on rank 2, which could not record its device."""
    one = device_run()
    columns = {}
    for name, column in one.rows.columns.items():
        factor = 3 if name in ("calls", *FIELDS) and not name.startswith("device_") else 0
        of_other = [2] * len(column) if name == "rank" else [value * factor if factor else value for value in column]
        if name.startswith("device_"):
            of_other = [0] * len(column)
        columns[name] = array("q", [*column, *of_other])
    measured = tuple(name for name in EVERYTHING if not name.startswith("device_"))
    metas = (one.meta, replace(one.meta, rank=2, measured=measured))
    return replace(one, metas=metas, rows=replace(one.rows, columns=columns))


@pytest.fixture(scope="module")
def real() -> Run:
    return checkpointed_run()


RUNS = {"real": checkpointed_run, "by hand": device_run, "two ranks": two_ranks}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]()


def named(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, record)) for record in table.records]


def needed(package: str) -> Any:
    """A package of the "test" extra; on CI it must be installed."""
    if find_spec(package) is None:
        missing(f"{package} is not installed")
    return import_module(package)


def name_of(run: Run, index: int) -> str:
    return run.layers[index].name if index >= 0 else {-1: "(outside)", -2: "(not selected)"}[index]


def added_up(run: Run) -> dict[tuple[str, str, int], Counter[str]]:
    """Self by layer, phase and rank, from the columns alone."""
    sums: dict[tuple[str, str, int], Counter[str]] = {}
    columns = run.rows.columns
    for at, layer in enumerate(columns["layer"]):
        key = name_of(run, layer), phase_of(layer, PHASES[columns["phase"][at]]), columns["rank"][at]
        found = sums.setdefault(key, Counter())
        for field in FIELDS:
            found[field] += columns[field][at]
    return sums


COLUMN_OF = {name: f"{name}_bytes" if name.endswith(("allocated", "freed")) else name for name in EVERYTHING}


def measured_by(run: Run, rank: int) -> set[str]:
    return next(set(meta.measured) for meta in run.metas if meta.rank == rank)


# Records


@pytest.mark.parametrize("of", ["layers", "operators", "rows"])
def test_self_of_the_records_of_a_layer_is_the_sum_of_its_rows(run: Run, of: str) -> None:
    sums = added_up(run)
    found: dict[tuple[str, str, int], Counter[str]] = {}
    for record in named(records_of(run, of)):
        key = record["layer"], record["phase"], record["rank"]
        for field in run.meta.requested:
            found.setdefault(key, Counter())[field] += record[f"self_{COLUMN_OF[field]}"] or 0
    assert {key: +value for key, value in found.items() if +value} == {
        key: +value for key, value in sums.items() if +value
    }


def test_the_total_of_a_layer_is_the_sum_of_self_of_all_below_it(run: Run) -> None:
    sums = added_up(run)
    records = named(records_of(run))
    ranks = len(run.metas)
    assert len(records) == ranks * len(run.phases()) * (len(run.layers) + len({n for n, *_ in sums if n[0] == "("}))
    called = {layer for (layer, _, _), sum_ in sums.items() if +sum_}
    for record in records:
        path = record["layer"]
        below = [key for key in sums if key[0] == path or key[0].startswith(f"{path}.")]
        ever_called = any(layer == path or layer.startswith(f"{path}.") for layer in called)
        for field in run.meta.requested:
            expected = sum(sums[key][field] for key in below if key[1:] == (record["phase"], record["rank"]))
            known = ever_called and field in measured_by(run, record["rank"])
            counted = field not in ("macs", "flops") or not record["total_uncounted"]
            value = record[f"total_{COLUMN_OF[field]}"]
            assert (value is None) == (not known or (not counted and not expected))
            assert (value or 0) == expected


def test_the_records_of_layers_describe_the_layers(real: Run) -> None:
    layers = {layer.name: layer for layer in real.layers}
    params = real.total_params()
    for record in named(records_of(real)):
        if (layer := layers.get(record["layer"])) is None:
            assert record["layer"] == "(outside)"
            assert (record["kind"], record["calls"], record["self_params"]) == (None, None, None)
            continue
        assert (record["kind"], record["depth"]) == (layer.kind, len(layer.path) - 1)
        assert (record["self_params"], record["total_params"]) == (layer.params, params[layer.path])
        assert (record["settings"] or "") == layer.settings
        shapes = [list(shape) for shape in layer.input_shapes]
        assert record["input_shapes"] == (json.dumps(shapes) if shapes else None)
    assert {one["settings"] for one in named(records_of(real)) if one["kind"] == "Linear"} == {
        "in_features=4, out_features=4, bias=True",
        "in_features=4, out_features=2, bias=True",
    }


def test_calls_are_those_of_the_phase_and_backward_has_none(real: Run) -> None:
    calls = {(one["layer"], one["phase"]): one["calls"] for one in named(records_of(real))}
    assert calls["Labelled", FORWARD] == 2
    assert calls["Labelled", RECOMPUTE] == 0
    assert calls["Labelled.inner.block", FORWARD] == calls["Labelled.inner.block", RECOMPUTE] == 2
    assert calls["Labelled.idle", FORWARD] == 0
    assert {value for (_, phase), value in calls.items() if phase == BACKWARD} == {None}


def test_fields_that_were_requested_and_not_measured_are_empty() -> None:
    run = run_of(
        [row(0, op("aten::a"), cpu_ns=5)], requested=("cpu_ns", "device_ns", "device_allocated"), measured=("cpu_ns",)
    )
    for of in ("layers", "operators", "rows"):
        [record, *_] = named(records_of(run, of))
        names = [name for name in record if "device_" in name]
        assert names
        assert {record[name] for name in names} == {None}
        assert record["self_cpu_ns"] == 5
        assert not [name for name in record if "flops" in name or "cpu_alloc" in name]  # they were not requested


def test_lower_bounds_are_marked_and_none_of_them_is_zero() -> None:
    records = {(one["layer"], one["phase"]): one for one in named(records_of(device_run()))}
    bound = records["Net.b.0", FORWARD]
    assert (bound["self_flops"], bound["self_uncounted"]) == (8, 3)
    assert (bound["self_macs"], bound["total_macs"]) == (None, None)
    assert (records["Net", FORWARD]["total_macs"], records["Net", FORWARD]["total_uncounted"]) == (6, 3)
    assert records["Net", FORWARD]["self_uncounted"] == 0
    assert records["Net", FORWARD]["self_macs"] == 0
    of_ops = {one["operator"]: one for one in named(records_of(device_run(), "operators"))}
    assert (of_ops["aten::strange"]["self_flops"], of_ops["aten::mul"]["self_flops"]) == (None, 8)


def test_durations_and_peaks_are_those_of_the_samples() -> None:
    run = run_of(
        [row(0, cpu_ns=9, calls=3), row(1, op("x"), device="cuda:0"), row(1, op("x"), device="cuda:1")],
        requested=EVERYTHING,
        measured=EVERYTHING,
    )
    samples = {
        SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): Spread.of([(1, 2), (5, 4), (9, 3), (12, 10)]),
        SampleKey(0, FORWARD, 0, "cpu", "peak_bytes"): Spread.of([(1, 7), (5, 6)]),
        SampleKey(0, FORWARD, 0, "cuda:0", "peak_bytes"): Spread.of([(1, 70)]),
        SampleKey(0, FORWARD, 0, "cuda:1", "peak_bytes"): Spread.of([(1, 90), (2, 10)]),
    }
    records = {one["layer"]: one for one in named(records_of(replace(run, samples=samples)))}
    names = ("min_call_cpu_ns", "median_call_cpu_ns", "max_call_cpu_ns", "peak_cpu_bytes", "peak_device_bytes")
    assert [records["Net"][name] for name in names] == [2, 3, 10, 7, 90]
    assert [records["Net.a"][name] for name in names] == [None] * 5


def test_an_operator_in_a_label_is_separate_from_the_same_operator_outside() -> None:
    found = named(records_of(device_run(), "operators"))
    part = [one for one in found if one["layer"] == "Net" and one["operator"] == "part"]
    [add] = [one for one in found if one["operator"] == "aten::add"]
    assert (add["labels"], add["operator_kind"], add["self_cpu_ns"]) == ("part", "op", 7)
    assert [(one["operator_kind"], one["self_cpu_ns"], one["total_cpu_ns"]) for one in part] == [
        ("label", 11, 11 + 7 + 30 + 20 + 5)
    ]
    between = [one for one in found if one["operator"] == "(between ops)"]
    assert between
    assert {one["calls"] for one in between} == {None}


def test_the_rows_are_those_of_the_run(run: Run) -> None:
    records = named(records_of(run, "rows"))
    assert len(records) == len(run.rows)
    for record, one in zip(records, run.rows):
        assert (record["phase"], record["rank"], record["device"]) == (one.phase, one.rank, one.device)
        assert record["operator"] == (one.frames[-1].name if one.frames else "(between ops)")
        assert record["operator_kind"] == (one.frames[-1].kind if one.frames else "op")
        assert (record["inside"] or "") == " > ".join(frame.name for frame in one.frames)
        if one.frames:
            assert record["calls"] == one.calls
        assert (record["within"] is None) == (not one.within)
        shapes = one.signature.shapes if one.signature is not None else ()
        assert (record["input_shapes"] or "[]") == json.dumps(shapes)


def test_a_sampled_source_line_has_calls_and_no_cost() -> None:
    run = run_of([row(0, python_line("net.py:5"), calls=7), row(0, cpu_ns=4)])
    seen, own = named(records_of(run, "rows"))
    assert (seen["operator_kind"], seen["calls"], seen["self_cpu_ns"]) == ("python", 7, None)
    assert own["self_cpu_ns"] == 4


def test_unknown_kinds_of_records_are_refused(real: Run) -> None:
    asks = lambda: records_of(real, "layer"), lambda: real.report("csv", of="layer"), lambda: real.to_dataframe("x")
    for ask in asks:
        with pytest.raises(TorchprofError, match="'layers', 'operators', 'rows'"):
            ask()


# CSV and data frames


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def hostile_run() -> Run:
    run = run_of([row(0, cpu_ns=1), *(row(1, op(name), label(name), cpu_ns=2) for name in HOSTILE)])
    layers = (run.layers[0], *(Layer(("Net", name), name, settings=name) for name in HOSTILE))
    columns = {**run.rows.columns}
    rows = replace(run.rows, layers=layers, columns=columns)
    columns["layer"] = array("q", [0, *range(1, len(HOSTILE) + 1)])
    return replace(run, layers=layers, rows=rows)


def test_no_text_of_a_csv_is_a_formula_and_each_can_be_restored(tmp_path: Path) -> None:
    run = hostile_run()
    dangerous = 0
    for of in ("layers", "operators", "rows"):
        run.export(tmp_path / "run.csv", of=of)
        expected = named(records_of(run, of))
        for line, record in zip(read_csv(tmp_path / "run.csv"), expected, strict=True):
            for name, value in record.items():
                if isinstance(value, str):
                    assert line[name][0] not in "=+-@\t\r\n＝＋－＠"
                    dangerous += value[0] in "=+-@"
                    was = line[name][1:] if line[name].startswith("'") else line[name]
                    assert was == value.encode("utf-8", "backslashreplace").decode()
    assert dangerous >= 12


def test_negative_numbers_of_a_csv_stay_numbers(tmp_path: Path) -> None:
    run = run_of(
        [row(0, op("x"), cpu_freed=512)],
        requested=("cpu_allocated", "cpu_freed"),
        measured=("cpu_allocated", "cpu_freed"),
    )
    run.export(tmp_path / "run.csv")
    assert read_csv(tmp_path / "run.csv")[0]["self_cpu_net_bytes"] == "-512"


def test_csv_is_gzipped_if_the_name_ends_in_gz(real: Run, tmp_path: Path) -> None:
    real.export(tmp_path / "run.csv.gz")
    assert gzip.decompress((tmp_path / "run.csv.gz").read_bytes()).decode() == real.report("csv")


@pytest.mark.parametrize("of", ["layers", "operators", "rows"])
def test_pandas_reads_from_the_csv_what_the_frame_has(run: Run, of: str, tmp_path: Path) -> None:
    pandas = needed("pandas")
    run.export(tmp_path / "run.csv", of=of)
    frame = run.to_dataframe(of)
    read = pandas.read_csv(tmp_path / "run.csv", dtype=dict(frame.dtypes), keep_default_na=False, na_values=[""])
    pandas.testing.assert_frame_equal(read, frame)
    columns, records = records_of(run, of)
    assert [*frame.columns] == [*columns]
    for (name, kind), values in zip(columns.items(), zip(*records)):
        assert str(frame[name].dtype) == {int: "Int64", str: "string"}[kind]
        assert [None if value is pandas.NA else value for value in frame[name]] == [*values]


def test_a_frame_of_no_rows_has_its_columns() -> None:
    needed("pandas")
    assert "self_cpu_ns" in run_of([]).to_dataframe("rows").columns
    assert len(hostile_run().to_dataframe("rows")) == len(HOSTILE) + 1


def test_without_pandas_the_error_says_how_to_install_it(real: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(TorchprofError, match="pip install pandas"):
        real.to_dataframe()


# Markdown


def parsed(text: str) -> tuple[list[list[str]], list[Any]]:
    """The cells of the one table, and all tokens, as a parser of Markdown has them. Code is marked by its kind."""
    parser = needed("markdown_it").MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    assert sum(token.type == "table_open" for token in tokens) == 1
    lines: list[list[str]] = []
    for at, token in enumerate(tokens):
        if token.type == "tr_open":
            lines.append([])
        elif token.type in ("th_open", "td_open"):
            children = tokens[at + 1].children
            lines[-1].append("".join(child.content for child in children))
    return lines, tokens


def test_the_indentation_of_markdown_is_visible(real: Run) -> None:
    lines, _ = parsed(real.report("markdown"))
    names = [line[0] for line in lines[1:]]
    assert names[:3] == ["Labelled", "├── trunk (label)", "├── inner"]
    assert "│├── first" in names
    run = run_of([row(3, cpu_ns=1)])
    assert [line[0] for line in parsed(run.report("markdown"))[0][1:]] == ["Net", "├── a", "└── b", "\u00a0└── 0"]


def test_markdown_has_the_facts_and_the_warnings(real: Run) -> None:
    assert run_of([row(0)]).report("markdown").startswith("**torchprof** of `Net`\n\n| Module |")
    assert two_ranks().report("markdown").startswith("**torchprof** of `Net`, rank 0 and 1 more\n")
    text = real.report("markdown")
    lines = text.splitlines()
    assert lines[0].startswith(f"**torchprof {torchprof.__version__}** of `Labelled`: ")
    assert "- Recorded with: profile\\_memory; with\\_flops; record\\_shapes" in lines
    _, tokens = parsed(text)
    shown = [token.content for token in tokens if token.type == "inline"]
    for warning in sentences(real):
        assert any(warning in re.sub(r"\\(.)", r"\1", content) for content in shown)
    assert sentences(real)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text_in_markdown(name: str) -> None:
    run = run_of([row(1, op(name), cpu_ns=1)], warnings=run_warnings(f"Never called: {name}."), device=name)
    layers = (Layer(("Net",), name), Layer(("Net", name), name))
    columns = {**run.rows.columns}
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers, columns=columns))
    run = replace(run, metas=(replace(run.meta, model=(name,), requested=("cpu_ns", "device_ns")),))
    text = run.report("markdown", show_events=True)
    lines, tokens = parsed(text)
    width = len(lines[0])
    assert [len(line) for line in lines] == [width] * 4
    assert width == 6
    inline = [child for token in tokens if token.type == "inline" for child in token.children]
    kinds = {"text", "code_inline", "html_inline", "softbreak", "strong_open", "strong_close"}
    assert {child.type for child in inline} <= kinds
    assert {child.content for child in inline if child.type == "html_inline"} <= {"<!-- -->"}
    visible = "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)
    visible = visible.replace("\\|", "\\\\|")  # the one text that a code span in a table cannot have
    names = [line[0] for line in lines[1:]]
    assert names[1].removeprefix("└── ") == visible
    assert names[2].replace("\u00a0", " ").removeprefix(" └── ") == visible
    notes = "".join(child.content for child in inline if child.type in ("text", "softbreak"))
    assert "".join(visible.replace("\\\\|", "\\|").split()) in "".join(notes.split())


# Stacks


def sum_of(run: Run, field: str, rank: int, phase: str) -> int:
    columns = run.rows.columns
    keys = zip(columns["rank"], columns["phase"], columns[field])
    return sum(value for one, number, value in keys if (one, PHASES[number]) == (rank, phase))


@pytest.mark.parametrize("field", ["cpu_ns", "device_ns", "cpu_allocated", "flops", "uncounted"])
def test_the_sum_of_all_stacks_is_the_sum_of_all_rows(run: Run, field: str) -> None:
    if field not in run.meta.measured:
        return
    found = stacks(run, field)
    for meta in run.metas:
        for phase in PHASES:
            assert found.get((meta.rank, phase), Counter()).total() == sum_of(run, field, meta.rank, phase)


@pytest.mark.parametrize("made_by", [checkpointed_run, device_run])
def test_the_width_of_a_box_is_the_total_of_its_layer_or_operator(made_by: Callable[[], Run]) -> None:
    run = made_by()
    seen = 0
    for (_, phase), weights in stacks(run, "cpu_ns").items():
        for node in run.tree(phase).walk():
            index = run.layers.index(node.layer)
            assert sum(value for stack, value in weights.items() if index in stack) == node.total.cpu_ns
        for operator, sums in operators(run, phase=phase).items():
            if operator.name == "(between ops)":
                continue
            inside = [
                weight
                for stack, weight in weights.items()
                if any(not isinstance(step, int) and step[:2] == (operator.kind, operator.name) for step in stack)
            ]
            # Recomputed work inside it is of another phase, and has a graph of its own.
            recomputed = "CheckpointFunctionBackward" in operator.name
            other = run.tree(RECOMPUTE).total.cpu_ns if recomputed else 0
            seen += recomputed
            assert sum(inside) == sums.total.cpu_ns - other
    assert seen == 2 * (made_by is checkpointed_run)


def lines_of_stacks(run: Run, measure: str) -> list[str]:
    """A line ``phase;Net;layer;operator value`` for each stack, sorted."""
    lines = []
    for (_, phase), weights in stacks(run, measure).items():
        for stack, weight in weights.items():
            steps = [
                range_in_words(step.kind, step.name)
                if isinstance(step, Frame)
                else run.layers[step].path[-1]
                if step >= 0
                else run.layers.name_of(step)
                for step in stack
            ]
            lines.append(f"{';'.join([phase, *steps])} {weight}")
    return sorted(lines)


def test_stacks_lead_from_the_model_inward(golden: Callable[..., None]) -> None:
    """And speedscope has a profile for each phase and measure, with a weight for each stack."""
    document = json.loads(device_run().report("speedscope"))
    names = [frame["name"] for frame in document["shared"]["frames"]]
    profiles = {}
    for profile in document["profiles"]:
        stacks = [";".join(names[step] for step in sample) for sample in profile["samples"]]
        title = f"{profile['name']}: {profile['startValue']} to {profile['endValue']} {profile['unit']}"
        profiles[title] = "\n".join(
            f"{stack} {weight}" for stack, weight in zip(stacks, profile["weights"], strict=True)
        )
    golden({"stacks of CPU time": "\n".join(lines_of_stacks(device_run(), "cpu_ns"))}, profiles)


def test_an_operator_of_another_phase_is_not_around_a_recomputed_layer() -> None:
    within = (Around(1, BACKWARD, (label("mine"), op("CheckpointBackward"))),)
    run = run_of(
        [row(1, op("CheckpointBackward"), phase=BACKWARD, cpu_ns=1), row(2, phase=RECOMPUTE, within=within, cpu_ns=5)]
    )
    assert lines_of_stacks(run, "cpu_ns") == ["backward;Net;a;CheckpointBackward 1", "recompute;mine (label);Net;b 5"]


def test_stacks_of_a_measure_that_was_not_recorded_are_refused(real: Run) -> None:
    with pytest.raises(TorchprofError, match=r"no measure 'cpu'.*cpu_ns"):
        stacks(real, "cpu")
    with pytest.raises(TorchprofError, match=r"'device_ns' was not measured.*cpu_ns"):
        stacks(real, "device_ns")
    nothing = run_of([], measured=())
    with pytest.raises(TorchprofError, match=r"[Nn]othing"):
        nothing.report("speedscope")
    damaged = run_of([row(0, cpu_ns=-4)])
    with pytest.raises(TorchprofError, match="less than 0"):
        stacks(damaged, "cpu_ns")


def test_speedscope_adds_up_for_each_rank(run: Run) -> None:
    document = json.loads(run.report("speedscope"))
    fields = {"CPU time": "cpu_ns", "CUDA time": "device_ns", "FLOPs": "flops"}
    seen = 0
    for profile in document["profiles"]:
        rank, phase, what = re.match(r"(?:rank (\d+), )?(\w+), ([^,]+)", profile["name"]).groups()
        assert (rank is None) == (len(run.metas) == 1)
        assert sum(profile["weights"]) == profile["endValue"]
        if what in fields:
            assert profile["endValue"] == sum_of(run, fields[what], int(rank or 0), phase)
            seen += 1
    assert seen >= 4


def test_calls_on_different_shapes_are_one_box() -> None:
    run = run_of([row(0, op("aten::mm", (2, 3)), cpu_ns=1), row(0, op("aten::mm", (4, 5)), cpu_ns=2)])
    assert lines_of_stacks(run, "cpu_ns") == ["forward;Net;aten::mm 3"]
    assert len(json.loads(run.report("speedscope"))["shared"]["frames"]) == 2


def test_layers_of_one_name_are_different_boxes() -> None:
    run = run_of([row(1, cpu_ns=1), row(2, cpu_ns=2)])
    layers = tuple(Layer(path, "Net") for path in (("Net",), ("Net", "a"), ("Net", "b"), ("Net", "b", "a")))
    document = json.loads(replace(run, layers=layers, rows=replace(run.rows, layers=layers)).report("speedscope"))
    assert [frame["name"] for frame in document["shared"]["frames"]] == ["Net", "Net.a", "Net.b"]


def test_speedscopes_own_schema_holds(run: Run, speedscope: Path) -> None:
    jsonschema = needed("jsonschema")
    schema = json.loads((speedscope / "dist/release/file-format-schema.json").read_text(encoding="utf-8"))
    for one in (run, hostile_run()):
        document = json.loads(one.report("speedscope"))
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "profiles": [{"type": "sampled"}]}, schema)


def shown(tab: Tab, file: Path | None = None) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What speedscope shows: the weight of each profile, and (total, self) of each name in the selected profile."""
    if file is not None:
        tab.page.set_input_files("input[type=file]", file)
        tab.page.wait_for_selector("text=Symbol Name")
    rows = tab.page.locator("tr").evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
    profiles = {name: weight for number, name, weight in rows if number.isdigit()}
    names = {name: (total, own) for total, own, name in rows if "%" in total}
    return profiles, names


def without_share(found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: (total.split(" (")[0], own.split(" (")[0]) for name, (total, own) in found.items()}


def open_speedscope(open_tab: Callable[..., Tab], folder: Path) -> Tab:
    return open_tab(folder / "dist" / "release" / "index.html", height=3000, fragment="view=sandwich")


def test_speedscope_shows_the_same_numbers(open_tab: Callable[..., Tab], speedscope: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.speedscope.json"
    device_run().export(file)
    tab = open_speedscope(open_tab, speedscope)
    profiles, found = shown(tab, file)
    assert profiles == {
        "forward, CPU time": "255.00ns",
        "backward, CPU time": "40.00ns",
        "forward, CUDA time": "533.00ns",
        "forward, allocated on the CPU": "8 B",
        "forward, allocated on CUDA": "64 B",
        "forward, FLOPs, at least (3 calls not counted)": "20",
        "backward, FLOPs": "24",
    }
    own = {
        "Net": (243, 100),
        "Net.a": (70, 0),
        "Net.b": (55, 30),
        "Net.b.0": (25, 0),
        "aten::mm": (70, 70),
        "aten::strange": (20, 20),
        "aten::mul": (5, 5),
        "aten::scan": (55, 0),
        "aten::add": (7, 7),
        "aten::sum": (9, 9),
        "aten::relu": (3, 3),
        "part (label)": (73, 11),
        "step (label)": (179, 0),
        "(outside)": (9, 0),
        "(not selected)": (3, 0),
    }
    assert without_share(found) == {name: (f"{t}.00ns", f"{s}.00ns") for name, (t, s) in own.items()}
    tab.page.get_by_text("forward, CPU time (1/7)").hover()
    tab.page.get_by_text("forward, CUDA time", exact=True).click()
    tab.page.wait_for_selector("text=forward, CUDA time (3/7)")
    _, of_device = shown(tab)
    assert without_share(of_device)["gemm<float, 4>"] == ("500.00ns", "500.00ns")
    assert without_share(of_device)["Net"] == ("500.00ns", "0.00ns")
    assert (tab.errors, tab.requests) == ([], [])


def test_speedscope_shows_hostile_names_unchanged(
    open_tab: Callable[..., Tab], speedscope: Path, tmp_path: Path
) -> None:
    hostile_run().export(tmp_path / "net.speedscope.json")
    tab = open_speedscope(open_tab, speedscope)
    _, found = shown(tab, tmp_path / "net.speedscope.json")
    for name in HOSTILE:
        assert without_share(found)[f"Net.{name}"] == ("2.00ns", "0.00ns")
        assert without_share(found)[f"{name} (label)"] == ("2.00ns", "2.00ns")
    assert (tab.errors, tab.requests) == ([], [])


# The registry and the page


def test_a_registered_format_of_the_users_is_exported(
    real: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for of in ("run", "diff"):
        monkeypatch.setitem(REPORTS, of, dict(reports.known(of)))

    @report("names", suffix=".layers.csv")
    def names(run: Run, *, depth: int = 9) -> str:
        return "\n".join(layer.name for layer in run.layers if len(layer.path) <= depth)

    real.export(tmp_path / "net.layers.csv", depth=1)  # the longest suffix that fits
    assert (tmp_path / "net.layers.csv").read_text() == "Labelled"
    real.export(tmp_path / "net.layers.csv.gz")
    assert gzip.decompress((tmp_path / "net.layers.csv.gz").read_bytes()).decode().splitlines()[:2] == [
        "Labelled",
        "Labelled.inner",
    ]
    assert real.report("names", depth=2).count("\n") == 3
    with pytest.raises(TorchprofError, match="no option 'deep'"):
        real.export(tmp_path / "net.layers.csv", deep=1)


def test_the_page_names_every_format() -> None:
    page = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `([\w.]+)` \| `([\w-]+)` \|", page, re.MULTILINE))
    assert named == {one.suffix: name for name, one in reports.known().items() if one.suffix is not None}


def test_the_page_names_every_column(real: Run) -> None:
    page = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w…]+)`", page))
    everything = replace(real, metas=(replace(real.meta, requested=EVERYTHING),))
    for of in ("layers", "operators", "rows"):
        for column in records_of(everything, of).columns:
            assert {column, re.sub("^(self|total)_", "…_", column)} & named, column

"""The data of reports: the same rows as the text, each figure in its base unit, – as null and ≥ as a lower bound."""

import functools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from build.all_kinds import KINDS as HAND_MADE
from torch import nn

import torchprof
from torchprof import Run, TorchprofError, compare
from torchprof.reports import known


@functools.cache
def loop() -> Run:
    """A real one: steps, and peaks of memory, which no run made by hand has."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torchprof.Profile(model, profile_memory=True) as prof:
        for _ in range(3):
            model(torch.rand(2, 4)).sum().backward()
            prof.step()
    # What other tests left in this process is a finding, which has no table in the text.
    return replace(prof.run, memory=tuple(replace(memory, before=(), others=None) for memory in prof.run.memory))


KINDS = {**HAND_MADE, "loop": loop}
OPTIONS = {"layers": {"op": "aten::mm"}, "tree": {"show_events": True}}
NOT_IN_ANY = {"device", "collectives"}  # reports whose tables no kind of run here has
REPORTS = [name for name, one in known().items() if one.answers and name not in ("headline", "findings")]

SIZES = {
    "ns": {"us": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3},
    "count": {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15},
    "per second": {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15},
    "bytes per second": {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    "share": {"%": 0.01},
    "ratio": {"": 1, "×": 1},
}
NUMBER = re.compile(r"(-?\d+(?:\.(\d+))?) ?([a-zA-Z%×/]*)")


def tables_in(text: str) -> Iterator[list[list[str]]]:
    """The cells of each table in a text, read from its lines, the headings first."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if at and re.fullmatch(r"-+(\|-+)+", line):
            edges = [0, *(place.start() + 1 for place in re.finditer(r"\|", line)), len(line) + 1]
            rows = []
            for row in [lines[at - 1], *lines[at + 1 :]]:
                if any(row[edge - 2 : edge + 1] not in (" | ", " |") for edge in edges[1:-1]):
                    break
                rows.append([row[start : end - 1].strip() for start, end in pairwise(edges)])
            yield rows


def shows(cell: str, value: float, unit: str) -> bool:
    """Whether the first number in a cell is this value, rounded to the digits that are shown."""
    match = NUMBER.search(cell)
    assert match is not None, cell
    size = SIZES[unit][match[3]]
    digits = len(match[2] or "")
    return abs(float(match[1]) * size - value) <= 0.5001 * size * 10**-digits + 1e-9


def reports() -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        for name in REPORTS:
            yield kind, name


@pytest.mark.parametrize(("kind", "name"), [*reports()])
def test_data_has_the_rows_and_figures_of_the_text(kind: str, name: str) -> None:
    run = KINDS[kind]()
    try:
        text = run.report(name, **OPTIONS.get(name, {}))
    except TorchprofError:  # this kind of run has no such report
        return
    data = json.loads(json.dumps(text.data, allow_nan=False))
    assert data["report"] == name
    drawn = [*tables_in(text)]
    # What a busy machine does in a real run is a finding, and it has more samples: these have no tables in the text.
    tables = [table for table in data["tables"] if table["name"] not in ("findings", "largest_lines")]
    assert [[one["heading"] for one in table["columns"]] for table in tables] == [rows[0] for rows in drawn]
    for table, (_, *rows) in zip(tables, drawn):
        assert len(table["rows"]) == len(rows)
        for row, cells in zip(table["rows"], rows):
            for column, cell in zip(table["columns"], cells):
                key, unit = column["key"], column["unit"]
                is_statistic = "statistic" in row and cell == f"({row['statistic']})"  # over all ranks
                is_other = key == "phase" and row.get(key) == "other"  # outside of all layers: empty in the text
                assert (key in row) is (cell != "" and not is_statistic) or (is_other and not cell), (key, cell)
                assert (row.get(key, "") is None) is (cell == "–"), (key, cell)
                assert (key in row.get("at_least", [])) is cell.startswith("≥")
                if unit and isinstance(row.get(key), (int, float)):
                    assert shows(cell.split(" to ")[-1], row[key], unit), (key, cell, row[key])  # of a range, its end
                elif row.get(key) is not None:
                    assert isinstance(row[key], str)
    for sentence in data["sentences"]:
        assert sentence in text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]().layers])
def test_rows_of_the_tree_are_layers_by_path_and_add_up(kind: str) -> None:
    run = KINDS[kind]()
    [table] = run.report("tree").data["tables"]
    paths = {layer.name for layer in run.layers}
    rows = [row for row in table["rows"] if row["module"] in paths]
    assert [row["module"] for row in rows] == [layer.name for layer in run.layers]
    if "cpu_ns" in run.meta.measured and run.meta.paths is None:
        outside = run.no_layer("forward").cpu_ns
        forward = [row for row in run.rows if row.phase in ("forward", "other")]
        known_ns = sum(row.get("self_cpu_total") or 0 for row in rows)
        assert known_ns + outside == sum(row.cost.cpu_ns for row in forward)


@pytest.mark.parametrize("name", REPORTS)
def test_tables_of_a_report_have_names_and_columns_have_one_type(name: str) -> None:
    tables: list[dict[str, Any]] = []
    for kind in KINDS:
        with suppress(TorchprofError):  # this kind of run has no such report
            of_kind = KINDS[kind]().report(name, **OPTIONS.get(name, {})).data["tables"]
            names = [(table["name"], table.get("rank"), table.get("device")) for table in of_kind]
            assert len(names) == len(set(names)) and all(one for one, _, _ in names), kind
            tables += of_kind
    assert name == "lines" or (not tables) == (name in NOT_IN_ANY)  # lines are sampled
    for column, rows in ((column, table["rows"]) for table in tables for column in table["columns"]):
        values = [row[column["key"]] for row in rows if row.get(column["key"]) is not None]
        assert all(isinstance(value, (int, float) if column["unit"] else str) for value in values), column


def test_rows_of_operators_have_the_layer_in_which_they_ran() -> None:
    run = KINDS["training"]()
    [table] = run.report("tree", show_events=True).data["tables"]
    paths = [layer.name for layer in run.layers]
    operators = [row for row in table["rows"] if row.get("kind") == "op"]
    assert operators and all(row["layer"] in [*paths, "(outside)"] for row in operators)
    assert {row["phase"] for row in operators} == set(run.phases())


def test_equal_layers_in_one_row_are_listed() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(40)))
    with torchprof.Profile(model) as prof:
        model(torch.rand(1, 2))
    [tree] = [table for table in prof.run.report("overview").data["tables"] if "module" in table["rows"][0]]
    listed = [path for row in tree["rows"] for path in row.get("layers", [])]
    assert len(listed) == len(set(listed)) and {f"Sequential.{n}" for n in range(40)} <= set(listed)


def test_a_file_format_has_no_data() -> None:
    text = KINDS["eager"]().report("csv")
    with pytest.raises(TorchprofError, match="'csv' is a file format"):
        _ = text.data
    assert text._repr_html_() is None


def test_the_data_of_a_comparison() -> None:
    before, after = KINDS["eager"](), KINDS["training"]()
    text = compare(before, after).report("table")
    [table] = text.data["tables"]
    assert table["columns"][0]["key"] == "layer" and table["rows"]
    assert len(table["rows"]) == len(next(tables_in(text))) - 1


def test_colors_are_not_in_the_data() -> None:
    run = KINDS["eager"]()
    assert run.report("tree", color=True).data == run.report("tree").data


def test_stacks_are_one_entry_of_a_row() -> None:
    """The text has a line for each source line."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with torchprof.Profile(model, with_stack=True) as prof:
        model(torch.rand(1, 2))
    text = prof.run.report("ops", group_by_stack_n=3)
    [table] = text.data["tables"]
    assert all(row["operator"] for row in table["rows"])
    with suppress(StopIteration):
        assert len(next(tables_in(text))) - 1 >= len(table["rows"])
    assert any("\n" in row.get("source_lines", "") for row in table["rows"])


def test_reports_can_be_read_by_type() -> None:
    run: Run = KINDS["eager"]()
    html = run.report("ops")._repr_html_()
    assert html.count("<tr>") == 1 + len(run.report("ops").data["tables"][0]["rows"])
    assert '<th class="text">Operator</th>' in html


def test_a_comparison_shows_its_table_in_a_notebook() -> None:
    diff = compare(KINDS["eager"](), KINDS["training"]())
    html = diff._repr_html_()
    assert html is not None and html.count("<tr>") == 1 + len(diff.report("table").data["tables"][0]["rows"])

"""Every view of a run shows the same rows with the same figures, the same – and the same ≥, on every kind of run.

The terminal's table is compared with calculations by hand, and every other view with the terminal's table, cell by
cell.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build.all_kinds import KINDS
from build.golden import GOLDEN, drawn
from build.hand_made import headings
from build.page import READ_TABLE, button, choice
from build.phases import in_column_of
from build.places import ROOT

import torchprof
from torchprof import Run, compare
from torchprof.analyze.records import records_of as records
from torchprof.analyze.report import ReportTable, TableRow, stacked
from torchprof.reports.documents import html_of, markdown_lines, text_of
from torchprof.reports.exports import data_of
from torchprof.run.formats import AT_LEAST, UNKNOWN, ReportCell, format_count, format_memory, format_time
from torchprof.run.meta import RunWarning
from torchprof.run.words import FORWARD, PHASES

if TYPE_CHECKING:
    from playwright.sync_api import Page

Rows = list[tuple[tuple[str, ...], list[str]]]
"""For each row: the names of the rows above it and its own, and its cells."""

WRITE = {"ns": format_time, "bytes": format_memory}


def rows_of(lines: Sequence[Sequence[str]]) -> Rows:
    """The rows of a table; each line starts with the name, after the lines of the tree."""
    found: Rows = []
    way: list[str] = []
    for name, *figures in lines:
        branch = re.match(r"[│├└─ \u00a0]*", name)
        assert branch is not None
        depth = len(branch[0].removesuffix("── ")) if branch[0] else 0
        way[depth:] = [name[branch.end() :].strip()]
        found.append((tuple(way), [cell.strip() for cell in figures]))
    return found


def terminal(run: Run, **options: Any) -> Rows:
    lines = run.report("tree", **options).split("\n\n")[0].splitlines()[2:]
    return rows_of([line.split("|") for line in lines])


def by_name(rows: Rows) -> dict[str, list[str]]:
    return {".".join(way): figures for way, figures in rows}


def cells_of(run: Run, name: str) -> dict[str, str]:
    return dict(zip(headings(run.report("tree"))[1:], by_name(terminal(run))[name]))


every_kind = pytest.mark.parametrize("run", KINDS.values(), ids=KINDS, indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    made: Run = request.param()
    return made


# Golden text

TEXTS = {
    "training": ("overview", "tree", "ops", "csv"),
    "without_formulas": ("overview", "tree", "ops"),
    "memory": ("tree", "ops", "types", "markdown"),
    "selected": ("overview", "tree", "ops"),
    "several_models": ("overview", "summary"),
    "on_a_device": ("overview", "tree", "kernels"),
    "device_not_recorded": ("tree", "top", "ops"),
    "ranks": ("overview", "device", "ranks"),
    "pipelined": ("overview", "pipeline"),
    "compiled_not_attributable": ("tree", "compiled", "calls"),
    "replayed": ("overview", "tree"),
    "without_layers": ("overview", "tree", "python"),
    "never_called": ("overview", "tree"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_text_of_reports(kind: str, golden: Callable[..., None]) -> None:
    options = {"overview": {"width": 110}, "tree": {"show_events": True}}
    golden(*(drawn(KINDS[kind](), report, **options.get(report, {})) for report in TEXTS[kind]))


def test_each_golden_file_is_of_one_test() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "test").rglob("test_*.py"))
    tests = re.findall(r"^def test_(\w+)\([^)]*\bgolden: ", code, re.MULTILINE)
    assert len(tests) == len({*tests})
    assert not [file.name for file in GOLDEN.iterdir() if not file.name.startswith(tuple(tests))], "no test reads it"


# The terminal's table, by hand


def test_uncounted_operators_by_hand() -> None:
    run = KINDS["without_formulas"]()
    assert cells_of(run, "Net")["FLOPs"] == "≥ 104"  # 48 and 56, and the unknown FLOPs of Net.b
    assert cells_of(run, "Net")["FLOP/s"] == "≥ 16.97 M"  # in 6.13 us
    assert [cells_of(run, "Net.b")[of] for of in ("MACs", "FLOPs", "FLOP/s")] == [UNKNOWN] * 3
    assert [cells_of(run, "Net.b.0")[of] for of in ("MACs", "FLOPs")] == ["0", "0"]  # known to have no FLOPs


def test_a_replay_by_hand() -> None:
    """One of two blocks is a CUDA graph. The other one has 2·3·4 MACs in 250 ns of device time."""
    run = KINDS["replayed"]()
    counts = ("MACs", "FLOPs", "FLOP/s")
    assert [cells_of(run, "Net")[of] for of in counts] == ["≥ 24", "≥ 48", "≥ 192.00 M"]
    assert [cells_of(run, "Net.blocks.0")[of] for of in counts] == [UNKNOWN] * 3
    assert [cells_of(run, "Net.blocks.0.(CUDA graph replay)")[of] for of in counts] == [UNKNOWN] * 3
    assert cells_of(run, "Net.blocks.0")["CUDA total"] == "0.150us"
    assert [cells_of(run, "Net.blocks.1")[of] for of in counts] == ["24", "48", "480.00 M"]
    assert re.search(r"FLOP/s \(mean\) +≥ 192.00 M\n", run.report("summary"))


def test_fused_kernels_by_hand() -> None:
    run = KINDS["compiled_fused"]()
    columns = ("Self CPU total", "CPU total", "MACs", "FLOP/s")
    block = "Net.blocks.0"
    assert [cells_of(run, f"{block}.(fused: fc1 + act)")[of] for of in columns] == ["0.040us", "0.040us", "–", "–"]
    assert [cells_of(run, f"{block}.fc1")[of] for of in columns] == ["≥ 0.020us", "≥ 0.020us", "≥ 24", "–"]
    assert [cells_of(run, f"{block}.act")[of] for of in columns] == ["–"] * 4
    assert [cells_of(run, f"{block}.fc2")[of] for of in columns[:3]] == ["0.030us", "0.030us", "24"]
    assert cells_of(run, block)["MACs"] == "≥ 48"


def test_fused_kernels_are_separate_work_in_top() -> None:
    """A replayed graph is separate work there, too."""
    for kind, work in (("compiled_fused", "(fused: fc1 + act)"), ("replayed", "(CUDA graph replay)")):
        run = KINDS[kind]()
        text = run.report("top", top=99)
        assert work in text
        assert not {"cpp_fused_addmm_gelu_0", "norm"} & {line.split("|")[-1].strip() for line in text.splitlines()}


def test_kernels_that_are_not_attributable_leave_layers_unknown() -> None:
    """Only the layers that were compiled into the block."""
    run = KINDS["compiled_not_attributable"]()
    assert (
        cells_of(run, "Net.blocks.0.(region 0/0).(not attributable: compiled before)")["Backward CPU total"]
        == "0.060us"
    )
    for name in ("fc1", "act", "fc2"):
        assert cells_of(run, f"Net.blocks.0.{name}")["Backward CPU total"] == UNKNOWN
    known = KINDS["compiled_fused"]()
    assert cells_of(known, "Net.blocks.0.fc1")["Backward CPU total"] == "0.040us"
    assert cells_of(known, "Net.blocks.0.fc2")["Backward CPU total"] == "0.000us"


# Renderers draw one value: a table


def test_each_renderer_draws_all_rows_and_cells() -> None:
    rows = [
        TableRow(["Net", ReportCell("≥ 1.500us", 1500, "ns", at_least=True), "1"], is_hot=True),
        TableRow([ReportCell("fc", "Net.fc"), UNKNOWN, ""], lead="└── "),
    ]
    part = stacked([ReportTable(["Module", "CPU total", "Calls"], rows, name="mine"), "", "A sentence."])
    assert text_of(part).splitlines() == [
        "Module | CPU total | Calls",
        "-------|-----------|------",
        "Net ◄  | ≥ 1.500us | 1",
        "└── fc | –         |",
        "",
        "A sentence.",
    ]
    assert [*markdown_lines(part.parts[0])] == [
        "| Module | CPU total | Calls |",
        "| :-- | --: | --: |",
        "| `Net` ◄ | ≥ 1.500us | 1 |",
        "| `└── fc` | – |  |",
    ]
    drawn = html_of(part).partition("</style>")[2]
    shown = [re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", line) for line in drawn.splitlines() if "<tr>" in line]
    assert shown == [["Module", "CPU total", "Calls"], ["Net ◄", "≥ 1.500us", "1"], ["<i>└── </i>fc", "–", ""]]
    assert "<p>A sentence.</p>" in drawn
    data = data_of("mine", part)
    assert data["tables"][0]["rows"] == [
        {"module": "Net", "cpu_total": 1500, "calls": "1", "at_least": ["cpu_total"]},
        {"module": "Net.fc", "cpu_total": None},
    ]
    assert data["sentences"] == ["A sentence."]


# Files and other views


@every_kind
def test_the_exported_json_loads_as_the_same_run(run: Run, tmp_path: Path) -> None:
    run.export(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run


@every_kind
def test_the_json_has_every_warning_of_the_run_as_data(run: Run, tmp_path: Path) -> None:
    shown = json.loads(run.report("json"))["warnings"]
    assert [one["sentence"] for one in shown] == [str(warning) for warning in run.warnings]
    again = [
        RunWarning(one["code"], tuple(one["layers"]), one["facts"], frozen(one.get("added", [])), tuple(one["ranks"]))
        for one in frozen(shown)
    ]
    assert again == [*run.warnings]
    run.save(tmp_path / "saved.json")
    assert "warnings" not in json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))


def frozen(value: Any) -> Any:
    """A value of JSON with tuples in place of lists, as a warning holds them."""
    if isinstance(value, dict):
        return {name: frozen(each) for name, each in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list) else value


@every_kind
def test_the_summary_has_the_macs_of_the_table(run: Run) -> None:
    """For the lowest rank and one call of the model: all these runs have one call."""
    run = run.of_rank(run.meta.rank)
    if not run.layers:
        assert "no layers" in run.report("summary")
        return
    lines = [line.split("|") for line in run.report("summary").split("\n\n")[0].splitlines()[2:]]
    found = {".".join(way): figures[-1] for way, figures in rows_of(lines)}
    in_table = headings(run.report("tree"))[1:]
    called = {root.name for root, at in zip(run.roots, range(len(run.roots))) if run.tree(FORWARD, at).calls}
    for layer in run.layers:
        if "MACs" not in in_table:
            assert found[layer.name] in (UNKNOWN, "")
        elif layer.path[0] in called:
            assert found[layer.name] == cells_of(run, layer.name)["MACs"]
    assert set(found) == {layer.name for layer in run.layers}


# Records


def text_of_record(record: Mapping[str, Any], column: str) -> str:
    """The cell of a table for a figure of a record; ``–`` if it is unknown."""
    value = record[column]
    if value is None:
        return UNKNOWN
    write = next((write for unit, write in WRITE.items() if column.endswith(f"_{unit}")), format_count)
    text = str(write(int(value)))
    return f"{AT_LEAST} {text}" if column in (record["lower_bounds"] or "").split(", ") else text


def name_in_records(heading: str) -> tuple[str, str] | None:
    """The phase and the column of records that have the figures of a table's column; None for rates."""
    phase = next((phase for phase in PHASES if heading.startswith(phase.capitalize())), FORWARD)
    heading = heading.removeprefix(f"{phase.capitalize()} ")
    which = "self" if heading.startswith("Self ") else "total"
    measure = heading.removeprefix("Self ")
    names = {
        "CPU total": "cpu_ns",
        "CUDA total": "device_ns",
        "CPU Mem": "cpu_net_bytes",
        "CUDA Mem": "device_net_bytes",
    }
    names |= {"MACs": "macs", "FLOPs": "flops"}
    if measure == "Number of Calls":
        return FORWARD, "calls"
    if measure == "Params":
        return FORWARD, "total_params"
    return (phase, f"{which}_{names[measure]}") if measure in names else None


def check_records(run: Run, of: Mapping[tuple[str, ...], Mapping[str, Mapping[str, Any]]], is_shown: Any) -> int:
    """Compare each cell of the table with the records of its row, by phase."""
    compared = 0
    columns = [name_in_records(heading) for heading in headings(run.report("tree"))[1:]]
    for way, cells in terminal(run):
        if not is_shown(way):
            continue
        for cell, column in zip(cells, columns):
            if column is None or (column[1] == "total_params" and column[1] not in of[way][column[0]]):
                continue
            record = of[way].get(column[0])
            text = UNKNOWN if record is None else text_of_record(record, column[1])
            # Records do not distinguish unknown from blank; and a layer that was not
            # selected is a blank row of the table, whatever its records are.
            blank = cell == "" and (text == UNKNOWN or column[1] in ("calls", "total_params"))
            assert blank or cell == text, (way, column)
            compared += 1
    return compared


RANGE = re.compile(r".* \(label(, \w+)?\)|\((region .*|fused: .*|not attributable: .*|compiling|CUDA .*|garbage .*)\)")


@every_kind
def test_csv_and_data_frames_have_the_cells_of_the_table(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    for alone in (run.of_rank(meta.rank) for meta in run.metas):
        read = [
            {name: cell or None for name, cell in line.items()}
            for line in csv.DictReader(io.StringIO(alone.report("csv")))
        ]
        layers: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
        for line in read:
            name = str(line["layer"])
            way = (name,) if name.startswith("(") else tuple(name.split("."))
            layers.setdefault(way, {})[in_column_of(str(line["phase"]))] = line
        compared = check_records(alone, layers, lambda way: not RANGE.fullmatch(way[-1]))
        assert compared >= 2 * len(layers) or alone.meta.requested == ("macs", "flops", "uncounted")
        frame = alone.to_dataframe()
        assert [
            {name: None if pandas.isna(cell) else str(cell) for name, cell in line.items()}
            for line in frame.to_dict("records")
        ] == read


def name_of_range(shown: str) -> str:
    """The name of a range in records, which have its kind in a column of its own."""
    label = re.fullmatch(r"(.*) \(label(, \w+)?\)", shown)
    return label[1] if label else re.sub(r"^\((region )?(.*)\)$", r"\2", shown)


@every_kind
def test_operators_of_csv_have_the_rows_of_labels_and_regions(run: Run) -> None:
    """Compares totals: the self of a region includes its overhead in the table, but not in records, which add up."""
    for alone in (run.of_rank(meta.rank) for meta in run.metas):
        found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
        columns, lines = records(alone, "operators")
        for values in lines:
            record = dict(zip(columns, values))
            if record["operator_kind"] in ("label", "region", "kernels", "gc"):
                way = (*filter(None, (record["labels"] or "").split(" > ")), record["operator"])
                found.setdefault((record["layer"], *way), {})[in_column_of(record["phase"])] = record
        shown = set()
        names = headings(alone.report("tree"))[1:]
        for way, cells in terminal(alone):
            if not RANGE.fullmatch(way[-1]):
                continue
            inside = [name for name in way if RANGE.fullmatch(name)]
            layer = ".".join(way[: len(way) - len(inside)])
            plain = [name_of_range(one) for one in inside]
            shown.add((layer, *plain))
            for heading, cell in zip(names, cells):
                column = name_in_records(heading)
                if column is None or not column[1].startswith("total_") or column[1] == "total_params":
                    continue
                record = found[(layer, *plain)].get(column[0])
                assert cell == ("" if record is None else text_of_record(record, column[1])), (way, heading)
        # Work of no layer has a row if it has any cost; a run without times may have garbage collections.
        rows = {".".join(way) for way, _ in terminal(alone)}
        assert shown == {way for way in found if way[0] in rows}


# The page


def shown_on(page: Page) -> Rows:
    """The rows of the page's table, with all levels open."""
    button(page, "Open all").click()
    found: Rows = []
    way: list[str] = []
    for line in page.evaluate(READ_TABLE):
        way[line["level"] - 1 :] = [line["name"]]
        found.append((tuple(way), line["cells"]))
    return found


def in_one_order(rows: Rows) -> list[tuple[bool, Rows]]:
    """Rows sorted: each view has its own order of the last rows, those of work of no layer."""
    blocks: dict[str, Rows] = {}
    for way, cells in rows:
        blocks.setdefault(way[0], []).append((way, cells))
    return sorted((name.startswith("("), block) for name, block in blocks.items())


@every_kind
def test_the_page_shows_the_terminals_rows_and_cells(run: Run, look: Callable[[str], Page]) -> None:
    page = look(run.report("html"))
    # Those of the chosen measure come first, with its share and its figures for a call: here are the terminal's.
    in_order = """all => all.filter((one) => one.dataset.at !== "-1")
      .sort((a, b) => (a.dataset.at ?? -1) - (b.dataset.at ?? -1)).map((one) => one.textContent)"""
    assert page.eval_on_selector_all(".head .cell", in_order) == headings(run.report("tree"))
    assert in_one_order(shown_on(page)) == in_one_order(terminal(run))
    check_line_under_the_icicle(page, run)
    if len(run.metas) > 1:
        for meta in run.metas:
            page.locator("select.source").select_option(f"rank {meta.rank}")
            alone = terminal(run.of_rank(meta.rank))
            assert in_one_order(shown_on(page)) == in_one_order(alone)


def check_line_under_the_icicle(page: Page, run: Run) -> None:
    """Its text for the first model starts with the cell of the table, in each measure and phase."""
    if not run.layers:
        return
    page.locator('.lines .line[data-node="0"] .number').first.click()
    cells = cells_of(run, run.roots[0].name)
    names = {"CPU time": "CPU total", "CUDA time": "CUDA total", "MACs": "MACs", "FLOPs": "FLOPs"}
    measures = page.get_by_role("group", name="Width").get_by_role("button").all_inner_texts()
    for measure in [one for one in measures if one in names]:
        choice(page, measure).click()
        for phase in run.phases() if len(run.phases()) > 1 else ():
            choice(page, phase).click()
            lead = "" if phase == FORWARD else f"{phase.capitalize()} "
            cell = cells[f"{lead}{names[measure]}"]
            expected = f"{run.roots[0].name}: {'not selected' if cell == '' else f'{measure} {cell}'}"
            assert page.locator(".status").inner_text().startswith(expected)


def test_the_line_below_the_icicle_adds_phases_up(look: Callable[[str], Page]) -> None:
    """The forward of fc1 is incomplete and its backward is complete: their sum is a lower bound."""
    run = KINDS["compiled_fused"]()
    page = look(run.report("html"))
    button(page, "Open all").click()
    said = {}
    for name in ("fc1", "act", "fc2"):
        page.locator(f'.lines .line:has(.name[title="Net.blocks.0.{name}"]) .number').first.click()
        said[name] = page.locator(".status").inner_text()
    block = "Net.blocks.0"
    assert said["fc1"].startswith(f"{block}.fc1: CPU time ≥ 0.060us")
    assert said["act"] == f"{block}.act: CPU time –"
    assert said["fc2"].startswith(f"{block}.fc2: CPU time 0.030us")


# A diff


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("without_layers", "never_called")])
def test_a_diff_of_a_run_with_itself_shows_only_exact_figures(name: str) -> None:
    """Each figure is that of the terminal; changes of figures that are not exact are unknown."""
    run = KINDS[name]()
    if len(run.metas) > 1:
        run = run.of_rank(0)
    diff = compare(run, run)
    table_of_run = by_name(terminal(run))
    names = headings(run.report("tree"))[1:]
    compared = 0
    for pair in diff.walk():
        for quantity in diff.quantities:
            if quantity.heading in names and quantity.key in pair.changes:
                change = pair.changes[quantity.key]
                cell = table_of_run[".".join(pair.path)][names.index(quantity.heading)]
                is_exact = cell not in ("", UNKNOWN) and not cell.startswith(AT_LEAST)
                if quantity.what != "params":  # parameters belong to the model, not to the work that ran
                    assert (change.before is not None) == (change.after is not None) == is_exact
                if is_exact:
                    assert str(quantity.write(change.before)) == cell
                if cell.startswith(AT_LEAST):
                    assert all(str(change.figure(side).text(quantity.write)) == cell for side in (0, 1))
                compared += 1
    assert compared


def test_a_diff_of_compiled_runs_is_the_same_in_every_view(look: Callable[[str], Page]) -> None:
    before, after = KINDS["compiled_fused"](), KINDS["compiled_not_attributable"]()
    diff = compare(before, after)
    changes = {".".join(pair.path): pair.changes["backward_cpu_total"] for pair in diff.walk()}
    assert (changes["Net.blocks.0.fc1"].before, changes["Net.blocks.0.fc1"].after) == (40, None)
    forward = {".".join(pair.path): pair.changes["cpu_total"] for pair in diff.walk()}
    assert (forward["Net.blocks.0.fc1"].before, forward["Net.blocks.0.fc1"].after) == (None, None)
    assert (forward["Net.blocks.0.fc2"].before, forward["Net.blocks.0.fc2"].after) == (30, 30)
    text = diff.report("table", sort_by="cpu_total")
    lines = {line.split("|")[0].strip(): [cell.strip() for cell in line.split("|")[1:]] for line in text.splitlines()}
    page = look(diff.report("html"))
    choice(page, "forward").click()
    shown = {".".join(way): cells for way, cells in shown_on(page)}
    at = page.eval_on_selector_all(".head .cell", "all => all.map((one) => one.textContent)").index("CPU total, before")
    for name, change in forward.items():
        both = [str(change.figure(side).text(format_time)) for side in (0, 1)]
        assert shown[name][at - 1 : at + 1] == both
        if name in lines:
            assert lines[name][:2] == both


def test_a_lower_bound_of_one_rank_is_one_of_all() -> None:
    run = KINDS["ranks"]()
    assert cells_of(run.of_rank(0), "Net")["FLOPs"] == "≥ 104"
    assert cells_of(run.of_rank(1), "Net")["FLOPs"] == "104"
    assert cells_of(run, "Net")["FLOPs"] == "≥ 208"
    # One rank did not record its device: the sum is unknown.
    assert cells_of(run, "Net")["CUDA total"] == UNKNOWN
    assert cells_of(run.of_rank(0), "Net")["CUDA total"] == "0.000us"


def test_a_lower_bound_has_no_share_of_the_whole() -> None:
    """Its share of the recorded time is unknown."""
    rows = by_name(terminal(KINDS["compiled_fused"](), percent=True))
    assert rows["Net.blocks.0.fc1"][1] == "≥ 0.020us"
    assert rows["Net.blocks.0.fc2"][1] == "0.030us (3.0%)"  # of 1 us


_COMMANDS = "\x1b]0;title\x07\x1b[31m\u202e\x9b31m\r"
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _texts_in(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the texts in a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        if isinstance(part, str):
            yield (*way, key)
        else:
            yield from _texts_in(part, (*way, key))


def test_no_name_in_a_file_commands_the_terminal(tmp_path: Path) -> None:
    """Each text of a saved run in turn, one of each place; in all reports that are text, and in errors."""
    KINDS["on_a_device"]().save(tmp_path / "run.json")
    document = (tmp_path / "run.json").read_text()
    of_shape = {tuple(key for key in way if isinstance(key, str)): way for way in _texts_in(json.loads(document))}
    shown = 0
    for way in of_shape.values():
        changed = inner = json.loads(document)
        for key in way[:-1]:
            inner = inner[key]
        inner[way[-1]] = f"name{_COMMANDS}"
        (tmp_path / "run.json").write_text(json.dumps(changed))
        try:
            run = torchprof.load(tmp_path / "run.json")
        except torchprof.TorchprofError as error:
            texts = [str(error)]
        else:
            texts = [repr(run), str(run), *(run.report(name) for name in ("top", "summary", "tree", "ops", "advice"))]
        for text in texts:
            assert not _RAW.search(text), (way, text)
            shown += "\\x1b" in text
    assert shown > 3

"""The HTML report in a real browser: its numbers against those of the run, its controls, hostile names, its looks.

Each test opens the page in Chromium without a network, and fails if the console has an error or the page made a
request.
"""

from __future__ import annotations

import csv
import io
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build import pipelines
from build.all_kinds import KINDS
from build.browser import Tab
from build.charted_runs import STEPS, roofline_run, with_memory
from build.hand_made import cells, headings, kernel, label, op, python_line, row, run_of
from build.hand_made_ranks import everybody, lockstep, run_of_ranks
from build.models import Checkpointed, Holder, Layers, Tied
from build.page import READ_TABLE, button, choice, data_in
from build.texts import format_count, format_memory, format_time
from build.warnings import run_warnings
from torch import Tensor, nn

import torchprof
from benchmarks.page import big_run
from torchprof import Profile, Run, TorchprofError
from torchprof.analyze.columns import CALLS, columns_of
from torchprof.analyze.device import short_kernel_name
from torchprof.analyze.figures import Figures
from torchprof.analyze.layers import entries_of
from torchprof.analyze.lines import largest_lines
from torchprof.analyze.operators import kernels, operators
from torchprof.analyze.report import QUESTIONS
from torchprof.reports.html import page_script
from torchprof.reports.icicle import color_of_change
from torchprof.reports.page import layers as layers_of_page
from torchprof.reports.page.data import page_data
from torchprof.reports.page.layers import Take
from torchprof.reports.page.tables import sum_of_ranks
from torchprof.run.formats import AT_LEAST, UNKNOWN, Bound, Unit
from torchprof.run.layers import Layer
from torchprof.run.lockstep import GAP, LockstepKey
from torchprof.run.measures import Cost, SampleKey, Spread, Trial
from torchprof.run.meta import RunWarning
from torchprof.run.rows import Around
from torchprof.run.timeline import DeviceTime, Held, Memory, StreamTime
from torchprof.run.words import (
    BACKWARD,
    FORWARD,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    OUTSIDE,
    OUTSIDE_NAME,
    PHASES,
    RECOMPUTE,
    range_in_words,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIGHT_AND_DARK = [pytest.param(False, id="light"), pytest.param(True, id="dark")]
WIDE_AND_NARROW = (1280, 400)


# Runs


class Net(nn.Module):
    """Three levels, work between the layers, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = Holder(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()))
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def profiled(model: nn.Module | Sequence[nn.Module], work: Callable[[], Any], **options: Any) -> Run:
    with Profile(model, **options) as prof:
        work()
    assert prof.run is not None
    return prof.run


def trained(model: nn.Module, *inputs: Tensor, steps: int = 2, **options: Any) -> Run:
    """Some training steps with all measures of the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"profile_memory": True, "with_flops": True, "with_timeline": True, **options}
    with Profile(model, **options) as prof:
        for _ in range(steps):
            optimizer.zero_grad()
            model(*inputs).sum().backward()
            optimizer.step()
            prof.step()
    assert prof.run is not None
    return prof.run


@cache
def training() -> Run:
    return trained(Net(), torch.rand(2, 3, 6, 6))


@cache
def checkpointed() -> Run:
    return trained(Checkpointed(use_reentrant=False), torch.rand(3, 4, requires_grad=True))


@cache
def on_a_device() -> Run:
    """Kernels of ops, of a label, and without an op; in both phases, in layers and outside; memory on the device."""
    every = ("cpu_ns", "device_ns", "cpu_allocated", "cpu_freed", "device_allocated", "device_freed")
    mm, add = op("aten::mm"), op("aten::add")
    rows = [
        row(0, cpu_ns=1500),
        row(0, add, calls=2, cpu_ns=2500),
        row(0, add, kernel("void add<float>"), device="cuda:0", calls=2, device_ns=900),
        row(1, cpu_ns=700),
        row(1, mm, calls=3, cpu_ns=70_500, cpu_allocated=1536, cpu_freed=512),
        row(1, mm, op("aten::fill_"), calls=3, cpu_ns=1_000_500, device_allocated=1),
        row(
            1,
            mm,
            kernel("gemm"),
            device="cuda:0",
            calls=3,
            device_ns=2_000_000_500,
            device_allocated=2**30,
            device_freed=2**20,
        ),
        row(1, mm, kernel("copy"), device="cuda:1", calls=1, device_ns=125),
        row(2, cpu_ns=10),
        row(2, label("mine"), kernel("gemm"), device="cuda:0", calls=1, device_ns=333),
        row(3, cpu_ns=20),
        row(3, kernel("loose"), device="cuda:0", calls=1, device_ns=50),
        row(1, op("aten::mm_backward"), phase=BACKWARD, cpu_ns=4000),
        row(1, op("aten::mm_backward"), kernel("gemm"), phase=BACKWARD, device="cuda:0", calls=2, device_ns=5000),
        row(OUTSIDE, op("aten::sum"), cpu_ns=300),
        row(OUTSIDE, op("aten::sum"), kernel("reduce"), device="cuda:0", device_ns=40),
    ]
    return run_of(rows, device="cuda", requested=every, measured=every, wall_ns=10**10, busy_ns=(("cuda:0", 10**9),))


@cache
def called_back() -> Run:
    """An op of a layer that calls another layer, as in ``torch.utils.checkpoint`` and vmap; a label around both."""
    around = Around(0, FORWARD, (label("mine"), op("aten::outer")))
    backward = Around(0, BACKWARD, (op("Engine"),))
    rows = [
        row(0, cpu_ns=100),
        row(0, label("mine"), calls=1, cpu_ns=10),
        row(0, label("mine"), op("aten::outer"), calls=2, cpu_ns=1000),
        row(1, cpu_ns=5, within=(around,)),
        row(1, op("aten::mm"), calls=4, within=(around,), cpu_ns=20_000),
        row(3, op("aten::mm"), calls=1, within=(around, Around(1, FORWARD, (op("aten::mm"),))), cpu_ns=300_000),
        row(0, op("Engine"), phase=BACKWARD, cpu_ns=7),
        row(1, op("aten::mm"), phase=RECOMPUTE, within=(backward,), calls=4, cpu_ns=4_000_000),
        row(2, op("aten::mm"), phase=BACKWARD, within=(Around(OUTSIDE, FORWARD, (label("mine"),)),), cpu_ns=50_000_000),
    ]
    return run_of(rows)


@cache
def of_ranks() -> Run:
    """The rows of a run on rank 0, and on rank 3 with three times the figures and without the calls of Net.b.0."""
    run = called_back()
    columns = {name: array("q", column) for name, column in run.rows.columns.items()}
    for at in range(len(run.rows)):
        if run.rows.columns["layer"][at] == 3:
            continue
        for name, column in run.rows.columns.items():
            columns[name].append(3 if name == "rank" else column[at] * (3 if name == "cpu_ns" else 1))
    metas = (run.meta, replace(run.meta, rank=3, warnings=run_warnings("The second rank warns.")))
    samples = {
        SampleKey(1, FORWARD, rank, "cpu", "cpu_ns"): Spread.of([(at, 1000 * at * (rank + 1)) for at in range(1, 6)])
        for rank in (0, 3)
    }
    return replace(run, metas=metas, rows=replace(run.rows, columns=columns), samples=samples)


RUNS: dict[str, Callable[[], Run]] = {
    **{name: make for name, make in KINDS.items() if name not in ("ranks", "selected")},
    **{make.__name__: make for make in (training, checkpointed, on_a_device, called_back, of_ranks)},
}
"""For parts of the page that are not its table: test_views compares that for all kinds of runs."""


# Reading the page


# The text of the panel of each layer for each choice of phase and measure, with all rows of its tables.
READ_SHEET = """(box) => {
  for (let more = box.querySelector(".more"); more && !more.hidden; ) more.click();
  return [...box.querySelectorAll("tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent));
}"""
READ_SHEET_ROWS = (
    "(box) => [...box.querySelectorAll('tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent))"
)
READ_PANELS = """(every) => {
  const all = document.querySelector(".treetable");
  all.style.height = all.style.maxHeight = "100000px"; // only rows in sight are in the document
  all.dispatchEvent(new Event("scroll"));
  const readSheet = READ_SHEET;
  const buttons = (label) => [...document.querySelectorAll(`.choice[aria-label=${label}] button`)];
  const choices = (label) => (every && buttons(label).length ? buttons(label).map((one) => one.textContent) : [null]);
  const choose = (label, text) => text !== null && buttons(label).find((one) => one.textContent === text).click();
  const found = [];
  for (const width of choices("Width")) {
    choose("Width", width);
    for (const phase of choices("Phase")) {
      choose("Phase", phase);
      for (const node of [...document.querySelectorAll(".lines .line")].map((line) => line.dataset.node)) {
        document.querySelector(`.lines .line[data-node="${node}"] .number`).click();
        const panel = document.querySelector(".panel");
        const all = (selector, read) => Object.fromEntries([...panel.querySelectorAll(selector)].map(read));
        const sheets = {};
        for (const heading of panel.querySelectorAll("h4")) {
          let next = heading.nextElementSibling;
          while (next && next.tagName !== "H4" && !next.querySelector(".sheet")) next = next.nextElementSibling;
          if (next && next.tagName !== "H4") sheets[heading.textContent] = readSheet(next);
        }
        found.push({
          width, phase, path: panel.querySelector("h3").textContent, text: panel.textContent, sheets,
          figures: all("td[data-key]", (cell) => [cell.dataset.key, cell.textContent]),
          facts: all("dt", (one) => [one.textContent, one.nextElementSibling.textContent]),
        });
      }
    }
  }
  return found;
}""".replace("READ_SHEET", READ_SHEET)


def table(page: Page, *, whole: bool = True) -> list[dict[str, Any]]:
    """The lines of the tree table, top to bottom; ``whole``: with every layer."""
    if whole:
        button(page, "Open all").click()
    lines: list[dict[str, Any]] = page.evaluate(READ_TABLE)
    return lines


def data_of(page: Page) -> Any:
    return data_in(page.content())


def text_rows(run: Run) -> list[list[str]]:
    """The rows of the terminal's table, without the lines of the tree."""
    return [[re.sub(r"^[│├└─ ]+", "", row[0]), *row[1:]] for row in cells(run.report("tree"))]


def paths_of(run: Run) -> list[str]:
    """The paths of the layers on the page, depth first, and the names of work of no layer."""
    found = [node.layer.name for root in range(len(run.roots)) for node in run.tree(root=root).walk()]
    selected = {NOT_SELECTED: "(not selected)", OUTSIDE: "(outside)"}
    return found + [
        name for key, name in selected.items() if any(run.no_layer(phase, selected=key == OUTSIDE) for phase in PHASES)
    ]


# Numbers


def test_rows_of_many_layers_are_made_when_they_are_opened(look: Callable[..., Page]) -> None:
    """1,011 layers: the model and its stages are open at first. The figures of an opened block are the terminal's."""
    run = big_run(1_000, 20_000)
    page = look(run)
    closed = table(page, whole=False)
    assert [line["level"] for line in closed] == [1, *[2] * 10]
    for path in ("Net.stage3", "Net.stage3.block4"):
        line = page.locator(f'.lines .line:has(.name[title="{path}"])')
        line.locator(".toggle").click()
        assert line.get_attribute("aria-expanded") == "true"
    opened = table(page, whole=False)
    assert len(opened) == len(closed) + 10 + 9
    rows_of = dict(zip(paths_of(run), text_rows(run)))
    assert all([line["name"], *line["cells"]] == rows_of[line["path"]] for line in opened)
    button(page, "Open all").click()
    assert page.locator(".lines .line").count() < 100


def test_the_data_of_many_layers_is_small() -> None:
    """Layers that are alike are described once, one call has no distribution, and columns are compressed."""
    run = big_run(1_000, 5_000)
    once = {key: Spread.of([(0, 5)]) for key in run.samples}
    data = page_data([Take("this run", replace(run, samples=once))])
    assert len(data["takes"][0]["described"]) == 2
    assert len(data["samples"]["node"]) == 0
    assert len(replace(run, samples=once).report("html")) < len(page_script()) + 120_000
    assert len(page_data([Take("this run", run)])["samples"]["node"]) == len(run.samples)


def test_a_layer_that_is_called_once_in_each_step_has_one_distribution() -> None:
    """Calls and steps begin at different times. The second layer is called once more."""
    steps = [Spread.of([(0, 5), (10, 7)]), Spread.of([(0, 3), (10, 4)])]
    calls = [Spread.of([(1, 5), (11, 7)]), Spread.of([(2, 3), (12, 2), (14, 2)])]
    samples = {
        SampleKey(layer, FORWARD, 0, "cpu", measure): spreads[layer]
        for layer in (0, 1)
        for measure, spreads in (("cpu_ns", calls), ("step_cpu_ns", steps))
    }
    run = replace(run_of([row(0, calls=2), row(1, calls=3)], steps=2), samples=samples)
    shown = page_data([Take("this run", run)])["samples"]
    measures = [("cpu_ns", "step_cpu_ns")[number] for number in shown["measure"]]
    assert sorted(zip(accumulate(shown["node"]), measures)) == [(0, "cpu_ns"), (1, "cpu_ns"), (1, "step_cpu_ns")]


def test_a_browser_that_cannot_decompress_the_data_says_so(chromium: Browser, tmp_path: Path) -> None:
    big_run(10, 20).export(tmp_path / "run.html")
    context = chromium.new_context()
    page = context.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto((tmp_path / "run.html").resolve().as_uri())
    page.get_by_text("needs a browser of May 2023 or later").wait_for()
    context.close()


def test_work_launched_before_the_recording_has_a_line_and_no_share(look: Callable[..., Page]) -> None:
    times = ("cpu_ns", "device_ns")
    rows = [
        row(0, cpu_ns=10),
        row(1, op("aten::mm"), cpu_ns=70),
        row(1, op("aten::mm"), kernel("gemm"), device="cuda:0", device_ns=900),
        row(OUTSIDE, kernel("loose"), device="cuda:0", device_ns=30),
        row(OUTSIDE, label(LAUNCHED_BEFORE), kernel("old"), device="cuda:0", calls=4, device_ns=5000),
    ]
    run = run_of(rows, device="cuda", requested=times, measured=times)
    page = look(run)
    lines = table(page)
    assert sorted([line["name"], *line["cells"]] for line in lines) == sorted(text_rows(run))
    assert lines[-1]["name"] == LAUNCHED_BEFORE
    choice(page, "CUDA time").click()
    check_icicle(page, run, "device_ns", [FORWARD])
    sheets = {panel["path"]: panel["sheets"] for panel in panels(page, every=False)}
    assert [row_[0] for row_ in sheets["(outside)"]["Kernels"]] == ["loose"]
    page.get_by_role("tab", name="Kernels").click()
    assert "old" in page.inner_text("#reports")


def panels(page: Page, *, every: bool = True) -> list[dict[str, Any]]:
    """The text of the panel of each layer; ``every``: for each phase and each measure."""
    button(page, "Open all").click()
    found: list[dict[str, Any]] = page.evaluate(READ_PANELS, every)
    return found


def facts(page: Page) -> dict[str, dict[str, str]]:
    return {panel["path"]: panel["facts"] for panel in panels(page, every=False)}


def phase_of(chosen: str | None, run: Run) -> str | None:
    """The argument of ``operators`` for a button of the phases."""
    return chosen if chosen in PHASES else None if len(run.phases()) > 1 else run.phases()[0]


def measured_field(run: Run, heading: str | None) -> str | None:
    """The field of ``Cost`` of a button of the widths."""
    device = (run.meta.device or "device").upper()
    fields = {"CPU time": "cpu_ns", f"{device} time": "device_ns", "MACs": "macs", "FLOPs": "flops"}
    fields |= {"CPU memory allocated": "cpu_allocated", f"{device} memory allocated": "device_allocated"}
    if heading is not None:
        return fields[heading]
    return next((field for field in fields.values() if field in run.meta.measured), None)


def cost_text(cost: Cost, field: str) -> str:
    """The cell of a field of a cost in any table."""
    value = getattr(cost, field)
    if field in ("macs", "flops") and cost.uncounted:
        return f"{AT_LEAST} {format_count(value)}" if value else UNKNOWN
    return (format_time if field.endswith("_ns") else format_count if field in ("macs", "flops") else format_memory)(
        value
    )


def operator_rows(run: Run, fields: Sequence[str], **chosen: Any) -> list[list[str]]:
    """The rows of a table of operators: name, calls, self of each field, and totals of times."""
    rows = []
    for one, sums in operators(run, **chosen).items():
        figures = []
        is_part = 0 < sums.calls == sums.parts  # the figure of the operator around it includes it
        for field in fields:
            hidden = is_part and field in ("macs", "flops") and not getattr(sums.self, field)
            figures.append("" if hidden else cost_text(sums.self, field))
            if field.endswith("_ns"):
                figures.append(cost_text(sums.total, field))
        name = range_in_words(one.kind, one.name)
        rows.append([name, str(sums.calls) if sums.calls else "", *figures])
    return sorted(rows)


def check_panels(page: Page, run: Run) -> None:
    """The panel of each layer shows its figures and operators."""
    columns = columns_of(run, show_events=True)
    figures = figures_by_path(run)
    seen = set()
    for panel in panels(page):
        field, phase = measured_field(run, panel["width"]), phase_of(panel["phase"], run)
        seen.add(panel["path"])
        texts = {
            column.key: str(column.text(figures[panel["path"]], None))
            for column in columns
            if column.heading != "Params"
        }
        assert panel["figures"] == {key: text for key, text in texts.items() if text != ""}
        if panel["path"] in {layer.name for layer in run.layers}:
            expected = operator_rows(run, [field] if field else [], layer=panel["path"], phase=phase)
            assert sorted(panel["sheets"].get("Operators", [])) == expected
    assert seen == set(paths_of(run))


def ordered_layers(run: Run) -> list[Layer]:
    return [node.layer for root in range(len(run.roots)) for node in run.tree(root=root).walk()]


def figures_by_path(run: Run) -> dict[str, Figures]:
    """The figures of the terminal's table for each layer and for work of no layer, by path; without labels."""
    return {name: figures for name, figures in all_figures(run).items() if ", " not in name}


def all_figures(run: Run) -> dict[str, Figures]:
    """The same with labels and compiled regions, by the path of their layer and their name."""
    found = {}
    waiting = [(one, ".".join(one.path) or one.name) for one in entries_of(run)]
    while waiting:
        entry, path = waiting.pop()
        found[path] = entry.figures
        waiting += [(one, ".".join(one.path)) for one in entry.children]
        waiting += [(one, f"{path}, {one.name}") for one in entry.ops]
    return found


def test_kernels_of_a_layer_include_those_of_layers_below(look: Callable[..., Page]) -> None:
    run = on_a_device()
    page = look(run)
    for panel in panels(page):
        if panel["path"] not in {layer.name for layer in run.layers}:
            continue
        expected: dict[str, list[int]] = {}
        for one, sums in kernels(run, layer=panel["path"], phase=phase_of(panel["phase"], run)).items():
            found = expected.setdefault(short_kernel_name(one.name), [0, 0])
            found[0] += sums.self.device_ns
            found[1] += sums.calls
        rows = [[name, format_time(ns), str(calls)] for name, (ns, calls) in expected.items()]
        assert sorted(panel["sheets"].get("Kernels", [])) == sorted(rows)
    assert kernels(run)  # checks the test


def test_facts_of_a_layer(look: Callable[..., Page]) -> None:
    found = facts(look(training()))
    stem = found["Net.stem.0"]
    assert stem["class"] == "Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))"
    assert stem["parameters"] == "112 (float32)"
    assert stem["input"] == "[2, 3, 6, 6]" and stem["output"] == "[2, 4, 6, 6]"
    assert stem["mode"] == "training"
    assert found["Net"]["parameters"].startswith("481, 0 self")  # 112 + 8 + 296 + 20 + 45
    assert "input" not in found["Net.unused"]
    assert facts(look(trained(Tied(), torch.rand(3, 4))))["Tied.left.inner"]["shared with"] == "Tied.right.inner"
    assert facts(look(KINDS["several_models"]()))["Net"]["parameters"].startswith(UNKNOWN)


def test_format_functions_agree_with_those_of_python(look: Callable[..., Page]) -> None:
    page = look("<!DOCTYPE html><title>numbers</title>")
    source = (Path(torchprof.__file__).parent / "reports" / "page" / "format.js").read_text(encoding="utf-8")
    generator = random.Random(0)
    numbers = [0, 1, 999, 1000, 1023, 1024, 999_994, 999_995, 999_999_499, 10**9 - 1, 10**9, 2**53 - 1]
    numbers += [round(10 ** generator.uniform(0, 15.9)) for _ in range(3000)]
    # An odd multiple of 2^-(digits + 1) is exact in binary and a tie of rounding: some of them in each unit.
    numbers += [odd * 62_500 for odd in range(1, 400, 2)] + [odd * 62_500_000 for odd in range(1, 400, 2)]
    numbers += [odd * 128 * 1024**power for odd in range(1, 100) for power in (0, 1, 2)]
    numbers += [odd * 125 * 1000**power for odd in range(1, 100) for power in (0, 1, 2, 3, 4)]
    numbers += [-number for number in numbers]
    rates = [number / 1000 for number in numbers] + [generator.uniform(0, 2000) for _ in range(1000)]
    rates += [odd / 8 for odd in range(1, 100)] + [999.994, 999.995, 999.996]
    found = page.evaluate(
        f"([numbers, rates]) => {{ {source}\n return [numbers.map(formatTime), numbers.map(formatBytes), "
        "numbers.map(formatCount), rates.map(formatTime), rates.map(formatCount)]; }",
        [numbers, rates],
    )
    expected = [
        [format_time(number) for number in numbers],
        [format_memory(number) for number in numbers],
        [format_count(number) for number in numbers],
        [format_time(rate) for rate in rates],
        [format_count(rate) for rate in rates],
    ]
    for texts, right in zip(found, expected):
        assert [pair for pair in zip(texts, right) if pair[0] != pair[1]] == []
    assert "1.062ms" in expected[0] and "1.12 K" in expected[2]  # checks the test: ties round to the even digit


# The icicle

# Between blocks is a gap of one pixel.
READ_BLOCKS = """() => {
  const box = document.querySelector(".icicle");
  const frame = box.getBoundingClientRect();
  return { width: box.clientWidth, blocks: [...box.querySelectorAll(".block")].map((block) => {
    const { left, width, top } = block.getBoundingClientRect();
    const text = block.querySelector("bdi")?.textContent ?? "";
    return { node: Number(block.dataset.node), classes: [...block.classList], text,
             left: left - frame.left, top: top - frame.top, width: width + 1 };
  }) };
}"""


def totals_of(run: Run, field: str, phases: Sequence[str]) -> dict[str, int]:
    """The total of each layer, and of work of no layer, by path."""
    found: dict[str, int] = {}
    for phase in phases:
        for root in range(len(run.roots)):
            for node in run.tree(phase, root).walk():
                found[node.layer.name] = found.get(node.layer.name, 0) + getattr(node.total, field)
        for name, selected in (("(outside)", True), ("(not selected)", False)):
            found[name] = found.get(name, 0) + getattr(run.no_layer(phase, selected=selected), field)
    return found


def check_icicle(page: Page, run: Run, field: str, phases: Sequence[str], whole_run: Run | None = None) -> None:
    """The width of each block is its layer's share, and the block is within the block above it. ``whole_run``: that of
    all ranks, whose layers the page has."""
    totals = totals_of(run, field, phases)
    totals["everything"] = (
        sum(totals[layer.name] for layer in run.roots) + totals["(outside)"] + totals["(not selected)"]
    )
    names = [
        *(layer.name for layer in ordered_layers(whole_run or run)),
        "(outside)",
        "(not selected)",
        LAUNCHED_BEFORE,
        "everything",
    ]
    drawn = page.evaluate(READ_BLOCKS)
    blocks = {
        names[block["node"]]: block
        for block in drawn["blocks"]
        if not {"rest", "own", "operator"} & {*block["classes"]}
    }
    top = min(blocks, key=lambda name: blocks[name]["top"], default=None)
    whole = totals["everything"] if top is None else totals[top]
    if top is None:
        assert whole == 0
        return
    assert top == "everything" or totals[top] == totals["everything"]
    for name, total in totals.items():
        share = drawn["width"] * total / whole
        if name in blocks:
            assert abs(blocks[name]["width"] - share) < 0.1
        elif name != "everything":
            above = name.rpartition(".")[0] or top
            assert share < 2 or above not in blocks  # too small to be visible
        above = name.rpartition(".")[0]
        if name in blocks and above in blocks:
            inner, outer = blocks[name], blocks[above]
            assert outer["left"] - 0.1 < inner["left"]
            assert inner["left"] + inner["width"] < outer["left"] + outer["width"] + 0.1
            assert inner["top"] > outer["top"]


def check_widths(page: Page, run: Run) -> None:
    """The width of each block is its share, for all measures, phases and ranks."""
    data = data_of(page)
    for measure in data["measures"]:
        if len(data["measures"]) > 1:
            choice(page, measure["heading"]).click()
        field = measured_field(run, measure["heading"])
        assert field == measure["field"]
        if len(run.phases()) > 1:
            choice(page, "both" if len(run.phases()) == 2 else "all phases").click()
        check_icicle(page, run, field, run.phases())
        for phase in run.phases() if len(run.phases()) > 1 else ():
            choice(page, phase).click()
            check_icicle(page, run, field, [phase])
    if len(run.metas) > 1:
        for meta in run.metas:
            page.get_by_label("Rank").select_option(f"rank {meta.rank}")
            check_icicle(page, run.of_rank(meta.rank), "cpu_ns", [run.phases()[-1]], run)


@pytest.mark.parametrize("name", RUNS)
def test_panels_show_the_figures_of_layers_and_blocks_are_as_wide_as_their_shares(
    name: str, look: Callable[..., Page]
) -> None:
    run = RUNS[name]()
    page = look(run)
    check_panels(page, run)
    check_widths(page, run)


def tree_of(own: Mapping[str, int], **meta: Any) -> Run:
    """A run in which each layer was called once, with a self of so many ns."""
    layers = [Layer(tuple(path.split(".")), "Module") for path in own]
    return run_of([row(at, cpu_ns=ns) for at, ns in enumerate(own.values())], layers=layers, **meta)


SMALL = {"Net": 100, "Net.a": 1000, "Net.a.x": 3000, "Net.a.y": 1000, "Net.b": 500, "Net.b.x": 4400}


def blocks(page: Page) -> list[str]:
    """The texts of the blocks, left to right in each row, rows from the top down."""
    found = page.evaluate(READ_BLOCKS)["blocks"]
    return [block["text"] for block in sorted(found, key=lambda block: (block["top"], block["left"]))]


def test_small_neighbors_are_one_block(look: Callable[..., Page]) -> None:
    run = tree_of({"Net": 0, "Net.large": 10**6, **{f"Net.small{number}": 100 for number in range(40)}})
    layers = tuple(replace(layer, kind=f"Kind{at % 2}") for at, layer in enumerate(run.layers))  # not equal in a row
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    drawn = page.evaluate(READ_BLOCKS)
    (rest,) = [block for block in drawn["blocks"] if "rest" in block["classes"]]
    assert abs(rest["width"] - drawn["width"] * 4000 / 1_004_000) < 0.1


def test_self_as_blocks(look: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_of_page, "_MOST_WITH_OPERATORS", 1)  # else its operators are blocks
    page = look(tree_of(SMALL))
    assert blocks(page) == ["Net", "a", "b", "x", "y", "x"]
    page.get_by_label("self and operators as blocks").check()
    drawn = page.evaluate(READ_BLOCKS)
    own = {block["text"]: block["width"] / drawn["width"] for block in drawn["blocks"] if "own" in block["classes"]}
    assert own == {
        "a (self)": pytest.approx(0.1, abs=1e-3),
        "b (self)": pytest.approx(0.05, abs=1e-3),
        "": pytest.approx(0.01, abs=1e-3),
    }
    assert sum(own.values()) == pytest.approx((1000 + 500 + 100) / 10_000)


# The answer first


@pytest.mark.parametrize("name", ["training", "on_a_device", "on_meta", "of_ranks", "several_models"])
def test_the_largest_places_are_those_of_the_terminal(name: str, look: Callable[..., Page]) -> None:
    run = RUNS[name]()
    page = look(run)
    tables = [
        [re.split(r" *\| ", line) for line in section.splitlines()[2:] if " | " in line]
        for section in run.report("top", top=5).split("\n\n")
        if section.lstrip().startswith("Share")
    ]
    shown = page.evaluate(f"[...document.querySelectorAll('.largest .sheet')].map({READ_SHEET_ROWS})")
    expected = [[[cell.strip() for cell in row] for row in table] for table in tables if table]
    expected = [[[*map(str, row.cells)] for row in table.rows] for table in largest_lines(run)] + expected
    assert shown == expected and shown
    idle = [section for section in run.report("top").split("\n\n") if " idle for " in section]
    assert page.locator(".largest > p:not(.hint)").all_inner_texts() == idle
    assert (name == "on_a_device") is bool(idle)


def test_on_a_phone_the_name_comes_first(look: Callable[..., Page]) -> None:
    heading = ".largest .sheet:last-of-type th"
    for width, first in ((390, "Layer"), (1200, "Share")):
        page = look(RUNS["on_a_device"](), width=width)
        assert page.locator(heading).first.inner_text() == first
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_click_on_a_large_place_selects_its_layer(look: Callable[..., Page]) -> None:
    run = RUNS["on_a_device"]()
    page = look(run)
    places = page.locator(".largest tbody tr").all()
    assert len(places) > 5
    for place in places:
        place.click()
        assert chosen(page) == place.locator("td").nth(2).inner_text().split(",")[0]


def test_headings_are_the_five_questions_in_their_order(look: Callable[..., Page]) -> None:
    run, ranks = everything(), of_ranks()
    headings = lambda page: page.locator("h2").all_inner_texts()  # noqa: E731
    order = list(QUESTIONS.values())
    for page in (look(run), look(ranks), look(RUNS["on_meta"]())):
        shown = [text for text in headings(page) if page.get_by_role("heading", name=text, exact=True).is_visible()]
        assert shown == [question for question in order if question in shown] and shown[0] == QUESTIONS["time"]
    assert {QUESTIONS["why"], QUESTIONS["fit"]} < set(headings(look(run)))
    assert headings(look(ranks))[-1] == QUESTIONS["waits"]
    compared = look(torchprof.compare(run, run).report("html"))
    assert headings(compared)[0] == QUESTIONS["changed"] and QUESTIONS["time"] not in headings(compared)
    assert compared.locator(".largest").count() == 0


def test_what_makes_times_uncertain_stands_below_the_headline_and_not_among_the_warnings(
    look: Callable[..., Page],
) -> None:
    busy = RunWarning.of("machine_busy", delay_ns=5 * 10**8, wall_ns=10**9)
    run = run_of([row(0, calls=2, cpu_ns=10)], warnings=(busy, *run_warnings("Another warning.")))
    page = look(run)
    assert page.locator("header > .warning").all_inner_texts() == [str(busy)]
    assert page.locator(".warnings li").all_inner_texts() == ["Another warning."]
    assert page.locator(".warnings summary").inner_text() == "Warnings"
    both = look(run, beside={"other": run_of([row(0, calls=2, cpu_ns=10)])})
    assert both.locator("header > .warning").all_inner_texts() == [f"this run: {busy}"]


def test_one_legend_explains_all_signs(look: Callable[..., Page]) -> None:
    page = look(KINDS["without_formulas"]())
    assert page.locator(".signs b").all_inner_texts() == [UNKNOWN, AT_LEAST.strip(), OUTSIDE_NAME, "(between ops)"]


# Devices

STREAMS = (StreamTime(7, 4, 6_500, 6_000, 0, 1_000), StreamTime(20, 1, 6_000, 0, 6_000, 0))
DEVICE = DeviceTime("cuda:0", 0, 10_000, 9_000, 6_000, 6_000, 1_500, 3_500, STREAMS)
READ_BAR = """() => [...document.querySelectorAll("#devices .chart g g g")].map((part) => [
  part.querySelector("title").textContent.replace("cuda:0: ", ""), part.querySelector("rect").getBBox().width,
])"""
READ_LEGEND = """() => [...document.querySelectorAll("#devices .chart text")]
  .map((text) => text.textContent).filter((text) => text.endsWith("%)"))"""


def test_time_of_a_device_by_hand(look: Callable[..., Page]) -> None:
    """The parts of the bar add up to the span: 10 us, of which 9 busy, 6 computing and 6 communicating."""
    page = look(replace(run_of([row(0, cpu_ns=10)]), device_times=(DEVICE,)))
    assert page.locator("#devices h4").all_inner_texts() == ["cuda:0"]
    assert page.locator("#devices .device p").all_inner_texts() == [
        "From its first work to its last: 10.000us, busy for 9.000us (90.0%), idle for 1.000us (10.0%). Communication: "
        "6.000us, 3.500us (58.3%) of it at the same time as computing, 2.500us (41.7%) exposed."
    ]
    parts = {
        "computing 2.5us (25.0%)": 0.25,
        "overlapped communication 3.5us (35.0%)": 0.35,
        "exposed communication 2.5us (25.0%)": 0.25,
        "copying only 0.5us (5.0%)": 0.05,
        "idle 1us (10.0%)": 0.1,
    }
    drawn = {name.replace("\n", " "): (width + 1) / 1160 for name, width in page.evaluate(READ_BAR)}
    assert drawn == pytest.approx(parts, abs=1e-3)
    assert list(drawn) == list(parts) == page.evaluate(READ_LEGEND)
    assert page.evaluate(f"({READ_SHEET})(document.querySelector('#devices'))") == [
        ["7", "4", "6.500us", "65.0%", "6.000us", "0.000us", "1.000us"],
        ["20", "1", "6.000us", "60.0%", "0.000us", "6.000us", "0.000us"],
        ["(all)", "5", "9.000us", "90.0%", "6.000us", "6.000us", "1.500us"],
    ]


def test_parts_of_a_device_of_zero_are_not_drawn(look: Callable[..., Page]) -> None:
    busy = DeviceTime("cuda:0", 0, 500, 500, 500, 0, 0, 0, (StreamTime(7, 1, 500, 500, 0, 0),))
    nothing = DeviceTime("cuda:1", 0, 0, 0, 0, 0, 0, 0, (StreamTime(7, 1, 0, 0, 0, 0),))
    page = look(replace(run_of([row(0, cpu_ns=10)]), device_times=(busy, nothing)))
    assert page.evaluate(READ_LEGEND) == ["computing 0.5us (100.0%)"]
    assert page.locator("#devices .device p").all_inner_texts() == [
        "From its first work to its last: 0.500us, busy for 0.500us (100.0%), idle for 0.000us (0.0%).",
        "From its first work to its last: 0.000us, busy for 0.000us, idle for 0.000us.",
    ]


def test_devices_of_ranks_and_of_other_runs(look: Callable[..., Page]) -> None:
    ranks = replace(of_ranks(), device_times=(DEVICE, replace(DEVICE, rank=3)))
    assert look(ranks).locator("#devices h4").all_inner_texts() == ["cuda:0, rank 0", "cuda:0, rank 3"]
    runs = [replace(run_of([row(0, cpu_ns=10)]), device_times=times) for times in ((DEVICE,), ())]
    assert look(runs[0], beside={"other": runs[1]}).locator("#devices h4").all_inner_texts() == ["cuda:0, this run"]
    assert look(runs[1], beside={"other": runs[0]}).locator("#devices h4").all_inner_texts() == ["cuda:0, other"]
    assert look(runs[1]).locator("#devices").count() == 0


# Memory


@pytest.mark.parametrize("name", ["training", "checkpointed"])
def test_what_was_live_at_the_peak_is_that_of_the_run(name: str, look: Callable[..., Page]) -> None:
    run = RUNS[name]()
    page = look(run)
    (memory,) = run.memory
    peak = f"peak: +{format_memory(memory.peak_bytes)} above the start, after {format_time(memory.peak_ns)}, in "
    assert peak in page.inner_text("#memory")
    names = {index: layer.name for index, layer in enumerate(run.layers)} | {OUTSIDE: "(outside)"}
    sizes: Counter[tuple[str, str, str]] = Counter()
    for one in memory.held:
        sizes[names[one.layer], "" if one.layer == OUTSIDE and one.phase == FORWARD else one.phase, one.kind] += (
            one.nbytes
        )
    by_kind, by_layer = page.locator("#memory .sheet").all()
    page.locator("#memory .more").last.evaluate("(more) => more.hidden || more.click()")
    rows = [row.split("\t") for row in by_layer.locator("tbody tr").all_inner_texts()]
    assert {tuple(row[:3]): row[3] for row in rows} == {key: format_memory(size) for key, size in sizes.items()}
    assert by_kind.locator("tbody tr").last.inner_text().split("\t")[:2] == ["all", format_memory(memory.peak_bytes)]


def test_a_click_on_what_was_live_at_the_peak_selects_its_layer(look: Callable[..., Page]) -> None:
    held = (
        Held(1, FORWARD, "unknown", 500, 1),
        Held(0, FORWARD, "parameters", 300, 2),
        Held(-1, FORWARD, "activations", 100, 1),
    )
    run = with_memory(run_of([row(0, cpu_ns=10)]), STEPS, Memory("cpu", peak_bytes=900, peak_ns=50, held=held))
    page = look(run)
    rows = page.locator("#memory .sheet").last.locator("tbody tr")
    assert [cell.split("\t") for cell in rows.all_inner_texts()] == [
        ["Net.a", "forward", "unknown", "500 B", "55.6%", "1"],
        ["Net", "forward", "parameters", "300 B", "33.3%", "2"],
        ["(outside)", "", "activations", "100 B", "11.1%", "1"],
    ]
    rows.first.click()
    assert chosen(page) == "Net.a"


def test_a_click_on_a_point_of_the_roofline_selects_its_layer(look: Callable[..., Page]) -> None:
    page = look(roofline_run())
    page.locator("#roofline circle").first.dispatch_event("click")
    assert chosen(page) == "Net.a"
    page.locator("#roofline circle").last.press("Enter")
    assert chosen(page) == "Net.b.0"


def test_a_run_without_a_timeline_says_how_to_record_one(look: Callable[..., Page]) -> None:
    model = Net()
    page = look(profiled(model, lambda: model(torch.rand(2, 3, 6, 6)), profile_memory=True))
    assert "with_timeline=True" in page.inner_text("#memory")
    assert page.locator("#memory svg").count() == 0
    assert look(tree_of(SMALL)).locator("#memory").count() == 0


def chosen(page: Page) -> str:
    """The layer of the panel."""
    return page.inner_text(".panel h3")


# Controls of the page


def lines(page: Page) -> list[str]:
    """The names of the visible rows of the tree table, top to bottom."""
    return [line["name"] for line in table(page, whole=False)]


def crumbs(page: Page) -> list[str]:
    names: list[str] = page.locator(".crumbs button").all_inner_texts()
    return names


def click_block(page: Page, text: str) -> None:
    page.locator(".icicle .block bdi", has_text=re.compile(rf"^{text}$")).first.click()


def test_click_zooms_and_crumbs_lead_back(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    assert crumbs(page) == ["Net"] and chosen(page) == "Net"
    click_block(page, "b")
    assert crumbs(page) == ["Net", "b"] and chosen(page) == "Net.b"
    assert blocks(page) == ["b", "x"]
    drawn = page.evaluate(READ_BLOCKS)
    assert [block["width"] / drawn["width"] for block in drawn["blocks"]] == [1, pytest.approx(4400 / 4900, abs=1e-4)]
    page.mouse.move(0, 0)  # hovering changes the text
    assert (
        page.inner_text(".status")
        == f"Net.b: CPU time {format_time(4900)}, 49.0% of the total, self {format_time(500)}"
    )
    page.locator(".crumbs button").first.click()
    assert crumbs(page) == ["Net"] and blocks(page) == ["Net", "a", "b", "x", "y", "x"]


def test_hovering_shows_the_figures_of_a_block(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    page.locator(".icicle .block bdi", has_text=re.compile("^y$")).hover()
    assert (
        page.inner_text(".status")
        == f"Net.a.y: CPU time {format_time(1000)}, 10.0% of the total, self {format_time(1000)}"
    )
    page.locator("h1").hover()
    assert page.inner_text(".status").startswith("Net: ")


def test_keys(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    page.locator(".icicle").focus()
    way = [
        ("ArrowDown", "Net.a"),  # the largest below
        ("ArrowRight", "Net.b"),
        ("ArrowRight", "Net.b"),
        ("ArrowDown", "Net.b.x"),
        ("ArrowDown", "Net.b.x"),
        ("ArrowUp", "Net.b"),
        ("ArrowLeft", "Net.a"),
        ("ArrowLeft", "Net.a"),
        ("ArrowUp", "Net"),
        ("ArrowUp", "Net"),
        ("ArrowDown", "Net.a"),
    ]
    for key, layer in way:
        page.keyboard.press(key)
        assert chosen(page) == layer
    assert crumbs(page) == ["Net"]
    page.keyboard.press("Enter")
    assert crumbs(page) == ["Net", "a"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert crumbs(page) == ["Net", "a", "x"]
    page.keyboard.press("Backspace")
    assert crumbs(page) == ["Net", "a"]
    page.keyboard.press("Escape")
    assert crumbs(page) == ["Net"]
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    assert page.input_value("input[type=search]") == ""


def test_keys_of_the_table(look: Callable[..., Page]) -> None:
    """As in the ARIA practices of a tree grid. Net has a (with x and y) and b (with x)."""
    page = look(tree_of(SMALL))
    page.locator(".treetable").focus()

    def listed() -> list[str]:
        return page.locator(".lines .line .name").evaluate_all("all => all.map((one) => one.title)")

    every = ["Net", "Net.a", "Net.a.x", "Net.a.y", "Net.b", "Net.b.x"]
    assert listed() == every
    way = [
        ("ArrowDown", "Net.a", every),
        ("ArrowLeft", "Net.a", [*every[:2], *every[4:]]),  # closes it
        ("ArrowDown", "Net.b", None),
        ("ArrowUp", "Net.a", None),
        ("ArrowRight", "Net.a", every),  # opens it
        ("ArrowRight", "Net.a.x", None),  # goes in
        ("ArrowRight", "Net.a.x", None),
        ("End", "Net.b.x", None),
        ("ArrowDown", "Net.b.x", None),
        ("ArrowLeft", "Net.b", None),  # goes out
        (" ", "Net.b", every[:5]),
        ("Home", "Net", None),
        ("ArrowLeft", "Net", ["Net"]),
        ("ArrowLeft", "Net", None),
    ]
    for key, layer, lines in way:
        page.keyboard.press(key)
        assert chosen(page) == layer, key
        assert lines is None or listed() == lines, key
    box = page.locator(".treetable")
    assert box.get_attribute("aria-activedescendant") == page.locator("[aria-selected=true].line").get_attribute("id")


def test_search(look: Callable[..., Page]) -> None:
    run = tree_of(SMALL)
    layers = tuple(replace(layer, kind="Conv2d") if layer.name == "Net.a.y" else layer for layer in run.layers)
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    found, box = page.locator("main > .controls .found"), page.locator("input[type=search]")
    box.fill("X")
    assert found.inner_text() == "2 layers, 74.0% of the time"
    assert lines(page) == ["Net", "a", "x", "b", "x"]  # with those above
    assert page.locator(".block.match").count() == 2 and page.locator(".block.dimmed").count() == 4
    box.press("Enter")
    assert chosen(page) == "Net.a.x"
    box.press("Enter")
    assert chosen(page) == "Net.b.x"
    box.press("Enter")
    assert chosen(page) == "Net.a.x"
    box.fill("net.a")  # a match inside another match counts once in the share
    assert found.inner_text() == "2 of 3 layers, 50.0% of the time"  # Net.a.x is still selected
    box.fill("conv")
    assert found.inner_text() == "1 layer, 10.0% of the time"
    assert lines(page) == ["Net", "a", "y"]
    box.fill("nothing of this name")
    assert found.inner_text() == "0 layers" and lines(page) == []
    box.press("Enter")
    box.press("Escape")
    assert box.input_value() == "" and found.inner_text() == ""
    assert page.locator(".block.match, .block.dimmed").count() == 0
    assert sorted(lines(page)) == sorted(["Net", "a", "x", "y", "b", "x"])


def heading(page: Page, name: str) -> Any:
    return page.locator(".treetable .head").get_by_text(name, exact=True)


def test_sorting_has_three_states_and_keeps_siblings_together(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    button(page, "Open all").click()
    modelled = ["Net", "a", "x", "y", "b", "x"]
    assert lines(page) == modelled
    orders = [
        (["Net", "a", "x", "y", "b", "x"], "descending"),  # a 5000, b 4900
        (["Net", "b", "x", "a", "y", "x"], "ascending"),
        (modelled, "none"),
    ]
    for names, order in orders:
        heading(page, "CPU total").click()
        assert lines(page) == names
        assert page.locator(".head [aria-sort]", has_text=re.compile("^CPU total$")).get_attribute("aria-sort") == order
    heading(page, "Self CPU total").click()
    assert lines(page) == ["Net", "a", "x", "y", "b", "x"]  # a 1000, b 500
    heading(page, "Self CPU total").click()
    assert lines(page) == ["Net", "b", "x", "a", "y", "x"]


def test_flat_list_sorts_across_all_layers(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    page.get_by_label("as a flat list").check()
    heading(page, "Self CPU total").click()
    assert lines(page) == ["Net.b.x", "Net.a.x", "Net.a", "Net.a.y", "Net.b", "Net"]
    assert {line["level"] for line in table(page, whole=False)} == {1}
    page.get_by_label("as a flat list").uncheck()
    heading(page, "Self CPU total").click()
    assert "Net.b.x" not in lines(page)


def test_unknown_figures_sort_after_all_others(look: Callable[..., Page]) -> None:
    run = training()
    page = look(run)
    page.get_by_label("as a flat list").check()
    heading(page, "CPU total").click()
    assert lines(page)[-1] == "Net.unused"


def test_open_and_close(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    button(page, "Close all").click()
    assert lines(page) == ["Net"]
    page.locator(".lines .line .toggle").first.click()
    assert lines(page) == ["Net", "a", "b"]
    assert [line["expanded"] for line in table(page, whole=False)] == ["true", "false", "false"]
    page.locator(".lines .line .toggle").nth(2).click()
    assert lines(page) == ["Net", "a", "b", "x"]
    button(page, "Open all").click()
    assert lines(page) == ["Net", "a", "x", "y", "b", "x"]
    page.locator(".lines .line .toggle").first.click()
    assert lines(page) == ["Net"]


def test_click_on_a_line_selects_its_layer(look: Callable[..., Page]) -> None:
    page = look(tree_of(SMALL))
    button(page, "Open all").click()
    page.locator(".lines .line", has_text="y").first.click()
    assert chosen(page) == "Net.a.y"
    assert page.locator(".lines .line.selected").count() == 1
    assert page.locator(".icicle .block.selected bdi").inner_text() == "y"


def test_a_layer_selected_in_the_icicle_is_opened_in_the_table(look: Callable[..., Page]) -> None:
    own = (
        {"Net": 0} | {f"Net.s{number}": 0 for number in range(100)} | {f"Net.s{number}.x": 100 for number in range(100)}
    )
    page = look(tree_of(own))
    button(page, "Close all").click()
    page.locator("input[type=search]").fill("s97.x")
    page.locator("input[type=search]").press("Enter")
    assert chosen(page) == "Net.s97.x"
    page.locator("input[type=search]").press("Escape")
    assert "x" in lines(page)
    page.locator(".icicle").focus()
    page.keyboard.press("Enter")
    line = page.locator(".lines .line.selected")
    line.wait_for()
    inside = page.evaluate("""() => {
        const line = document.querySelector(".lines .line.selected").getBoundingClientRect();
        const box = document.querySelector(".treetable").getBoundingClientRect();
        return line.top >= box.top && line.bottom <= box.bottom;
    }""")
    assert inside


def expected_csv(run: Run) -> list[list[str]]:
    """Path and plain figures of every layer; unknown figures are empty."""
    columns = columns_of(run)
    rows = []
    for path, figures in all_figures(run).items():
        cells = [path]
        for column in columns:
            text = str(column.text(figures, None))
            cells.append("" if text in ("", UNKNOWN) else repr(column.sort_key(figures)))
        bounds = [column.heading for column in columns if column.figure(figures).bound is Bound.AT_LEAST]
        rows.append([*cells, ", ".join(bounds)])
    return rows


@pytest.mark.parametrize("name", ["training", "without_formulas", "on_a_device", "several_models"])
def test_copied_csv_has_the_runs_integers(name: str, look: Callable[..., Page]) -> None:
    run = RUNS[name]()
    page = look(run)
    button(page, "Open all").click()
    button(page, "Copy as CSV").click()
    page.get_by_text(f"Copied: {len(all_figures(run))} rows.").wait_for()
    first, *rows = csv.reader(io.StringIO(page.evaluate("navigator.clipboard.readText()")))
    units = {Unit.TIME: " (ns)", Unit.BYTES: " (bytes)", Unit.COUNT: ""}
    assert first == [
        "Module",
        *(
            column.heading + units[getattr(getattr(column, "measure", None), "unit", Unit.COUNT)]
            for column in columns_of(run)
        ),
        "Lower bounds",
    ]
    assert len(rows) == len(all_figures(run))
    for row_, expected in zip(sorted(rows), sorted(expected_csv(run))):
        assert (row_[0], row_[-1]) == (expected[0], expected[-1])
        for cell, right in zip(row_[1:-1], expected[1:-1]):
            assert cell == right or float(cell) == pytest.approx(float(right))
            assert "." in right or cell == right  # integers to the digit


def test_copied_csv_quotes_names(look: Callable[..., Page]) -> None:
    names = ["comma,", 'quote"', "line\nbreak", "plain"]
    run = tree_of({"Net": 0})
    layers = (*run.layers, *(Layer(("Net", name), "Module") for name in names), Layer(("=1+1",), "Module"))
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    button(page, "Open all").click()
    button(page, "Copy as CSV").click()
    page.get_by_text("Copied: 6 rows.").wait_for()
    rows = list(csv.reader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    assert [row_[0] for row_ in rows[1:]] == ["Net", *(f"Net.{name}" for name in names), "'=1+1"]  # no formula


def test_theme_switch(look: Callable[..., Page]) -> None:
    for dark in (False, True):
        page = look(tree_of(SMALL), dark=dark)
        paper = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(paper)
        button(page, "Light or dark").click()
        after = page.evaluate(paper)
        assert before != after
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == ("light" if dark else "dark")
        button(page, "Light or dark").click()
        assert page.evaluate(paper) == before


def test_sheet_sorts_and_shows_more(look: Callable[..., Page]) -> None:
    run = run_of(
        [
            row(0),
            *(
                row(0, op(f"aten::op{number:02}"), calls=100 - number, cpu_ns=1000 * (number + 1))
                for number in range(30)
            ),
        ]
    )
    page = look(run)
    section = page.locator("#reports [role=tabpanel]")
    names = lambda: section.locator("tbody td:first-child").all_inner_texts()  # noqa: E731
    assert names() == [f"aten::op{number:02}" for number in range(29, 17, -1)]
    section.get_by_role("button", name="18 more").or_(section.get_by_role("button", name="19 more")).click()
    assert len(names()) in (30, 31) and not section.locator(".more").is_visible()
    section.get_by_role("button", name="Calls").click()
    assert names()[0] == "aten::op00"
    section.get_by_role("button", name="Calls").click()
    assert names()[-1] == "aten::op00"
    section.get_by_role("button", name="Operator").click()
    assert names()[-1] == "aten::op29"


# Several ranks, several runs


def test_spread_over_the_ranks(look: Callable[..., Page]) -> None:
    page = look(of_ranks())
    assert "3: The second rank warns." in page.inner_text("header") and "The second rank" in page.inner_text(
        ".warnings"
    )
    choice(page, "forward").click()
    sheets = {panel["path"]: panel["sheets"] for panel in panels(page, every=False) if panel["path"]}
    totals = [of_ranks().of_rank(rank).tree(FORWARD).children[0].total.cpu_ns for rank in (0, 3)]
    assert sheets["Net.a"]["By rank"] == [[f"rank {rank}", format_time(ns)] for rank, ns in zip((0, 3), totals)]
    assert totals == [5 + 20_000, 3 * (5 + 20_000)]
    assert sheets["Net.b.0"]["By rank"] == [["rank 0", format_time(300_000)], ["rank 3", UNKNOWN]]


@cache
def beside() -> tuple[Run, Run]:
    """Two runs: the second has one more layer, lacks one, and has a larger one of the same name."""
    first = {"Net": 100, "Net.both": 1000, "Net.first": 3000, "Net.grown": 500}
    second = {"Net": 200, "Net.both": 4000, "Net.second": 800, "Net.grown": 900}
    runs = []
    for own, size in ((first, 8), (second, 64)):
        counted = ("cpu_ns", "macs", "flops", "uncounted")
        run = tree_of(own, requested=counted, measured=counted)
        layers = tuple(
            replace(layer, params=size, input_shapes=((size,),), settings=f"{size}")
            if layer.path[-1] == "grown"
            else layer
            for layer in run.layers
        )
        runs.append(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    return runs[0], runs[1]


def test_several_runs_on_one_page(look: Callable[..., Page]) -> None:
    first, second = beside()
    page = look(first, beside={"other": second})
    for name, run in (("this run", first), ("other", second), ("this run", first)):
        page.get_by_label("Run").select_option(name)
        found = {line["path"]: dict(zip(headings(run.report("tree"))[1:], line["cells"])) for line in table(page)}
        assert list(found) == ["Net", "Net.both", "Net.first", "Net.grown", "Net.second"]
        for path, figures in figures_by_path(run).items():
            assert found[path]["CPU total"] == format_time(figures.total[FORWARD].cpu_ns)
            assert found[path][CALLS] == "1"
        (missing,) = set(found) - set(figures_by_path(run))
        assert {column: text for column, text in found[missing].items() if column not in (CALLS, "Params")} == {
            column: UNKNOWN for column in found[missing] if column not in (CALLS, "Params")
        }
    sheets = {panel["path"]: panel["sheets"] for panel in panels(page, every=False) if panel["path"]}
    assert sheets["Net.both"]["By run"] == [["this run", format_time(1000)], ["other", format_time(4000)]]
    assert sheets["Net.second"]["By run"] == [["this run", UNKNOWN], ["other", format_time(800)]]
    page.get_by_label("Run").select_option("other")
    params = {line["path"]: line["cells"][headings(second.report("tree")).index("Params") - 1] for line in table(page)}
    assert params["Net.grown"] == "64" and params["Net"] == "64", "a layer is described as in the run that is shown"
    assert facts(page)["Net.grown"]["input"] == "[64]"


# Sizes and shapes


def test_deep_model(look: Callable[..., Page]) -> None:
    path = ("Net", *(f"m{number}" for number in range(1, 2000)))
    layers = tuple(Layer(path[: number + 1], "Module") for number in range(2000))
    page = look(run_of([row(at, cpu_ns=1000) for at in range(2000)], layers=layers))
    button(page, "Open all").click()
    assert page.locator(".treetable").get_attribute("aria-rowcount") in ("2000", "2001")  # with the headings or without
    page.locator("input[type=search]").fill("m1999")
    assert page.inner_text("main > .controls .found") == "1 layer, 0.1% of the time"
    page.locator("input[type=search]").press("Enter")
    assert chosen(page).endswith(".m1999")
    page.locator("input[type=search]").press("Escape")
    page.locator(".icicle").focus()
    page.keyboard.press("Enter")
    assert blocks(page) == ["m1999"]
    page.keyboard.press("Escape")
    assert len(blocks(page)) == 60 and "below" in blocks(page)[-1]


def test_wide_model(look: Callable[..., Page]) -> None:
    page = look(tree_of({"Net": 0, **{f"Net.m{number}": 1000 + number for number in range(10_000)}}))
    button(page, "Open all").click()
    page.evaluate("document.querySelector('.treetable').scrollTop = 1e9")
    page.locator(".lines .line", has_text="m9999").wait_for()
    assert page.locator(".lines .line").count() < 100
    heading(page, "CPU total").click()
    page.evaluate("document.querySelector('.treetable').scrollTop = 0")
    page.locator(".lines .line", has_text="m9999").wait_for()
    assert len(page.evaluate(READ_BLOCKS)["blocks"]) < 1000


def test_runs_without_layers_with_one_layer_and_without_rows(look: Callable[..., Page]) -> None:
    runs = [tree_of({}), *(tree_of({"Net": ns}) for ns in (0, 5))]
    runs += [tree_of(own, requested=(), measured=()) for own in ({}, {"Net": 5})]
    for run in runs:
        page = look(run)
        assert [line["name"] for line in table(page)] == [layer.path[-1] for layer in run.layers]
        for key in ("ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "Enter", "Backspace", "Escape"):
            page.keyboard.press(key)
        page.locator("input[type=search]").fill("net")
        page.locator("input[type=search]").press("Enter")


# Safety

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!--<script>",
    "]]>",
    "line\u2028and\u2029paragraph",
    "a lone \ud800 surrogate",
    "quotes\"'`&amp;&lt;",
    "{{script}}",
    "\\u003cscript\\u003e",
    "javascript:window.hacked=3",
    "שלום \u202egnp.exe",
    "\x1b[31mred\x00null\r\n",
    "\u200b",
    " ",
    "",
    "__proto__",
    "constructor",
    "toString",
    "x" * 3000,
    "(outside)",
    "everything",
]


@cache
def hostile_run() -> Run:
    """A run in which every name is hostile."""
    rows = []
    for number, name in enumerate(HOSTILE):
        rows += [
            row(1, op(name), calls=1, cpu_ns=1000 + number),
            row(2, label(name), calls=1, cpu_ns=1000),
            row(3, op("aten::mm"), kernel(name), device="cuda:0", device_ns=500),
            row(3, python_line(name), calls=1),
            row(OUTSIDE, op(name), calls=1, cpu_ns=10),
        ]
    every = ("cpu_ns", "device_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")
    pairs = tuple((name, name) for name in HOSTILE)
    meta = {"device": "cuda", "requested": every, "measured": every, "environment": pairs, "versions": pairs}
    run = run_of(rows, machine=HOSTILE[0], script=HOSTILE[1], warnings=run_warnings(*HOSTILE), **meta)
    layers = list(run.layers)
    for name in HOSTILE:
        layers.append(Layer(("Net", name), name, settings=name, shared_with=((name, name),), dtype_bytes=((name, 4),)))
    held = tuple(Held(4 + number, FORWARD, "unknown", 10, 1) for number in range(len(HOSTILE)))
    memory = (Memory("cpu", peak_bytes=10 * len(HOSTILE), held=held), Memory(HOSTILE[1], peak_bytes=5))
    return replace(
        run,
        layers=tuple(layers),
        rows=replace(run.rows, layers=tuple(layers)),
        memory=memory,
        device_times=(replace(DEVICE, device=HOSTILE[1]),),
    )


def check_nothing_ran(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, object, embed, link, base, form").count() == 0
    assert page.locator("script").count() == 2


def test_hostile_names_stay_text(look: Callable[..., Page]) -> None:
    run = hostile_run()
    page = look(run, beside={"<b>other</b>": run, "": tree_of(SMALL)})
    lines_ = table(page)
    assert set(HOSTILE) <= {line["name"] for line in lines_}
    assert {f"Net.{name}" for name in HOSTILE} <= {line["path"] for line in lines_}
    by_path = {panel["path"]: panel for panel in panels(page, every=False)}
    operator_names = {row_[0] for row_ in by_path["Net.a"]["sheets"]["Operators"]}
    assert set(HOSTILE) <= operator_names
    assert {f"{name} (label)" for name in HOSTILE} <= {row_[0] for row_ in by_path["Net.b"]["sheets"]["Operators"]}
    assert {*map(short_kernel_name, HOSTILE)} <= {row_[0] for row_ in by_path["Net.b.0"]["sheets"]["Kernels"]}
    for name in HOSTILE:
        found = by_path[f"Net.{name}"]["facts"]
        assert found["class"] == (f"{name}({name})" if name else UNKNOWN)
        assert found["shared with"] == f"{name}.{name}"
    header = page.text_content("header")
    assert header is not None and all(name in header for name in HOSTILE)
    for name in HOSTILE:
        page.locator("input[type=search]").fill(name[:40])
    page.locator("input[type=search]").fill("script")
    page.locator("input[type=search]").press("Enter")
    for source in ("this run", "<b>other</b>"):
        page.get_by_label("Run").select_option(source)
    button(page, "Copy as CSV").click()
    check_nothing_ran(page)


def test_hostile_names_of_models(look: Callable[..., Page]) -> None:
    for name in HOSTILE:
        if not name:
            continue
        layers = (Layer((name,), name), Layer((name, name), name))
        page = look(run_of([row(0, cpu_ns=900), row(1, cpu_ns=100)], layers=layers))
        assert page.text_content("h1") == name
        assert page.locator(".lines .line").count() == 2
        check_nothing_ran(page)


def test_the_policy_allows_only_the_script_of_the_page(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    tree_of(SMALL).export(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    assert tab.errors == []
    tab.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        const box = document.createElement("div");
        document.body.append(box);
        box.innerHTML = "<img src=x onerror='window.hacked = 2'>";
        const frame = document.createElement("iframe");
        frame.src = "https://example.com/";
        document.body.append(frame);
    }""")
    refused = tab.page.evaluate("fetch('https://example.com/').then(() => false, () => true)")
    tab.page.wait_for_timeout(200)
    assert refused is True
    assert tab.page.evaluate("window.hacked") is None
    assert tab.requests == []
    assert len(tab.errors) >= 3 and all("Content Security Policy" in error or "fetch" in error for error in tab.errors)


class Loads(HTMLParser):
    """Reads the addresses that a page would load, and the attributes that run scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "background", "poster") or name.startswith("on"):
                self.found.append((tag, name, value))


def test_page_is_self_contained() -> None:
    text = training().report("html")
    loads = Loads()
    loads.feed(text)
    assert loads.found == []
    addresses = set(
        re.findall(
            r"https?://[^\s\"'`<>)]+", re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
        )
    )
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert "@import" not in text and "url(" not in text
    assert text.isascii() or text.encode("utf-8")


@pytest.mark.parametrize("attributes", ["", 'sandbox="allow-scripts"'], ids=["with all rights", "without"])
def test_page_works_in_a_frame(attributes: str, look: Callable[..., Page]) -> None:
    text = escape(tree_of(SMALL).report("html"))
    frame = f'<iframe {attributes} width="1000" height="800" srcdoc="{text}"></iframe>'
    page = look(f"<!DOCTYPE html><title>t</title>{frame}")
    inside = page.frame_locator("iframe")
    inside.locator(".icicle .block bdi", has_text=re.compile("^b$")).click()
    assert inside.locator(".panel h3").inner_text() == "Net.b"
    inside.get_by_role("button", name="Copy as CSV").click()
    inside.locator("#layers .found", has_text=re.compile("Copied|copy")).wait_for()


def test_without_scripts_the_page_says_so(chromium: Any, tmp_path: Path) -> None:
    tree_of(SMALL).export(tmp_path / "page.html")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert "Allow it to run" in page.locator("body").inner_text()
    context.close()


# Layout and contrast


@cache
def everything() -> Run:
    """A run with all sections of the page."""
    run = roofline_run()
    held = (Held(1, FORWARD, "activations", 500, 1), Held(0, FORWARD, "parameters", 300, 2))
    samples = {
        SampleKey(layer, FORWARD, 0, "cpu", "cpu_ns"): Spread.of([(at, 100 * at) for at in range(1, 8)])
        for layer in range(4)
    }
    metas = (
        replace(run.meta, warnings=run_warnings("A warning."), environment=(("CPU", "a processor of a long name"),)),
    )
    measured = replace(run, metas=metas, samples=samples, device_times=(DEVICE,))
    return with_memory(measured, STEPS, Memory("cpu", peak_bytes=900, peak_ns=50, held=held))


def pipeline() -> Run:
    orders = pipelines.interleaved(2, 2, 4)
    return pipelines.run_of_pipelines(pipelines.pipelines_of(orders, [pipelines.equal()]))


PAGES: dict[str, Callable[[], Run]] = {
    "training": training,
    "of_ranks": of_ranks,
    "everything": everything,
    "pipeline": pipeline,
    "two ranks": lambda: job(2),
    "many ranks": lambda: job(40),
    "small": lambda: tree_of(SMALL),
}


@pytest.mark.parametrize("width", WIDE_AND_NARROW)
@pytest.mark.parametrize("name", [*PAGES, "hostile_run"])
def test_page_is_no_wider_than_the_window(name: str, width: int, look: Callable[..., Page]) -> None:
    """In light colors, then in dark ones."""
    page = look({**PAGES, "hostile_run": hostile_run}[name](), width=width)
    # An element wider than its section is cut off, and the user could not scroll to it.
    fits = """() => document.documentElement.scrollWidth <= window.innerWidth
        && [...document.querySelectorAll("header, section, section > div, aside, footer")].every(
            (one) => one.scrollWidth <= one.clientWidth)"""
    for _ in LIGHT_AND_DARK:
        assert page.evaluate(fits)
        button(page, "Open all").click()
        for line in page.locator(".lines .line").all()[:8]:
            line.locator(".number").first.dispatch_event("click")
            assert page.evaluate(fits)
        button(page, "Light or dark").click()


# The contrast of a text with its background (WCAG 2.1). A canvas converts any color of CSS to sRGB.
CONTRASTS = """(selectors) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = ([r, g, b]) => {
    const linear = (one) => (one <= 0.04045 * 255 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const behind = (element) => {  // all that can be behind a text: a bar covers some of a cell
    if (!element) return [[255, 255, 255, 1]];
    const style = getComputedStyle(element);
    const under = behind(element.parentElement);
    const opacity = Number(style.opacity);
    const colors = [style.backgroundColor, ...(style.backgroundImage.match(/(rgba?|oklab|color)\\([^()]*\\)/g) || [])];
    const faded = (color) => rgba(color).map((one, at) => (at === 3 ? one * opacity : one));
    return under.flatMap((below) => colors.map((color) => over(faded(color), below)));
  };
  const found = {};
  for (const selector of selectors) {
    for (const element of document.querySelectorAll(selector)) {
      if (!element.textContent.trim()) continue;
      const style = getComputedStyle(element);
      const color = rgba(element instanceof SVGElement ? style.fill : style.color);
      for (let at = element; at; at = at.parentElement) color[3] *= Number(getComputedStyle(at).opacity);
      for (const back of behind(element)) {
        const [low, high] = [light(over(color, back)), light(back)].sort((one, other) => one - other);
        const contrast = (high + 0.05) / (low + 0.05);
        if (!(selector in found) || contrast < found[selector]) found[selector] = contrast;
      }
    }
  }
  return found;
}"""

TEXTS = [
    *("h1", "h2", "h3", "h4", ".headline", "summary", "li", "dt", "dd", ".warnings li", ".hint", "footer", ".status"),
    *("label", "button", ".choice button[aria-pressed=true]", ".crumbs button", ".more", ".head button", ".calls"),
    *(".block:not(.rest, .dimmed)", ".figures td", ".figures th", ".sheet td", ".sheet td.text", ".sheet th button"),
    *(".cell.name", ".line .kind", ".legend", ".finding", ".chart text"),
    *("#pipelines p", "#pipelines td", "#pipelines .chart text", "#ranks .chart text", "#ranks p"),
]
FIGURES_OF_TABLES = [".line .number", ".sheet td.number", ".line .unit", ".sheet .unit"]


def read_contrasts(look: Callable[..., Page], selectors: Sequence[str], dark: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for make in PAGES.values():
        page = look(make(), dark=dark)
        button(page, "Open all").click()
        page.get_by_label("self and operators as blocks").check()
        page.mouse.move(0, 0)
        for selector, contrast in page.evaluate(CONTRASTS, selectors).items():
            found[selector] = min(found.get(selector, 21.0), contrast)
    return found


@pytest.mark.parametrize("dark", LIGHT_AND_DARK)
def test_texts_and_figures_have_enough_contrast(dark: bool, look: Callable[..., Page]) -> None:
    found = read_contrasts(look, [*TEXTS, *FIGURES_OF_TABLES], dark)
    assert {*TEXTS, *FIGURES_OF_TABLES} - set(found) <= {".finding"}
    assert {selector: contrast for selector, contrast in found.items() if contrast < 4.5} == {}


def test_cells_are_aligned_with_their_headings(look: Callable[..., Page]) -> None:
    page = look(tree_of({"Net": 10, "Net." + "x" * 300: 20, "Net.short": 30}))
    places = page.evaluate("""() => [...document.querySelectorAll(".treetable .line")].map((line) =>
        [...line.querySelectorAll(".cell")].slice(1).map((cell) => Math.round(cell.getBoundingClientRect().right)))""")
    assert len(places) == 4
    assert all(line == places[0] for line in places)


def test_units_are_aligned(look: Callable[..., Page]) -> None:
    page = look(training())
    ends = page.evaluate("""() => [...document.querySelectorAll(".lines .line")].map((line) =>
        [...line.querySelectorAll(".number .unit")].map((unit) => Math.round(unit.getBoundingClientRect().left)))""")
    assert len(ends) > 5 and all(line == ends[0] for line in ends)


def test_every_control_has_a_name_and_a_role(look: Callable[..., Page]) -> None:
    page = look(everything(), beside={"other": training()})
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    present = {"button", "searchbox", "combobox", "checkbox", "treegrid", "columnheader", "rowheader"}
    controls = {*present, "textbox", "link", "img", "navigation"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if "role" in node and not node.get("ignored")
    ]
    assert {role for role, _ in found} >= present
    corner = ("columnheader", "")  # the empty heading above the names of a layer's figures
    assert [one for one in found if one[0] in controls and not one[1].strip() and one != corner] == []


def test_roles_of_the_table_are_consistent(look: Callable[..., Page]) -> None:
    page = look(training())
    button(page, "Open all").click()
    grid = page.evaluate("""() => {
        const grid = document.querySelector("[role=treegrid]");
        const rows = [...grid.querySelectorAll("[role=row]")].map((row) => ({
          index: row.getAttribute("aria-rowindex"), level: row.getAttribute("aria-level"),
          roles: [...row.querySelectorAll("[role]")].map((one) => one.getAttribute("role")),
        }));
        return { count: Number(grid.getAttribute("aria-rowcount")), rows };
    }""")
    first, *rows = grid["rows"]
    assert set(first["roles"]) == {"columnheader"}
    columns = len(first["roles"])
    assert {tuple(row_["roles"]) for row_ in rows} == {("rowheader", *["gridcell"] * (columns - 1))}
    levels = [row_["level"] for row_ in rows if row_["level"]]
    assert levels[0] == "1" and "4" in levels
    assert len({row_["index"] for row_ in rows}) == len(rows) <= grid["count"]


def test_the_focus_is_visible(look: Callable[..., Page]) -> None:
    page = look(everything())
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        tag, width, style = page.evaluate("""() => {
            const at = document.activeElement;
            const { outlineWidth, outlineStyle } = getComputedStyle(at);
            return [at === document.body ? "" : at.className || at.textContent, parseFloat(outlineWidth), outlineStyle];
        }""")
        if tag:
            seen.add(tag)
            assert width >= 2 and style == "solid", tag
    assert {"icicle", "treetable", "theme"} <= seen


# Two runs compared


def compared() -> tuple[Run, Run]:
    """Layers that became slower or faster, that were added or removed, and one that did not change."""
    both = {"Net": 100, "Net.same": 1000}
    before = {"Net.slower": 1000, "Net.faster": 4000, "Net.a_bit_more": 1000, "Net.a_bit_less": 1000, "Net.gone": 500}
    after = {"Net.slower": 3000, "Net.faster": 1000, "Net.a_bit_more": 1500, "Net.a_bit_less": 650, "Net.new": 800}
    later = tree_of(both | after)
    layers = tuple(replace(layer, kind="Linear") if layer.path[-1] == "new" else layer for layer in later.layers)
    return tree_of(both | before), replace(later, layers=layers, rows=replace(later.rows, layers=layers))


@pytest.mark.parametrize("dark", LIGHT_AND_DARK)
def test_page_of_a_comparison(dark: bool, look: Callable[..., Page]) -> None:
    before, after = compared()
    text = torchprof.compare(before, after).report("html")
    page = look(text, dark=dark)
    listed = [line["name"].removeprefix("Net.") for line in table(page)]
    expected = ["faster", "slower", "new", "a_bit_more", "gone", "a_bit_less"]
    assert [*listed[:3], *sorted(listed[3:5]), listed[5]] == expected
    page.get_by_label("as a flat list").uncheck()
    assert {line["name"] for line in table(page)} == {"Net", *listed} >= {"same"}
    changes = page.eval_on_selector_all(
        ".block[data-change] bdi", "all => all.map((one) => [one.textContent, one.parentElement.dataset.change])"
    )
    of_one_call = {"slower": "unknown", "faster": "unknown", "same": "same", "new": "added"}  # too few to test a time
    assert dict(changes).items() >= of_one_call.items()
    page.locator(".icicle .block", has_text="new").first.hover()
    assert page.locator(".tip").inner_text().splitlines()[-1] == "CPU total: 0.800us, added"
    found = page.evaluate(CONTRASTS, [".block[data-change]", ".legend", ".line .cell"])
    assert {selector: contrast for selector, contrast in found.items() if contrast < 4.5} == {}
    for name in ("slower", "gone", "new"):
        page.locator(".lines .line", has_text=name).first.locator(".number").first.click()
        assert chosen(page).endswith(name)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    narrow = look(text, width=400, dark=dark)
    assert narrow.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_colors_of_a_comparison_are_of_changes_beyond_noise(look: Callable[..., Page]) -> None:
    """FLOPs are exact; that a time of one call has changed is not known. As in the picture above."""
    layers = [Layer(tuple(name.split(".")), "A") for name in ("Net", "Net.more", "Net.less", "Net.same")]
    measured = ("cpu_ns", "flops")

    def run(*amounts: int) -> Run:
        rows = [row(at, calls=1, cpu_ns=amount, flops=amount) for at, amount in enumerate(amounts)]
        return run_of(rows, layers=layers, measured=measured, requested=measured)

    diff = torchprof.compare(run(0, 100, 300, 200), run(0, 200, 100, 200))
    page = look(diff)
    colors = """() => Object.fromEntries([...document.querySelectorAll(".block[data-change]")].map(
        (block) => [block.querySelector("bdi").textContent, block.dataset.change]))"""
    assert page.evaluate(colors) == {"Net": "unknown", "more": "unknown", "less": "unknown", "same": "same"}
    page.locator(".icicle .block", has_text="more").hover()
    assert page.locator(".tip").inner_text().splitlines()[-1] == "CPU total: 0.100us → 0.200us, 2.00×, unknown"
    choice(page, "FLOPs").click()
    assert page.evaluate(colors) == {"Net": "less", "more": "more", "less": "less", "same": "same"}
    pairs = {pair.name: pair for pair in diff.walk()}
    for key, words in (("flops", {"more": "more", "less": "less", "same": "quiet"}), ("cpu_total", {"more": "quiet"})):
        for name, color in words.items():
            assert color_of_change(pairs[name], [pairs[name].changes[key]]) == color


def test_layers_of_a_comparison_are_sorted_by_all_chosen_phases(look: Callable[..., Page]) -> None:
    """By hand: backward of a takes 300 longer, forward of b 50; both of c 20 longer; forward of d takes 15 less, and
    backward 15 longer. The FLOPs of c before are a lower bound: how they differ is unknown, so it comes last."""
    layers = [Layer(tuple(name.split(".")), name) for name in ("Net", "Net.a", "Net.b", "Net.c", "Net.d")]
    measured = ("cpu_ns", "flops", "uncounted")

    def run(forward: Sequence[int], backward: Sequence[int], uncounted: int) -> Run:
        rows = [row(at, cpu_ns=ns, flops=ns) for at, ns in enumerate(forward)]
        rows += [row(at, cpu_ns=ns, phase=BACKWARD) for at, ns in enumerate(backward)]
        return run_of([*rows, row(3, uncounted=uncounted)], layers=layers, measured=measured, requested=measured)

    before = run([1, 100, 100, 100, 100], [1, 100, 100, 100, 100], 1)
    after = run([1, 100, 150, 120, 85], [1, 400, 100, 120, 115], 0)
    page = look(torchprof.compare(before, after).report("html"))

    def order() -> list[str]:
        return [line["name"] for line in table(page)]

    assert order()[:3] == ["Net.a", "Net.b", "Net.c"]
    sums = "Self CPU total, difference and Backward Self CPU total, difference"
    assert page.inner_text("#layers .hint >> nth=0") == f"The largest first, up or down: the sum of {sums}."
    button(page, "backward").click()
    assert order()[:3] == ["Net.a", "Net.c", "Net.d"]
    choice(page, "FLOPs").click()
    choice(page, "forward").click()
    assert order()[:2] == ["Net.b", "Net.d"] and order()[-1] == "Net.c"


class Grown(Layers):
    """Like ``Net``, with a renamed layer, an added layer, and a wider layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.stem(x)).mean((2, 3))))


def change_of(how: str, change: Any, quantity: Any) -> list[str]:
    """The cells of a quantity on the page: blank if the layer did not exist."""
    known = [str(change.figure(side).text(quantity.write)) for side in (0, 1)]
    known.append(UNKNOWN if change.difference is None else str(quantity.write(change.difference)))
    if change.difference is not None and change.difference > 0:
        known[2] = f"+{known[2]}"
    if how == "added":
        return ["", known[1], known[2], "", ""]
    if how == "removed":
        return [known[0], "", known[2], "", ""]
    return [*known, UNKNOWN if change.ratio is None else f"{change.ratio:.2f}×", change.verdict]


def test_figures_of_a_comparison_are_those_of_the_diff(look: Callable[..., Page]) -> None:
    """Two steps before and three after, so all figures are for one call of the model."""
    x = torch.rand(2, 3, 8, 8)
    grown = Grown(
        stem=nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        trunk=Holder(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 50),
    )
    diff = torchprof.compare(trained(Net(), x, steps=2), trained(grown, x, steps=3))
    assert diff.unit == "call" and {pair.how for pair in diff.walk()} >= {"same", "added", "removed", "renamed"}
    page = look(diff.report("html"))
    expected = {".".join(pair.path): pair for pair in diff.walk() if pair.is_layer}
    measures = {"CPU time": "CPU total", "CPU memory allocated": "CPU Mem", "MACs": "MACs", "FLOPs": "FLOPs"}
    compared = 0
    for measure, name in measures.items():
        page.get_by_role("group", name="Width").get_by_role("button", name=measure, exact=True).click()
        for lead, phase in (("", "forward"), ("Backward ", "backward")):
            page.get_by_role("group", name="Phase").get_by_role("button", name=phase, exact=True).click()
            columns = headings_shown(page)
            for line in table(page):
                pair = expected.get(line["path"])
                for quantity in diff.quantities if pair else ():
                    if quantity.heading in (f"{lead}{name}", f"{lead}Self {name}"):
                        at = columns.index(f"{quantity.heading}, before") - 1
                        assert line["cells"][at : at + 5] == change_of(pair.how, pair.changes[quantity.key], quantity)
                        compared += 1
    assert compared > 100
    for panel in panels(page, every=False):
        if panel["path"] in expected and expected[panel["path"]].how == "renamed":
            assert (
                "was renamed. Before: Grown.body." in panel["text"] or "was renamed. Before: Net.body." in panel["text"]
            )


def headings_shown(page: Page) -> list[str]:
    return page.eval_on_selector_all(".head .cell", "all => all.map((one) => one.textContent)")


def test_peaks_of_a_layer_are_those_of_the_run(look: Callable[..., Page]) -> None:
    run = training()
    page = look(run)
    peaks = {(key.layer, key.phase): spread.max for key, spread in run.samples.items() if key.measure == "peak_bytes"}
    assert peaks
    for panel in panels(page, every=False):
        for index, layer in enumerate(run.layers):
            if layer.name == panel["path"] and (index, "forward") in peaks:
                assert f"Peak on cpu{format_memory(peaks[index, 'forward'])}" in panel["text"]


def with_big_in(where: str) -> Run:
    """A Linear and what is in it of one name, in the one or in the other of two parts. Each Linear has 8 FLOPs."""
    paths = ["Parts", "Parts.enc", "Parts.enc.a", "Parts.dec", "Parts.dec.b"]
    paths += [f"Parts.{where}.big", f"Parts.{where}.big.0"]
    layers = [Layer(tuple(path.split(".")), "Linear" if path[-1] in "ab0" else path, len(path)) for path in paths]
    layers[5:] = [replace(layers[5], kind="Big", params=7), replace(layers[6], params=9)]
    counted = ("cpu_ns", "macs", "flops", "uncounted")
    rows = [row(at, cpu_ns=10, flops=8 * (layer.kind == "Linear")) for at, layer in enumerate(layers)]
    return run_of(rows, layers=layers, requested=counted, measured=counted)


def test_a_layer_that_moved_is_at_both_places(look: Callable[..., Page]) -> None:
    """So the layers at both places have their own figures in each run."""
    before, after = with_big_in("enc"), with_big_in("dec")
    diff = torchprof.compare(before, after)
    assert {pair.how for pair in diff.walk()} == {"same", "moved"}
    page = look(diff.report("html"))
    page.get_by_role("group", name="Width").get_by_role("button", name="FLOPs", exact=True).click()
    colors = dict(
        page.eval_on_selector_all(
            ".block[data-change] bdi", "all => all.map((one) => [one.textContent, one.parentElement.dataset.change])"
        )
    )
    assert colors["enc"] == "less" and colors["dec"] == "more" and colors["a"] == "same"
    for name, run in (("before", before), ("after", after)):
        page.get_by_label("Run").select_option(name)
        for node in run.tree("forward").walk():
            path = ".".join(node.layer.path)
            blocks = page.locator(".icicle .block bdi", has_text=re.compile(f"^{node.layer.path[-1]}$"))
            if blocks.count() == 1:
                blocks.hover()
                assert (
                    page.locator(".status").inner_text().startswith(f"{path}: FLOPs {format_count(node.total.flops)},")
                )
    texts = {panel["path"]: panel["text"] for panel in panels(page, every=False) if panel["path"]}
    assert "This layer was moved. Before: Parts.enc.big." in texts["Parts.dec.big"]
    assert "This layer was moved. After: Parts.dec.big." in texts["Parts.enc.big"]


def test_a_redraw_keeps_the_keyboard_focus(look: Callable[..., Page]) -> None:
    page = look(training())
    for role, name in (("group", "backward"), ("columnheader", "FLOPs"), ("columnheader", "Calls")):
        found = page.get_by_role(role).get_by_role("button", name=name, exact=True)
        target = (found if found.count() else page.get_by_role(role, name=name, exact=True)).first
        target.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.textContent") == name


def test_operators_keep_their_order_when_another_layer_is_selected(look: Callable[..., Page]) -> None:
    page = look(training())
    sorted_by = "#reports th[aria-sort=descending]"
    page.locator("#reports").get_by_role("button", name="Calls", exact=True).click()
    before = page.locator("#reports tbody").inner_text()
    page.locator(".icicle .block").nth(2).click()
    assert page.locator(sorted_by).inner_text().startswith("Calls")
    assert page.locator("#reports tbody").inner_text() == before


def test_a_removed_layer_does_not_show_advice_on_a_layer_of_the_same_name(look: Callable[..., Page]) -> None:
    """A layer was inserted into a list: the layers after it have other numbers."""
    torch.manual_seed(0)
    x = torch.rand(8, 16)
    before = trained(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), x)
    after = trained(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)), x)
    page = look(torchprof.compare(before, after).report("html"))
    lines = table(page)
    assert len({line["path"] for line in lines}) == len(lines)
    assert sum(line["path"].endswith("(before)") for line in lines) == 1


@pytest.mark.parametrize("beside", [3, [SMALL], {"other": 3}], ids=["number", "list", "no run"])
def test_beside_takes_runs_by_name(beside: Any) -> None:
    with pytest.raises(TorchprofError, match=r"beside="):
        tree_of(SMALL).report("html", beside=beside)


# Pipelines

READ_STEP = """() => [...document.querySelectorAll("#pipelines .chart rect[style]")].map((action) => {
    const title = action.parentElement.querySelector("title").textContent;
    return [title, [action.x.baseVal.value, action.width.baseVal.value]];
  })"""
FIRST_ACTION, END = 170, 1160  # where a step begins and ends


@pytest.mark.parametrize("late_ns", [0, 7_000_000])
def test_a_step_of_a_pipeline_as_a_picture(late_ns: int, look: Callable[..., Page]) -> None:
    """Actions are where a simulation by brute force has them, also if the rank with the last stage began 7 ms before
    the other. The picture has the step of median length."""
    orders, slow = pipelines.interleaved(2, 2, 4), pipelines.unequal({2: 1.5})
    steps = [pipelines.equal(), slow, pipelines.unequal({2: 4})]
    first, last = pipelines.pipelines_of(orders, steps)
    waits = last.actions[0]
    early = waits._replace(waited_ns=tuple(ns + late_ns for ns in waits.waited_ns))
    last = replace(last, step_ns=tuple(ns + late_ns for ns in last.step_ns), actions=(early, *last.actions[1:]))
    page = look(pipelines.run_of_pipelines([first, last]))
    starts = pipelines.starts_of(orders, slow, 4)
    whole = max(start + slow(*action) for action, start in starts.items())
    names = {"F": "forward", "B": "backward"}
    drawn = {title.partition(",")[0]: place for title, place in page.evaluate(READ_STEP)}
    scale = (END - FIRST_ACTION) / whole
    assert drawn == {
        f"{names[what]} of microbatch {microbatch} in stage {stage}": pytest.approx(
            [FIRST_ACTION + starts[stage, what, microbatch] * scale, slow(stage, what, microbatch) * scale], abs=0.7
        )
        for order in orders
        for stage, what, microbatch in order
    }
    words = page.locator("#pipelines .chart text").all_text_contents()
    assert [text for text in words if text.startswith("rank")] == ["rank 0, stages 0, 2", "rank 1, stages 1, 3"]
    assert words[-3:] == ["forward", "backward", "waiting"]
    assert "forward of microbatch 1 in stage 0, rank 0: 1.000ms" in [title for title, _ in page.evaluate(READ_STEP)]
    assert words.count("1") == 8  # of microbatch 1 in four stages


def test_the_tables_of_pipelines_are_those_of_the_terminal(look: Callable[..., Page]) -> None:
    orders = pipelines.one_f_one_b(4, 8)
    run = pipelines.run_of_pipelines(pipelines.pipelines_of(orders, [pipelines.unequal({2: 1.5})] * 5))
    page = look(run)
    sentences, *tables = run.report("pipeline").split("\n\n")
    section = page.locator("#pipelines")
    assert section.locator("p").first.inner_text() == sentences
    shown = [
        [row.split("\t") for row in sheet.locator("tbody tr").all_inner_texts()]
        for sheet in section.locator(".sheet").all()
    ]
    assert [*map(len, shown)] == [4, 1, 8]
    assert shown == [cells(table)[: len(rows)] for table, rows in zip(tables, shown)]
    section.locator(".sheet tbody tr").nth(2).click()
    assert chosen(page) == "Stage2"
    assert look(run, beside={"other": training()}).locator("#pipelines h4").all_inner_texts() == ["this run"]
    alone = look(run.of_rank(2)).locator("#pipelines")  # when it begins depends on the others
    assert alone.locator(".chart").count() == 0 and alone.locator(".sheet").count() == 3
    assert look(training()).locator("#pipelines").count() == 0


def test_of_a_large_pipeline_the_first_ranks_are_drawn() -> None:
    """1,024 actions on each of 8 ranks: 6,000 are of 5 of them."""
    run = pipelines.run_of_pipelines(
        pipelines.pipelines_of(pipelines.gpipe(8, 512), [pipelines.equal()]), with_rows=False
    )
    (pipeline,) = page_data([Take("this run", run)])["pipelines"]
    assert "3 ranks are hidden." in " ".join(re.sub("<[^>]*>", " ", pipeline["step"]).split())
    assert "rank 4, stage 4" in pipeline["step"]
    assert "rank 5" not in pipeline["step"] and pipeline["step"].count("fill-opacity") == 5 * 1_024


# The ranks of a job


def job(size: int, **options: Any) -> Run:
    """Net.a takes 20 ms in forward and 10 ms in backward, twice that on rank 1; only even ranks have Net.b.0 (1 ms)."""
    own = {
        ("Net.a", FORWARD): {rank: [40_000_000 if rank == 1 else 20_000_000] * 5 for rank in range(size)},
        ("Net.a", BACKWARD): {rank: [20_000_000 if rank == 1 else 10_000_000] * 5 for rank in range(size)},
        ("Net.b.0", FORWARD): {rank: [1_000_000] * 5 for rank in range(0, size, 2)},
    }
    waits = {rank: [1_000 if rank == 1 else 9_000] * 5 for rank in range(size)}
    return run_of_ranks(
        own,
        {("Net.a", BACKWARD, "all_reduce", everybody(size)): waits},
        ranks_of={"Net.b.0": tuple(range(0, size, 2))},
        flops={("Net.a", phase, rank): 1_000 + rank for rank in range(size) for phase in (FORWARD, BACKWARD)},
        **options,
    )


def heat_of(page: Page) -> dict[str, list[str]]:
    """The cells of the heat map after the median, by layer: their texts, or their titles if they have no text."""
    read = """() => {
      const body = document.querySelector("#ranks .chart > g");
      const y = (one) => one.y.baseVal.value ?? one.y.baseVal[0].value;
      const of = (cell, name) => cell.parentElement.querySelector(name);
      const said = (cell) => cell.querySelector("title") ?? of(cell, "text") ?? of(cell, "title");
      return Object.fromEntries([...body.querySelectorAll('text[x="0"]')].map((name) => [
        name.textContent,
        [...body.querySelectorAll("[text-anchor=end], rect.quiet, rect.removed")]
          .filter((one) => Math.abs(y(one) - y(name) + (one.matches("rect") ? 15 : 0)) < 1)
          .map((one) => (one.matches("rect") ? said(one).textContent : one.textContent))]));
    }"""
    found: dict[str, list[str]] = page.evaluate(read)
    return found


def test_ranks_are_compared(look: Callable[..., Page]) -> None:
    """The median of 30 ms on three ranks and 60 ms on one is 30; Net has 31 on ranks 0 and 2, 60 on 1 and 30 on 3."""
    page = look(job(4, world_size=5))
    section = page.locator("#ranks")
    said, ranks_, *_ = job(4, world_size=5).report("ranks").split("\n\n")
    assert section.locator("p").first.inner_text() == said
    rows = [line.split("\t") for line in section.locator(".sheet tr").all_inner_texts()]
    assert rows == [headings(ranks_), *cells(ranks_)][: len(rows)] and len(rows) == 1 + 4 + 3
    assert [row[2] for row in rows[1:]] == [f"{ms}.000ms" for ms in (60, 31, 31, 30, 30, 31, 60)]  # own work a step
    section.get_by_role("button", name="Rank", exact=True).click()  # the rows about all ranks stay the last
    ranks = section.locator(".sheet tbody td:first-child").all_inner_texts()
    assert ranks == ["3", "2", "1", "0", "(min)", "(median)", "(max)"]
    assert heat_of(page) == {
        "Net": ["31.000ms", "1.00", "1.94", "1.00", "0.97"],
        "Net.a": ["30.000ms", "1.00", "2.00", "1.00", "1.00"],
        "Net.b": ["500.000us", "2.00", "0.00", "2.00", "0.00"],
        "Net.b.0": ["1.000ms", "1.00", "Net.b.0 is not on rank 1", "1.00", "Net.b.0 is not on rank 3"],
    }
    assert "Figures are sums over 4 ranks, unless one is chosen." in page.inner_text("header")


def test_the_map_of_ranks_follows_the_phase_and_leads_to_layers(look: Callable[..., Page]) -> None:
    page = look(job(4))
    button(page, "backward").click()
    assert heat_of(page) == {
        "Net": ["10.000ms", "1.00", "2.00", "1.00", "1.00"],
        "Net.a": ["10.000ms", "1.00", "2.00", "1.00", "1.00"],
    }
    titles = page.locator("#ranks .chart title").all_text_contents()
    assert "Net.a, rank 1: 20.000ms, 2.00× the median 10.000ms" in titles
    page.locator("#ranks .chart").get_by_role("button", name="Net.a", exact=True).click()
    assert page.inner_text(".panel h3") == "Net.a"


def whole_flops(page: Page) -> int:
    """The FLOPs of everything, in all phases, as the page's data has them for what it shows first."""
    data = data_of(page)
    where = [
        number
        for number, column in enumerate(data["columns"])
        if (column["where"], column.get("field"), column.get("phase"), column.get("self"))
        == ("chart", "flops", -1, False)
    ]
    vector = data["figures"]["vectors"][data["figures"]["values"][-1 if data["areRanks"] else 0][where[0]]]
    total: int = vector[len(data["layers"]["name"]) + 3]
    return total


def test_of_many_ranks_all_are_compared_and_some_are_whole(look: Callable[..., Page]) -> None:
    """130 ranks, three in a column of the map. Rank 1 is the straggler. Of the others, the odd ones, which lack a
    layer, are the faster half: rank 3 is the first of them, rank 0 is in the middle of all."""
    run = job(130)
    page = look(run)
    assert page.locator("select.source option").all_inner_texts() == ["these 3 ranks", "rank 0", "rank 1", "rank 3"]
    header = page.inner_text("header")
    assert "Figures are sums over ranks 0, 1 and 3, unless one is chosen." in header
    assert "below compares all 130 ranks." in header and "130 ranks were compared: Rank 1 is the straggler" in header
    assert "\n3 of 130 ranks\n" in header
    assert whole_flops(page) == sum(2 * (1_000 + rank) for rank in (0, 1, 3))  # forward and backward
    assert page.locator("#ranks p").first.inner_text() == run.report("ranks").split("\n\n")[0]
    assert (
        page.locator("#ranks .chart rect[y='22']").evaluate_all(
            "all => new Set(all.map((one) => one.x.baseVal.value)).size"
        )
        == 44
    )
    first = heat_of(page)["Net.a"][1]
    assert first == "Net.a, rank 1: 60.000ms, 2.00× the median 30.000ms"
    assert "One column for up to 3 ranks" in page.inner_text("#ranks")


def test_quantiles_over_all_ranks_are_those_of_their_own_work(look: Callable[..., Page]) -> None:
    """Rank r of 200 takes 1 + r/100 ms in Net.a, and the last one is slow; only the first 50 have Net.b.0."""
    ns = {rank: 1_000_000 + 10_000 * rank for rank in range(199)} | {199: 9_000_000}
    own = {
        ("Net.a", FORWARD): {rank: [took] * 5 for rank, took in ns.items()},
        ("Net.b.0", BACKWARD): {rank: [1_000 * (rank + 1)] * 5 for rank in range(50)},
    }
    page = look(run_of_ranks(own, ranks_of={"Net.b.0": tuple(range(50))}, flops={("Net.b.0", BACKWARD, 0): 1}))
    table = page.locator("#ranks .sheet").nth(1)
    cells = [line.split("\t") for line in table.locator("tr").all_inner_texts()]
    assert cells[0] == ["Layer", "Phase", "Ranks", "Min", "10 %", "Median", "90 %", "Max", "Slowest rank"]
    figures = {(layer, phase): rest for layer, phase, *rest in cells[1:]}
    tenths = [quantiles([*ns.values()], n=10, method="inclusive")[at] for at in (0, 4, 8)]
    assert figures["Net.a", FORWARD] == [
        "200", "1.000ms", *(str(format_time(round(ns))) for ns in tenths), "9.000ms", "199",
    ]  # fmt: skip
    assert figures["Net.b.0", BACKWARD] == ["50", "1.000us", "5.900us", "25.500us", "45.100us", "50.000us", "49"]
    table.get_by_text("Net.b.0").click()
    assert page.inner_text(".panel h3") == "Net.b.0"
    assert look(job(64)).locator("#ranks .sheet").count() == 1


def test_the_time_in_no_operator_is_a_row_of_the_map(look: Callable[..., Page]) -> None:
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", GAP)
    gaps = lockstep({rank: [10_000_000 + 40_000_000 * (rank == 2)] * 5 for rank in range(4)}, key)
    run = job(4)
    page = look(replace(run, lockstep={**run.lockstep, key: gaps}))
    assert heat_of(page)["(in no operator)"] == ["10.000ms", "1.00", "1.00", "5.00", "1.00"]
    assert LAUNCHED_BEFORE not in heat_of(page)


def test_ranks_are_summed_next_to_another_run(look: Callable[..., Page]) -> None:
    run = job(130)
    page = look(run, beside={"other": job(2)})
    assert page.locator("select.source option").all_inner_texts() == ["this run", "other"]
    assert whole_flops(page) == sum(2 * (1_000 + rank) for rank in range(130))  # forward and backward


def test_sums_of_ranks_keep_every_figure() -> None:
    run = of_ranks()
    summed = sum_of_ranks(run)
    assert [meta.rank for meta in summed.metas] == [0]
    assert {row.rank for row in summed.rows} == {0}
    for phase in run.phases():
        assert [node.total for node in summed.tree(phase).walk()] == [node.total for node in run.tree(phase).walk()]
        assert summed.ops(phase) == run.ops(phase)
    (spread,) = summed.samples.values()
    assert (spread.count, spread.sum) == (10, sum(one.sum for one in run.samples.values()))
    memory = (Memory("cuda:0", 0, 500), Memory("cuda:1", 3, 900), Memory("cpu", 0, 7))
    kept = sum_of_ranks(replace(run, memory=memory)).memory
    assert [(one.device, one.rank, one.peak_bytes) for one in kept] == [
        ("cpu of rank 0", 0, 7),
        ("cuda:1 of rank 3", 0, 900),
    ]


def test_one_rank_has_no_section_of_ranks(look: Callable[..., Page]) -> None:
    page = look(training())
    assert page.locator("#ranks").count() == 0
    assert "sums over" not in page.inner_text("header")
    assert look(of_ranks(), beside={"other": training()}).locator("#ranks").count() == 0


def test_bars_show_the_time_with_a_remedy_that_was_tried_and_its_interval(look: Callable[..., Page]) -> None:
    """Of 30 % (20 to 40 %): a bar of 70 % of the other, and a mark from 60 to 80 %. Of a loss the other is shorter."""
    model = nn.Sequential(nn.Linear(256, 256)).double()
    with Profile(model) as prof:
        model(torch.rand(512, 256, dtype=torch.double))
    run = prof.run
    found, *_ = run.findings
    for gain, low, high, widths in (
        (0.3, 0.2, 0.4, (1.0, 0.7, 0.6, 0.2)),
        (-0.1, -0.25, 0.0, (0.8, 0.88, 0.8, 0.2)),
    ):
        trial = Trial(0, found.rule, found.layers, how="x", pairs=6, gain=gain, low=low, high=high)
        bars = look(replace(run, trials=(trial,))).locator(".trial").last
        box = bars.bounding_box()
        as_it_is, after = (bars.locator(".time").nth(number).bounding_box() for number in (0, 1))
        mark = bars.locator(".interval").bounding_box()
        assert box and as_it_is and after and mark
        whole = as_it_is["width"] / widths[0]
        measured = (whole, after["width"], mark["x"] - after["x"], mark["width"])
        assert measured == pytest.approx((whole, *(part * whole for part in widths[1:])), abs=1.5)

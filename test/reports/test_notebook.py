"""Notebooks: the table as HTML, read back cell by cell, and the page in a frame."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from build.colors import luminance
from build.hand_made import label, row, run_of
from build.warnings import run_warnings
from torch import nn

from torchprof import Profile, TorchprofError, compare
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE

LINES = [row(0, cpu_ns=100), row(1, cpu_ns=300), row(2, cpu_ns=97), row(3, cpu_ns=500), row(OUTSIDE, cpu_ns=3)]


class Read(HTMLParser):
    """Reads HTML: the cells of each row, the paragraphs, and every tag with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.bars: list[list[tuple[str, str]]] = []
        self.notes: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.bars.append([])
        elif tag in ("td", "th"):
            given = dict(attributes)
            self.rows[-1].append("")
            self.bars[-1].append((given.get("class") or "", given.get("style") or ""))
        elif tag == "p":
            self.notes.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif "p" in self.open:
            self.notes[-1] += data


def read(run: Run, **options: Any) -> Read:
    return Read(run.report("notebook", **options))


def test_the_length_of_a_bar_is_the_share_of_the_column() -> None:
    shown = read(run_of(LINES))
    bars = {row[0].strip("├└─│ "): bars[1:] for row, bars in zip(shown.rows, shown.bars)}
    # Self and total, of 1000: Net 100 and 997, a 300, b 97 and 597, b.0 500, outside 3; calls have no bar.
    assert bars["Net"] == [("warm", "--share:10%"), ("hot", "--share:100%"), ("", "")]
    assert bars["a"] == [("warm", "--share:30%")] * 2 + [("", "")]
    assert bars["b"] == [("", "--share:10%"), ("hot", "--share:60%"), ("", "")]
    assert bars["0"] == [("hot", "--share:50%")] * 2 + [("", "")]
    assert bars["(outside)"] == [("", "")] * 3


def test_the_html_runs_and_loads_nothing() -> None:
    shown = read(run_of(LINES, warnings=run_warnings("x")))
    known = {"div", "style", "table", "thead", "tbody", "tr", "th", "td", "i", "p", "pre"}
    assert {tag for tag, _ in shown.tags} == known
    assert {name for _, attributes in shown.tags for name in attributes} <= {"class", "style", "title"}
    html = run_of(LINES).report("notebook")
    assert "url(" not in html and "@import" not in html and "http" not in html


def test_hostile_names_stay_text() -> None:
    evil = "<script>alert(1)</script>&amp;\"'\n\x1b[31m\udc80"
    run = run_of(
        [*LINES, row(1, label(evil), cpu_ns=5)],
        warnings=run_warnings(evil),
        requested=("cpu_ns", "device_ns"),
        device=evil,
    )
    layers = tuple(replace(one, path=tuple(step.replace("b", evil) for step in one.path)) for one in run.layers)
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    html = run.report("notebook")
    shown = Read(html)
    assert "script" not in {tag for tag, _ in shown.tags} and html.encode()
    written = "<script>alert(1)</script>&amp;\"'\\n\\x1b[31m\\udc80"
    texts = [cell.strip("├└─│ ") for row in shown.rows for cell in row]
    assert written in texts and f"{written} (label)" in texts and shown.notes[-1] == written


LONG = "a label that somebody wrote <at length>, " * 8
JUPYTER = """:root{--jp-layout-color0:#111;--jp-content-font-color1:#fff}body{background:#111;color:#fff}"""
PAPER_AND_INK = """cell => {
    const style = getComputedStyle(cell);
    return [style.backgroundColor, style.color].map(color => color.match(/[0-9.]+/g).map(Number));
}"""


def test_names_that_are_cut_off_have_a_title() -> None:
    run = run_of([*LINES, row(1, label(LONG), cpu_ns=5)])
    titles = [attributes.get("title") for name, attributes in read(run).tags if name == "td"]
    assert [title for title in titles if title] == [f"{LONG} (label)"]


@pytest.mark.parametrize(
    "style, is_dark",
    [("", False), (":root{color-scheme:dark}", True), (JUPYTER, True), ("body{background:#111;color:#fff}", False)],
    ids=["light", "dark", "JupyterLab's dark", "dark page of unknown kind"],
)
def test_headings_and_names_stay_visible(open_tab: Any, tmp_path: Path, style: str, is_dark: bool) -> None:
    fields = ("cpu_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")
    rows = [*LINES, *(row(1, label(f"{LONG}{number}"), cpu_ns=5) for number in range(60))]
    html = run_of(rows, requested=fields, measured=fields).report("notebook")
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{html}", "utf-8")
    page = open_tab(tmp_path / "page.html", width=640).page
    box, name, heading = (page.locator(f".torchprof {what}") for what in ("> div", "td[title]", "th:first-child"))
    name = name.first
    assert 300 < name.bounding_box()["width"] < 400 and name.evaluate("cell => cell.scrollWidth > cell.clientWidth")
    assert page.locator("td:nth-child(2)").first.bounding_box()["x"] < 400, "figures are in sight before any scrolling"
    left = name.bounding_box()["x"]
    box.evaluate("box => box.scrollTo(250, 200)")
    assert box.evaluate("box => [box.scrollLeft, box.scrollTop]") == [250, 200]
    inside = box.bounding_box()
    assert name.bounding_box()["x"] == left == inside["x"] == heading.bounding_box()["x"]
    assert abs(heading.bounding_box()["y"] - inside["y"]) < 1
    at = {"x": inside["x"] + 20, "y": inside["y"] + 10}
    assert page.evaluate("at => document.elementFromPoint(at.x, at.y).textContent", at) == "Module"
    at = {"x": inside["x"] + 300, "y": inside["y"] + 100}
    assert page.evaluate("at => document.elementFromPoint(at.x, at.y).closest('td').cellIndex", at) == 0
    page.mouse.move(at["x"], at["y"])
    for cell in (name, heading, page.locator("td:first-child:hover")):
        paper, ink = cell.evaluate(PAPER_AND_INK)
        assert len(paper) == 3, "opaque: rgb, and not rgba"
        dim, bright = sorted([luminance(paper), luminance(ink)])
        assert (bright + 0.05) / (dim + 0.05) > 7
        assert (luminance(paper) < luminance(ink)) == is_dark


def chain(*widths: int) -> Run:
    """A model with ``widths`` layers on each level below it, all of them children of the first layer of the level
    above."""
    layers = [Layer(("Net",), "Net")]
    path: tuple[str, ...] = ("Net",)
    for width in widths:
        layers += [Layer((*path, str(number)), "Linear") for number in range(width)]
        path = (*path, "0")
    run = run_of([row(0, cpu_ns=10)])
    return replace(run, layers=tuple(layers), rows=replace(run.rows, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("widths", "rows", "hidden"), [((400, 99), 500, 0), ((400, 100), 401, 100), ((600, 5), 1, 605)]
)
def test_a_tree_of_many_layers_is_cut_by_default(widths: tuple[int, ...], rows: int, hidden: int) -> None:
    shown = read(chain(*widths))
    assert len(shown.rows) == 1 + rows
    assert shown.notes == [f"Deeper layers are hidden: {hidden}. The page that run.show() shows has them all."][:hidden]
    assert len(read(chain(*widths), depth=2).rows) == 2 + sum(widths)


# In a notebook


def test_a_profile_shows_its_table_after_the_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    unfinished = "<pre>&lt;unfinished torchprof.profile&gt;</pre>"
    prof = Profile(model)
    assert prof._repr_html_() == unfinished
    with prof:
        model(torch.rand(2, 4))
        assert prof._repr_html_() == unfinished
    assert prof._repr_html_() == prof.run._repr_html_() == prof.run.report("notebook")
    assert Profile(model, enabled=False)._repr_html_() == unfinished
    seen = []
    with Profile(model, on_trace_ready=lambda one: seen.append(one._repr_html_())):
        model(torch.rand(2, 4))
    assert seen[0].startswith('<div class="torchprof">')


@pytest.fixture
def shell() -> Iterator[Any]:
    """IPython as in a notebook's kernel."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell.instance()
    yield shell
    interactiveshell.InteractiveShell.clear_instance()


def test_ipython_finds_the_table(shell: Any) -> None:
    run = run_of(LINES)
    data, _ = shell.display_formatter.format(run)
    assert data["text/html"] == run.report("notebook") and "text/plain" in data


def test_the_repr_of_a_report_is_its_text(shell: Any) -> None:
    """In a notebook and at Python's prompt. It is still a str, equal to its text, and can be pickled."""
    run = run_of(LINES)
    text = run.report("tree")
    assert "\n" in text and repr(text) == text and type(str(text)) is str
    data, _ = shell.display_formatter.format(text)
    assert data == {"text/plain": str(text), "text/html": text._repr_html_()}
    assert data["text/html"].count("<tr>") == 1 + len(text.data["tables"][0]["rows"])
    csv, _ = shell.display_formatter.format(run.report("csv"))
    assert [*csv] == ["text/plain"]
    assert pickle.loads(pickle.dumps(text)) == text and json.loads(json.dumps(text)) == text
    assert repr(compare(run, run).report("table")).startswith("Net: ")


def test_the_page_is_in_an_isolated_frame(shell: Any) -> None:
    capture = pytest.importorskip("IPython.utils.capture")
    run = run_of(LINES)
    with capture.capture_output() as shown:
        run.show(height=321)
    [output] = shown.outputs
    frame = dict(Read(output.data["text/html"]).tags[1][1])
    assert frame["srcdoc"] == run.report("html") and "height: 321px" in (frame["style"] or "")
    assert frame["sandbox"] == "allow-scripts", "its own origin: nothing of the notebook is within its reach"


def test_a_profile_shows_the_page(shell: Any) -> None:
    capture = pytest.importorskip("IPython.utils.capture")
    model = nn.Linear(2, 2)
    prof = Profile(model)
    with pytest.raises(TorchprofError, match="has not ended"):
        prof.show()
    with prof:
        model(torch.rand(1, 2))
    with capture.capture_output() as shown:
        prof.show()
    assert "iframe" in shown.outputs[0].data["text/html"]


@pytest.mark.parametrize("height", [0, -5, "tall", 1.5])
def test_the_height_is_a_number_of_pixels(height: Any) -> None:
    with pytest.raises(TorchprofError, match="height is a number of pixels"):
        run_of(LINES).show(height=height)


def test_outside_of_notebooks_the_error_says_what_to_do() -> None:
    pytest.importorskip("IPython")
    with pytest.raises(TorchprofError, match=r'for notebooks only.* run\.export\("report\.html"\)'):
        run_of(LINES).show()


def test_in_ipython_in_a_terminal_the_error_says_what_to_do(tmp_path: Any) -> None:
    pytest.importorskip("IPython")
    run_of(LINES).save(tmp_path / "run.json")
    code = f"import torchprof; torchprof.load({str(tmp_path / 'run.json')!r}).show()"
    command = [sys.executable, "-m", "IPython", "--quick", "--colors=NoColor", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "show() is for notebooks only." in done.stdout + done.stderr


def test_without_ipython_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "IPython"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoIPython(), *sys.meta_path])
    with pytest.raises(TorchprofError, match=r'pip install ipython.* run\.export\("report\.html"\)'):
        run_of(LINES).show()


class _NoIPython:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "IPython":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_torchprof_itself_needs_no_ipython() -> None:
    code = "import sys, torchprof.reports; torchprof.reports.known(); assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

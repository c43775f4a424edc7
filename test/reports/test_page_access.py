"""The page for everybody: accessibility rules, keys, the theme, search, print, and what is copied and saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build.all_kinds import KINDS
from build.browser import missing
from build.charted_runs import roofline_run, trained
from build.hand_made import row, run_of
from build.page import button
from build.places import ROOT
from torch import nn

import torchprof
from torchprof import Profile, Run
from torchprof.run.layers import Layer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = ROOT / "test" / "page" / "node_modules" / "axe-core" / "axe.min.js"


def small() -> Run:
    return trained(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), 8, 16)


def compared() -> Any:
    return torchprof.compare(small(), small())


PAGES: dict[str, Callable[[], Any]] = {
    **{name: KINDS[name] for name in ("eager", "ranks", "on_a_device", "compiled_regions", "pipelined", "memory")},
    "trained": small,
    "compared": compared,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_no_violation_of_accessibility_rules(chromium: Browser, name: str, tmp_path: Path) -> None:
    """By axe-core, in light and dark. Its script is no part of the page, so the page's policy is off."""
    if not AXE.is_file():
        missing(f"no axe-core in {AXE.parent}: make lint installs it")
    PAGES[name]().export(tmp_path / "page.html")
    for scheme in ("light", "dark"):
        context = chromium.new_context(bypass_csp=True, color_scheme=scheme, viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.locator("main").wait_for()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert found["passes"]  # the rules did run
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        context.close()


def test_a_question_mark_lists_the_keys(look: Callable[..., Page]) -> None:
    page = look(small())
    keys = page.locator("dialog.keys")
    assert not keys.is_visible()
    page.keyboard.press("?")
    assert keys.is_visible() and "search layers" in keys.inner_text()
    page.keyboard.press("Escape")
    assert not keys.is_visible()
    page.locator("input[type=search]").fill("what?")
    assert not keys.is_visible()


def test_the_theme_is_remembered(look: Callable[..., Page]) -> None:
    page = look(small())
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    button(page, "Light or dark").click()
    page.reload()
    page.locator("main").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_search_says_which_match_is_selected(look: Callable[..., Page]) -> None:
    """Net has the layers a0 to a4 of 1,000 ns each."""
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", f"a{number}"), "A") for number in range(5))]
    page = look(run_of([row(number, cpu_ns=1000) for number in range(1, 6)], layers=layers))
    box, found = page.locator("input[type=search]"), page.locator(".controls.chosen .found")
    box.fill("a")
    assert found.inner_text() == "5 layers, 100.0% of the time"
    for key, text in (("Enter", "1 of 5"), ("Enter", "2 of 5"), ("Shift+Enter", "1 of 5"), ("Shift+Enter", "5 of 5")):
        box.press(key)
        assert found.inner_text() == f"{text} layers, 100.0% of the time"
    assert page.inner_text(".panel h3") == "Net.a4"


def test_on_paper_the_page_is_light_and_has_all_lines(look: Callable[..., Page]) -> None:
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", str(number)), "A") for number in range(200))]
    page = look(run_of([row(number, cpu_ns=1000) for number in range(201)], layers=layers), dark=True)
    button(page, "Open all").click()
    assert page.locator(".lines .line").count() < 100
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".paper .lines .line").count() == 201
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".lines .line").count() < 100
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_nothing_is_cut_off_or_covered_on_paper(look: Callable[..., Page]) -> None:
    """Blocks stay in their chart, spans in theirs, all columns on the paper, and all rows are there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    with Profile(model, with_timeline=True, profile_memory=True, with_flops=True) as prof:
        for _ in range(3):
            model(torch.rand(256, 64)).sum().backward()
            prof.step()
    page = look(prof.run)
    rows = len(prof.run.report("ops").data["tables"][0]["rows"])
    assert page.locator("#report tbody tr").count() < rows
    columns = page.evaluate("[...document.querySelectorAll('.head .cell:not(.name)')].map((one) => one.textContent)")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1000, "height": 700})  # letter paper in landscape
    assert page.locator("#report tbody tr").count() == rows
    on_paper = "[...document.querySelectorAll('.paper .head .cell:not(.name)')].map((one) => one.textContent)"
    assert page.evaluate(on_paper) == columns
    outside = """() => [
      [".icicle", ".icicle .block"], [".spans", ".span"], ["body", ".paper .cell"], [".panel", ".panel *"],
    ].flatMap(([outer, inner]) => [...document.querySelectorAll(inner)].filter((one) => {
        const [a, b] = [one.closest(outer).getBoundingClientRect(), one.getBoundingClientRect()];
        const isInside = b.left >= a.left - 1 && b.top >= a.top - 1 && b.right <= a.right + 1;
        return b.width > 0 && !(isInside && b.bottom <= a.bottom + 1);
      }).map((one) => inner + one.textContent))"""
    assert page.evaluate(outside) == []
    tops = [page.locator(name).bounding_box() for name in (".icicle", ".panel", "#layers", "#timeline")]
    for above, below in pairwise(tops):
        assert above and below and above["y"] + above["height"] <= below["y"] + 1
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#report tbody tr").count() < rows and page.locator(".paper").count() == 0


def test_the_table_is_copied_as_markdown(look: Callable[..., Page]) -> None:
    run = roofline_run()
    layers = (*run.layers[:3], replace(run.layers[3], path=("Net", "b", "a|b")))
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    button(page, "Open all").click()
    lines = page.evaluate(
        """() => [...document.querySelectorAll(".lines .line")].map((line) => [
          line.querySelector(".name").title,
          ...[...line.querySelectorAll(".number")].map((cell) => cell.textContent)])"""
    )
    button(page, "Copy as Markdown").click()
    copied: list[str] = page.evaluate("navigator.clipboard.readText()").splitlines()
    head, rule, *rows = copied
    assert head.startswith("| Module | ") and set(rule) <= set("|-:") and head.count("|") == rule.count("|")
    assert len(rows) == len(lines)
    for text, line in zip(rows, lines):
        cells = text.replace("\\|", "\0").removeprefix("| ").removesuffix(" |").split(" | ")
        assert [cell.replace("\0", "|").strip() for cell in cells] == line


def test_the_timeline_is_saved_as_a_trace(look: Callable[..., Page], tmp_path: Path) -> None:
    """Each span of the run is an event, at its time in us and as long as it took."""
    run = small()
    assert run.timeline is not None and run.timeline.spans is not None
    page = look(run)
    with page.expect_download(timeout=30_000) as download:
        button(page, "Save trace for Perfetto").click()
    assert download.value.suggested_filename == "Sequential.trace.json"
    download.value.save_as(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    columns = run.timeline.spans.columns
    wanted = sorted((start / 1e3, (end - start) / 1e3) for start, end in zip(columns["start_ns"], columns["end_ns"]))
    assert sorted((one["ts"], one["dur"]) for one in events if one["ph"] == "X") == wanted
    names = {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert "forward, thread 1" in names
    assert {one["name"] for one in events if one["ph"] == "X"} >= {"Sequential", "Sequential.0"}

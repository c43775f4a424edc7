"""The page for everybody: accessibility rules, keys, the theme, search, print, and what is copied and saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build.all_kinds import KINDS
from build.browser import missing
from build.charted_runs import roofline_run, trained
from build.hand_made import row, run_of
from build.page import button
from build.places import ROOT
from torch import nn

import torchprof
from torchprof import Run
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
    assert page.locator(".lines .line").count() == 201
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".lines .line").count() < 100
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


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

"""The timeline of the page, in a browser: where each span is, and what dragging and keys show."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build.hand_made import row, run_of
from torch import nn

import torchprof
from torchprof import Profile, Run
from torchprof.reports.page import tables
from torchprof.run.layers import Layer
from torchprof.run.timeline import Lane, Memory, Spans, Timeline

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SPANS = [
    # start, end, lane, layer, phase, name, in us
    (0, 800, 0, 0, 0, -1),
    (100, 300, 0, 1, 0, -1),
    (300, 700, 0, 2, 0, -1),
    (350, 600, 0, 2, 0, 0),
    (400, 900, 1, 2, 0, 1),
    (850, 1000, 0, 2, 1, -1),
]


def with_spans(spans: Sequence[tuple[int, ...]] = SPANS, names: Sequence[str] = ("mine", "gemm"), **more: Any) -> Run:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "Linear"), Layer(("Net", "b"), "Conv1d")]
    columns = {name: array("q", column) for name, column in zip(Spans.COLUMNS, zip(*spans))}
    columns |= {name: array("q", [1000 * us for us in columns[name]]) for name in ("start_ns", "end_ns")}
    found = Spans((Lane("cpu", 1), Lane("cuda:0", 1)), tuple(names), columns, (0, 500_000, 1_000_000), **more)
    run = run_of([row(at, calls=1, cpu_ns=1000) for at in range(3)], layers=layers)
    return replace(run, timeline=Timeline.of_spans(found, 0))


WHOLE = "Shown: 1.000ms, from 0.000us to 1.000ms."
READ = """() => {
  const frame = document.querySelector(".tracks").getBoundingClientRect();
  return [...document.querySelectorAll(".track")].map((track) => ({
    name: track.querySelector(".track-name").textContent,
    spans: [...track.querySelectorAll(".span")].map((span) => {
      const { left, top, width } = span.getBoundingClientRect();
      const area = span.parentElement.getBoundingClientRect();
      const part = width / frame.width;
      const [at, row] = [(left - frame.left) / frame.width, Math.round((top - area.top) / 18)];
      return { text: span.textContent, at, part, row };
    }),
  }));
}"""


def shown(page: Page) -> dict[str, list[dict[str, Any]]]:
    return {track["name"]: track["spans"] for track in page.evaluate(READ)}


def status(page: Page) -> str:
    return page.locator("#timeline .status").inner_text()


def drag(page: Page, first: float, last: float) -> None:
    """Drag over a part of the width of the tracks, on the lowest line."""
    page.locator(".tracks").scroll_into_view_if_needed()
    box = page.locator(".tracks").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] - 3
    page.mouse.move(box["x"] + first * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (first + last) / 2 * box["width"], y)
    page.mouse.move(box["x"] + last * box["width"], y)
    page.mouse.up()


def test_each_span_is_at_its_time_and_inside_those_around_it(look: Callable[..., Page]) -> None:
    """By hand: all of it is 1 ms. Tracks are those of the Chrome trace."""
    run = with_spans()
    found = shown(look(run))
    trace = json.loads(run.report("chrome-trace"))["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["ph"] == "M" and event["name"] == "thread_name"]
    assert [*found] == [name for name in names if name != "steps"]
    expected = {
        "forward, thread 1": [("Net", 0.0, 0.8, 0), ("a", 0.1, 0.2, 1), ("b", 0.3, 0.4, 1), ("mine", 0.35, 0.25, 2)],
        "backward, thread 1": [("b", 0.85, 0.15, 0)],
        "cuda:0": [("gemm", 0.4, 0.5, 0)],
    }
    for name, spans in expected.items():
        assert [(span["text"], span["row"]) for span in found[name]] == [(text, deep) for text, _, _, deep in spans]
        for span, (_, at, part, _) in zip(found[name], spans):
            assert span["at"] == pytest.approx(at, abs=0.003) and span["part"] == pytest.approx(part, abs=0.003)


def test_what_a_span_is_under_the_mouse_and_on_a_click(look: Callable[..., Page]) -> None:
    page = look(with_spans())
    page.locator(".span", has_text="gemm").hover()
    assert page.locator(".tip").inner_text().splitlines() == ["gemm", "in Net.b", "forward, 500.000us, from 400.000us"]
    page.locator(".span", has_text="a").first.hover()
    assert page.locator(".tip").inner_text().splitlines() == ["Net.a", "Linear", "forward, 200.000us, from 100.000us"]
    page.locator(".span", has_text="gemm").click()
    assert page.inner_text(".panel h3") == "Net.b"
    assert {*page.locator(".span.selected").all_inner_texts()} == {"b", "mine", "gemm"}
    page.locator("h1").hover()
    assert page.locator(".tip").is_hidden()


def test_a_drag_shows_a_part_which_is_in_the_address(look: Callable[..., Page]) -> None:
    page = look(with_spans())
    assert status(page) == WHOLE
    drag(page, 0.3, 0.7)
    first, last = map(float, re.findall(r"([0-9.]+)us", status(page))[1:])
    assert (first, last) == (pytest.approx(300, abs=2), pytest.approx(700, abs=2))
    b, mine = shown(page)["forward, thread 1"][-2:]
    assert b["at"] == pytest.approx(0, abs=0.006) and mine["part"] == pytest.approx(250 / 400, abs=0.01)
    here = shown(page)
    page.reload()
    page.locator("main").wait_for()
    assert shown(page) == here
    page.go_back()
    page.wait_for_function("location.hash === ''")
    assert status(page) == WHOLE
    drag(page, 0.5, 0.6)
    page.locator(".tracks").dblclick(position={"x": 200, "y": 3})
    assert status(page) == WHOLE


def test_keys_move_and_zoom(look: Callable[..., Page]) -> None:
    page = look(with_spans())
    page.locator(".timeline").focus()
    page.keyboard.press("+")
    assert status(page) == "Shown: 625.000us, from 187.500us to 812.500us."
    page.keyboard.press("ArrowRight")
    assert status(page) == "Shown: 625.000us, from 312.500us to 937.500us."
    page.keyboard.press("ArrowRight")
    assert status(page) == "Shown: 625.000us, from 375.000us to 1.000ms.", "not beyond the end"
    page.keyboard.press("ArrowLeft")
    assert status(page) == "Shown: 625.000us, from 250.000us to 875.000us."
    page.keyboard.press("-")
    assert status(page) == WHOLE
    page.keyboard.press("+")
    page.keyboard.press("Escape")
    assert status(page) == WHOLE and page.inner_text(".panel h3") == "Net"


def test_steps_and_round_times_are_marked(look: Callable[..., Page]) -> None:
    page = look(with_spans())
    assert page.locator(".step-mark span").all_inner_texts() == ["step 1", "step 2", ""]
    marks = page.locator(".axis-line span").all_inner_texts()
    assert marks == [f"{us}us" for us in range(0, 1000, 100)] + ["1ms"]


def test_memory_is_on_the_same_axis_as_steps(look: Callable[..., Page]) -> None:
    """By hand: 100 bytes from the start, 300 from 500 us, 50 from 800 us on."""
    run = with_spans()
    moments = {"time_ns": [0, 500_000, 800_000], "nbytes": [100, 200, -250], "device": [0] * 3, "layer": [1] * 3}
    columns = {name: array("q", values) for name, values in {**moments, "phase": [0] * 3, "kind": [2] * 3}.items()}
    assert run.timeline is not None
    timeline = replace(run.timeline, devices=("cpu",), columns=columns)
    page = look(replace(run, timeline=timeline, memory=(Memory("cpu", peak_bytes=300, peak_ns=500_000),)))
    assert page.locator(".track-name").last.inner_text() == "memory on cpu above the start, up to 300 B"
    points = page.locator(".memory-line polygon").get_attribute("points")
    width = page.evaluate("document.querySelector('.tracks').clientWidth")
    corners = [tuple(map(float, point.split(","))) for point in (points or "").split()]
    [low, high] = [corners[0][1], min(y for _, y in corners)]
    levels = [(round(x / width * 1000), round((low - y) / (low - high) * 300)) for x, y in corners]
    assert (499, 100) in [(x - 1, y) for x, y in levels] and (500, 300) in levels and (800, 300) in levels


def test_many_spans_are_few_elements(look: Callable[..., Page]) -> None:
    spans = [(at, at + 1, 0, 1, 0, -1) for at in range(0, 60_000, 2)]
    page = look(with_spans([(0, 60_000, 0, 0, 0, -1), *spans]))
    assert page.locator(".span").count() < 1500
    page.locator(".timeline").focus()
    for _ in range(18):
        page.keyboard.press("+")
    assert page.locator(".span.named", has_text="a").count() > 5, "each is there from near"


def test_what_is_left_out_is_said(look: Callable[..., Page], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_SPANS", 4)
    page = look(with_spans(dropped=7))
    assert status(page).endswith(
        "The 2 shortest spans are not on this page. The last 7 spans were not recorded. "
        "So the figures of the page stay those of the whole run."
    )
    assert {span["text"] for spans in shown(page).values() for span in spans} == {"Net", "b", "mine", "gemm"}


def test_runs_without_a_timeline_say_how_to_record_one(look: Callable[..., Page]) -> None:
    run = replace(with_spans(), timeline=None)
    assert "record with Profile(..., with_timeline=True)" in look(run).inner_text("#timeline")
    assert look(torchprof.compare(run, run).report("html")).locator("#timeline").count() == 0


def test_a_recorded_training_has_all_its_calls(look: Callable[..., Page]) -> None:
    """Each call of each layer of a run, at its own time; and a name is text."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    with Profile(model, with_timeline=True, profile_memory=True) as prof:
        for _ in range(3):
            model(torch.rand(256, 64)).sum().backward()
            prof.step()
    page = look(prof.run)
    timeline = prof.run.timeline
    assert timeline is not None and timeline.spans is not None and len(timeline.spans) > 10
    drawn = [span for track in shown(page).values() for span in track]
    starts, ends = (timeline.spans.columns[name] for name in ("start_ns", "end_ns"))
    whole = max(*ends, *timeline.spans.steps, *timeline.columns["time_ns"])
    wide = [end - start for start, end in zip(starts, ends) if end - start > whole / 150]  # a pixel is a gap
    assert len(wide) > 5 and sum(span["part"] > 1 / 200 for span in drawn) >= len(wide)
    hostile = look(with_spans(names=("<img src=x onerror=alert(1)>", "gemm")))
    assert hostile.locator(".span img").count() == 0

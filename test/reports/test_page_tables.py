"""The tables of the page that are reports of the run: their tabs, and that they show what the terminal shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from build.all_kinds import KINDS
from build.hand_made import op, row, run_of
from build.page import READ_TABLE, data_in

import torchprof
from torchprof import Run, TorchprofError
from torchprof.analyze.report import tables_and_sentences
from torchprof.reports import content_of
from torchprof.reports.page.layers import FiguresOfPage, Take, Tree
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

if TYPE_CHECKING:
    from playwright.sync_api import Page

TABS: Mapping[str, tuple[str, bool, Mapping[str, Any]]] = {
    "Operators": ("ops", True, {"top": 200}),
    "Types": ("types", True, {"top": 200}),
    "Kernels": ("kernels", True, {"top": 200}),
    "Source lines": ("lines", False, {"top": 200}),
    "Between operators": ("python", False, {"top": 50}),
    "Memory": ("memory", True, {"top": 200}),
    "Steps": ("steps", False, {"top": 50}),
    "Compiled code": ("compiled", False, {}),
    "Collectives": ("collectives", False, {}),
}
"""By tab: the report of the terminal, whether it depends on the phase, and its options."""

READ_TABLES = """() => {
  const box = document.querySelector("#reports [role=tabpanel]");
  for (const more of box.querySelectorAll(".more")) while (!more.hidden) more.click();
  return [...box.querySelectorAll("table")].map((table) =>
    [...table.querySelectorAll("tbody tr")].map((row) =>
      [...row.children].map((cell) => cell.textContent.replace(/^\\u2003+/, ""))));
}"""


def tables_of(run: Run, report: str, options: Mapping[str, Any]) -> list[list[list[str]]]:
    """The cells of each table of a report, in the terminal's order; none if the run has nothing for it."""
    try:
        parts = [*tables_and_sentences(content_of(report, run, options))]
    except TorchprofError:
        return []
    tables = [part for part in parts if not isinstance(part, str)]
    if report == "memory":  # the rest is in a section of its own
        tables = [table for table in tables if table.name == "layers"]
    return [[[str(cell) for cell in row_.cells] for row_ in table.rows] for table in tables]


def check_tabs(page: Page, run: Run) -> None:
    """Each tab has the tables of its report, for each phase; a report without a table has no tab."""
    shown = page.get_by_role("tab").all_inner_texts()
    phases = run.phases()
    choices = [*phases, "both" if len(phases) == 2 else "all phases"] if len(phases) > 1 else [None]
    for choice in choices:
        if choice is not None:
            page.locator(".choice[aria-label=Phase]").get_by_role("button", name=choice, exact=True).click()
        for title, (report, is_by_phase, options) in TABS.items():
            phase = {"phase": choice if choice in phases else None} if is_by_phase else {}
            expected = tables_of(run, report, {**options, **phase})
            if title not in shown:
                assert not any(expected)
                continue
            page.get_by_role("tab", name=title, exact=True).click()
            assert page.evaluate(READ_TABLES) == (expected if any(expected) else [])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "ranks"])
def test_each_tab_shows_the_rows_of_the_terminal(name: str, look: Callable[..., Page]) -> None:
    run = KINDS[name]()
    check_tabs(look(run), run)


def test_the_tabs_of_a_rank_are_those_of_its_run(look: Callable[..., Page]) -> None:
    run = KINDS["ranks"]()
    page = look(run)
    check_tabs(page, run)
    first = run.metas[0].rank
    page.get_by_label("Rank").select_option(f"rank {first}")
    check_tabs(page, run.of_rank(first))


def test_the_chosen_tab_is_in_the_address_and_arrows_choose_another(look: Callable[..., Page]) -> None:
    page = look(KINDS["training"]())
    titles = page.get_by_role("tab").all_inner_texts()
    page.get_by_role("tab", name=titles[1], exact=True).click()
    assert f"table={titles[1]}" in page.url.replace("+", " ")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")  # from the first to the last
    chosen = page.locator("[role=tab][aria-selected=true]")
    assert chosen.inner_text() == titles[-1] == page.evaluate("document.activeElement.textContent")
    assert page.locator("[role=tab][tabindex='0']").count() == 1
    assert page.locator("[role=tabpanel]").get_attribute("aria-label") == titles[-1]
    page.reload()
    page.locator("main").wait_for()
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == titles[-1]


def test_operators_are_sorted_by_the_chosen_measure(look: Callable[..., Page]) -> None:
    counted = ("cpu_ns", "macs", "flops")
    rows = [row(0, op("aten::mm"), cpu_ns=1000, flops=9000), row(0, op("aten::add"), cpu_ns=2000, flops=10)]
    page = look(run_of(rows, layers=[Layer(("Net",), "Net")], requested=counted, measured=counted))
    first = page.locator("#report tbody tr").first
    for measure, name in (("CPU time", "aten::add"), ("FLOPs", "aten::mm"), ("CPU time", "aten::add")):
        page.locator(".choice[aria-label=Width]").get_by_role("button", name=measure, exact=True).click()
        assert first.inner_text().startswith(name)


def test_of_many_layers_the_largest_have_operators_and_others_say_how_to_see_them(
    look: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layers below the model, those of 30 and 20 ns are the largest, next to the model itself."""
    monkeypatch.setattr("torchprof.reports.page.layers._MOST_WITH_OPERATORS", 3)
    layers = [Layer(("Net", *path), "Module") for path in ((), ("a",), ("b",), ("c",))]
    rows = [row(number, op("aten::mm"), calls=1, cpu_ns=10 * number) for number in (1, 2, 3)]
    run = run_of(rows, layers=layers)
    found = FiguresOfPage(
        [(run, {layer.path: at for at, layer in enumerate(layers)})], Tree.of([Take("", run)]), are_ranks=True
    )
    columns = found.operators("cpu_ns", ["cpu_ns"])
    assert len(columns["node"]) == 3
    page = look(run)
    page.locator('.lines .line:has(.name[title="Net.a"]) .number').first.click()
    assert 'run.report("ops", layer="Net.a")' in page.inner_text(".panel")
    page.locator('.lines .line:has(.name[title="Net.c"]) .number').first.click()
    assert "aten::mm" in page.inner_text(".panel")
    assert data_in(page.content())["operators"]["layers"] == 3


READ_DERIVED = """() => Object.fromEntries([...document.querySelectorAll(".lines .line")].map((line) => [
  line.querySelector(".name").title, [...line.querySelectorAll(".derived")].map((cell) => cell.textContent)]))"""


def derived_run() -> Run:
    """Net.a has 2 calls of 3 us and 1 us of backward each, Net.b one of 12 us with an operator without a formula."""
    measured = ("cpu_ns", "macs", "flops", "uncounted")
    rows = [
        row(0, calls=2),
        row(1, calls=2, cpu_ns=6000, flops=4000),
        row(1, phase=BACKWARD, cpu_ns=2000),
        row(2, calls=1, cpu_ns=12_000, flops=1000, uncounted=1),
        row(OUTSIDE, cpu_ns=5000),
    ]
    layers = [Layer(path, path[-1]) for path in (("Net",), ("Net", "a"), ("Net", "b"))]
    run = run_of(rows, layers=layers, requested=measured, measured=measured, wall_ns=25_000)
    steps = {SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"): Spread.of([(0, 12_500), (1, 12_500)])}
    return replace(run, samples=steps)


def test_the_table_has_the_share_of_the_chosen_measure_and_what_it_is_for_a_call_and_a_step(
    look: Callable[..., Page],
) -> None:
    page = look(derived_run())
    headings = page.locator(".head [role=columnheader]").all_inner_texts()
    assert headings[:6] == ["Module", "CPU time, both", "Self CPU time, both", "%", "per call", "per step"]
    assert page.evaluate(READ_DERIVED) == {
        "Net": ["20.000us", "0.000us", "80.0%", "10.000us", "10.000us"],
        "Net.a": ["8.000us", "8.000us", "32.0%", "4.000us", "4.000us"],
        "Net.b": ["12.000us", "12.000us", "48.0%", "12.000us", "6.000us"],
        "(outside)": ["5.000us", "5.000us", "20.0%", "", "2.500us"],
    }
    page.locator(".choice[aria-label=Phase]").get_by_role("button", name="forward", exact=True).click()
    assert page.evaluate(READ_DERIVED)["Net.a"] == ["26.1%", "3.000us", "3.000us"]  # of 23 us
    page.locator(".choice[aria-label=Width]").get_by_role("button", name="FLOPs", exact=True).click()
    found = page.evaluate(READ_DERIVED)
    # What is a lower bound has nothing for a call or a step, and no figure has a share of a whole that is one.
    assert (found["Net.b"], found["Net"]) == (["≥ 1.00 K", "–", "–", "–"], ["0", "–", "–", "–"])
    assert found["Net.a"] == ["4.00 K", "–", "2.00 K", "2.00 K"]
    assert "%" not in page.inner_text(".icicle") + page.inner_text(".status")
    page.locator(".choice[aria-label=Width]").get_by_role("button", name="CPU time", exact=True).click()
    assert page.locator(".icicle .share").first.inner_text() == "100.0%"


def test_the_flat_list_is_sorted_by_the_chosen_measure(look: Callable[..., Page]) -> None:
    page = look(derived_run())
    page.locator(".flat").click()
    assert [line["path"] for line in page.evaluate(READ_TABLE)] == ["Net", "Net.b", "Net.a", "(outside)"]


def test_a_loop_with_time_outside_of_steps_has_no_figures_for_a_step(look: Callable[..., Page]) -> None:
    run = derived_run()
    page = look(replace(run, metas=(replace(run.meta, wall_ns=40_000),)))
    assert "per step" not in page.locator(".head [role=columnheader]").all_inner_texts()


def test_of_all_ranks_a_figure_for_a_step_is_the_mean_over_their_steps(look: Callable[..., Page]) -> None:
    """Net takes 10 us in each of 2 steps of rank 0, and 40 us in each of 4 of rank 1."""
    layers = [Layer(("Net",), "Net")]
    rows = [row(0, calls=2, cpu_ns=20_000), row(0, calls=4, cpu_ns=160_000, rank=1)]
    run = run_of(rows, layers=layers, wall_ns=1000)
    samples = {
        SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns"): Spread.of([(at, 1000) for at in range(steps)])
        for rank, steps in ((0, 2), (1, 4))
    }
    run = replace(run, metas=(run.meta, replace(run.meta, rank=1)), samples=samples)
    page = look(run)
    assert page.evaluate(READ_DERIVED)["Net"] == ["100.0%", "30.000us", "30.000us"]
    page.get_by_label("Rank").select_option("rank 1")
    assert page.evaluate(READ_DERIVED)["Net"] == ["100.0%", "40.000us", "40.000us"]
    without = {key: spread for key, spread in samples.items() if key.rank == 0}
    assert look(replace(run, samples=without)).locator(".head", has_text="per step").count() == 0


def test_in_a_comparison_of_other_lengths_operators_of_a_layer_are_for_one_call(look: Callable[..., Page]) -> None:
    """Net.a takes 4 us of aten::mm in each of 2 calls before, and 6 us in each of 3 after."""
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "A")]

    def of_calls(calls: int, ns: int) -> Run:
        rows = [row(0, calls=calls), row(1, calls=calls)]
        return run_of([*rows, row(1, op("aten::mm"), calls=2 * calls, cpu_ns=ns * calls)], layers=layers)

    page = look(torchprof.compare(of_calls(2, 4000), of_calls(3, 6000)))
    page.locator('.lines .line:has(.name[title="Net.a"]) .number').first.click()
    operators = page.locator(".panel .sheet").first.locator("tbody tr").all_inner_texts()
    assert operators[0].split() == ["aten::mm", "2", "6.000us", "6.000us"]
    assert page.inner_text("#reports h3") == "Tables of the whole run after"
    page.get_by_label("Run").select_option("before")
    operators = page.locator(".panel .sheet").first.locator("tbody tr").all_inner_texts()
    assert operators[0].split() == ["aten::mm", "2", "4.000us", "4.000us"]
    assert page.inner_text("#reports h3") == "Tables of the whole run before"

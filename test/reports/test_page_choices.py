"""What a reader of the page chooses, in a browser: it is in the address, and all parts of the page follow it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build.hand_made import op, row, run_of
from build.hand_made_ranks import run_of_ranks
from build.jobs import MS, even, planted
from build.page import button, choice
from torch import nn

import torchprof
from torchprof import Profile, Run
from torchprof.ranks import balance_of
from torchprof.reports.page import layers as layers_of_page
from torchprof.run.layers import Layer
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

NAMES = ["Net", "Net.h", *(f"Net.h.{at}{inner}" for at in range(4) for inner in ("", ".up", ".down")), "Net.head"]
KINDS = {"Net": "Net", "h": "ModuleList", "up": "Linear", "down": "Linear", "head": "Conv1d"}
WHOLE, BLOCKS, UP, DOWN = 142, (19, 21, 23, 25), (8, 10, 12, 14), 10
"""In us, of ``four_blocks``, in both phases."""


def four_blocks(**meta: Any) -> Run:
    """Four blocks of two layers, ``up`` of 4 to 7 us and ``down`` of 5 us, with as much again in backward, and 1 us of
    their own; and a head of 54 us in forward."""
    layers = [Layer(tuple(name.split(".")), KINDS.get(name.rpartition(".")[2], "Block")) for name in NAMES]
    rows = [row(0, calls=2), row(14, calls=2, cpu_ns=54_000)]
    for at in range(4):
        rows += [row(3 * at + 2, calls=2, cpu_ns=1000)]
        for layer, ns in ((3 * at + 3, 4000 + 1000 * at), (3 * at + 4, 5000)):
            rows += [row(layer, calls=2), row(layer, op("aten::mm"), calls=2, cpu_ns=ns)]
            rows += [row(layer, op("aten::mm"), phase=BACKWARD, cpu_ns=ns)]
    return run_of(rows, layers=layers, **meta)


def equal_layers(*us: int, **meta: Any) -> Run:
    """Linear layers in ``Net.h`` that take so long; those that take nothing were never called."""
    layers = [Layer(("Net",), "Net"), Layer(("Net", "h"), "ModuleList")]
    layers += [Layer(("Net", "h", str(at)), "Linear") for at in range(len(us))]
    rows = [row(0, calls=1), *(row(at, calls=1, cpu_ns=1000 * time) for at, time in enumerate(us, 2) if time)]
    return run_of([*rows, row(0, op("aten::add"), cpu_ns=1)], layers=layers, **meta)


def state(page: Page) -> dict[str, Any]:
    """What is chosen, as the controls and the parts of the page show it."""
    found: dict[str, Any] = page.evaluate(
        """() => ({
            pressed: [...document.querySelectorAll(".choice [aria-pressed=true]")].map((one) => one.textContent),
            checked: [...document.querySelectorAll("input[type=checkbox]:checked")].map((one) => one.className),
            crumbs: [...document.querySelectorAll(".crumbs button")].map((one) => one.textContent),
            selected: document.querySelector(".panel h3").textContent,
            sorted: [...document.querySelectorAll(".head [aria-sort]")].filter((one) => one.ariaSort !== "none")
              .map((one) => [one.textContent, one.ariaSort]),
            search: document.querySelector("input[type=search]").value,
            lines: [...document.querySelectorAll(".lines .line.selected")].map((one) => one.title || one.dataset.node),
        })"""
    )
    return found


def block(page: Page, name: str) -> Any:
    return page.locator(".icicle .block bdi").get_by_text(name, exact=True)


def test_what_is_chosen_is_in_the_address(look: Callable[..., Page]) -> None:
    """A reload and a copied link restore it."""
    page = look(four_blocks())
    assert "#" not in page.url, "at first, nothing is chosen"
    choice(page, "backward").click()
    page.get_by_label("group equal layers").uncheck()
    block(page, "1").click()
    page.get_by_label("as a flat list").check()
    page.locator(".head").get_by_text("Self CPU total", exact=True).click()
    page.get_by_label("Search layers").fill("down")
    chosen = state(page)
    assert (
        chosen["pressed"] == ["backward"] and chosen["crumbs"] == ["Net", "h", "1"] and chosen["selected"] == "Net.h.1"
    )
    assert {*chosen["checked"]} == {"flat"} and chosen["sorted"] == [["Self CPU total", "descending"]]
    assert chosen["search"] == "down"
    page.reload()
    page.locator("main").wait_for()
    assert state(page) == chosen
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("main").wait_for()
    assert state(other) == chosen


def test_a_reload_keeps_the_place_and_a_link_is_copied(look: Callable[..., Page]) -> None:
    page = look(four_blocks(), height=400)
    choice(page, "backward").click()
    button(page, "Copy link").click()
    assert page.evaluate("navigator.clipboard.readText()") == page.url and "phase=backward" in page.url
    page.evaluate("scrollTo(0, 300)")
    page.wait_for_function("() => history.state?.y === 300")
    page.reload()
    page.wait_for_function("() => scrollY === 300", timeout=10_000)


def test_back_and_forward_restore_what_was_chosen(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    at_first = state(page)
    choice(page, "forward").click()
    second = state(page)
    page.locator(".lines .line .number").nth(20).click()
    third = state(page)
    assert at_first != second != third
    page.get_by_label("Search layers").fill("up")  # no step of its own
    page.get_by_label("Search layers").fill("")
    page.go_back()
    page.wait_for_function("!location.hash.includes('select')")
    assert state(page) == second
    page.go_back()
    page.wait_for_function("location.hash === ''")
    assert state(page) == at_first
    page.go_forward()
    page.wait_for_function("location.hash !== ''")
    assert state(page) == second


@pytest.mark.parametrize(
    "fragment", ["zoom=nothing&select=Net.9&phase=sideways&measure=x&source=7&sort=y&show=z", "%%%", "search=%3Cb%3E"]
)
def test_an_address_that_names_what_is_not_there_opens_the_page(
    fragment: str, look: Callable[..., Page], open_tab: Callable[..., Any], tmp_path: Any
) -> None:
    four_blocks().export(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html", fragment=fragment)
    assert tab.errors == [] and state(tab.page)["crumbs"] == ["Net"]
    assert "nothing" not in tab.page.url and "sideways" not in tab.page.url
    entries = tab.page.evaluate("history.length")
    tab.page.reload()
    tab.page.locator("main").wait_for()
    assert tab.page.evaluate("history.length") == entries, "Back leads away from it"


def test_keys_are_no_steps_that_back_has_to_undo(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    entries = page.evaluate("history.length")
    page.locator(".icicle").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert state(page)["selected"] == "Net.h" and "select=Net.h" in page.url
    assert page.evaluate("history.length") == entries


def test_ranks_and_other_runs_are_in_the_address_by_name(look: Callable[..., Page]) -> None:
    run = four_blocks()
    page = look(run, beside={"with AMP & more": run})
    page.locator("select.source").select_option("with AMP & more")
    page.reload()
    page.locator("main").wait_for()
    assert page.locator("select.source option:checked").inner_text() == "with AMP & more"


# Equal layers


def texts(page: Page) -> list[str]:
    """The texts of all blocks with a name, in the order of rows, left to right."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".icicle .block.named")].map((one) => [one.getBoundingClientRect(), one])
            .sort(([a], [b]) => a.top - b.top || a.left - b.left)
            .map(([, one]) => [...one.children].map((part) => part.textContent).join(" "))"""
    )
    return found


def share(us: float) -> str:
    return f"{us / WHOLE:.1%}"


def shares(us: Sequence[float]) -> str:
    return f"4 × {share(us[0])[:-1]}–{share(us[-1])}"


def test_equal_layers_in_a_row_are_one_block_until_it_is_clicked(look: Callable[..., Page]) -> None:
    """Its share is that of each: from the smallest to the largest."""
    page = look(four_blocks())
    assert texts(page) == [
        "Net Net 100.0%",
        f"h ModuleList {share(sum(BLOCKS))}",
        f"head Conv1d {share(54)}",
        f"0–3 Block {shares(BLOCKS)}",
        f"up Linear {shares(UP)}",
        f"down Linear 4 × {share(DOWN)}",
    ]
    page.locator(".icicle .block", has_text="0–3").hover()
    assert page.locator(".tip").inner_text().splitlines() == [
        "Net.h.0 and 3 like it",
        "Block",
        f"CPU time 88.000us, {share(88)} of the total",
        "each 19.000us to 25.000us",
        "8 calls, 11.000us a call",
        "Click to see each of them.",
    ]
    assert page.inner_text(".icicle ~ .status").startswith("Net.h.0 and 3 like it: CPU time 88.000us, ")
    page.locator(".icicle .block", has_text="0–3").click()
    assert [text.split()[0] for text in texts(page)][:5] == ["h", "0", "1", "2", "3"]
    assert state(page)["selected"] == "Net.h"
    page.go_back()
    page.wait_for_function("location.hash === ''")
    assert [text.split()[0] for text in texts(page)][3] == "0–3"


def test_equal_layers_one_by_one(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    page.get_by_label("group equal layers").uncheck()
    names = [text.split()[0] for text in texts(page)]
    assert names == ["Net", "h", "head", "0", "1", "2", "3", *["up", "down"] * 4]
    page.get_by_label("group equal layers").check()
    assert "0–3" in [text.split()[0] for text in texts(page)]


@pytest.mark.parametrize(
    ("us", "names"),
    [
        ((10, 10, 97, 10, 10, 10), ["0", "1", "2", "3–5"]),  # one takes longer than its equals
        ((10, 10, 10, 0, 10, 10, 10), ["0–2", "4–6"]),  # one was never called
        ((10, 10, 0, 10, 10), ["0", "1", "3", "4"]),
        ((10, 11, 12, 13, 14, 15, 16, 17), ["0–5", "6", "7"]),  # at most half as long again
    ],
)
def test_only_layers_that_take_about_as_long_are_one_block(
    us: tuple[int, ...], names: list[str], look: Callable[..., Page]
) -> None:
    assert [text.split()[0] for text in texts(look(equal_layers(*us)))][2:] == names


@pytest.mark.parametrize("change", [{"kind": "Conv1d"}, {"settings": "in_features=3"}, {"params": 5}])
def test_layers_that_differ_are_no_group(change: dict[str, Any], look: Callable[..., Page]) -> None:
    run = equal_layers(10, 10, 10)
    layers = (*run.layers[:3], replace(run.layers[3], **change), *run.layers[4:])
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    assert not [text for text in texts(page) if text.startswith("0–")]
    assert page.get_by_label("group equal layers").count() == 0


def test_a_group_has_the_layers_of_the_chosen_rank(look: Callable[..., Page]) -> None:
    """Of eight layers, each of two ranks has four, as in a pipeline."""
    run = equal_layers(*[10] * 8)
    ranks = array("q", [int(layer >= 6) for layer in run.rows.columns["layer"]])
    rows = replace(run.rows, columns={**run.rows.columns, "rank": ranks})
    page = look(replace(run, rows=rows, metas=(run.meta, replace(run.meta, rank=1))))
    assert [text.split()[0] for text in texts(page)][-1] == "0–7"
    for rank, name in (("rank 0", "0–3"), ("rank 1", "4–7")):
        page.get_by_label("Rank").select_option(rank)
        group = page.locator(".icicle .block", has_text=name)
        assert group.inner_text().split()[-3:] == ["4", "×", "25.0%"]
        group.hover()
        assert "CPU time 40.000us, 100.0% of the total" in page.locator(".tip").inner_text()


def test_children_of_the_whole_chart_are_drawn_one_by_one_where_there_is_room(look: Callable[..., Page]) -> None:
    page = look(equal_layers(*[10] * 500))
    page.locator(".icicle .block", has_text="0–499").click()  # each is 2 pixels wide
    assert state(page)["crumbs"] == ["Net", "h"] and [text.split()[0] for text in texts(page)] == ["h", "0–499"]
    page.locator(".icicle .block", has_text="0–499").hover()
    assert "Click" not in page.locator(".tip").inner_text()
    page.locator(".icicle .block", has_text="0–499").click()
    assert state(page)["selected"] == "Net.h.0"


def test_the_sum_of_a_group_is_a_lower_bound_if_that_of_one_layer_is(look: Callable[..., Page]) -> None:
    """FLOPs of one of four equal layers could not be counted."""
    run = equal_layers(10, 10, 10, 10)
    measures = ("cpu_ns", "flops", "uncounted")
    rows = [row(0, calls=1), *(row(at, op("aten::mm"), calls=1, cpu_ns=9, flops=100) for at in range(2, 6))]
    rows += [row(5, op("mine::op"), calls=1, cpu_ns=9, uncounted=1)]
    page = look(run_of(rows, layers=run.layers, requested=measures, measured=measures))
    choice(page, "FLOPs").click()
    page.locator(".icicle .block", has_text="0–3").hover()
    tip = page.locator(".tip").inner_text().splitlines()
    assert tip[2].startswith("FLOPs ≥ 400") and tip[3] == "each 100 to ≥ 100"
    assert not any("a call" in line for line in tip)


def test_the_self_of_a_layer_as_a_block_has_its_figures(
    look: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_of_page, "_MOST_WITH_OPERATORS", 1)  # else its operators are blocks
    page = look(four_blocks())
    page.get_by_label("self and operators as blocks").check()
    page.get_by_label("group equal layers").uncheck()
    page.locator(".icicle .block.own").nth(1).hover()
    assert page.locator(".tip").inner_text().splitlines()[2] == f"self CPU time 1.000us, {share(1)} of the total"


def test_the_selected_layer_is_marked_in_the_block_that_has_it(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    button(page, "Open all").click()
    page.locator('.lines .line[data-node="8"] .number').first.click()
    assert state(page)["selected"] == "Net.h.2"
    assert [text.split()[0] for text in page.locator(".block.selected").all_inner_texts()] == ["0–3"]


# Colors, caption and columns


def test_blocks_have_the_color_of_their_class(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    legend = page.locator(".classes .legend").all_inner_texts()
    assert legend == ["Linear", "Conv1d", "Block", "Net", "ModuleList"], "the most time first"
    colors = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".icicle .block.named")].map((one) =>
            [one.querySelector("bdi").textContent, getComputedStyle(one).backgroundColor]))"""
    )
    assert colors["up"] == colors["down"] and len({*colors.values()}) == 5
    chip = "getComputedStyle(document.querySelector('.classes .legend'), '::before').backgroundColor"
    assert page.evaluate(chip) == colors["up"], "the legend has the color of the blocks"
    page.get_by_label("color by self").check()
    assert page.inner_text(".classes") == "The darker, the larger the self of the layer."
    assert page.locator('.block[class*="class-"]').count() == 0


def test_operators_of_innermost_layers_are_blocks_as_wide_as_their_self(look: Callable[..., Page]) -> None:
    """Three equal layers of 10 us each: 6 of aten::mm, 3 of aten::add, 1 between operators; none of the model."""
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", str(at)), "Linear") for at in range(3))]
    rows = []
    for at in (1, 2, 3):
        rows += [row(at, op("aten::mm"), calls=1, cpu_ns=6000), row(at, op("aten::add"), calls=1, cpu_ns=3000)]
        rows += [row(at, calls=1, cpu_ns=1000)]
    page = look(run_of(rows, layers=layers))
    assert page.locator(".block.operator").count() == 0
    page.get_by_label("self and operators as blocks").check()
    widths = """all => all.map((one) => [one.textContent, one.getBoundingClientRect().width])"""
    (_, whole), *_ = page.eval_on_selector_all(".block:not(.operator)", widths)
    found = page.eval_on_selector_all(".block.operator", widths)
    assert [text for text, _ in found] == ["mm", "add", ""] * 3  # (between ops) has no room
    for (_, width), share in zip(found, [0.2, 0.1, 1 / 30] * 3):
        assert width + 1 == pytest.approx((whole + 1) * share, abs=0.5)
    page.locator(".block.operator").nth(1).hover()  # the last layer is drawn first
    assert page.inner_text(".tip").splitlines() == [
        "aten::add",
        "in Net.2",
        "self CPU time 3.000us, 10.0% of the total",
    ]


def test_operators_of_a_layer_with_children_are_those_in_none_of_them(look: Callable[..., Page]) -> None:
    """Of 8 us of aten::add 3 are in the child; of aten::mm all."""
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "A")]
    rows = [
        row(0, op("aten::add"), calls=1, cpu_ns=5000),
        row(1, op("aten::add"), calls=1, cpu_ns=3000),
        row(1, op("aten::mm"), calls=1, cpu_ns=12_000),
    ]
    page = look(run_of(rows, layers=layers))
    page.get_by_label("self and operators as blocks").check()
    page.locator('.block.operator[data-node="0"]').hover()
    assert page.inner_text(".tip").splitlines() == ["aten::add", "in Net", "self CPU time 5.000us, 25.0% of the total"]
    assert page.locator('.block.operator[data-node="0"]').count() == 1
    assert page.locator('.block.operator[data-node="1"]').all_inner_texts() == ["mm", "add"]


def test_the_caption_says_what_widths_are(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    assert page.inner_text(".caption") == "Width: CPU time, forward, backward; the whole is 142.000us."
    choice(page, "forward").click()
    assert page.inner_text(".caption") == "Width: CPU time, forward; the whole is 100.000us."


def test_the_columns_of_what_was_chosen_come_first(look: Callable[..., Page]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Profile(model, profile_memory=True) as prof:
        model(torch.rand(2, 4)).sum().backward()
    page = look(prof.run)

    def headings() -> list[str]:
        return page.locator(".head [data-at]").all_inner_texts()

    def of_terminal() -> list[str]:
        return page.locator('.head [data-at]:not([data-at="-1"])').all_inner_texts()

    every = of_terminal()
    assert every[:3] == ["Self CPU total", "CPU total", "Backward CPU total"]
    assert headings()[:4] == ["CPU time, both", "Self CPU time, both", "%", "per call"]
    choice(page, "CPU memory allocated").click()
    choice(page, "backward").click()
    first = of_terminal()
    assert "Mem" in first[0] and first[0].startswith("Backward")
    assert headings()[:4] == ["Backward CPU Mem", "Self CPU memory allocated, backward", "%", "per call"]
    assert sorted(first) == sorted(every), "all columns of the terminal's table are there"


def test_a_run_without_layers_opens_with_its_operators(look: Callable[..., Page]) -> None:
    rows = [row(OUTSIDE, op("aten::mm"), cpu_ns=3000), row(OUTSIDE, op("aten::add"), cpu_ns=1000)]
    page = look(run_of(rows, layers=[]))
    assert page.locator("#timeline").count() == 0
    operators = """() => [...document.querySelectorAll(".icicle .operator")].map(
        (one) => [one.textContent, one.getBoundingClientRect().width + 1])"""
    (mm, wide), (add, narrow) = page.evaluate(operators)
    assert (mm, add) == ("mm", "add") and wide == pytest.approx(3 * narrow, abs=0.2)
    assert "#" not in page.url and page.inner_text(".panel h3") == "(outside)"
    page.get_by_label("self and operators as blocks").uncheck()
    assert page.evaluate(operators) == []
    page.reload()
    page.locator("main").wait_for()
    assert page.evaluate(operators) == [] and page.inner_text(".caption").startswith("Width: CPU time; the whole is")


@pytest.mark.parametrize(("device_ns", "opens"), [(5000, "CUDA time"), (0, "CPU time")])
def test_a_run_opens_with_the_measure_of_its_headline(device_ns: int, opens: str, look: Callable[..., Page]) -> None:
    both = ("cpu_ns", "device_ns")
    rows = [row(0, op("aten::mm"), calls=1, cpu_ns=1000), row(0, op("aten::mm"), device="cuda:0", device_ns=device_ns)]
    page = look(run_of(rows, device="cuda", requested=both, measured=both))
    assert page.locator(".choice[aria-label=Width] [aria-pressed=true]").inner_text() == opens
    assert page.locator(".icicle .block").count()
    assert ("Nothing ran on CUDA" in page.inner_text("header")) == (opens == "CPU time")


def test_a_job_opens_on_its_straggler(look: Callable[..., Page]) -> None:
    run = planted()
    found = balance_of(run).first
    assert found is not None and not found.may_be_chance
    page = look(run)
    ranks = page.locator("select.source")
    assert ranks.locator("option:checked").inner_text() == f"rank {found.ranks[0]}" and "#" not in page.url
    ranks.select_option("-1")
    assert "source=all" in page.url
    page.reload()
    assert ranks.locator("option:checked").inner_text() == "all ranks"
    assert (
        look(run_of_ranks({("Net.a", FORWARD): even(10 * MS)})).locator("select.source option:checked").inner_text()
        == "all ranks"
    )


def test_the_panel_starts_at_its_top_when_another_layer_is_selected(look: Callable[..., Page]) -> None:
    page = look(four_blocks(), height=300)
    page.evaluate("document.querySelector('.panel').scrollTop = 90")
    page.locator(".lines .line .number").nth(9).click()
    assert page.evaluate("document.querySelector('.panel').scrollTop") == 0


def test_a_comparison_keeps_its_choices_in_the_address(look: Callable[..., Page]) -> None:
    run = four_blocks()
    page = look(torchprof.compare(run, run).report("html"))
    choice(page, "backward").click()
    assert page.locator(".icicle .block.named", has_text="–").count() == 0, "layers that changed are apart"
    page.reload()
    page.locator("main").wait_for()
    assert state(page)["pressed"] == ["backward"]


def test_blocks_keep_their_elements_and_move(look: Callable[..., Page]) -> None:
    """A block that is there before and after a choice is the same element, unless motion is to be reduced it moves."""
    page = look(equal_layers(100, 300, 500, 900))
    page.evaluate("document.querySelectorAll('.icicle .block').forEach((one) => { one.was = one.dataset.node; })")
    count = page.locator(".icicle .block").count()
    page.get_by_label("self and operators as blocks").check()
    read = "[...document.querySelectorAll('.icicle .block')].map((one) => [one.dataset.node, one.was ?? null])"
    kept = [(node, was) for node, was in page.evaluate(read) if was is not None]
    assert len(kept) == count < page.locator(".icicle .block").count()
    assert all(node == was for node, was in kept)
    duration = "getComputedStyle(document.querySelector('.icicle .block')).transitionDuration"
    assert page.evaluate(duration) == "0s"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(duration).startswith("0.2s")

"""What a reader of the page chooses, in a browser: it is in the address, and all parts of the page follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build.hand_made import op, row, run_of
from build.page import button, choice
from torch import nn

import torchprof
from torchprof import Profile, Run
from torchprof.run.layers import Layer
from torchprof.run.words import BACKWARD

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

NAMES = ["Net", *(f"Net.{at}{inner}" for at in range(4) for inner in ("", ".up", ".down")), "Net.head"]
KINDS = {"Net": "Net", "up": "Linear", "down": "Linear", "head": "Conv1d"}


def four_blocks(**meta: Any) -> Run:
    """Four equal blocks of two layers, of 10, 11, 12 and 13 us, with as much again in backward; and a head of 54 us."""
    layers = [Layer(tuple(name.split(".")), KINDS.get(name.rpartition(".")[2], "Block")) for name in NAMES]
    rows = [row(0, calls=2)]
    for at in range(4):
        rows += [row(3 * at + 1, calls=2, cpu_ns=1000)]
        for inner, ns in ((2, 4000 + 1000 * at), (3, 5000)):
            rows += [row(3 * at + 1 + inner - 1, calls=2), row(3 * at + inner, op("aten::mm"), calls=2, cpu_ns=ns)]
            rows += [row(3 * at + inner, op("aten::mm"), phase=BACKWARD, cpu_ns=ns)]
    rows += [row(13, calls=2, cpu_ns=54_000)]
    return run_of(rows, layers=layers, **meta)


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
    page.get_by_label("each layer apart").check()
    block(page, "1").click()
    page.get_by_label("as a flat list").check()
    page.locator(".head").get_by_text("Self CPU total", exact=True).click()
    page.get_by_label("Search layers").fill("down")
    chosen = state(page)
    assert chosen["pressed"] == ["backward"] and chosen["crumbs"] == ["Net", "1"] and chosen["selected"] == "Net.1"
    assert {*chosen["checked"]} == {"unfolded", "flat"} and chosen["sorted"] == [["Self CPU total", "descending"]]
    assert chosen["search"] == "down"
    page.reload()
    page.locator("main").wait_for()
    assert state(page) == chosen
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("main").wait_for()
    assert state(other) == chosen


def test_back_and_forward_restore_what_was_chosen(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    at_first = state(page)
    choice(page, "forward").click()
    second = state(page)
    page.locator(".lines .line .number").nth(5).click()
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


def test_equal_layers_in_a_row_are_one_block_until_it_is_clicked(look: Callable[..., Page]) -> None:
    """46 of 146 us in forward and 92 in both phases: 146 us with the head. By hand: 4 × (1 + 2 × 9) + 12 = 88 ns."""
    page = look(four_blocks())
    whole = 4 * 1000 + 2 * (4000 + 5000 + 6000 + 7000 + 4 * 5000) + 54_000
    folded = whole - 54_000
    assert texts(page) == [
        "Net Net 100.0%",
        f"0–3 Block 4 × {folded / whole / 4:.1%}",
        f"head Conv1d {54_000 / whole:.1%}",
        f"up Linear 4 × {2 * 22_000 / whole / 4:.1%}",
        f"down Linear 4 × {2 * 20_000 / whole / 4:.1%}",
    ]
    page.locator(".icicle .block", has_text="0–3").hover()
    tip = page.locator(".tip").inner_text().splitlines()
    assert tip == [
        "Net.0 and 3 like it",
        "Block",
        f"CPU time 88.000us, {folded / whole:.1%} of the total",
        "each 19.000us to 25.000us",
        "2 calls, 9.500us a call",
        "A click draws them apart.",
    ]
    page.locator(".icicle .block", has_text="0–3").click()
    assert [text.split()[0] for text in texts(page)][1:6] == ["0", "1", "2", "3", "head"]
    assert state(page)["selected"] == "Net.0" and page.locator(".tip").is_hidden()


def test_what_is_unknown_of_a_block_has_no_share(look: Callable[..., Page]) -> None:
    """FLOPs of one of four equal layers could not be counted: the figure of all is a lower bound."""
    layers = [Layer(("Net",), "Net"), *(Layer(("Net", str(at)), "Linear") for at in range(4))]
    measures = ("cpu_ns", "flops", "uncounted")
    rows = [row(0, calls=1), *(row(at, op("aten::mm"), calls=1, cpu_ns=9, flops=100) for at in range(1, 5))]
    rows += [row(4, op("mine::op"), calls=1, cpu_ns=9, uncounted=1)]
    page = look(run_of(rows, layers=layers, requested=measures, measured=measures))
    choice(page, "FLOPs").click()
    page.locator(".icicle .block", has_text="0–3").hover()
    tip = page.locator(".tip").inner_text()
    assert "FLOPs ≥ 400" in tip and "each ≥ 100 to ≥ 100" in tip


def test_each_layer_apart(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    page.get_by_label("each layer apart").check()
    names = [text.split()[0] for text in texts(page)]
    assert names == ["Net", "0", "1", "2", "3", "head", *["up", "down"] * 4]
    page.get_by_label("each layer apart").uncheck()
    assert "0–3" in [text.split()[0] for text in texts(page)]


def test_layers_that_only_look_alike_are_apart(look: Callable[..., Page]) -> None:
    """One of the four has a layer of another class; and a model without equal layers has no switch."""
    run = four_blocks()
    layers = [*run.layers]
    layers[8] = Layer(layers[8].path, "Conv1d")
    rows = [row(at, calls=1, cpu_ns=1000) for at in range(len(layers))]
    page = look(run_of(rows, layers=layers))
    assert not [text for text in texts(page) if "–" in text]
    assert page.get_by_label("each layer apart").count() == 0


def test_the_selected_layer_is_marked_in_the_block_that_has_it(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    button(page, "Open all").click()
    page.locator('.lines .line[data-node="7"] .number').first.click()
    assert state(page)["selected"] == "Net.2"
    assert [text.split()[0] for text in page.locator(".block.selected").all_inner_texts()] == ["0–3"]


# Colors, caption and columns


def test_blocks_have_the_color_of_their_class(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    legend = page.locator(".classes .legend").all_inner_texts()
    assert {*legend} == {"Net", "Block", "Linear", "Conv1d"} and legend[0] == "Linear", "the most time first"
    colors = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".icicle .block.named")].map((one) =>
            [one.querySelector("bdi").textContent, getComputedStyle(one).backgroundColor]))"""
    )
    assert colors["up"] == colors["down"] and len({*colors.values()}) == 4
    page.get_by_label("color by self").check()
    assert page.locator(".classes .legend").count() == 0
    assert page.locator('.block[class*="class-"]').count() == 0


def test_the_caption_says_what_widths_are(look: Callable[..., Page]) -> None:
    page = look(four_blocks())
    assert page.inner_text(".caption") == "Width: CPU time, forward and backward; the whole is 142.000us."
    choice(page, "forward").click()
    assert page.inner_text(".caption") == "Width: CPU time, forward; the whole is 100.000us."


def test_the_columns_of_what_was_chosen_come_first(look: Callable[..., Page]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Profile(model, profile_memory=True) as prof:
        model(torch.rand(2, 4)).sum().backward()
    page = look(prof.run)

    def headings() -> list[str]:
        return page.locator(".head .number, .head button").all_inner_texts()

    every = headings()
    assert every[:4] == ["Self CPU total", "CPU total", "Backward CPU total", "Number of Calls"] or "CPU" in every[0]
    choice(page, "CPU memory allocated").click()
    choice(page, "backward").click()
    first = headings()
    assert "Mem" in first[0] and first[0].startswith("Backward")
    assert sorted(first) == sorted(every), "all columns of the terminal's table are there"


def test_a_run_on_a_device_opens_on_its_time(look: Callable[..., Page]) -> None:
    both = ("cpu_ns", "device_ns")
    rows = [row(0, op("aten::mm"), calls=1, cpu_ns=1000), row(0, op("aten::mm"), device="cuda:0", device_ns=5000)]
    page = look(run_of(rows, device="cuda", requested=both, measured=both))
    assert page.locator(".choice[aria-label=Width] [aria-pressed=true]").inner_text() == "CUDA time"


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

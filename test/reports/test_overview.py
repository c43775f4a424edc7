"""What prints first: the headline, the largest places, and the tree in few rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from build.forests import Paths, layer_trees
from build.hand_made import FORWARD, cells, label, names, row, run_of
from build.models import Layers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchprof
from torchprof import Run
from torchprof.analyze.figures import Figures
from torchprof.analyze.layers import Entry, all_entries, entries_of
from torchprof.first_screen.overview import outline
from torchprof.run.formats import Bound
from torchprof.run.layers import Layer


def size(figures: Figures) -> float:
    return figures.cost(FORWARD).cpu_ns


def run_with(paths: Sequence[str], ns: Sequence[int], kinds: Sequence[str] | None = None) -> Run:
    layers = [Layer(tuple(path.split(".")), kind) for path, kind in zip(paths, kinds or ["Block"] * len(paths))]
    return run_of([row(number, cpu_ns=one) for number, one in enumerate(ns)], layers=layers)


def short(run: Run, limit: int) -> list[Entry]:
    return outline(entries_of(run), {layer.path: layer.kind for layer in run.layers}, size, limit)


def shown(lines: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """The total in ns of each row, and how many layers it is the sum of."""
    return {line.name: (line.figures.cost(FORWARD).cpu_ns, len(line.parts)) for line in all_entries(lines)}


def tree(text: str) -> str:
    """The table of layers in an overview."""
    return next(section for section in text.split("\n\n") if section.startswith("Module"))


# The tree in few rows


def test_a_tree_that_fits_is_whole() -> None:
    run = run_with(["Net", "Net.0", "Net.1", "Net.2", "Net.3"], [1, 2, 3, 4, 5])
    assert {*shown(short(run, 5))} == {"Net", *"0123"}
    assert {*shown(short(run, 4))} == {"Net", "0–3"}


def test_equal_neighbors_are_one_row_with_their_sum_and_so_are_the_layers_below_them() -> None:
    paths = ["Net", *(path for block in range(4) for path in (f"Net.{block}", f"Net.{block}.a", f"Net.{block}.b"))]
    run = run_with(paths, [1, *(ns for block in range(4) for ns in (10, block, 100 * block))])
    assert shown(short(run, 12)) == {"Net": (1 + 40 + 6 + 600, 0), "0–3": (646, 4), "a": (6, 4), "b": (600, 4)}


@pytest.mark.parametrize("what", ["a gap in the numbers", "another class", "other layers below", "only two"])
def test_what_is_not_equal_is_not_folded(what: str) -> None:
    paths, kinds = ["Net", *(f"Net.{block}" for block in range(4))], ["Net", *["Block"] * 4]
    if what == "a gap in the numbers":
        paths[2:] = ["Net.2", "Net.3", "Net.5"]
    elif what == "another class":
        kinds[2] = "Other"
    elif what == "other layers below":
        paths.insert(3, "Net.1.a")
        kinds.insert(3, "Block")
    else:
        del paths[3:], kinds[3:]
    run = run_with(paths, range(len(paths)), kinds)
    found = [name for name in shown(short(run, len(paths) - 1)) if "–" in name]
    assert found == []


def test_the_hottest_path_is_open_and_the_rest_is_added_up() -> None:
    paths = ["Net", *(f"Net.part{number}" for number in range(30)), "Net.part7.inner", "Net.part7.inner.deep"]
    run = run_with(paths, [0, *range(30), 1_000, 2_000], ["Net", *(f"Kind{number}" for number in range(32))])
    lines = short(run, 15)
    found = shown(lines)
    assert {"part7", "inner", "deep", "part29", "part21"} < {*found} and "part6" not in found
    rest = next(name for name in found if name.endswith("more)"))
    [count] = re.findall(r"\d+", rest)
    assert found[rest][0] == sum(number for number in range(30) if f"part{number}" not in found)
    assert int(count) == 30 - sum(name.startswith("part") for name in found)


@given(layer_trees(most=20), st.data(), st.integers(1, 12))
def test_totals_below_an_open_layer_add_up_as_in_the_whole_tree(paths: Paths, data: st.DataObject, limit: int) -> None:
    ns = data.draw(st.lists(st.integers(0, 1000), min_size=len(paths), max_size=len(paths)))
    kinds = data.draw(st.lists(st.sampled_from("AB"), min_size=len(paths), max_size=len(paths)))
    run = run_with([".".join(path) for path in paths], ns, kinds)
    lines = short(run, limit)
    assert len([*all_entries(lines)]) <= max(limit, 1)
    for line in all_entries(lines):
        if line.children:
            below = sum(child.figures.cost(FORWARD).cpu_ns for child in line.children)
            assert below == line.figures.cost(FORWARD).cpu_ns - line.figures.cost(FORWARD, True).cpu_ns
    # Every layer is in a row of its own, in the sum of equal ones, or hidden below one that says how many.
    represented = sum(max(1, len(line.parts)) + line.hidden for line in all_entries(lines) if line.path)
    rest = sum(line.hidden for line in all_entries(lines) if not line.path)
    assert represented + rest == len(paths)


def test_a_label_in_equal_layers_is_one_row_with_its_sum() -> None:
    paths = ["Net", *(path for block in range(4) for path in (f"Net.{block}", f"Net.{block}.attn"))]
    rows = [row(2 + 2 * block, label("core"), cpu_ns=10**block) for block in range(4)]
    layers = [Layer(tuple(path.split(".")), "Block") for path in paths]
    [net] = short(run_of(rows, layers=layers), 6)
    [blocks] = net.children
    [attn] = blocks.children
    [core] = attn.ops
    assert (blocks.name, core.name) == ("0–3", "core (label)")
    assert (core.figures.cost(FORWARD).cpu_ns, core.figures.calls) == (1111, 4)


def test_a_selected_layer_is_shown_below_layers_that_were_not_selected() -> None:
    paths = ["Net", *(f"Net.part{number}" for number in range(60)), "Net.part50.inner"]
    layers = [Layer(tuple(path.split(".")), f"Kind{number}") for number, path in enumerate(paths)]
    run = run_of([row(61, cpu_ns=99)], layers=layers, paths=(("Net", "part50", "inner"),))
    found = shown(short(run, 20))
    assert found["inner"] == (99, 0) and "part50" in found
    rest = next(line for line in all_entries(short(run, 20)) if line.name.endswith("more)"))
    assert rest.figures.number_of_calls().bound is Bound.BLANK


# The report


class Deep(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def deep() -> Run:
    model = Deep(layers=nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(40))))
    x = torch.rand(4, 8)
    model(x)
    with torchprof.Profile(model, profile_memory=True, with_flops=True) as prof:
        for _ in range(3):
            model(x).sum().backward()
    return prof.run


def test_it_begins_with_the_verdict_and_the_five_largest_places(deep: Run) -> None:
    first, found, *others = deep.report("overview").split("\n\n")
    places = next(section for section in others if section.startswith("Where"))
    assert first.splitlines()[2] == deep.report("headline")
    assert found.startswith(("What would help", "No change was found"))
    assert places.splitlines()[:1] == ["Where the time goes"] and len(cells(places.partition("\n")[2])) >= 5
    assert not any(section.startswith("Where") for section in deep.report("overview", places=0).split("\n\n"))


def test_equal_blocks_are_a_row_with_their_class_and_the_spread_of_one(deep: Run) -> None:
    table = tree(deep.report("overview"))
    assert names(table)[:5] == [
        "Deep",
        "└── layers  Sequential",
        "└── 0–39  40 × Sequential",
        "├── 0  40 × Linear",
        "└── 1  40 × ReLU",
    ]
    headings = [cell.strip() for cell in table.splitlines()[0].split("|")]
    linear = dict(zip(headings, next(line for line in cells(table) if "× Linear" in line[0])))
    assert (linear["Number of Calls"], linear["Params"]) == ("120", "2.88 K")  # by hand: 40 × (8 × 8 + 8)
    assert linear["MACs"] == "30.72 K"  # 3 calls × 40 layers × 4 × 8 × 8
    assert re.fullmatch(r"median of 40: [\d.]+us \([\d.]+(us)?–[\d.]+(us|ms)\)", linear["CPU total of one"])


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_columns_that_do_not_fit_are_left_out_and_named(deep: Run, width: int) -> None:
    text = deep.report("overview", width=width, places=0)
    table = tree(text)
    rows = [line for line in table.splitlines() if " | " in line]
    whole = tree(deep.report("overview", places=0)).splitlines()[0].split(" | ")
    shown = {cell.strip() for cell in rows[0].split(" | ")}
    short = {cell.strip(): cell.strip().replace(" total", "").replace("Number of ", "") for cell in whole}
    left = [heading for heading in short if not {heading, short[heading]} & shown]
    assert "CPU" in shown
    assert not any(re.search(r"\.\d{3}(us|ms|s)\b", line) for line in rows), "times are short, too"
    if width >= 80:
        assert max(map(len, rows)) <= width
    assert ("No room for" in table) == bool(left) and all(heading in table for heading in left)


def test_one_call_is_said_in_the_first_lines() -> None:
    model, x = nn.Linear(2, 2), torch.rand(1, 2)
    with torchprof.Profile(model) as once:
        model(x)
    first, *_ = once.run.report("overview").partition("\n\nWhere")
    assert "\n\nOne call was recorded" in first
    with torchprof.Profile(model) as twice:
        model(x)
        model(x)
    assert "One call" not in twice.run.report("overview")


def test_in_color_each_figure_is_as_without(deep: Run) -> None:
    colored = deep.report("overview", color=True)
    assert "\033[" in colored and re.sub(r"\033\[[\d;]*m", "", colored).split() == deep.report("overview").split()

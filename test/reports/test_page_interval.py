"""An interval of the timeline on the page, in a browser: its figures are those of the spans in it."""

from __future__ import annotations

import csv
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from build.hand_made import kernel, label, row, run_of
from build.page import choice
from build.traced_runs import A100, MI250, NEEDS_TRACES
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchprof import Profile, Run, from_trace, merge
from torchprof.reports.page import tables
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.meta import RunWarning
from torchprof.run.timeline import KINDS, Lane, Spans, Timeline
from torchprof.run.words import LAUNCHED_BEFORE, NOT_SELECTED, OUTSIDE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

COPIED = """() => {
  let text = "";
  document.execCommand = () => { text = document.querySelector("textarea").value; return true; };
  document.querySelector("button.copy").click();
  return text;
}"""


RESTRICTED = """(time) => {
  const choices = new URLSearchParams(location.hash.slice(1));
  choices.set("time", time);
  location.hash = choices.toString();
}"""


def table(page: Page) -> dict[str, dict[str, int | None]]:
    """The figures of the table of layers in ns, by layer and heading. None: unknown."""
    [header, *lines] = csv.reader(StringIO(page.evaluate(COPIED)))
    rows = {line[0]: dict(zip(header[1:-1], line[1:])) for line in lines if ", " not in line[0]}  # without labels
    return {
        layer: {name: int(float(cell)) if cell else None for name, cell in row.items()} for layer, row in rows.items()
    }


def times(figures: dict[str, int | None]) -> dict[str, int]:
    """The CPU time by phase in a row."""
    lead = {"CPU total (ns)": "forward", "Backward CPU total (ns)": "backward", "Recompute CPU total (ns)": "recompute"}
    return {lead[name]: ns or 0 for name, ns in figures.items() if name in lead}


def outside(page: Page) -> str:
    """The chosen measure of work of no layer, in all phases."""
    text: str = page.locator(".lines .line", has_text="(outside)").locator(".number").first.inner_text()
    return text


def restrict(page: Page, first_ns: int, last_ns: int) -> None:
    page.evaluate(RESTRICTED, f"{first_ns}-{last_ns}")
    page.locator("button.interval").wait_for()


def net(
    spans: Sequence[tuple[int, ...]], lanes: Sequence[Lane], names: Sequence[str], rows: Sequence[tuple], **meta: Any
) -> Run:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), "Linear"), Layer(("Net", "b"), "Conv1d")]
    columns = {name: array("q", column) for name, column in zip(Spans.COLUMNS, zip(*spans))}
    found = Spans(tuple(lanes), tuple(names), columns, (0, 500_000, 1_000_000))
    run = run_of(rows, layers=layers, measured=MEASURED, requested=MEASURED, device="cuda", **meta)
    return replace(run, timeline=Timeline.of_spans(found, 0))


US = 1000
MEASURED = ("cpu_ns", "device_ns", "flops")
SPANS = [
    # start, end, lane, layer, phase, name
    (0, 800 * US, 0, 0, 0, -1),
    (100 * US, 300 * US, 0, 1, 0, -1),
    (300 * US, 700 * US, 0, 2, 0, -1),
    (350 * US, 600 * US, 0, 2, 0, 0),
    (400 * US, 900 * US, 1, 2, 0, 1),
    (850 * US, 1000 * US, 0, 2, 1, -1),
]
ROWS = [
    *(row(at, calls=1, cpu_ns=1000, flops=5) for at in range(3)),
    *(row(at, cpu_ns=10, phase="backward") for at in (-1, 2)),
    row(-1, cpu_ns=1),
    row(2, kernel("gemm"), device="cuda:0", device_ns=9),
]


def by_hand() -> Run:
    return net(SPANS, (Lane("cpu", 1), Lane("cuda:0", 1)), ("mine", "gemm"), ROWS)


def test_figures_of_an_interval_by_hand(look: Callable[..., Page]) -> None:
    """From 600 to 900 us: Net runs until 800, 100 of it in b; then nothing for 50; then backward of b for 50. A kernel
    of b runs all the time. One call begins before it: there are none in it."""
    page = look(by_hand())
    whole = table(page)
    restrict(page, 600 * US, 900 * US)
    found = table(page)
    assert {layer: times(figures) for layer, figures in found.items()} == {
        "Net": {"forward": 200 * US, "backward": 50 * US},
        "Net.a": {"forward": 0, "backward": 0},
        "Net.b": {"forward": 100 * US, "backward": 50 * US},
        "(outside)": {"forward": 0, "backward": 0},  # unknown
    }
    choice(page, "CPU time").click()
    assert outside(page) == "50.000us"
    assert [found[name]["Self CPU total (ns)"] for name in ("Net", "Net.b")] == [100 * US, 100 * US]
    assert found["Net.b"]["Self CUDA total (ns)"] == found["Net"]["CUDA total (ns)"] == 300 * US
    assert [figures["Number of Calls"] for figures in found.values()] == [0, 0, 0, None]
    assert page.locator("button.interval").inner_text() == "600.000us to 900.000us ×"
    assert page.evaluate(COPIED).startswith('"Module, 600.000us to 900.000us",')
    page.locator("button.interval").click()
    assert table(page) == whole and page.locator("button.interval").count() == 0


def test_a_measure_without_spans_gives_way_to_a_time(look: Callable[..., Page]) -> None:
    page = look(by_hand())
    choice(page, "FLOPs").click()
    restrict(page, 0, 500 * US)
    assert page.locator(".choice").get_by_role("button", name="FLOPs").count() == 0
    caption = page.locator("p.caption").inner_text()
    assert caption == "Width: CUDA time, forward, backward, in step 1 of the timeline; the whole is 100.000us."
    assert "FLOPs" not in page.locator(".treetable .head").inner_text()
    page.locator("button.interval").click()
    assert page.locator("p.caption").inner_text().startswith("Width: FLOPs")


def test_labels_and_kernels_of_a_layer_in_an_interval(look: Callable[..., Page]) -> None:
    """A label from 350 to 600 us with another one in it from 400 to 550, and a wait in that; from 380 us on."""
    inner = [(400 * US, 550 * US, 0, 2, 0, 2), (500 * US, 540 * US, 0, 2, 0, 3)]
    names = ("mine", "gemm", "inner", "(waits for autograd)")
    labels = [row(2, label(name), cpu_ns=1) for name in ("mine", "inner")]
    spans = sorted([*SPANS, *inner], key=lambda span: (span[0], -span[1]))
    page = look(net(spans, (Lane("cpu", 1), Lane("cuda:0", 1)), names, [*ROWS, *labels]))
    restrict(page, 380 * US, 700 * US)
    page.locator(".line", has_text="Conv1d").click()  # with the time of the device chosen: of labels it is not known
    rows = [page.locator(".panel .sheet").nth(number).locator("tbody tr") for number in range(2)]
    [labels_, kernels] = [[row.split("\t") for row in of_sheet.all_inner_texts()] for of_sheet in rows]
    assert [[cell.strip() for cell in row] for row in labels_] == [
        ["inner (label)", "1", "110.000us", "150.000us"],
        ["mine (label)", "", "70.000us", "220.000us"],  # it began before
        ["(waits for autograd)", "1", "40.000us", "40.000us"],
    ]
    assert [[cell.strip() for cell in row] for row in kernels] == [["gemm", "300.000us", "1"]]
    assert page.locator(".panel h4").all_inner_texts() == ["Labels", "Kernels"]
    assert "One forward call" not in page.locator(".panel").inner_text()


def test_other_threads_have_only_their_spans(look: Callable[..., Page]) -> None:
    """As backward on a device, which has a thread of its own: between two passes it has nothing to do."""
    lanes = [Lane("cpu", 1), Lane("cpu", 2)]
    spans = [(0, 100, 0, 0, 0, -1), (100, 300, 0, -1, 0, 0), (150, 250, 1, 2, 1, -1), (700, 800, 1, 1, 1, -1)]
    page = look(net([*spans, (900, 1000, 0, 0, 0, -1)], lanes, ("(waits for autograd)",), ROWS))
    restrict(page, 0, 950)
    found = {layer: times(figures) for layer, figures in table(page).items()}
    assert found["Net"] == {"forward": 150, "backward": 200}
    choice(page, "CPU time").click()
    assert outside(page) == "0.800us", "the wait, and the time of the first thread from 300 to 900"


def test_in_inference_the_phase_of_all_work_is_known(look: Callable[..., Page]) -> None:
    page = look(net(SPANS[:5], (Lane("cpu", 1), Lane("cuda:0", 1)), ("mine", "gemm"), [*ROWS[:3], *ROWS[5:]]))
    restrict(page, 0, 850 * US)
    assert times(table(page)["(outside)"]) == {"forward": 50 * US}


UNKNOWN_IN_SPANS = {
    # What spans do not say → the run, and the figures in it from 300 to 500 us: those of CPU and CUDA, "–" for unknown.
    "kernels launched before": (
        {"rows": [row(OUTSIDE, label(LAUNCHED_BEFORE), kernel("old"), device="cuda:0", device_ns=7)]},
        {"(outside)": ("0.000us", "–"), "Net": ("200.000us", "100.000us"), LAUNCHED_BEFORE: ("0.000us", "–")},
    ),
    "layers that were not selected": (
        {"rows": [row(NOT_SELECTED, cpu_ns=5)], "paths": (("Net",), ("Net", "b"))},
        {"(outside)": ("–", "0.000us"), "(not selected)": ("–", "0.000us"), "Net": ("200.000us", "100.000us")},
    ),
}


@pytest.mark.parametrize("what", UNKNOWN_IN_SPANS)
def test_what_spans_do_not_say_is_unknown(what: str, look: Callable[..., Page]) -> None:
    meta, expected = UNKNOWN_IN_SPANS[what]
    rows = [*ROWS, *meta["rows"]]
    meta = {name: value for name, value in meta.items() if name != "rows"}
    page = look(net(SPANS, (Lane("cpu", 1), Lane("cuda:0", 1)), ("mine", "gemm"), rows, **meta))
    restrict(page, 300 * US, 500 * US)
    for number, measure in enumerate(("CPU time", "CUDA time")):
        choice(page, measure).click()
        for name, texts in expected.items():
            line = page.locator(".lines .line").filter(has=page.locator(f".name[title='{name}']"))
            assert line.locator(".number").first.inner_text() == texts[number], (name, measure)


def test_work_after_the_last_span_of_a_thread_is_of_no_layer_until_the_last_step(look: Callable[..., Page]) -> None:
    """Kernels may run longer than the thread: from 1.2 to 1.5 ms there is nothing to count on it."""
    spans = [*SPANS[:4], (400 * US, 1500 * US, 1, 2, 0, 1), SPANS[5]]
    page = look(net(spans, (Lane("cpu", 1), Lane("cuda:0", 1)), ("mine", "gemm"), ROWS))
    restrict(page, 900 * US, 1400 * US)
    choice(page, "CPU time").click()
    assert outside(page) == "0.000us", "backward of b until 1 ms, where the last step ends"
    assert table(page)["Net.b"]["CUDA total (ns)"] == 500 * US


def test_calls_of_a_layer_without_all_its_spans_are_a_lower_bound(look: Callable[..., Page]) -> None:
    """Calls on threads that were not recorded: the run has them from elsewhere, and its times are lower bounds."""
    warning = RunWarning.of("calls_not_recorded", ["Net.b"], calls=4)
    page = look(net(SPANS, (Lane("cpu", 1), Lane("cuda:0", 1)), ("mine", "gemm"), ROWS, warnings=(warning,)))
    line = page.locator(".lines .line", has_text="Conv1d")
    assert "≥" in line.inner_text()
    restrict(page, 0, 900 * US)
    column = [text.strip() for text in page.locator(".head .cell").all_inner_texts()].index("Number of Calls") - 1
    assert line.locator(".number").nth(column).inner_text() == "≥ 1"


def test_layers_in_compiled_code_have_unknown_times_on_a_thread(look: Callable[..., Page]) -> None:
    """Calls of b in it are in no span: its time is unknown, and so is what Net has without it."""
    run = net(SPANS[:2], [Lane("cpu", 1)], (), [row(0, cpu_ns=9), row(1, cpu_ns=9), row(2, cpu_ns=9, calls=0)])
    layers = (*run.layers[:2], replace(run.layers[2], compiled=True))
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    restrict(page, 0, 300 * US)
    found = {name: (row["Self CPU total (ns)"], row["CPU total (ns)"]) for name, row in table(page).items()}
    assert found == {"Net": (None, 300 * US), "Net.a": (200 * US, 200 * US), "Net.b": (None, None)}
    above = replace(run.layers[0], compiled=True)  # and what is around all of it is outside of layers
    rows = [row(at, cpu_ns=9, calls=0) for at in range(3)]
    run = net(SPANS[1:2], [Lane("cpu", 1)], (), [*rows, row(OUTSIDE, cpu_ns=9)])
    layers = (above, *(replace(layer, compiled=True) for layer in run.layers[1:]))
    page = look(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))
    restrict(page, 0, 300 * US)
    assert table(page)["(outside)"]["CPU total (ns)"] is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.fixture(scope="module")
def trained() -> Run:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with Profile(model, with_timeline=True, profile_memory=True) as prof:
        for _ in range(3):
            model(torch.rand(256, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return prof.run


def test_an_interval_of_all_has_the_figures_of_the_run(look: Callable[..., Page], trained: Run) -> None:
    """All but its last nanosecond. In forward and recompute each figure is that of the run; in backward that of each
    innermost layer is, and modules have the engine's time between their layers in addition."""
    assert trained.timeline is not None and trained.timeline.spans is not None
    spans = trained.timeline.spans
    end = max(*spans.columns["end_ns"], *spans.steps, *trained.timeline.columns["time_ns"])
    page = look(trained)
    whole = table(page)
    restrict(page, 0, end - 1)
    found = table(page)
    assert [*found] == [*whole]
    for name, figures in whole.items():
        for heading, ns in figures.items():
            is_exact = "Backward" not in heading or not any(other.startswith(f"{name}.") for other in whole)
            if heading.endswith("(ns)") and name != "(outside)":
                shown = found[name][heading] or 0
                assert shown == (ns or 0) if is_exact else shown >= (ns or 0), (name, heading)
            if heading == "Number of Calls":
                assert found[name][heading] == ns
    [net, of_none] = [times(whole[name]) for name in ("Net", "(outside)")]
    engine = times(found["Net"])["backward"] - net["backward"]
    assert 0 < engine < of_none["backward"], "it is outside of all layers in the run"
    wall = format_time(end - 1)
    assert f"the whole is {wall}." in page.locator("p.caption").inner_text(), "all ran on one thread"
    assert outside(page) == str(format_time(end - 1 - sum(times(found["Net"]).values())))


def test_a_step_is_complete_and_a_click_on_it_restricts_the_page(look: Callable[..., Page], trained: Run) -> None:
    """The figures of a step add up to its duration, since all ran on one thread; those of the steps to all of them."""
    assert trained.timeline is not None and trained.timeline.spans is not None
    steps = trained.timeline.spans.steps
    page = look(trained)
    sums: Counter[str] = Counter()
    for number, (start, end) in enumerate(pairwise(steps), 1):
        page.locator("header [data-link]").nth(number - 1).dispatch_event("click")
        assert page.locator("button.interval").inner_text() == f"step {number} ×"
        assert page.locator("header .chosen").get_attribute("data-link") == str(number - 1)
        found = table(page)
        assert outside(page) == str(format_time(end - start - sum(times(found["Net"]).values())))
        assert f"the whole is {format_time(end - start)}." in page.locator("p.caption").inner_text()
        assert found["Net"]["Number of Calls"] == 1
        sums.update({name: figures["Self CPU total (ns)"] or 0 for name, figures in found.items()})
    page.locator("button.interval").click()
    own = {name: figures["Self CPU total (ns)"] for name, figures in table(page).items()}
    assert {**own, "(outside)": 0} == {**sums, "(outside)": 0}
    page.locator(".step-mark [data-step]").first.click()
    assert page.locator("button.interval").inner_text() == "step 1 ×"
    page.go_back()
    assert page.locator("button.interval").count() == page.locator("header .chosen").count() == 0


def test_memory_at_the_highest_point_of_an_interval(look: Callable[..., Page], trained: Run) -> None:
    """From all allocations and frees until then, added up."""
    timeline = trained.timeline
    assert timeline is not None and timeline.spans is not None
    [start, end] = timeline.spans.steps[1:3]
    columns = [*zip(*(timeline.columns[name] for name in ("time_ns", "nbytes", "layer", "kind")))]
    levels = {0: 0}
    for number, (_, nbytes, _, _) in enumerate(columns, 1):
        levels[number] = levels[number - 1] + nbytes
    inside = [number for number, (time, *_) in enumerate(columns, 1) if start <= time <= end]
    last = max(inside, key=lambda number: (levels[number], -number))
    live: Counter[tuple[str, str]] = Counter()
    for _, nbytes, layer, kind in columns[:last]:
        live[trained.layers.name_of(layer), KINDS[kind] if kind >= 0 else "unknown"] += nbytes
    page = look(trained)
    restrict(page, start, end)
    said = page.locator(".live p").inner_text()
    assert f"at most {format_memory(levels[last])} above the start" in said
    assert f"{format_time(columns[last - 1][0])} after it." in said
    if page.locator(".live button.more").is_visible():
        page.locator(".live button.more").click()
    rows = page.locator(".live tbody tr")
    found = {tuple(cell.strip() for cell in rows.nth(at).locator("td").all_inner_texts()) for at in range(rows.count())}
    assert found == {(*key, str(format_memory(nbytes))) for key, nbytes in live.items() if nbytes > 0}
    freed = -sum(nbytes for nbytes in live.values() if nbytes < 0)
    assert (f"{format_memory(freed)} of what was live at the start" in said) == (freed > 0)


@pytest.mark.parametrize("missing", ["dropped", "left out"])
def test_without_some_spans_figures_stay_those_of_the_run(
    missing: str, look: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = by_hand()
    assert run.timeline is not None and run.timeline.spans is not None
    if missing == "dropped":
        run = replace(run, timeline=Timeline.of_spans(replace(run.timeline.spans, dropped=3), 0))
    else:
        monkeypatch.setattr(tables, "_MOST_SPANS", 4)
    page = look(run)
    whole = table(page)
    page.evaluate(RESTRICTED, f"{600 * US}-{950 * US}")
    status = page.locator("#timeline .status", has_text="Shown: 350.000us")
    assert "So the figures of the page stay those of the whole run." in status.inner_text()
    assert table(page) == whole and page.locator("button.interval").count() == 0


def test_memory_is_left_out_if_its_allocations_are_not_all_there(look: Callable[..., Page], trained: Run) -> None:
    assert trained.timeline is not None
    page = look(replace(trained, timeline=replace(trained.timeline, dropped=1)))
    restrict(page, 1000, 20_000_000)
    assert "not on this page" in page.locator(".live").inner_text() and page.locator(".memory-line").count() == 1


def test_an_interval_is_of_the_rank_of_the_timeline(look: Callable[..., Page]) -> None:
    run = by_hand()
    other = run_of([row(at, cpu_ns=7, rank=1) for at in range(3)], layers=[*run.layers], rank=1)
    page = look(merge([run, other]))
    assert page.locator("select.source").input_value() == "-1"
    restrict(page, 600 * US, 900 * US)
    assert page.locator("select.source").input_value() == "0"
    page.locator("button.interval").click()
    assert page.locator("select.source").input_value() == "-1", "all ranks, as before"
    restrict(page, 600 * US, 900 * US)
    page.locator("select.source").select_option("1")
    assert page.locator("button.interval").count() == 0 and page.locator("select.source").input_value() == "1"


@NEEDS_TRACES
def test_a_trace_without_layers_has_its_timeline(look: Callable[..., Page]) -> None:
    run = from_trace(MI250, with_timeline=True)
    assert not run.layers
    page = look(run)
    assert page.locator(".tracks").count() == 1
    page.locator("header [data-link]").first.dispatch_event("click")
    assert page.locator("button.interval").inner_text() == "step 1 ×"


@NEEDS_TRACES
def test_an_interval_of_a_trace_of_a_gpu_has_the_figures_of_the_run(look: Callable[..., Page]) -> None:
    """Kernels, and the forward of the thread that launches them; backward has a thread of its own."""
    run = from_trace(A100, with_timeline=True)
    assert run.timeline is not None and run.timeline.spans is not None
    page = look(run)
    whole = table(page)
    restrict(page, 0, max(run.timeline.spans.columns["end_ns"]) - 1)
    found = table(page)
    for name in [*whole][:-1]:  # work of no layer is also before and after the spans
        assert found[name]["Number of Calls"] == whole[name]["Number of Calls"]
        for heading in ("Self CUDA total (ns)", "CUDA total (ns)", "Backward CUDA total (ns)", "CPU total (ns)"):
            assert found[name][heading] == whole[name][heading], (name, heading)
        [backward, of_run] = [times(each[name])["backward"] for each in (found, whole)]
        assert backward == pytest.approx(of_run, rel=0.001)

"""The verdict: what ran, the parts of its time, what would help."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build.hand_made import FORWARD, kernel, label, op, row, run_of
from build.page import data_in
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchprof
from torchprof import Run
from torchprof.advise import Advice
from torchprof.analyze import compiled
from torchprof.analyze.compiled_regions import PhaseOfRegion, RegionUse
from torchprof.analyze.sentences import throughput
from torchprof.analyze.steps import device_parts, percents, time_parts
from torchprof.analyze.top import largest_parts
from torchprof.first_screen import verdict
from torchprof.first_screen.verdict import lines_of_run, parts_of_time, what_ran, what_would_help
from torchprof.reports.documents import text_of
from torchprof.run.formats import short_time
from torchprof.run.layers import Layer
from torchprof.run.measures import Cost, SampleKey, Spread
from torchprof.run.meta import Peak
from torchprof.run.words import BACKWARD, COMPILING, GRAPH, OUTSIDE, Frame, FrameKind

MS = 1_000_000


def lines(run: Run) -> list[str]:
    return run.report("overview", width=100).partition("\n\nModule")[0].splitlines()


# What ran


def of_calls(ms: list[int], **of_layer: Any) -> Run:
    layer = Layer(("Net",), "Net", 1500, **of_layer)
    run = run_of([row(0, calls=len(ms), cpu_ns=sum(ms) * MS)], layers=[layer], wall_ns=2 * sum(ms) * MS)
    times = Spread.of([*enumerate(one * MS for one in ms)])
    return replace(run, samples={SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): times})


@pytest.mark.parametrize(
    "ms, said",
    [
        ([20], "1 forward call of Net: 20ms"),
        ([10, 20, 30], "3 forward calls of Net: median 20ms (10–30ms)"),
        ([10, 20, 1500], "3 forward calls of Net: median 20ms (10ms–1.5s)"),
        ([10, 20, 30] * 7, "21 forward calls of Net: median 20ms, 90% in 10–30ms"),
        ([20] * 38 + [1, 900], "40 forward calls of Net: median 20ms, 90% in 20–20ms"),
    ],
)
def test_the_time_of_a_call(ms: list[int], said: str) -> None:
    assert what_ran(of_calls(ms)) == f"{said} · 1.50 K parameters"


@pytest.mark.parametrize("counts, said", [((3, 3), "3 steps each"), ((3, 2), "5 steps")])
def test_steps_of_several_ranks(counts: tuple[int, int], said: str) -> None:
    run = run_of([row(0, cpu_ns=5)], wall_ns=9, steps=3)
    keys = (SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns") for rank in (0, 1))
    spreads = (Spread.of([(at, 20 * MS) for at in range(count)]) for count in counts)
    ranks = replace(run, metas=(run.meta, replace(run.meta, rank=1)), samples=dict(zip(keys, spreads)))
    assert what_ran(ranks).startswith(f"2 ranks, {said}: median 20ms (20–20ms)")


@pytest.mark.parametrize(
    "busy_ms, said", [(180, "50ms (50–50ms) on the CPU, which runs ahead of CUDA: 60ms"), (150, "50ms (50–50ms)")]
)
def test_steps_are_shorter_on_a_cpu_that_runs_ahead_of_its_device(busy_ms: int, said: str) -> None:
    """Each of 3 steps launches kernels of 80 ms; kernels at once count once. As much ran before the steps."""
    cuda: dict[str, Any] = {"device": "cuda", "requested": ("cpu_ns", "device_ns"), "measured": ("cpu_ns", "device_ns")}
    kernels = row(0, op("a"), kernel("k"), device="cuda:0", device_ns=(240 + 240) * MS)
    busy = (("cpu", 150 * MS), ("cuda:0", 2 * busy_ms * MS))
    run = run_of([row(0, cpu_ns=150 * MS), kernels], wall_ns=900 * MS, steps=3, busy_ns=busy, **cuda)
    key = SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")
    of_device = [SampleKey(layer, FORWARD, 0, "cuda:0", "step_device_ns") for layer in (OUTSIDE, 0, 1)]
    # Of the 80 ms, 50 are in no layer, and 30 in the model; 20 of these are in the layer below it.
    samples = {key: 50, **dict(zip(of_device, (50, 30, 20)))}
    run = replace(run, samples={key: Spread.of([(n, ms * MS) for n in range(3)]) for key, ms in samples.items()})
    assert what_ran(run) == f"3 steps: median {said}"
    assert ("In a long loop, a step takes no less." in run.report("steps")) == (busy_ms == 180)


@pytest.mark.parametrize(
    "of_layer, said",
    [
        ({"input_shapes": ((8, 4),), "same_shapes": True}, "200 samples/s over 120ms"),  # 8 × 3 in 120 ms
        ({"input_shapes": ((8, 3, 4),), "same_shapes": True}, ""),  # or 8 points in time of 3 samples
        ({"input_shapes": ((8, 4),), "same_shapes": False}, ""),
        ({"input_shapes": ((8, 4),)}, ""),
        ({"input_shapes": ((8,),), "same_shapes": True}, ""),
        ({"input_shapes": ((-1, 4),), "same_shapes": True}, ""),
    ],
)
def test_the_rate_is_shown_where_the_batch_is_known(of_layer: dict[str, Any], said: str) -> None:
    found = what_ran(of_calls([10, 20, 30], **of_layer))
    assert [part for part in found.split(" · ") if "/s" in part] == ([said] if said else [])
    assert (", input shapes differ" in found) == (of_layer.get("same_shapes") is False)


def test_tokens_are_those_of_an_embedding_and_a_batch_may_not_be_first() -> None:
    def ran(model: nn.Module, x: torch.Tensor) -> str:
        model(x)
        with torchprof.Profile(model) as prof:
            model(x)
            model(x)
        if (rate := re.search(r"([\d,.]+) (\w+)/s", what_ran(prof.run))) is None:
            return ""
        number, count = float(rate[1].replace(",", "")), x.numel() if rate[2] == "tokens" else len(x)
        assert number == pytest.approx(2 * count * 1e9 / prof.run.meta.wall_ns, rel=0.01)
        return rate[2]

    assert ran(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), torch.ones(3, 5, dtype=torch.long)) == "tokens"
    assert ran(nn.Sequential(nn.Linear(4, 4)), torch.rand(3, 4)) == "samples"
    assert ran(nn.LSTM(4, 4), torch.rand(7, 3, 4)) == ""


def test_macs_and_the_peak_are_in_the_line_where_they_were_recorded() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
    with torchprof.Profile(model, with_flops=True, profile_memory=True) as prof:
        for _ in range(2):
            model(torch.rand(512, 64))
    said = what_ran(prof.run).split(" · ")
    assert "16.64 K parameters" in said and "8.39 M MACs a call" in said  # 512 × 64 × 256
    assert re.fullmatch(r"cpu peak \+[\d.]+ [KM]B, \d+% of it in .+", said[-1])


def test_the_mfu_is_in_the_line_if_the_peak_was_measured() -> None:
    """2 · 4 · 1000 FLOPs in 20 us are 0.4 GFLOP/s: a quarter of the peak."""
    counted = ("cpu_ns", "macs", "flops")
    layers = [Layer(("Net",), "Net")]
    rows = [row(0, op("aten::mm", (2, 4), dtypes=("float",)), calls=1, cpu_ns=9000, macs=4000, flops=8000)]
    run = run_of(rows, layers=layers, measured=counted, requested=counted, wall_ns=20_000)
    assert "MFU" not in what_ran(run)
    peaks = (Peak("cpu", "float32", 1, 1.6e9, 1e9),)
    assert "MFU 25.0%" in what_ran(replace(run, metas=(replace(run.meta, peaks=peaks),))).split(" · ")


@pytest.mark.parametrize("ns, text", [(950, "0.95us"), (81_234, "81.2us"), (812_345, "812us"), (2.5e9, "2.5s")])
def test_short_times_have_three_digits(ns: float, text: str) -> None:
    assert short_time(ns) == text


# The parts


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**9), max_size=8))
def test_percents_add_up_to_100_and_are_within_one_of_the_truth(parts: dict[str, int]) -> None:
    found, whole = percents(parts), sum(parts.values())
    assert sum(found.values()) == (100 if whole else 0)
    assert all(abs(found.get(name, 0) - 100 * ns / whole) < 1 for name, ns in parts.items() if whole)


def test_the_parts_of_a_run_are_all_of_its_time() -> None:
    work = [
        row(0, calls=1, cpu_ns=5 * MS),
        row(1, op("aten::mm"), cpu_ns=15 * MS),
        row(1, op("aten::mm"), phase=BACKWARD, cpu_ns=25 * MS),
        row(1, op("aten::mm"), phase="recompute", cpu_ns=10 * MS),
        row(OUTSIDE, op("x"), phase=BACKWARD, cpu_ns=5 * MS),
        row(OUTSIDE, label("enumerate(DataLoader)#x"), op("aten::stack"), cpu_ns=20 * MS),
        row(OUTSIDE, label("Optimizer.step#SGD.step"), cpu_ns=6 * MS),
        row(OUTSIDE, label("Optimizer.zero_grad#SGD.zero_grad"), cpu_ns=4 * MS),
        row(OUTSIDE, cpu_ns=7 * MS),
        row(OUTSIDE, op("aten::mse_loss"), cpu_ns=3 * MS),
    ]
    run = run_of(work, wall_ns=100 * MS)
    assert list(parts_of_time(run)) == [
        "data 20% · forward 20% · recompute 10% · backward 30% · optimizer 10% · other 10%"
    ]
    assert sum(time_parts(run, "cpu_ns").values()) == sum(run.rows.columns["cpu_ns"])


def test_the_parts_of_a_real_run_add_up_to_its_rows() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchprof.Profile(model) as prof:
        for x in torch.utils.data.DataLoader(torch.rand(8, 8), batch_size=4):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    parts = time_parts(prof.run, "cpu_ns")
    assert sum(parts.values()) == sum(prof.run.rows.columns["cpu_ns"])
    assert {*parts} >= {"data", "forward", "backward", "optimizer", "other"}


@pytest.mark.parametrize(
    "ms, said",
    [
        ([40, 10, 10, 20], "first call 40% · later calls 40% · other 20%"),
        ([19, 10, 10, 41], "forward 80% · other 20%"),
        ([80], "forward 80% · other 20%"),
    ],
)
def test_a_long_first_call_is_a_part_of_inference(ms: list[int], said: str) -> None:
    run = of_calls(ms)
    rows = run_of([row(0, calls=len(ms), cpu_ns=80 * MS), row(OUTSIDE, cpu_ns=20 * MS)], wall_ns=100 * MS)
    run = replace(rows, samples=run.samples)
    assert [*parts_of_time(run)] == [said]
    training = run_of([row(0, cpu_ns=80 * MS), row(0, op("x"), phase=BACKWARD, cpu_ns=20 * MS)], wall_ns=100 * MS)
    assert [*parts_of_time(replace(training, samples=run.samples))] == ["forward 80% · backward 20%"]


def test_what_torch_compile_did_is_said() -> None:
    region, graph = Frame(FrameKind.REGION, "0/0"), Frame(FrameKind.OP, GRAPH)
    work = [
        row(0, calls=1, cpu_ns=20 * MS),
        row(0, region, cpu_ns=10 * MS),
        row(0, region, graph, cpu_ns=5 * MS),
        row(0, region, graph, op("extern"), cpu_ns=45 * MS),
        row(0, Frame(FrameKind.REGION, COMPILING), cpu_ns=20 * MS),
    ]
    assert lines_of_run(run_of(work, wall_ns=100 * MS))[1:] == [
        "torch.compile compiling 20% · forward 80%",
        "Compiled: 1 graph, 75% of the forward. 50ms of 60ms are in graphs, 10ms are torch.compile's own work.",
    ]


def test_the_time_of_a_device_has_its_idle_time() -> None:
    """Two kernels at once, 40 ms each, in 60 ms: the device works for 60 of 100 ms, half of it in each phase."""
    cuda: dict[str, Any] = {"device": "cuda", "requested": ("cpu_ns", "device_ns"), "measured": ("cpu_ns", "device_ns")}
    kernels = [
        row(1, op("a"), kernel("k"), device="cuda:0", device_ns=40 * MS),
        row(1, op("a"), kernel("k"), phase=BACKWARD, device="cuda:0", device_ns=40 * MS),
    ]
    run = run_of([row(0, cpu_ns=50 * MS), *kernels], wall_ns=100 * MS, busy_ns=(("cuda:0", 60 * MS),), **cuda)
    assert device_parts(run) == {"forward": 30 * MS, "backward": 30 * MS, "idle": 40 * MS}
    assert [*parts_of_time(run)] == ["CUDA: forward 30% · backward 30% · idle 40%", "CPU: forward 100%"]


def test_a_trace_whose_layers_are_only_ranges_has_no_parts() -> None:
    run = run_of([row(0, cpu_ns=5)], wall_ns=9)
    assert [*parts_of_time(replace(run, metas=(replace(run.meta, model=()),)))] == []


# What would help


def finding(ns: int | None, number: int = 0) -> Advice:
    sentences = f"Cause {number} is here.", "Use `this`."
    return Advice("Net.a", *sentences, ns, None, "mine", ("Net.a",), "More of it.", "Or that.")


def with_findings(monkeypatch: pytest.MonkeyPatch, *found: Advice) -> str:
    judged = torchprof.advise.Judgement([*found], {})
    monkeypatch.setattr(verdict, "judge", lambda run: judged)
    return text_of(what_would_help(run_of([row(0, cpu_ns=80 * MS)], wall_ns=100 * MS, steps=4)))


@pytest.mark.parametrize(("autocast", "times"), [("False", "1.6"), ("True", "2.0")])
def test_without_a_finding_the_largest_layers_are_compared_with_ordinary_values(autocast: str, times: str) -> None:
    """A call takes 8 ms; on ordinary values 5, under autocast 4."""
    rows = [row(0, op("aten::addmm"), calls=3, cpu_ns=24 * MS)]
    run = run_of(rows, layers=[Layer(("Net",), "Net")], wall_ns=24 * MS, switches=(("cpu_autocast", autocast),))
    key = SampleKey(0, FORWARD, 0, "cpu", "cpu_ns")
    again = {key._replace(measure="ordinary_ns"): 5, key._replace(measure="bfloat16_ns"): 4}
    samples = {name: Spread.of([(0, ms * MS)]) for name, ms in again.items()}
    run = replace(run, samples={key: Spread.of([*enumerate([8 * MS] * 3)]), **samples})
    said = text_of(what_would_help(run)).replace("\n", " ")
    assert (
        f"take 100% of it. Computed again alone, with 0.5 for all values, the largest layers are {times} times" in said
    )
    near = {name: Spread.of([(0, 7 * MS)]) for name in again}
    assert "alone" not in text_of(what_would_help(replace(run, samples={**run.samples, **near})))
    assert "alone" not in text_of(what_would_help(replace(run, samples={key: run.samples[key]})))


def test_what_would_help(monkeypatch: pytest.MonkeyPatch, golden: Callable[..., None]) -> None:
    """The three largest of 3 % and more; those of unknown gain last; without any, what bounds the run."""
    findings = {
        "40, 20, 10 and 8 % of the time": [finding(ms * MS, ms) for ms in (40, 20, 10, 8)],
        "3 and 2 %": [finding(3 * MS), finding(2 * MS)],
        "5 %, 2 % and unknown": [finding(5 * MS), finding(2 * MS), finding(None, 9)],
        "2 %": [finding(2 * MS)],
    }
    texts = {title: with_findings(monkeypatch, *found) for title, found in findings.items()}
    monkeypatch.setattr(verdict, "judge", lambda run: torchprof.advise.Judgement([], {}))
    rows = [row(0, cpu_ns=20 * MS), row(0, op("aten::linear"), op("aten::addmm"), cpu_ns=60 * MS)]
    golden(texts, {"none": text_of(what_would_help(run_of(rows, wall_ns=80 * MS)))})


def test_the_page_and_the_data_have_the_same_verdict() -> None:
    model = nn.Linear(512, 512).double()  # float64 costs half of the time
    x = torch.rand(512, 512).double()
    model(x).sum().backward()  # the first call has start-up costs
    with torchprof.Profile(model) as prof:
        model(x).sum().backward()
    text = prof.run.report("overview")
    page = data_in(prof.run.report("html"))
    assert page["ran"] == text.splitlines()[:2]
    assert page["help"] and all(cause.split(":")[0] in text for cause, *_ in page["help"])
    assert page["noHelp"] == "" and dict(page["largest"]).keys() >= {"Where the time goes"}
    data = prof.run.report("overview").data
    assert next(table["name"] for table in data["tables"]) == "findings"


def test_the_first_screen_with_two_long_findings_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 24 lines of 100 columns before the largest places."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    with torchprof.Profile(model) as prof:
        for _ in range(3):
            model(torch.rand(2, 16, 32)).sum().backward()
    long = finding(prof.run.meta.wall_ns // 2)._replace(cause="This is slow " * 20, action="Make it fast " * 20)
    monkeypatch.setattr(verdict, "judge", lambda run: torchprof.advise.Judgement([long, long], {}))
    monkeypatch.setattr(verdict, "about_times", lambda run: [])
    shown = lines(prof.run)
    shown = shown[: shown.index("Where the time goes")]
    assert sum(line.startswith("2. ") for line in shown) == 1
    assert sum(-(-max(len(line), 1) // 100) for line in shown) <= 24, "\n".join(shown)


@pytest.mark.parametrize("width", [90, 100, 140])
def test_the_largest_places_fit_the_width(width: int) -> None:
    names = ["Net", *(f"Net.some_quite_long_name.{at}.another_long_name" for at in range(3))]
    layers = [Layer(tuple(name.split(".")), f"AnExtraordinarilyLongClassName{at}") for at, name in enumerate(names)]
    work = ["autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0", "aten::mm"]
    rows = [row(at, op(work[at % 2]), cpu_ns=(at + 1) * MS) for at in range(4)]
    run = run_of(rows, layers=layers, wall_ns=20 * MS)
    [table] = map(text_of, largest_parts(run, 5, width=width))
    assert max(map(len, table.splitlines())) <= width
    assert len(table.splitlines()) == 2 + 4


def test_pythons_time_in_the_closure_of_an_optimizer_is_not_the_optimizers() -> None:
    """The closure sleeps for 20 ms in each step; Adam of a small layer takes less than one."""
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.rand(4, 16)).sum()
        loss.backward()
        time.sleep(0.02)
        return loss

    optimizer.step(closure)
    with torchprof.Profile(model) as prof:
        for _ in range(5):
            optimizer.step(closure)
    parts = time_parts(prof.run, "cpu_ns")
    assert parts["other"] >= 5 * 20 * MS > 2 * parts["optimizer"]
    assert sum(parts.values()) == prof.run.meta.wall_ns


def test_there_is_no_rate_where_a_step_has_several_calls() -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def rate(evaluations: int) -> str:
        with torchprof.Profile(model) as prof:
            for _ in range(6):
                model(torch.rand(4, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for _ in range(evaluations):
                        model(torch.rand(4, 16))
        return throughput(prof.run, 0)

    assert "samples/s" in rate(0) and rate(2) == ""


def test_code_that_is_compiled_for_an_optimizer_is_not_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of([row(1, op("aten::mm"), cpu_ns=5 * MS)], wall_ns=5 * MS)
    use = RegionUse(OUTSIDE, "0/0", calls=1, phases={FORWARD: PhaseOfRegion(graph=Cost(cpu_ns=MS))})
    monkeypatch.setattr(compiled, "compiled_in", lambda run: SimpleNamespace(uses=[use]))
    assert compiled.compiled_in_short(run) == ""
    monkeypatch.setattr(compiled, "compiled_in", lambda run: SimpleNamespace(uses=[replace(use, layer=1)]))
    assert compiled.compiled_in_short(run).startswith("Compiled: 1 graph, 20% of the forward.")

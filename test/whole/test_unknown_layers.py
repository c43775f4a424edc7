"""Runs with less information than live ones, such as traces without the model: the missing facts are unknown."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build.golden import drawn
from build.hand_made import kernel, label, op, row, run_of

import torchprof
from torchprof import Run, TorchprofError
from torchprof.advise import advise, judge
from torchprof.advise.python import UNKNOWN_REASON
from torchprof.cli import main
from torchprof.reports import known
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import Held, Lane, Memory, Spans, Timeline
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

if TYPE_CHECKING:
    from playwright.sync_api import Page

MB = 2**20
TIMES = ("cpu_ns", "device_ns")
ALL = (*TIMES, "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")
NODE = op("autograd::engine::evaluate_function: AddmmBackward0")


def unknown(*path: str, kind: str = "") -> Layer:
    """A layer with a known path, and perhaps a known class."""
    return Layer(
        path, kind, params=None, trainable_params=None, param_bytes=None, buffers=None, buffer_bytes=None, training=None
    )


def traced(
    rows: Sequence[Any],
    layers: tuple[Layer, ...] = (),
    samples: dict[SampleKey, Spread] | None = None,
    memory: tuple[Memory, ...] = (),
    timeline: Timeline | None = None,
    **meta: Any,
) -> Run:
    run = run_of(rows, **{"versions": (("torchprof", "9.9"),), **meta})
    return replace(
        run,
        metas=(replace(run.meta, model=()),),
        layers=layers,
        rows=replace(run.rows, layers=layers),
        samples=samples or {},
        memory=memory,
        timeline=timeline,
    )


def spread(*values: int) -> Spread:
    return Spread.of([(1000 * number, value) for number, value in enumerate(values)])


def on_device(**meta: Any) -> dict[str, Any]:
    return {"device": "cuda", "requested": TIMES, "measured": TIMES, **meta}


def without_layers(**meta: Any) -> Run:
    return traced(
        [
            row(OUTSIDE, op("aten::linear"), cpu_ns=1000, calls=3),
            row(OUTSIDE, op("aten::linear"), op("aten::addmm"), cpu_ns=4000, calls=3),
            row(OUTSIDE, NODE, phase=BACKWARD, cpu_ns=2000, calls=3),
        ],
        **meta,
    )


def without_layers_on_device(**meta: Any) -> Run:
    return traced(
        [
            row(OUTSIDE, op("aten::linear"), cpu_ns=1000, calls=3),
            row(OUTSIDE, op("aten::linear"), kernel("gemm"), device="cuda:0", device_ns=9000, calls=3),
            row(OUTSIDE, kernel("of unknown launch"), device="cuda:0", device_ns=100, calls=2),
        ],
        **on_device(busy_ns=(("cpu", 1000), ("cuda:0", 9100)), **meta),
    )


RANGES = (
    unknown("## forward ##"),
    unknown("## forward ##", "block 1.a/b <x>"),
    unknown("## forward ##", "block 1.a/b <x>", "é"),
    unknown("## forward ##", "head"),
    unknown("## backward ##"),
    unknown("Parallel.forward"),
)


def of_ranges(**meta: Any) -> Run:
    return traced(
        [
            row(0, cpu_ns=500, calls=2),
            row(1, cpu_ns=100, calls=2),
            row(2, cpu_ns=10, calls=4),
            row(2, op("aten::linear"), cpu_ns=4000, calls=4),
            row(3, cpu_ns=20, calls=2),
            row(3, op("aten::linear"), cpu_ns=3000, calls=2),
            row(4, cpu_ns=100, calls=2),
            row(4, op("aten::mul"), cpu_ns=700, calls=2),
            row(5, cpu_ns=60, calls=1),
            row(2, NODE, phase=BACKWARD, cpu_ns=2000, calls=3),
            row(OUTSIDE, op("aten::zero_"), cpu_ns=70, calls=1),
        ],
        RANGES,
        **meta,
    )


MODULES = (
    unknown("Net_0", kind="Net"),
    unknown("Net_0", "Linear_0", kind="Linear"),
    unknown("Net_0", "BatchNorm2d_0", kind="BatchNorm2d"),
    unknown("Net_0", "Dropout_0", kind="Dropout"),
)


def of_modules(**meta: Any) -> Run:
    """Everything that a trace can contain: memory, steps, FLOPs from shapes, a timeline."""
    linear = op("aten::linear", (2, 3), (4, 3))
    rows = [
        row(0, cpu_ns=500, calls=2),
        row(1, cpu_ns=100, calls=2),
        row(1, linear, cpu_ns=4000, calls=2, macs=24, flops=48, cpu_allocated=4096, cpu_freed=1024),
        row(1, linear, kernel("gemm"), device="cuda:0", device_ns=7000, calls=2),
        row(2, cpu_ns=100, calls=2),
        row(2, op("aten::batch_norm", (2, 3)), cpu_ns=900, calls=2, flops=10),
        row(3, cpu_ns=100, calls=2),
        row(3, op("aten::dropout"), cpu_ns=300, calls=2, uncounted=2),
        row(1, NODE, phase=BACKWARD, cpu_ns=2000, calls=2, macs=48, flops=96),
        row(OUTSIDE, label("Optimizer.step#SGD.step"), cpu_ns=70, calls=2),
    ]
    samples = {
        SampleKey(number, FORWARD, 0, "cpu", "cpu_ns"): spread(ns, ns)
        for number, ns in enumerate((3000, 2050, 500, 200))
    }
    samples |= {
        SampleKey(1, FORWARD, 0, "cpu", "peak_bytes"): spread(4096, 2048),
        SampleKey(1, FORWARD, 0, "cpu", "kept_bytes"): spread(512, 512),
        SampleKey(0, FORWARD, 0, "cpu", "step_cpu_ns"): spread(3000, 3000),
        SampleKey(0, FORWARD, 0, "cuda:0", "step_device_ns"): spread(3500, 3500),
        SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns"): spread(4500, 4400),
        SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_gap_ns"): spread(1500, 1400),
    }
    when = {name: array("q") for name in Spans.COLUMNS}
    for span in [(0, 3000, 0, 0, 0, -1), (100, 2150, 0, 1, 0, -1), (5000, 8000, 1, 1, 0, 0)]:
        for name, value in zip(Spans.COLUMNS, span):
            when[name].append(value)
    moments = {name: array("q") for name in Timeline.COLUMNS}
    for moment in [(100, 4096, 0, 1, 0, -1), (200, -1024, 0, 1, 0, -1)]:
        for name, value in zip(Timeline.COLUMNS, moment):
            moments[name].append(value)
    lanes = (Lane("cpu", 1), Lane("cuda:0", 1, 7))
    return traced(
        rows,
        MODULES,
        samples,
        (Memory("cpu", 0, 4096, 3000, (Held(1, FORWARD, "unknown", 4096, 2),)), Memory("cuda:0")),
        Timeline(("cpu", "cuda:0"), moments, 0, Spans(lanes, ("gemm",), when, (0, 4500, 8900))),
        **{
            "device": "cuda",
            "requested": ALL,
            "measured": ALL,
            "steps": 2,
            "busy_ns": (("cpu", 8070), ("cuda:0", 7000)),
            "flags": (("record_shapes", True), ("profile_memory", True)),
            **meta,
        },
    )


def live() -> Run:
    layers = (
        Layer(("Net",), "Net", input_shapes=((2, 3),)),
        Layer(("Net", "fc"), "Linear", 16, 16, 64, (("float32", 64),), settings="3, 4", input_shapes=((2, 3),)),
    )
    run = run_of(
        [row(0, cpu_ns=500, calls=2), row(1, cpu_ns=100, calls=2), row(1, op("aten::linear"), cpu_ns=4000, calls=2)],
        environment=(("torch", "2.13 on Python 3.11"), ("CPU", "one")),
        switches=(("cudnn_benchmark", "False"),),
        versions=(("torch", "2.13"), ("torchprof", "9.9")),
        wall_ns=9000,
    )
    return replace(run, layers=layers, rows=replace(run.rows, layers=layers))


RUNS: dict[str, Callable[[], Run]] = {
    "nothing": lambda: traced([]),
    "no layers": without_layers,
    "no layers, device": without_layers_on_device,
    "no layers, device, wall time": lambda: without_layers_on_device(wall_ns=20_000),
    "ranges": of_ranges,
    "modules": of_modules,
    "modules, wall time": lambda: of_modules(wall_ns=9000),
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]()


# Every report and export


def texts_of(run: Run) -> Iterator[tuple[str, str]]:
    """The texts of all reports that apply to the run; the others raise an error with the reason."""
    used = next((frames[0].name for frames in run.rows.frames if frames), None)
    for name in known():
        options = {"op": used} if name == "layers" else {}
        try:
            yield name, run.report(name, **options)
        except TorchprofError as error:
            assert str(error)[0].isupper(), name
            assert str(error).endswith("."), name


def test_every_report_shows_the_known_facts_and_nothing_more(run: Run) -> None:
    for name, text in texts_of(run):
        if name in ("html", "json"):  # the page's script has the same texts for every run, and None is null there
            continue
        for word in ("None", "lazy", "evaluation", " of :", "``", ": ,"):
            assert word not in text, (name, word)


def test_options_of_the_tree(run: Run) -> None:
    for options in (
        {"show_events": True, "percent": True},
        {"depth": 0},
        {"sort_by": "calls"},
        {"top": 1},
        {"hot": True, "color": True},
        {"tablefmt": "html"},
    ):
        assert run.report("tree", **options)


def test_a_saved_run_loads_as_it_was(run: Run, reloaded: Any) -> None:
    assert reloaded(run) == run


def test_the_command_line_shows_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, make in enumerate(RUNS.values()):
        file = tmp_path / f"{number}.json"
        make().save(file)
        for name in ("tree", "summary", "top", "python", "calls", "headline", "advice", "ops"):
            assert main(["show", str(file), "--report", name]) == 0, name
            assert capsys.readouterr().out.strip(), name


def test_notebook_shows_each_layer(run: Run) -> None:
    html = run._repr_html_()
    assert html.count("<tr>") >= len(run.layers)


# Facts of layers


def test_the_text_of_runs_without_a_model(golden: Callable[..., None]) -> None:
    """A range has no class and unknown parameters, and is no model. 8,490 of 10,560 ns are the forward's, 7,630 of that
    in one range, 4,010 of that in the innermost. Without layers there is no table of them; without the recorded time no
    idle time; work that no operator launched has time on the device alone."""
    ranges = tuple(unknown(*path.split(".")) for path in ("a", "a.x", "a.y", "b", "c"))
    rows = [row(number, op("aten::mul"), cpu_ns=ns) for number, ns in enumerate((10, 30, 30, 50, 40))]
    timed, untimed = without_layers_on_device(wall_ns=20_000), without_layers_on_device()
    idle = lambda run: "\n".join(run.report(name).partition("\n\n")[0] for name in ("top", "kernels"))  # noqa: E731
    facts = (without_layers(), without_layers(wall_ns=20_000), live())
    golden(
        *(
            drawn(of_ranges(), report, **options)
            for report, options in {"summary": {}, "headline": {}, "top": {"top": 1}}.items()
        ),
        {
            "parts: a class is known": of_modules().report("top", top=1),
            "of the ranges a (110 ns), b and c": traced(rows, ranges).report("headline"),
        },
        *(drawn(without_layers(), report) for report in ("summary", "calls", "tree")),
        {
            "facts": "\n".join(run.report("markdown").splitlines()[0] for run in facts),
            "comparison": repr(torchprof.compare(live(), without_layers())),
            "on a device": timed.report("tree", show_events=True),
            "idle": idle(timed),
            "recorded for how long?": idle(untimed),
        },
    )


def test_a_sum_with_one_known_layer_is_unknown() -> None:
    some = replace(of_modules(), layers=(*MODULES[:1], replace(MODULES[1], buffers=2, buffer_bytes=8), *MODULES[2:]))
    assert "  Buffers                  –" in some.report("summary")
    every = tuple(replace(layer, buffers=2, buffer_bytes=8) for layer in MODULES)
    assert "  Buffers                  32 B" in replace(of_modules(), layers=every).report("summary")


def test_an_unknown_class_is_empty_in_files() -> None:
    pandas = pytest.importorskip("pandas")
    for of in ("layers", "operators", "rows"):
        frame = of_ranges().to_dataframe(of)
        assert frame["kind"].isna().all(), of
        assert set(of_modules().to_dataframe(of)["kind"].dropna()) <= {"Net", "Linear", "BatchNorm2d", "Dropout"}
    frame = of_ranges().to_dataframe()
    for column in ("settings", "self_params", "total_params", "self_trainable_params", "input_shapes"):
        assert frame[column].isna().all(), column
        assert frame[column].iloc[0] is pandas.NA
    first = next(csv.DictReader(io.StringIO(of_ranges().report("csv"))))
    assert (first["layer"], first["kind"], first["total_params"]) == ("## forward ##", "", "")
    layers = json.loads(of_ranges().report("json"))["layers"]
    assert json.dumps(layers).count("null") >= len(RANGES)


# Runs without layers


def test_without_a_model_the_trace_names_its_rank_alone() -> None:
    events = json.loads(of_modules().report("chrome-trace"))["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0"]


# Advice


def rules_of(run: Run) -> set[str]:
    assert not judge(run).failed
    return {one.rule for one in advise(run)}


def test_no_rule_of_the_advice_raises(run: Run) -> None:
    rules_of(run)


def test_no_finding_about_an_unknown_mode() -> None:
    rows = [row(1, cpu_ns=100, calls=2), row(1, op("aten::dropout"), cpu_ns=900, calls=2)]
    layers = (unknown("Net_0", kind="Net"), unknown("Net_0", "Dropout_0", kind="Dropout"))
    assert "eval_forgotten" not in rules_of(traced(rows, layers))
    trained = (layers[0], replace(layers[1], training=True))
    assert "eval_forgotten" in rules_of(traced(rows, trained))


def test_a_range_is_no_layer_with_many_ops() -> None:
    rows = [row(0, cpu_ns=10, calls=1), row(0, op("aten::tanh"), cpu_ns=900_000, calls=9)]
    assert "many_small_operators" not in rules_of(traced(rows, (unknown("step"),), wall_ns=900_010))
    assert "many_small_operators" in rules_of(traced(rows, (unknown("Cell_0", kind="Cell"),), wall_ns=900_010))


def test_unknown_numbers_of_calls_are_not_shown_as_0() -> None:
    rows = [row(0, cpu_ns=900_000_000, calls=2), row(0, op("aten::mul"), cpu_ns=1, calls=2)]
    of_the_user = replace(unknown("step", kind="Step"), of_torch=False)
    run = traced(rows, (of_the_user,), wall_ns=900_000_001)
    [found] = [one for one in advise(run) if one.rule == "python_in_layers"]
    assert found.finding == f"No operator runs for 900.000ms: {UNKNOWN_REASON}."


def test_unknown_memory_before_the_start_is_not_shown_as_0() -> None:
    def held(before: tuple[tuple[str, int], ...] | None) -> Run:
        block = Held(0, FORWARD, "activations", 20 * MB, 1)
        memory = Memory("cpu", 0, 25 * MB, 1, (block,), before)
        calls = {SampleKey(number, FORWARD, 0, "cpu", "cpu_ns"): spread(10) for number in range(9)}
        layers = tuple(unknown("Net_0", *(["x"] * depth), kind="Net") for depth in range(9))
        return traced([row(0, cpu_ns=10, calls=1)], layers, calls, (memory,))

    text = " ".join(held(None).report("findings").split())
    assert "80% of the peak of cpu (25.00 MB above the start) was allocated here" in text
    assert "Saves up to 20.00 MB of 25.00 MB at the peak above the start (80.0%)" in text
    text = " ".join(held((("parameters", 15 * MB),)).report("findings").split())
    assert "50% of the peak of cpu (40.00 MB) was allocated here" in text
    assert "Saves up to 20.00 MB of 40.00 MB at the peak (50.0%)" in text


# Comparisons


def test_every_report_of_a_diff(run: Run) -> None:
    for before, after in ((run, run), (live(), run), (run, live())):
        diff = torchprof.compare(before, after)
        for name in known("diff"):
            text = diff.report(name)
            assert "()" not in text or name == "html", name
            assert "(, " not in text, name
            if name not in ("json", "html"):
                assert "None" not in text, name


def test_a_run_is_the_same_as_itself(run: Run) -> None:
    diff = torchprof.compare(run, run)
    assert {change.difference for pair in diff.walk() for change in pair.changes.values()} <= {0, None}
    assert diff.notes == () or not run.layers or "Figures are totals" in diff.notes[0]
    if run.rows and not run.layers:
        assert diff.report("headline").startswith("(outside): ")


def test_equal_ranges_have_no_differences() -> None:
    text = torchprof.compare(of_ranges(), of_ranges()).report()
    assert "Not shown: 4 rows without a change." in text


def test_unknown_facts_of_a_layer_do_not_differ() -> None:
    known_one = replace(of_modules(), layers=(Layer(("Net_0",), "Net"), *MODULES[1:]))
    for before, after in ((known_one, of_modules()), (of_modules(), known_one)):
        diff = torchprof.compare(before, after)
        assert all(pair.differs == () for pair in diff.walk())
    of_another_class = replace(of_modules(), layers=(replace(MODULES[0], kind="Other"), *MODULES[1:]))
    pair = torchprof.compare(of_modules(), of_another_class).pairs[0]
    assert pair.differs == (("kind", "Net", "Other"),)
    nameless = replace(of_modules(), layers=(replace(MODULES[0], kind=""), *MODULES[1:]))
    assert torchprof.compare(of_modules(), nameless).pairs[0].differs == ()


def test_unknown_conditions_do_not_differ() -> None:
    notes = torchprof.compare(live(), of_modules()).notes
    assert "The environment of the run after is incomplete: it was read from a trace." in notes
    assert not [note for note in notes if "torch:" in note or "CPU:" in note or "types of the parameters" in note]
    gpu = of_modules(environment=(("CPU", "another"), ("GPU", "H100")))
    notes = torchprof.compare(live(), gpu).notes
    assert "Different CPU: one before, another after." in notes
    assert not [note for note in notes if "GPU" in note]


def test_ranges_are_matched_by_name() -> None:
    def of(*paths: str, kind: str = "") -> Run:
        layers = tuple(unknown(path, kind=kind) for path in paths)
        return traced([row(number, op("aten::mul"), cpu_ns=100) for number in range(len(layers))], layers)

    diff = torchprof.compare(of("fwd", "bwd"), of("fwd", "data"))
    assert [(pair.name, pair.how) for pair in diff.pairs] == [("fwd", "same"), ("data", "added"), ("bwd", "removed")]
    assert "Added: data\n" in diff.report()
    diff = torchprof.compare(of("Net_0", kind="Net"), of("Model_0", kind="Net"))
    assert [pair.name for pair in diff.pairs] == ["Model_0"]


def test_limits_on_unknown_values_never_pass() -> None:
    torchprof.assert_budget(of_modules(), {"cpu_total": "1s", "peak": "1MB"})
    torchprof.assert_budget(of_ranges(), {"## backward ##: cpu_total": "1s"})
    with pytest.raises(TorchprofError, match="did not measure 'params'"):
        torchprof.assert_budget(of_modules(), {"params": 10})
    with pytest.raises(TorchprofError, match="this run has no layers: all its work is outside of them"):
        torchprof.assert_budget(without_layers(), {"cpu_total": "1s"})
    half = replace(of_modules(), layers=(MODULES[0], Layer(("Net_0", "Linear_0"), "Linear", 16), *MODULES[2:]))
    with pytest.raises(TorchprofError, match="params of Net_0 is unknown in the run"):
        torchprof.assert_budget(half, {"params": 10})


# The page


def facts_on(page: Page, selector: str) -> dict[str, str]:
    words = page.locator(f"{selector} dl.facts").locator("dt, dd").all_text_contents()
    return dict(zip(words[::2], words[1::2]))


def test_every_page_is_drawn_without_errors(look: Callable[..., Page]) -> None:
    runs = [traced([]), without_layers_on_device(), of_ranges(), of_modules()]
    for what in (*runs, torchprof.compare(live(), runs[1]), torchprof.compare(runs[2], runs[3])):
        page = look(what)
        if page.locator(".icicle .block").count():
            page.locator(".icicle .block").last.dispatch_event("click")
        page.locator("input[type=search]").fill("lin")
        assert "layer" in (page.locator(".found").first.text_content() or "")


def test_facts_of_a_layer_on_the_page(look: Callable[..., Page]) -> None:
    page = look(of_ranges())
    page.locator(".icicle .block", has_text="head").dispatch_event("click")
    assert facts_on(page, ".panel") == {"class": "–", "parameters": "–", "mode": "–"}
    assert facts_on(page, "details.about")["recorded"] == "–"
    page = look(of_modules(wall_ns=9000))
    page.locator(".icicle .block", has_text="Linear_0").dispatch_event("click")
    assert facts_on(page, ".panel") == {"class": "Linear", "parameters": "–", "mode": "–"}
    assert facts_on(page, "details.about")["recorded"] == "9.000us"

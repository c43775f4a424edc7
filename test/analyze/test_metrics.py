"""``run.metrics()``: each value against sums over rows, and runs made by hand; the names against the docs page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from build.examples import examples
from build.hand_made import NET, op, row, run_of
from build.random_runs import runs
from hypothesis import given
from torch import nn

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.analyze.records import layer_records
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta, Peak
from torchprof.run.timeline import Memory
from torchprof.run.words import NOT_SELECTED, OUTSIDE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
EVERYTHING = ("cpu_ns", "device_ns", "cpu_allocated", "cpu_freed", "macs", "flops")
LAYERS = [Layer(tuple(path.split(".")), "Module", params=10) for path in NET]


def times(metrics: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith("time/") and name.endswith(kind)}


@examples(150)
@given(runs())
def test_times_and_counts_are_sums_over_rows(run: Run) -> None:
    metrics = run.metrics()
    for field, kind in (("cpu_ns", "/cpu_ms"), ("device_ns", "/device_ms")):
        found = times(metrics, kind)
        everything = sum(getattr(one.cost, field) for one in run.rows)
        if field in run.meta.measured:
            assert sum(found.values()) == pytest.approx(everything / 1e6)
        else:
            assert not found
    for field in ("flops", "macs"):
        for phase in run.phases():
            ours = [one.cost for one in run.rows if one.layer is not None and one.phase == phase]
            value = sum(getattr(cost, field) for cost in ours)
            lacks = any(cost.uncounted for cost in ours)
            if field in run.meta.measured and (value or not lacks) and f"{field}/{phase}" in metrics:
                assert metrics[f"{field}/{phase}"] == value
            else:
                assert not value or field not in run.meta.measured
    assert metrics["warnings/count"] == len(run.warnings)
    assert all(type(value) in (int, float) for value in metrics.values())


@examples(100)
@given(runs())
def test_a_layer_has_what_the_table_has(run: Run) -> None:
    run = replace(run, metas=(replace(run.meta, requested=EVERYTHING),))  # the table has columns for what was requested
    metrics = run.metrics(layers=99)
    table = layer_records(run)
    at = {name: number for number, name in enumerate(table.columns)}
    found = {name: value for name, value in metrics.items() if name.startswith("layer/")}
    expected = {}
    for record in table.records:
        if record[at["layer"]] not in {layer.name for layer in run.layers}:
            continue
        for column, name, scale in (
            ("total_cpu_ns", "cpu_ms", 1e6),
            ("total_device_ns", "device_ms", 1e6),
            ("total_flops", "flops", 1),
        ):
            value = record[at[column]] if column in at else None
            if value is not None:
                expected[f"layer/{record[at['layer']]}/{record[at['phase']]}/{name}"] = value / scale
    assert found == pytest.approx(expected)


def by_hand(**meta: Any) -> Run:
    lines = [
        row(0, cpu_ns=1_000_000, calls=2),
        row(1, cpu_ns=2_000_000, calls=2),
        row(1, op("mm", (4, 4)), device="cuda:0", cpu_ns=500_000, device_ns=7_000_000, macs=40, flops=80),
        row(1, op("mm", (4, 4)), phase="backward", cpu_ns=250_000, macs=60, flops=120),
        row(1, op("mm", (4, 4)), phase="recompute", cpu_ns=125_000, macs=40, flops=80),
        row(OUTSIDE, op("loss"), cpu_ns=30_000),
        row(NOT_SELECTED, op("other"), cpu_ns=20_000),
    ]
    options = {"requested": EVERYTHING, "measured": EVERYTHING, "device": "cuda", "wall_ns": 20_000_000}
    return run_of(lines, layers=LAYERS, **{**options, **meta})


def test_every_value_of_a_run_made_by_hand(golden: Callable[..., None]) -> None:
    """Forward takes 1 + 2 + 0.5 ms; the two steps 4 and 6 ms; the device is busy for 5 of 20 ms. 200 FLOPs in 20 ms are
    an MFU of 0.01 of a peak of 1 M a second."""
    peaks = (Peak("cuda:0", "float32", 0, 1e6, 1e6),)
    run = by_hand(busy_ns=(("cpu", 19), ("cuda:0", 5_000_000)), peaks=peaks)
    steps = Spread.of([(0, 4_000_000), (1, 6_000_000)])
    memory = (Memory("cpu", 0, 10), Memory("cuda:0", 0, 300), Memory("cuda:1", 0, 500))
    run = replace(run, samples={SampleKey(OUTSIDE, "forward", 0, "cpu", "step_ns"): steps}, memory=memory)
    golden("\n".join(f"{name}: {value:.10g}" for name, value in run.metrics().items()))


def test_what_is_unknown_is_left_out() -> None:
    metrics = run_of([], layers=LAYERS).metrics(layers=2)
    unknown = {"time/forward/cpu_ms", "flops/forward", "mfu", "steps/count", "memory/cpu/peak_bytes"}
    assert not unknown & set(metrics)
    assert not [name for name in metrics if name.startswith("layer/")]
    assert (metrics["calls/forward"], metrics["time/outside/cpu_ms"]) == (0, 0)
    never = run_of([row(1, cpu_ns=5)], layers=[replace(LAYERS[0], params=None), *LAYERS[1:]]).metrics(layers=2)
    assert "parameters/count" not in never and "layer/Net.b/forward/cpu_ms" not in never
    assert never["layer/Net.a/forward/cpu_ms"] == 5e-6
    assert "time/forward/device_ms" not in never


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"peaks": (Peak("cuda:0", "bfloat16", 0, 1e6, 1e6),)},
        {"peaks": (Peak("cpu", "float32", 1, 1e6, 1e6),)},
        {"peaks": (Peak("cuda:0", "float32", 0, 1e6, 1e6),), "wall_ns": 0},
        {"peaks": (Peak("cuda:0", "float32", 0, 1e6, 1e6),), "measured": ("cpu_ns", "device_ns")},
        {"peaks": (Peak("cpu", "float32", 0, 1e6, 1e6),), "measured": ("flops", "macs")},
    ],
    ids=["no peak", "of another type", "of another device", "no duration", "no FLOPs", "no times"],
)
def test_mfu_is_left_out_if_a_part_is_unknown(meta: dict[str, Any]) -> None:
    assert "mfu" not in by_hand(**meta).metrics()


def test_mfu_is_left_out_if_a_rank_used_two_devices() -> None:
    lines = [row(1, op("mm", (4,)), device=f"cuda:{n}", device_ns=7, macs=40, flops=80) for n in (0, 1)]
    peaks = (Peak("cuda:0", "float32", 0, 1e6, 1e6),)
    options: dict[str, Any] = {"measured": EVERYTHING, "device": "cuda", "wall_ns": 20, "peaks": peaks}
    assert "mfu" in run_of(lines[:1], layers=LAYERS, **options).metrics()
    assert "mfu" not in run_of(lines, layers=LAYERS, **options).metrics()


def test_lower_bounds_are_counted() -> None:
    lines = [row(1, op("mm", (4,)), macs=40, flops=80, uncounted=3), row(1, op("sort"), phase="backward", uncounted=2)]
    metrics = run_of(lines, layers=LAYERS, measured=EVERYTHING).metrics()
    assert (metrics["flops/forward"], metrics["macs/forward"], metrics["uncounted/forward"]) == (80, 40, 3)
    assert "flops/backward" not in metrics and metrics["uncounted/backward"] == 2
    assert metrics["lower_bounds/count"] == 2


def test_ranks_are_put_together_as_the_page_says() -> None:
    peaks = (Peak("cuda:0", "float32", 0, 1e6, 1e6),)
    first = by_hand(peaks=peaks, busy_ns=(("cuda:0", 5_000_000),))
    lines = [row(0, cpu_ns=3_000_000, rank=1), row(1, op("mm", (4, 4)), rank=1, macs=40, flops=80, device_ns=9)]
    other = run_of(
        lines,
        layers=LAYERS,
        rank=1,
        measured=EVERYTHING,
        device="cuda",
        wall_ns=30_000_000,
        peaks=peaks,
        busy_ns=(("cuda:0", 22_500_000),),
    )
    shorter, longer = Spread.of([(0, 4), (1, 60), (2, 5)]), Spread.of([(0, 30), (1, 40)])
    key = SampleKey(OUTSIDE, "forward", 0, "cpu", "step_ns")
    first = replace(first, samples={key: shorter}, memory=(Memory("cuda:0", 0, 7),))
    other = replace(other, samples={key._replace(rank=1): longer}, memory=(Memory("cuda:0", 1, 9),))
    metrics = torchprof.merge([first, other]).metrics()
    assert metrics["ranks/count"] == 2
    assert metrics["time/recorded/wall_ms"] == 30
    assert metrics["time/forward/cpu_ms"] == 3.5 + 3
    assert metrics["flops/forward"] == 160
    assert metrics["calls/forward"] == 3
    assert metrics["parameters/count"] == 40
    assert metrics["memory/device/peak_bytes"] == 9
    assert metrics["steps/count"] == 3
    assert metrics["time/step/mean_ms"] == pytest.approx(35e-6)
    assert metrics["time/step/max_ms"] == pytest.approx(40e-6)
    assert metrics["device/busy_share"] == pytest.approx((0.25 + 0.75) / 2)
    assert metrics["mfu"] == pytest.approx(280 / (0.05 * 1e6))


def layers_in(metrics: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.split("/")[1] for name in metrics if name.startswith("layer/")))


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        (None, []),
        (0, ["Net"]),
        (1, ["Net", "Net.a", "Net.b"]),
        ("b.0", ["Net.b.0"]),
        ("Net.*", ["Net.a", "Net.b"]),
        (["b.*", ("Net", "a")], ["Net.a", "Net.b.0"]),
        ([], []),
    ],
)
def test_the_layers_that_were_asked_for(layers: Any, shown: list[str]) -> None:
    run = run_of([row(number, cpu_ns=1) for number in range(4)])
    assert layers_in(run.metrics(layers)) == layers_in(run.metrics(layers=layers)) == shown


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (-1, "depth of 0 or more.* not -1"),
        (True, "depth of 0 or more.* not True"),
        (1.5, "depth of 0 or more.* not 1.5"),
        ("Net.bb", "No module .*'Net.bb'.*'Net.b'"),
        (["a", "c"], "No module .*'c'"),
        ([3], "3 is not a path"),
    ],
)
def test_bad_layers_raise(layers: Any, words: str) -> None:
    with pytest.raises(TorchprofError, match=words):
        run_of([row(0, cpu_ns=1)]).metrics(layers)


def test_a_live_run_and_a_run_without_times() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with Profile(model, with_flops=True) as prof:
        model(torch.rand(3, 4)).sum().backward()
    metrics = prof.metrics()
    assert metrics == prof.run.metrics()
    assert metrics["macs/forward"] == 3 * (4 * 8 + 8 * 2)
    assert (metrics["calls/forward"], metrics["parameters/count"]) == (1, 4 * 8 + 8 + 8 * 2 + 2)
    counted = torchprof.flops(model, torch.rand(3, 4)).metrics()
    assert counted["flops/forward"] == metrics["flops/forward"]
    assert not [name for name in counted if name.startswith(("time/", "mfu", "device/"))]


# The page


def names_of_page() -> list[re.Pattern[str]]:
    """The names in the first column of the table, as patterns."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    return [
        re.compile(re.escape(name).replace("<phase>", "(forward|backward|recompute)").replace("<path>", "[^/]+"))
        for name in names
    ]


def test_the_page_lists_every_name_and_no_other() -> None:
    run = replace(
        by_hand(peaks=(Peak("cuda:0", "float32", 0, 1e6, 1e6),), busy_ns=(("cuda:0", 5),)),
        samples={SampleKey(OUTSIDE, "forward", 0, "cpu", "step_ns"): Spread.of([(0, 4)])},
        memory=(Memory("cpu", 0, 10, growth=()), Memory("cuda:0", 0, 300, growth=())),
    )
    metrics = run.metrics(layers=1)
    patterns = names_of_page()
    assert [name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)] == []
    assert [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, metrics))] == []


MLFLOW_NAME = re.compile(r"[\w\-. :/]+", re.ASCII)
PROMETHEUS_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class Recorder:
    """Stands for each of the four packages: what is logged is collected."""

    def __init__(self) -> None:
        self.logged: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.logged["wandb"] = values

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        self.logged.setdefault("tensorboard", {})[name] = value

    def log_metrics(self, values: dict[str, float]) -> None:
        assert all(MLFLOW_NAME.fullmatch(name) for name in values), values
        self.logged["mlflow"] = values

    def gauge(self, name: str, documentation: str) -> SimpleNamespace:
        assert PROMETHEUS_NAME.fullmatch(name)
        logged = self.logged.setdefault("prometheus", {})
        assert name not in logged, "prometheus_client refuses a second gauge of a name"
        logged[name] = 0.0
        return SimpleNamespace(set=lambda value: logged.update({name: value}))


def test_the_snippets_of_the_page_log_all_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    recorder = Recorder()
    for name, values in {
        "wandb": {"init": lambda project: recorder},
        "mlflow": {"start_run": lambda: recorder, "log_metrics": recorder.log_metrics},
        "prometheus_client": {"Gauge": recorder.gauge, "start_http_server": lambda port: None},
        "torch.utils.tensorboard": {"SummaryWriter": lambda folder: recorder},
    }.items():
        package = ModuleType(name)
        vars(package).update(values)
        monkeypatch.setitem(sys.modules, name, package)
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "metrics.md", "exec"), space)
    prof = space["prof"]
    assert len(capsys.readouterr().out.split()) == 3
    assert recorder.logged["wandb"] == recorder.logged["mlflow"] == prof.metrics(layers=1)
    assert recorder.logged["tensorboard"] == prof.metrics(layers=["features.*"])
    space["publish"](prof.metrics())  # as in on_trace_ready of the next cycle
    plain = {"torchprof_" + name.replace("/", "_"): value for name, value in prof.metrics().items()}
    assert recorder.logged["prometheus"] == plain


def test_no_meta_is_needed_but_the_default() -> None:
    assert Run((Meta(()),), (), run_of([], layers=[]).rows, {}).metrics()["ranks/count"] == 1  # type: ignore[arg-type]

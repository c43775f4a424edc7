"""Advice: which findings are reported; and each rule with a planted fault, without it, and with near misses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.findings import of as told
from build.hand_made import kernel, label, op, row
from build.hand_made import run_of as made_run_of
from build.models import Layers, Mlp
from build.places import ROOT
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torchprof
import torchprof.advise.fusion
import torchprof.advise.gradients
import torchprof.advise.python
from torchprof import Run
from torchprof.advise import PER_RULE, Advice, Gain, advise, merged, merged_into_one, rules
from torchprof.advise.chains import inside
from torchprof.advise.evidence import Evidence
from torchprof.errors import TorchprofError
from torchprof.run.formats import format_time
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import Memory
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE

CUDA: dict[str, Any] = {"device": "cuda", "requested": ("cpu_ns", "device_ns"), "measured": ("cpu_ns", "device_ns")}
SHAPES: dict[str, Any] = {"flags": (("record_shapes", True),)}
AMPERE = (("float32_matmul_precision", "highest"), ("cudnn_tf32", "True"), ("compute_capability", "8.0"))


@pytest.fixture(autouse=True)
def calls_of_compiled_layers_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of these tests are short, and their gain is all of their time."""
    monkeypatch.setattr(torchprof.advise.fusion, "_COMPILED_CALL_NS", 0)
    monkeypatch.setattr(torchprof.advise.fusion, "_SAVED_BY_FUSING", 1)


def run_of(rows: Sequence[tuple[Any, ...]], **meta: Any) -> Run:
    """A run of rows that was recorded for as long as the CPU worked in them, or the device, whichever is longer."""
    costs = [one[6] for one in rows]
    longest = max(sum(cost.cpu_ns for cost in costs), sum(cost.device_ns for cost in costs))
    return made_run_of(rows, **{"wall_ns": longest, **meta})


def of(run: Run, rule: str) -> list[Advice]:
    """All findings of one rule, also those that are too small to report."""
    return list(rules()[rule](Evidence(run)))


def profiled(model: nn.Module, work: Callable[[], object], **options: Any) -> Run:
    work()  # what the first call pays is no layer's fault
    with torchprof.Profile(model, **options) as prof:
        work()
    return prof.run


def on_device(*rows: tuple[Any, ...], **meta: Any) -> Run:
    return run_of(rows, **{**CUDA, **meta})


# What is told


def finds(monkeypatch: pytest.MonkeyPatch, **by_rule: list[Advice]) -> None:
    monkeypatch.setattr(
        torchprof.advise, "rules", lambda: {name: lambda evidence, one=one: iter(one) for name, one in by_rule.items()}
    )


def gain(ns: int | None, layer: str = "Net.a", nbytes: int | None = None, rule: str = "mine") -> Advice:
    return Advice(layer, "Is slow.", "Make it fast.", ns, nbytes, rule)


def microseconds(number: int) -> Run:
    return run_of([row(0, cpu_ns=number * 1000)])


def test_the_largest_gain_comes_first_and_unknown_gains_last(monkeypatch) -> None:
    finds(monkeypatch, one=[gain(None, "c"), gain(20_000, "b")], two=[gain(30_000, "a")])
    assert [one.layer for one in advise(microseconds(100))] == ["a", "b", "c"]


def test_gains_on_a_place_are_together_at_most_the_recorded_time(monkeypatch) -> None:
    finds(monkeypatch, one=[gain(90_000, "(outside)"), gain(83_000, "(outside)")], two=[gain(70_000, "Net.b")])
    assert [(one.layer, one.gain_ns) for one in advise(microseconds(100))] == [
        ("(outside)", 90_000),
        ("Net.b", 70_000),
        ("(outside)", 10_000),
    ]


def test_shares_of_time_and_of_memory_have_equal_weight(monkeypatch) -> None:
    run = replace(microseconds(100), memory=(Memory("cpu", peak_bytes=800, before=(("parameters", 200),)),))
    finds(monkeypatch, one=[gain(20_000, "time")], two=[gain(None, "memory", 210)], three=[gain(0, "less", 190)])
    assert [one.layer for one in advise(run)] == ["memory", "time", "less"]


@pytest.mark.parametrize("ns, told", [(999, 0), (1000, 1)])
def test_findings_that_save_less_than_one_percent_are_not_reported(monkeypatch, ns, told) -> None:
    finds(monkeypatch, one=[gain(ns)])
    assert len(advise(microseconds(100))) == told


def test_small_findings_are_not_reported_even_if_a_rule_has_many(monkeypatch) -> None:
    finds(monkeypatch, one=[gain(500, "a"), gain(500, "b")], two=[gain(1500, "c")])
    assert [one.layer for one in advise(microseconds(100))] == ["c"]


def test_the_same_time_is_gained_once(monkeypatch) -> None:
    """The first finding saves 3/4 of a layer of 60 us, of which 40 are in the layer below: a second one of either layer
    can save only the rest. Those of another layer and of work outside all layers are as if they were alone."""
    run = blocks("Net", "Net.0", "Net.0.a", "Net.1", kinds=["Net", "Block", "Block", "Block"], wall_ns=200_000)
    rows = [row(1, cpu_ns=20_000), row(2, cpu_ns=40_000), row(3, cpu_ns=50_000)]
    run = replace(run_of(rows, layers=run.layers, wall_ns=200_000))

    def on(layer: str, ns: int) -> Advice:
        return Advice(layer, "", "", ns, None, "mine", (layer,))

    found = [on("Net.0", 45_000), on("Net.1", 30_000), on("Net.0.a", 25_000), gain(20_000)]
    finds(monkeypatch, one=found)
    gains = {one.layer: one.gain_ns for one in advise(run)}
    assert gains == {"Net.0": 45_000, "Net.1": 30_000, "Net.0.a": 40_000 - 30_000, found[3].layer: 20_000}
    finds(monkeypatch, one=[on("Net.0", 45_000), on("Net.0", 30_000)])
    assert [one.gain_ns for one in advise(run)] == [45_000, 15_000]


def test_a_gain_in_memory_has_no_weight_without_a_known_peak(monkeypatch) -> None:
    finds(monkeypatch, one=[gain(None, nbytes=10**9)])
    assert advise(microseconds(100)) == []


def test_a_failing_rule_gives_no_finding_and_does_not_stop_others(monkeypatch) -> None:
    def broken(evidence: Evidence) -> Iterator[Advice]:
        yield gain(1)
        raise ValueError("odd")

    monkeypatch.setattr(torchprof.advise, "rules", lambda: {"broken": broken, "two": lambda _: iter([gain(50_000)])})
    run = microseconds(100)
    assert advise(run) == [gain(50_000)]
    assert "\n\nThese rules failed and found nothing: broken (ValueError: odd). Please report this.\n\n" in run.report(
        "advice"
    )
    monkeypatch.setattr(torchprof.advise, "rules", lambda: {"broken": broken})
    assert advise(run) == []


@pytest.mark.parametrize("wall, cpu, device", [(100, 30, 40), (100, 130, 40), (100, 30, 140), (0, 0, 0)])
def test_a_gain_is_a_share_of_the_recorded_time(monkeypatch, wall, cpu, device) -> None:
    """It is at most that time, even if several threads and streams worked in parallel."""
    run = on_device(row(0, cpu_ns=cpu), row(0, kernel("k"), device="cuda:0", device_ns=device), wall_ns=wall)
    assert Evidence(run).recorded_ns == wall
    finds(monkeypatch, one=[gain(max(cpu, device))])
    assert [one.gain_ns for one in advise(run)] == [min(wall, max(cpu, device))] * (wall > 0)


def test_an_empty_run_has_no_findings() -> None:
    assert advise(run_of([])) == []
    assert run_of([]).report("findings").startswith("No findings: ")


def test_took_sums_the_matching_rows_by_layer() -> None:
    relu, clamp = op("aten::relu"), op("aten::clamp")
    run = run_of(
        [
            row(1, relu, calls=2, cpu_ns=10, cpu_allocated=64),
            row(1, relu, clamp, calls=2, cpu_ns=5),
            row(1, relu, clamp, relu, calls=7, cpu_ns=1),
            row(1, relu, phase=BACKWARD, calls=1, cpu_ns=3),
            row(2, op("aten::add"), cpu_ns=100),
            row(OUTSIDE, clamp, relu, calls=3, cpu_ns=2),
        ]
    )
    evidence = Evidence(run)
    assert evidence.took(inside("aten::relu")) == {1: (3, 19, 0, 64), OUTSIDE: (3, 2, 0, 0)}
    assert evidence.took(inside("aten::relu"), phases=(BACKWARD,)) == {1: (1, 3, 0, 0)}
    assert sorted(match.cpu_ns for match in evidence.rows(inside("aten::clamp"))) == [1, 2, 5]
    assert [evidence.name_of(number) for number in (3, OUTSIDE, -2)] == ["Net.b.0", "(outside)", "(not selected)"]


def test_every_file_with_rules_has_its_place_in_the_order() -> None:
    files = {
        path.stem for path in Path(torchprof.advise.__file__).parent.glob("*.py") if "\n@rule\n" in path.read_text()
    }
    assert files == {*torchprof.advise.FILES}


# Layers are merged


def blocks(*paths: str, kinds: Sequence[str] = (), **meta: Any) -> Run:
    """A run of 1 ms with these layers and classes."""
    run = run_of([row(0, cpu_ns=10**6)], **meta)
    layers = (
        replace(run.layers[0], path=tuple(path.split(".")), kind=kind)
        for path, kind in zip(paths, [*kinds] or [*paths])
    )
    return replace(run, layers=tuple(layers))


def test_the_same_layer_of_every_block_is_one_finding() -> None:
    run = blocks("Net", *(f"Net.layers.{at}.mlp" for at in range(12)), kinds=["Net", *["Mlp"] * 12])
    gains = {at: Gain(1000 * at, 100) for at in range(1, 13)}
    (group,) = merged(Evidence(run), gains)
    assert group.name == "Net.layers.*.mlp"
    assert group.layers == tuple(f"Net.layers.{at}.mlp" for at in reversed(range(12)))  # the largest gain first
    assert group.gain == (1000 * sum(range(13)), 1200)
    advice = group.advice("Is slow.", "Make it fast.")
    assert advice.finding == "Is slow. The largest gain is in Net.layers.11.mlp: up to 12.000us and 100 B."
    assert (advice.gain_ns, advice.gain_bytes, advice.layers) == (*group.gain, group.layers)


PARTS = [f"Net.{part}.{at}.{name}" for part in ("a", "b") for at in range(3) for name in ("x", "y")]


@pytest.mark.parametrize(
    "kinds, names",
    [
        ({"Net.a.x": "X", "Net.a.y": "Y", "Net.b.x": "X"}, ["Net.a.*.x", "Net.a.*.y", "Net.b.*.x"]),
        ({"Net.a.x": "X", "Net.a.y": "Y", "Net.b.x": "X", "Net.b.y": "Y"}, ["X", "Y"]),
        ({"Net.a.x": "A", "Net.a.y": "B", "Net.b.x": "C", "Net.b.y": "D"}, ["Net"]),
        ({"Net.a.x": "", "Net.a.y": "", "Net.b.x": "", "Net.b.y": ""}, ["Net"]),  # unknown classes are not one class
    ],
    ids=["pattern", "class", "all", "unknown"],
)
def test_layers_are_merged_until_there_are_no_more_than_three_findings(kinds, names) -> None:
    assert PER_RULE == 3
    kind_of = {path: kinds.get(re.sub(r"\.\d", "", path)) for path in PARTS}
    paths = [path for path, kind in kind_of.items() if kind is not None]
    run = blocks("Net", *paths, kinds=["Net", *(kind_of[path] or "" for path in paths)])
    gains = {at: Gain(at) for at in range(1, len(run.layers))}
    groups = merged(Evidence(run), gains)
    assert [group.name for group in groups] == names
    assert sorted(number for group in groups for number in group.numbers) == sorted(gains)  # each layer once
    assert sum(group.gain.ns or 0 for group in groups) == sum(gain.ns or 0 for gain in gains.values())


def test_work_of_no_layer_and_other_remedies_stay_apart() -> None:
    run = blocks("Net", *(f"Net.{at}" for at in range(4)), kinds=["Net", *["Block"] * 4])
    gains = {at: Gain(at) for at in range(1, 5)} | {OUTSIDE: Gain(7)}
    groups = merged(Evidence(run), gains, {at: at % 2 for at in range(1, 5)})
    assert [(group.name, group.layers, group.gain.ns) for group in groups] == [
        ("Net.*", ("Net.2", "Net.0"), 4),
        ("Net.*", ("Net.3", "Net.1"), 6),
        ("(outside)", (), 7),
    ]
    assert groups[-1].advice("Is slow.", "").finding == "Is slow. This is outside all layers."


def test_unknown_gains_add_nothing_and_are_no_largest_gain() -> None:
    run = blocks("Net.0", "Net.1", "Net.2", kinds=["Block"] * 3)
    group = merged_into_one(Evidence(run), {0: Gain(), 1: Gain(5), 2: Gain(nbytes=8)})
    assert (group.gain, group.layers[0]) == ((5, 8), "Net.1")
    (unknown,) = merged(Evidence(run), dict.fromkeys(range(3), Gain()))
    assert unknown.gain == (None, None)
    assert unknown.advice("Is slow.", "").finding == "Is slow."


def test_layers_of_several_models_have_the_names_of_the_models() -> None:
    run = blocks("Net.a", "Other.b", "Net.c", kinds=["A", "B", "A"])
    assert merged_into_one(Evidence(run), dict.fromkeys(range(3), Gain(1))).name == "Net, Other"
    assert merged_into_one(Evidence(run), {0: Gain(1), 2: Gain(1)}).name == "A"


def test_a_finding_on_layers_and_on_work_of_no_layer_says_so() -> None:
    """The largest gain is one of a layer, also if the work of no layer is more."""
    run = blocks("Net", "Net.a", kinds=["Net", "A"])
    group = merged_into_one(Evidence(run), {OUTSIDE: Gain(9000), 1: Gain(1000), 0: Gain(2000), NOT_SELECTED: Gain(50)})
    assert (group.name, group.layers, group.gain.ns) == ("Net", ("Net", "Net.a"), 12_050)
    assert group.advice("Is slow.", "").finding == (
        "Is slow. The largest gain is in Net: up to 2.000us. A part of this is in layers that were not selected. "
        "A part of this is outside all layers."
    )
    nowhere = merged_into_one(Evidence(run), {OUTSIDE: Gain(9), NOT_SELECTED: Gain(50)})
    assert (nowhere.name, nowhere.layers, nowhere.gain.ns) == ("(not selected)", (), 59)


def test_a_finding_that_saves_nothing_is_not_reported(monkeypatch) -> None:
    finds(monkeypatch, one=[gain(50_000, "a"), gain(0, "b"), gain(None, "c")])
    assert [one.layer for one in advise(microseconds(100))] == ["a", "c"]


@pytest.mark.parametrize("ns, count", [(99, 0), (100, 1)])
def test_merged_layers_are_worth_it_together(monkeypatch, ns, count) -> None:
    """1 % is 10,000 ns: what 100 layers save, each a hundredth of that."""
    run = blocks(*(f"Net.{at}" for at in range(100)), kinds=["Block"] * 100)

    def rule(evidence: Evidence) -> Iterator[Advice]:
        for group in merged(evidence, dict.fromkeys(range(100), Gain(ns))):
            yield group.advice("Is slow.", "Make it fast.")

    monkeypatch.setattr(torchprof.advise, "rules", lambda: {"mine": rule})
    assert [len(one.layers) for one in advise(run)] == [100] * count


def test_the_gain_of_merged_layers_is_no_more_than_the_recorded_time(monkeypatch) -> None:
    run = blocks("Net.0", "Net.1", kinds=["Block"] * 2, wall_ns=10**6)
    group = merged_into_one(Evidence(run), {0: Gain(900_000), 1: Gain(800_000)})  # on two threads
    finds(monkeypatch, one=[group.advice("Is slow.", "Make it fast.")])
    assert group.gain.ns == 1_700_000 and [one.gain_ns for one in advise(run)] == [10**6]


def test_merging_keeps_every_nanosecond_and_counts_none_twice() -> None:
    """The ops of twelve blocks: the gain and the sentence have the sums of the rows of all of them."""

    def block(at: int) -> list[tuple[Any, ...]]:
        return [
            row(at, calls=2, cpu_ns=50 * at),
            row(at, op("aten::add"), calls=20, cpu_ns=10_000 * at),
            row(
                at, op("autograd::engine::evaluate_function: AddBackward0"), phase=BACKWARD, calls=20, cpu_ns=3_000 * at
            ),
        ]

    run = run_of([row(0, calls=2), *(one for at in range(1, 4) for one in block(at))])
    layers = [
        replace(run.layers[0], path=("Net", *path), kind="Block" if path else "Net") for path in ((), "0", "1", "2")
    ]
    (found,) = told(replace(run, layers=tuple(layers)), "many_small_operators")
    assert found.layer == "Net.*" and found.layers == ("Net.2", "Net.1", "Net.0")
    assert found.gain_ns == sum(one.cost.cpu_ns for one in run.rows) == 6 * 13_050
    assert found.finding == (
        "A forward call runs 10 elementwise operators on average. They take 60.000us in total, 1.000us each."
        f"{SHORT} Their backward takes 18.000us. The time between operators is 0.300us. The largest gain is in Net.2: "
        "up to 39.150us."
    )


# The report


def test_the_report_is_numbered_and_has_the_gains(monkeypatch) -> None:
    run = replace(microseconds(100), memory=(Memory("cpu", peak_bytes=4096, before=(("parameters", 4096),)),))
    finds(monkeypatch, one=[gain(25_000, nbytes=2048)], two=[gain(None, "Net")])
    assert run.report("findings").splitlines()[:8] == [
        "1. Saves up to 25.000us of 100.000us (25.0%) and 2.00 KB of 8.00 KB at the peak (25.0%) in Net.a: Is",
        "   slow.",
        "   Make it fast.",
        "",
        "2. Gain unknown in Net: Is slow.",
        "   Make it fast.",
        "",
        "More can be found in a run recorded with record_shapes=True (shapes and types), profile_memory=True",
    ]


@pytest.mark.parametrize(
    "found, said",
    [
        (gain(25_000, "(outside)"), "Saves up to 25.000us of 100.000us (25.0%): Is slow."),
        (gain(25_000, "(not selected)"), "Saves up to 25.000us of 100.000us (25.0%): Is slow."),
        (gain(None, ""), "Gain unknown: Is slow."),
        (gain(0, "Net", 1024), "Saves up to 1.00 KB of 4.00 KB at the peak above the start (25.0%) in Net: Is slow."),
        (gain(5_000, "Net.*")._replace(layers=("Net.1", "Net.0")), "(5.0%) in Net.* (2 layers): Is slow."),
    ],
)
def test_a_finding_begins_with_its_gain_and_place(monkeypatch, found, said) -> None:
    run = replace(microseconds(100), memory=(Memory("cpu", peak_bytes=4096, before=None),))
    finds(monkeypatch, one=[found])
    assert f"{said} Make it fast." in " ".join(run.report("findings").split())


def test_the_data_of_the_report_has_every_finding_as_a_row(monkeypatch) -> None:
    merged_one = gain(25_000, "Net.*", nbytes=2048)._replace(layers=("Net.1", "Net.0"))
    finds(monkeypatch, one=[merged_one], two=[gain(None, "(outside)")])
    data = microseconds(100).report("findings").data
    (table,) = data["tables"]
    texts = {"finding": "Is slow.", "remedy": "Make it fast.", "rule": "mine"}
    assert table["rows"] == [
        {"layer": "Net.*", "layers": ["Net.1", "Net.0"], "gain_time": 25_000, "gain_memory": 2048, **texts},
        {"layer": "(outside)", "layers": [], "gain_time": None, "gain_memory": None, **texts},
    ]
    units = {column["key"]: column["unit"] for column in table["columns"]}
    assert (units["gain_time"], units["gain_memory"], units["finding"]) == ("ns", "bytes", "")
    assert len(data["sentences"]) == 1 and data["sentences"][0].startswith("More can be found")
    finds(monkeypatch)
    assert microseconds(100).report("findings").data["tables"] == []


def test_the_limit_says_how_many_are_not_shown(monkeypatch) -> None:
    finds(monkeypatch, **{f"rule{at}": [gain(3_000 - at)] for at in range(30)})
    run = microseconds(100)
    assert "\n20. Saves" in run.report("findings")
    assert "\n\n10 more findings are not shown: top=None shows all.\n\n" in run.report("findings")
    assert "\n\n1 more finding is not shown: top=None shows all.\n\n" in run.report("findings", top=29)
    assert "not shown" not in run.report("findings", top=30)
    assert "\n30. Saves" in run.report("findings", top=None) and "not shown" not in run.report("findings", top=None)
    assert "1. Saves" not in run.report("findings", top=0)
    with pytest.raises(TorchprofError, match="top is a number of rows"):
        run.report("findings", top=-1)


def test_lines_fit_a_terminal_and_names_stay_text(monkeypatch) -> None:
    hostile = "Net.\x1b[31m<script>\n2. Net.b"
    finds(monkeypatch, one=[gain(50_000, hostile)._replace(cause="Is " + "very " * 60 + "slow.")])
    text = microseconds(100).report("findings")
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "Net.\\x1b[31m<script>\\n2. Net.b: Is very" in " ".join(text.split())
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 1


def test_the_report_does_not_ask_for_what_was_recorded() -> None:
    everything = run_of([], flags=(("record_shapes", True), ("profile_memory", True)), **CUDA)
    assert everything.report("findings") == "No findings: no rule found a change that is worth it in this run."
    assert "use_cuda" in run_of([]).report("findings")


@pytest.mark.parametrize(
    "environment, asks",
    [
        ([("torch", "2.13.0+cpu on Python 3.11.7"), ("threads", "2")], False),
        ([("torch", "2.13.0 on Python 3.11.7"), ("CUDA", "12.6, but no device was found")], True),
        ([], True),
    ],
    ids=["built without", "built with", "unknown"],
)
def test_the_report_asks_for_cuda_if_torch_supports_it(environment, asks) -> None:
    assert ("use_cuda=True" in run_of([], environment=tuple(environment)).report("findings")) == asks


def test_the_docs_list_every_rule() -> None:
    page = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(rules())


def test_every_rule_says_what_it_looks_for() -> None:
    assert all(find.__doc__ for find in rules().values())


# Double precision


def test_float64_parameters_and_inputs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).double()
    x = torch.rand(256, 64, dtype=torch.float64)
    run = profiled(model, lambda: model(x).sum().backward(), record_shapes=True, profile_memory=True)
    found = {one.layer: one for one in of(run, "double_precision")}
    both = found["Sequential.*"]
    assert set(both.layers) == {"Sequential.0", "Sequential.2"}
    assert "65.00 KB of parameters are float64." in both.finding
    assert both.gain_bytes == 2 * 64 * 65 * 8 // 2
    assert found["Sequential.1"].gain_bytes is None  # it holds none, but computes in it
    assert found["(outside)"].finding.endswith(" This is outside all layers.")  # the sum


def test_float64_parameters_are_reported_without_shapes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double())

    def work() -> None:
        model[1](model[0](torch.rand(64, 64)).double())

    run = profiled(model, work)
    (found,) = of(run, "double_precision")
    assert found.layer == "Sequential.1"
    own = sum(one.cost.cpu_ns for one in run.rows if one.layer is not None and one.layer.name == "Sequential.1")
    assert found.gain_ns == round(own / 2) and f"takes {format_time(own)}, " in found.finding


@pytest.mark.parametrize("kind, part", [("Linear", 0.5), ("Conv2d", 0.75), ("LSTM", 0.75)])
def test_the_gain_of_float32_on_a_cpu(kind: str, part: float) -> None:
    layers = [Layer(("Net",), "Net"), Layer(("Net", "a"), kind, 10, dtype_bytes=(("float64", 80),))]
    (found,) = of(made_run_of([row(1, op("x"), cpu_ns=1000)], layers=layers, wall_ns=1000), "double_precision")
    assert found.gain_ns == 1000 * part


def test_float32_with_python_scalars_is_not_float64() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x / 3.5 + 0.25) * 2.0

    model = nn.Sequential(nn.Linear(8, 8), Scaled())
    for options in ({}, {"record_shapes": True}):
        run = profiled(model, lambda: model(torch.rand(4, 8)).sum().backward(), **options)
        assert of(run, "double_precision") == []


def test_on_a_device_float64_may_cost_all() -> None:
    mm = op("aten::mm", (8, 8), (8, 8), dtypes=["double", "double"])
    (found,) = of(on_device(row(1, mm, kernel("dgemm"), device="cuda:0", device_ns=640), **SHAPES), "double_precision")
    assert found.gain_ns == 640


IN_DOUBLE = [
    row(1, op("aten::mm", (8, 8), (8, 8), dtypes=["double", "double"]), cpu_ns=2),
    row(1, op("aten::linear", (8, 8), (8, 8), dtypes=["double", "double"]), op("aten::t"), cpu_ns=2),
    row(1, op("aten::add", (8, 8), (8,), dtypes=["float", "double"]), cpu_ns=2),  # the float is promoted
    row(1, op("X"), op("aten::mm", (8, 8), (8, 8), dtypes=["double", "double"]), phase=BACKWARD, cpu_ns=2),
]
NOT_IN_DOUBLE = [
    row(1, op("CompiledFunction", (8,), (8, 8), dtypes=["double", "float"]), op("cpp_fused_add_0"), cpu_ns=1),
    row(1, op("CompiledFunction", (8,), dtypes=["double"]), cpu_ns=1),
    row(1, op("CompiledFunction", (8,), dtypes=["double"]), op("aten::empty"), cpu_ns=1),
    row(1, op("torch::autograd::AccumulateGrad", (8,), dtypes=["double"]), cpu_ns=1),
    row(1, op("mine::op", (8,), dtypes=["double"]), op("aten::empty"), cpu_ns=1),
    row(1, op("aten::copy_", (8,), (8,), dtypes=["float", "double"]), cpu_ns=1),  # a conversion
    row(1, op("aten::linear", (8,), dtypes=["double"]), op("aten::mm", (8, 8), dtypes=["float"]), cpu_ns=1),
    row(1, op("aten::mul", (8,), (), dtypes=["float", "double"]), cpu_ns=1),  # Python's number
]


@pytest.mark.parametrize("one", IN_DOUBLE, ids=lambda one: one[3][0].name)
def test_operators_that_compute_in_float64(one) -> None:
    assert [found.gain_ns for found in of(run_of([one], **SHAPES), "double_precision")] == [1]


@pytest.mark.parametrize("one", NOT_IN_DOUBLE, ids=lambda one: one[3][0].name)
def test_operators_with_a_float64_input_that_do_not_compute_in_float64(one) -> None:
    assert of(run_of([one], **SHAPES), "double_precision") == []


def test_a_layer_with_some_float64_parameters_may_compute_in_float32() -> None:
    """Without shapes it is unknown which of its parameters an operator used."""
    run = run_of([row(1, op("aten::mm"), cpu_ns=1)])
    for bytes_of, count in (((("float64", 8), ("float32", 400)), 0), ((("float64", 8), ("int64", 400)), 1)):
        layers = (run.layers[0], replace(run.layers[1], dtype_bytes=bytes_of), *run.layers[2:])
        assert len(of(replace(run, layers=layers), "double_precision")) == count


# Layout

TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(…)"
TO_NCHW = "void cudnn::ops::nhwcToNchwKernel<float, float, float, true, false, (cudnnKernelDataType_t)0>(…)"
CONVOLUTION = (op("aten::conv2d"), op("aten::convolution"), op("aten::_convolution"), op("aten::cudnn_convolution"))


def test_kernels_that_only_convert_the_layout_are_reported() -> None:
    run = on_device(
        row(1, *CONVOLUTION, kernel(TO_NHWC), device="cuda:0", calls=4, device_ns=300),
        row(1, *CONVOLUTION, kernel(TO_NCHW), device="cuda:0", calls=2, device_ns=100),
        row(1, *CONVOLUTION, kernel("sm80_xmma_fprop_implicit_gemm_tf32f32_nhwckrsc_nhwc"), device_ns=600),
    )
    (found,) = told(run, "channels_last_missed")
    assert (found.layer, found.gain_ns) == ("Net.a", 400)
    assert found.finding.startswith("6 kernels convert between NCHW and NHWC around convolutions, for 0.400us in")


def test_kernels_that_run_in_a_layout_are_not_conversions() -> None:
    names = ("void nhwcToFoldedNhwcKernel<half>", "max_pool_forward_nchw<float>", "implicit_gemm_nhwckrsc_nhwc")
    rows = [row(1, *CONVOLUTION, kernel(name), device="cuda:0", device_ns=100) for name in names]
    assert of(on_device(*rows), "channels_last_missed") == []


# TF32 and autocast

MM, CONV = op("aten::mm"), op("aten::cudnn_convolution")
SGEMM, TF32 = kernel("ampere_sgemm_128x64_tn"), kernel("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_nn>")


def gpu_work(*frames: Any, ns: int = 900, layer: int = 1) -> tuple[Any, ...]:
    return row(layer, *frames, device="cuda:0", device_ns=ns)


def set_to(**changed: str) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(AMPERE), **changed}.items())


def test_products_that_tf32_would_speed_up() -> None:
    run = on_device(
        gpu_work(MM, SGEMM), gpu_work(MM, SGEMM, ns=50, layer=3), gpu_work(op("x"), kernel("k"), ns=50), switches=AMPERE
    )
    (found,) = told(run, "tf32_not_used")
    assert (found.layers, found.gain_ns) == (("Net.a", "Net.b.0"), 900 * 7 // 8 + 50 * 7 // 8)
    assert " take 0.950us: TF32 is off. The largest gain is in Net.a: up to 0.787us." in found.finding
    assert 'set_float32_matmul_precision("high")' in found.remedy and "cudnn" not in found.remedy
    assert told(run, "autocast_not_used") == []  # one advice, not two


def test_convolutions_have_a_switch_of_their_own() -> None:
    rows = [gpu_work(CONV, kernel("cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1"))]
    assert of(on_device(*rows, switches=AMPERE), "tf32_not_used") == []
    (found,) = told(on_device(*rows, switches=set_to(cudnn_tf32="False")), "tf32_not_used")
    assert "cudnn.allow_tf32 = True" in found.remedy


@pytest.mark.parametrize(
    "rows, switches",
    [
        ([gpu_work(MM, SGEMM)], set_to(float32_matmul_precision="high")),
        ([gpu_work(MM, SGEMM)], set_to(compute_capability="7.5")),
        ([gpu_work(MM, SGEMM)], ()),
        ([gpu_work(MM, SGEMM)], set_to(compute_capability="new")),
        ([gpu_work(MM, TF32)], AMPERE),
        ([gpu_work(op("aten::mm", (8, 8), (8, 8), dtypes=["c10::Half"] * 2), kernel("gemm"))], AMPERE),
        ([gpu_work(op("aten::mm", (8, 8), (8, 8), dtypes=["double"] * 2), kernel("dgemm"))], AMPERE),
        ([gpu_work(MM, kernel("volta_fp16_sgemm_fp16_128x32_nn"))], AMPERE),
        ([gpu_work(MM, op("aten::copy_"), kernel("elementwise"))], AMPERE),
        ([gpu_work(op("aten::add"), SGEMM)], AMPERE),
    ],
)
def test_tf32_is_not_recommended_if_it_gains_nothing(rows, switches) -> None:
    assert of(on_device(*rows, switches=switches), "tf32_not_used") == []


def test_dtypes_decide_what_is_float32_if_shapes_were_recorded() -> None:
    mm = op("aten::mm", (8, 8), (8, 8), dtypes=["float", "float"])
    (found,) = told(on_device(gpu_work(mm, kernel("_ZN19cutlass")), switches=AMPERE, **SHAPES), "tf32_not_used")
    assert found.gain_ns == 900 * 7 // 8


def test_autocast_where_tf32_is_on() -> None:
    run = on_device(
        gpu_work(MM, TF32, ns=500),
        gpu_work(op("x"), kernel("k"), ns=500),
        switches=set_to(float32_matmul_precision="high"),
    )
    (found,) = told(run, "autocast_not_used")
    assert (found.layer, found.gain_ns) == ("Net.a", 250)
    assert "50% of the CUDA time" in found.finding and "bfloat16" in found.remedy


def test_autocast_where_there_is_no_tf32() -> None:
    (found,) = told(
        on_device(gpu_work(MM, SGEMM, ns=800), switches=set_to(compute_capability="7.0")), "autocast_not_used"
    )
    assert found.gain_ns == 700 and "float16" in found.remedy and "GradScaler" in found.remedy


@pytest.mark.parametrize(
    "rows, capability",
    [
        ([gpu_work(MM, TF32, ns=499), gpu_work(op("x"), kernel("k"), ns=501)], "8.0"),
        ([gpu_work(MM, TF32), gpu_work(MM, kernel("ampere_fp16_s16816gemm_fp16_64x64"), ns=1)], "8.0"),
        ([gpu_work(MM, TF32), gpu_work(op("aten::add", (8,), dtypes=["c10::BFloat16"]), ns=1)], "8.0"),
        ([gpu_work(MM, SGEMM)], "6.1"),
        ([gpu_work(MM, SGEMM)], ""),
    ],
)
def test_cases_in_which_autocast_is_not_recommended(rows, capability) -> None:
    switches = set_to(compute_capability=capability, float32_matmul_precision="high")
    assert of(on_device(*rows, switches=switches), "autocast_not_used") == []


def test_the_cpu_has_no_tf32() -> None:
    run = profiled(model := nn.Linear(64, 64), lambda: model(torch.rand(64, 64)))
    assert of(run, "tf32_not_used") == of(run, "autocast_not_used") == []


# The optimizer


def training(optimizer: type[torch.optim.Optimizer], depth: int = 12, set_to_none: bool = True, **options: Any) -> Run:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))
    stepping = optimizer(model.parameters(), lr=0.01, **options)

    def work() -> None:
        stepping.zero_grad(set_to_none=set_to_none)
        model(torch.rand(4, 16)).sum().backward()
        stepping.step()

    work()
    return profiled(model, work, profile_memory=True)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_step_per_tensor_is_reported(optimizer) -> None:
    run = training(optimizer)
    (found,) = of(run, "optimizer_step_per_tensor")
    assert found.layer == "(outside)" and f"torch.optim.{optimizer.__name__}(…, fused=True)" in found.remedy
    took = run.rows.columns["cpu_ns"]
    inside_step = [at for at, one in enumerate(run.rows) if one.frames and "Optimizer.step#" in one.frames[0].name]
    assert found.gain_ns == int(sum(took[at] for at in inside_step) * 0.75)
    assert found.finding.startswith(f"{optimizer.__name__} updates tensors one by one. A step takes ")


def test_foreach_is_not_recommended_on_the_cpu() -> None:
    (found,) = of(training(torch.optim.Adam, foreach=True), "optimizer_step_per_tensor")
    assert "fused=True" in found.remedy


@pytest.mark.parametrize(
    "optimizer, options",
    [
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.RMSprop, {}),  # has no fused step, and foreach=True gains nothing on the CPU
        (torch.optim.Adam, {"depth": 2}),
    ],
)
def test_an_optimizer_step_without_a_faster_version_is_not_reported(optimizer, options) -> None:
    assert of(training(optimizer, **options), "optimizer_step_per_tensor") == []


@pytest.mark.parametrize("optimizer, momentum", [("SGD", 0.0), ("SGD", 0.9), ("Adagrad", None)])
def test_sparse_gradients_are_not_reported(monkeypatch, optimizer, momentum) -> None:
    def stepped(sparse: bool) -> Run:
        model = nn.Sequential(nn.Embedding(50, 8, sparse=sparse), *(nn.Linear(8, 8) for _ in range(8)))
        options = {} if momentum is None else {"momentum": momentum}
        stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)

        def work() -> None:
            stepping.zero_grad()
            model(torch.arange(4)).sum().backward()
            stepping.step()

        return profiled(model, work)

    monkeypatch.setattr(torchprof.advise.gradients, "_SMALL_NS", 10**9)  # however slow this machine is
    assert of(stepped(True), "optimizer_step_per_tensor") == []
    assert len(of(stepped(False), "optimizer_step_per_tensor")) == 1


def test_complex_parameters_are_not_reported() -> None:
    step = label("Optimizer.step#Adam.step")
    rows = [row(OUTSIDE, step, cpu_ns=10), row(OUTSIDE, step, op("aten::add_"), calls=40, cpu_ns=400)]
    assert len(of(run_of(rows), "optimizer_step_per_tensor")) == 1
    for inside_op in ((op("aten::view_as_real"),), (op("aten::add_"), op("aten::_nnz"))):
        assert of(run_of([*rows, row(OUTSIDE, step, *inside_op)]), "optimizer_step_per_tensor") == []
    before = row(OUTSIDE, op("aten::view_as_real"), step, op("aten::add_"))
    assert len(of(run_of([*rows, before]), "optimizer_step_per_tensor")) == 1  # it is not in the step


def test_sgd_on_few_large_tensors_gains_nothing_on_the_cpu() -> None:
    step = label("Optimizer.step#SGD.step")
    slow, fast = (
        run_of([row(OUTSIDE, step, cpu_ns=10), row(OUTSIDE, step, op("aten::add_"), calls=40, cpu_ns=40 * ns)])
        for ns in (30_001, 30_000)
    )
    assert of(slow, "optimizer_step_per_tensor") == []
    assert len(of(fast, "optimizer_step_per_tensor")) == 1


def gpu_step(name: str, *ops: str, calls: int = 40) -> Run:
    step = label(f"Optimizer.step#{name}.step")
    rows = [row(OUTSIDE, step, calls=2, cpu_ns=1000)]
    for one in ops:
        rows.append(row(OUTSIDE, step, op(one), calls=calls, cpu_ns=4000))
        rows.append(row(OUTSIDE, step, op(one), kernel("k"), device="cuda:0", calls=calls, device_ns=500))
    return on_device(*rows)


def test_an_optimizer_step_per_tensor_on_a_gpu_is_reported() -> None:
    (found,) = told(gpu_step("Adam", "aten::lerp_", "aten::addcdiv_"), "optimizer_step_per_tensor")
    assert "fused=True" in found.remedy and found.gain_ns == 9000 * 3 // 4  # launching takes longer than running
    assert found.finding == "Adam updates tensors one by one. A step takes 4.500us on average."


def test_a_batched_or_small_optimizer_step_on_a_gpu_is_not_reported() -> None:
    for run in (
        gpu_step("Adam", "aten::_foreach_lerp_", "aten::add_"),
        gpu_step("Adam", "aten::_fused_adam_", "aten::add_"),
        gpu_step("Mine", "aten::add_"),
        gpu_step("RMSprop", "aten::addcmul_"),
        gpu_step("Adam", "aten::add_", calls=19),
    ):
        assert of(run, "optimizer_step_per_tensor") == []


def test_zeroed_gradients_are_reported() -> None:
    run = training(torch.optim.SGD, set_to_none=False)
    (found,) = of(run, "gradients_zeroed")
    assert "(24 writes)" in found.finding and found.finding.startswith("`zero_grad` of SGD fills ")
    assert found.gain_bytes == 12 * (16 * 16 + 16) * 4
    spent = 0
    for one in run.rows:
        names = [frame.name for frame in one.frames]
        zeroed = "Optimizer.zero_grad#SGD.zero_grad" in names and "aten::zero_" in names
        added = "torch::autograd::AccumulateGrad" in names and "aten::add_" in names
        spent += one.cost.cpu_ns * (zeroed or added)
    assert found.gain_ns == spent


@pytest.mark.parametrize("calls, said", [(1, "(1 write)"), (1406, "(1,406 writes)")])
def test_the_finding_counts_the_writes_of_zeros(calls, said) -> None:
    zero = label("Optimizer.zero_grad#SGD.zero_grad")
    (found,) = of(run_of([row(OUTSIDE, zero, op("aten::zero_"), calls=calls, cpu_ns=50)]), "gradients_zeroed")
    assert said in found.finding


def test_gradients_that_are_accumulated_on_purpose_are_not_counted() -> None:
    zero, add = label("Optimizer.zero_grad#SGD.zero_grad"), op("torch::autograd::AccumulateGrad")
    accumulating = [row(1, add, op("aten::add_"), phase=BACKWARD, calls=40, cpu_ns=4000)]
    assert of(run_of(accumulating), "gradients_zeroed") == []
    (found,) = of(
        run_of([row(OUTSIDE, zero, op("aten::zero_"), calls=10, cpu_ns=50), *accumulating]), "gradients_zeroed"
    )
    assert found.gain_ns == 50 + 1000  # a quarter of the additions are to zeros


def test_gradients_set_to_none_are_not_reported() -> None:
    assert of(training(torch.optim.SGD), "gradients_zeroed") == []


# Elementwise ops


class Gelu(nn.Module):
    """The approximation of GELU in 8 elementwise ops."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + x * 0.5).neg()  # 4


def test_a_gelu_in_python_is_reported_with_its_backward(monkeypatch) -> None:
    monkeypatch.setattr(torchprof.advise.python, "_GAP_NS", 10**9)  # however slow this machine's Python is
    model = nn.Sequential(nn.Linear(64, 64), Gelu())
    run = profiled(model, lambda: model(torch.rand(32, 64)).sum().backward())
    (found,) = of(run, "many_small_operators")
    assert found.layer == "Sequential.1" and found.finding.startswith("A forward call runs 8 elementwise operators. ")
    rows = [one for one in run.rows if one.layer is not None and one.layer.name == "Sequential.1"]
    assert {one.phase for one in rows} == {"forward", BACKWARD}  # all nodes in it are elementwise
    assert found.gain_ns == sum(one.cost.cpu_ns for one in rows)  # with the engine's time between the nodes
    nodes = [one for one in rows if not one.frames or one.frames[-1].name != AUTOGRAD_ENGINE]
    back = sum(one.cost.cpu_ns for one in nodes if one.phase == BACKWARD)
    assert f" Their backward takes {format_time(back)}. The time between operators is " in found.finding


def test_operators_in_a_loop_have_the_backward_nodes_that_are_short() -> None:
    def node(name: str, ns: int) -> tuple[Any, ...]:
        frames = op(f"autograd::engine::evaluate_function: {name}"), op(name), op("aten::x")
        return row(1, *frames, phase=BACKWARD, cpu_ns=ns)

    nodes = [node("SumBackward1", 100), node("LeakyReluBackward0", 20), node("torch::autograd::AccumulateGrad", 3)]
    sums = row(1, op("autograd::engine::evaluate_function: SumBackward1"), phase=BACKWARD, calls=1)
    long = row(1, op("autograd::engine::evaluate_function: MmBackward0"), phase=BACKWARD, calls=1, cpu_ns=10_000)
    for ops, gain_ns in ((OTHER, 50_120), (ELEMENTWISE, 40_120), (FEW, 1_020)):
        (found,) = of(run_of([row(1), ops, sums, long, *nodes]), "many_small_operators")
        assert found.gain_ns == gain_ns
    assert " Their backward takes 0.020us." in found.finding  # that of elementwise ones


class Functional(Layers):
    """An activation after each of six products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight).tanh()
        return x


def test_the_activation_of_each_product_is_not_to_be_fused() -> None:
    model = nn.Sequential(Functional(weights=nn.ParameterList(torch.rand(64, 64) for _ in range(6))))
    assert of(profiled(model, lambda: model(torch.rand(32, 64))), "many_small_operators") == []


class ResidualForEach(Layers):
    """A residual around each layer; ``ops``: further elementwise operators."""

    def __init__(self, ops: int) -> None:
        super().__init__(layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), ops=ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        for _ in range(self.ops):
            x = x.tanh()
        return x


@pytest.mark.parametrize("ops, found", [(4, 0), (5, 1)])
def test_a_residual_for_each_layer_is_not_to_be_fused(ops: int, found: int) -> None:
    model = ResidualForEach(ops)
    assert len(of(profiled(model, lambda: model(torch.rand(32, 64))), "many_small_operators")) == found


def test_few_elementwise_ops_are_not_reported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Residual(), nn.GELU(), nn.LayerNorm(64))
    assert of(profiled(model, lambda: model(torch.rand(32, 64))), "many_small_operators") == []


@pytest.mark.parametrize("ns, is_short", [(9_999, True), (10_000, False)])
def test_the_overhead_of_short_ops_is_named(ns, is_short) -> None:
    names = ("add", "mul_", "sub", "neg", "exp")
    run = run_of([row(1, calls=2), *(row(1, op(f"aten::{name}"), calls=2, cpu_ns=2 * ns) for name in names)])
    (found,) = told(run, "many_small_operators")
    said = f"A forward call runs 5 elementwise operators. They take {format_time(10 * ns)} in total, "
    said += f"{format_time(ns)} each."
    assert found.finding == said + SHORT * is_short
    assert found.gain_ns == 10 * ns


def test_ops_inside_ops_do_not_count() -> None:
    mean = [
        row(1),
        *(
            row(1, op("aten::mean"), op(f"aten::{name}"), cpu_ns=9)
            for name in ("div_", "add", "mul", "sub", "neg", "exp")
        ),
    ]
    assert of(run_of(mean), "many_small_operators") == []
    own = [
        row(1),
        *(row(1, label("mine"), op(f"aten::{name}"), cpu_ns=9) for name in ("add", "mul", "sub", "neg", "exp")),
    ]
    assert len(of(run_of(own), "many_small_operators")) == 1


# Tiny ops


class Loop(nn.Module):
    """1,001 ops: for each of 500 rows a select and a sum, and the stack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[row].sum() for row in range(500)])


def test_a_loop_over_rows_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(torchprof.advise.python, "_GAP_NS", 10**9)
    monkeypatch.setattr(torchprof.advise.fusion, "_SHORT_NS", 10**9)  # however slow this machine is
    model = nn.Sequential(Loop(), nn.Linear(500, 4))
    run = profiled(model, lambda: [model(torch.rand(500, 8)) for _ in range(3)])
    (found,) = of(run, "many_small_operators")
    ns = sum(one.cost.cpu_ns for one in run.rows if one.layer is not None and one.layer.kind == "Loop")
    assert found.layer == "Sequential.0" and found.gain_ns == ns
    assert found.finding.startswith("A forward call runs 1,001 operators. ")
    assert "torch.compile" in found.remedy


def loop(calls: int, ns: int, *more: Any, layer_calls: int = 1) -> Run:
    """A layer that calls so many ops, of which one calls another inside; together they take so long."""
    sums, inside = op("aten::sum"), op("aten::fill_")
    rows = [
        row(1, calls=layer_calls),
        row(1, sums, calls=calls, cpu_ns=ns - 7),
        row(1, sums, inside, calls=5, cpu_ns=7),
    ]
    return run_of([*rows, *more])


@pytest.mark.parametrize(
    "calls, ns, layer_calls, count",
    [(100, 999_999, 1, 1), (99, 9_900, 1, 0), (199, 19_900, 2, 0), (200, 19_900, 2, 1), (100, 1_000_000, 1, 0)],
)
def test_a_hundred_ops_of_less_than_ten_microseconds(calls, ns, layer_calls, count) -> None:
    assert len(of(loop(calls, ns, layer_calls=layer_calls), "many_small_operators")) == count


def test_the_figures_of_tiny_ops() -> None:
    (found,) = told(loop(2000, 100_000, layer_calls=2), "many_small_operators")
    assert found.finding == ("A forward call runs 1,000 operators. They take 100.000us in total, 0.050us each." + SHORT)
    assert found.gain_ns == 100_000


def test_operators_in_a_loop_are_elementwise_ones_and_others() -> None:
    run = loop(500, 100_000, row(1, op("aten::add"), calls=500, cpu_ns=50_000))
    (found,) = of(run, "many_small_operators")
    assert found.finding == ("A forward call runs 1,000 operators. They take 150.000us in total, 0.150us each." + SHORT)
    assert found.gain_ns == 150_000


def between(own: int, *rows: tuple[Any, ...], **meta: Any) -> Run:
    """A layer that takes so long between its ops, 9 ns of it in a label of the user's."""
    mine = [row(1, calls=2, cpu_ns=own - 9), row(1, label("mine"), calls=2, cpu_ns=9)]
    return run_of([*mine, *rows, row(0, op("aten::mm"), cpu_ns=10**9)], **meta)


SHORT = " Operators this short are usually bound by dispatch overhead."
ELEMENTWISE = row(1, op("aten::add"), calls=1000, cpu_ns=40_000)
OTHER = row(1, op("aten::sum"), calls=1000, cpu_ns=50_000)
FEW = row(1, op("aten::add"), calls=5, cpu_ns=1000)
AGAIN = row(1, calls=1, cpu_ns=700, phase="recompute")


@pytest.mark.parametrize(("ops", "gain_ns"), [(ELEMENTWISE, 40_000), (OTHER, 50_000)])
def test_the_gain_includes_the_time_between_ops(ops, gain_ns) -> None:
    (found,) = of(between(30_000, ops), "many_small_operators")
    assert found.finding.endswith(f"{SHORT} The time between operators is 30.000us.")
    assert found.gain_ns == gain_ns + 30_000
    (again,) = of(between(30_000, ops, AGAIN), "many_small_operators")
    assert again.gain_ns == gain_ns + 30_700
    (found,) = of(between(30_000, ops, row(1, phase=BACKWARD, cpu_ns=999)), "many_small_operators")
    assert found.gain_ns == gain_ns + 30_000


def test_the_time_between_ops_is_counted_once() -> None:
    slow = between(300_000_000, ELEMENTWISE, OTHER)  # 30 ms of 300 would be 1,000 calls
    (found,) = of(slow, "many_small_operators")
    assert [one.gain_ns for one in of(slow, "python_in_layers")] == [300_000_000]
    assert found.gain_ns == 90_000
    assert found.finding.endswith(SHORT)


def test_on_a_device_the_time_between_launches_does_not_count() -> None:
    adds = [row(1, op("aten::add"), kernel("k"), device="cuda:0", calls=1000, device_ns=7000)]
    end = " They take 7.000us in total, 0.007us each." + SHORT.replace("dispatch", "kernel launch")
    for between_ns in (30_000, 300_000_000):
        (found,) = of(between(between_ns, ELEMENTWISE, *adds, **CUDA), "many_small_operators")
        assert found.gain_ns == 7000 and found.finding.endswith(end)


def test_a_loop_outside_the_layer_does_not_count() -> None:
    tiny = {"calls": 500, "cpu_ns": 5000}
    nested = [row(1), row(1, op("aten::sum"), cpu_ns=9), row(1, op("aten::sum"), op("aten::fill_"), **tiny)]
    for rows in (
        [row(OUTSIDE), row(OUTSIDE, op("aten::sum"), **tiny)],
        [row(1), row(1, op("aten::sum"), phase=BACKWARD, **tiny)],
        nested,
        [row(1), row(1, label("mine"), **tiny)],
    ):
        assert of(run_of(rows), "many_small_operators") == []
    assert len(of(run_of([row(1), row(1, label("mine"), op("aten::sum"), **tiny)]), "many_small_operators")) == 1


def test_a_compiled_layer_is_not_reported() -> None:
    run = loop(500, 5000)
    compiled = tuple(replace(one, compiled=True) for one in run.layers)
    assert of(replace(run, layers=compiled), "many_small_operators") == []


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_layers_without_a_loop_call_fewer_than_a_hundred_ops(monkeypatch, name) -> None:
    monkeypatch.setattr(torchprof.advise.fusion, "_SHORT_NS", 10**12)  # whatever their ops take
    model = ARCHITECTURES[name].make()
    with torchprof.Profile(model) as prof:
        model(*ARCHITECTURES[name].inputs())
    assert [one for one in of(prof.run, "many_small_operators") if "in a loop" in one.remedy] == []


# Attention


class Attention(Layers):
    """Self-attention of 4 heads, by hand or by torch's function."""

    def __init__(self, how: str) -> None:
        super().__init__(qkv=nn.Linear(32, 96), attend=nn.Softmax(dim=-1), how=how)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.how == "by hand":
            return torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v
        if self.how == "with a layer":
            return self.attend(torch.einsum("bhqd,bhkd->bhqk", q, k)) @ v
        if self.how == "one product":
            return torch.softmax(q @ k.transpose(-1, -2), -1)
        dropout = 0.1 if self.how == "math" else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def attention(how: str, length: int = 256, train: bool = True, **options: Any) -> Run:
    model = Attention(how)
    x = torch.rand(2, length, 32)

    def work() -> None:
        with torch.set_grad_enabled(train):
            y = model(x)
        if train:
            y.sum().backward()

    return profiled(model, work, profile_memory=True, **options)


@pytest.mark.parametrize("how", ["by hand", "with a layer", "math"])
def test_attention_that_stores_its_scores_is_reported(how) -> None:
    run = attention(how)
    (found,) = of(run, "attention_not_fused")
    assert found.layer == "Attention"
    assert ("uses no fused kernel" in found.finding) == (how == "math")
    scores = 2 * 4 * 256 * 256 * 4  # batch, heads, rows, columns, bytes
    assert found.gain_bytes == scores
    spent = sum(
        one.cost.cpu_ns
        for one in run.rows
        if {"bmm", "softmax", "math"}
        & set(re.findall(r"(bmm|softmax|math)", " ".join(frame.name for frame in one.frames if frame.kind == "op")))
    )
    assert found.gain_ns is not None and found.gain_ns <= int(spent * 7 / 8) + 1
    assert found.gain_ns > spent / 2


class Experts(Layers):
    """A dense mixture of experts: the softmax of a router, and two batched products of the experts."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        y = torch.bmm(torch.bmm(x.expand(4, -1, -1), self.up).relu(), self.down)
        return (y * gates.t()[..., None]).sum(0)


def test_a_mixture_of_experts_may_be_attention() -> None:
    up, down = nn.Parameter(torch.rand(4, 32, 64)), nn.Parameter(torch.rand(4, 64, 32))
    model, x = Experts(router=nn.Linear(32, 4), up=up, down=down), torch.rand(512, 32)
    (found,) = of(profiled(model, lambda: model(x).sum()), "attention_not_fused")
    assert found.finding.startswith("Batched matrix products and softmax run as separate operators, for ")
    assert found.finding.endswith(". If this is attention, it stores all scores.")
    assert found.remedy.startswith("If this is attention, use `torch.nn.functional.scaled_dot_product_attention(")


def test_scores_with_a_mask_in_the_same_op() -> None:
    """baddbmm, as in torch's MultiheadAttention: the matrices are its second and third tensors."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(2, 256, 256)
            return torch.baddbmm(mask, x, x.transpose(1, 2)).softmax(-1) @ x

    model, x = Masked(), torch.rand(2, 256, 32)
    assert len(of(profiled(model, lambda: model(x)), "attention_not_fused")) == 1


@pytest.mark.parametrize("how", ["fused", "one product"])
def test_fused_attention_is_not_reported(how) -> None:
    assert of(attention(how), "attention_not_fused") == []


@pytest.mark.parametrize("how", ["by hand", "with a layer"])
def test_attention_with_short_rows_is_not_reported_on_the_cpu(how) -> None:
    assert of(attention(how, 255), "attention_not_fused") == []


@pytest.mark.parametrize(("shape", "found"), [((2, 255), 0), ((2, 256), 1), ((256, 2), 1)])
def test_the_rows_of_multihead_attention_may_be_in_either_dimension(shape, found) -> None:
    model, x = nn.MultiheadAttention(32, 4), torch.rand(*shape, 32)
    assert len(of(profiled(model, lambda: model(x, x, x)), "attention_not_fused")) == found


def test_without_backward_the_gain_has_no_bytes() -> None:
    (found,) = of(attention("by hand", train=False), "attention_not_fused")
    assert found.gain_bytes is None


def test_multihead_attention_that_returns_weights_is_reported() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.rand(2, 256, 32)
    (found,) = of(profiled(model, lambda: model(x, x, x)), "attention_not_fused")
    assert found.finding.startswith(
        "Attention runs as separate matrix products and softmax, for "
    )  # it is known to be one
    assert "need_weights=False" in found.remedy
    assert of(profiled(model, lambda: model(x, x, x, need_weights=False)), "attention_not_fused") == []


# Modes


def with_dropout(p: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(p))


def test_forgotten_eval_is_reported() -> None:
    model = with_dropout()
    with torch.no_grad():
        run = profiled(model, lambda: model(torch.rand(4, 8)))
    (found,) = told(run, "eval_forgotten")
    assert (found.layer, found.gain_ns) == ("Sequential", None)
    assert "Sequential.1 (BatchNorm1d) and 1 more layer were called in train mode" in found.finding


def test_train_mode_without_effect_or_on_purpose_is_not_reported() -> None:
    x = torch.rand(4, 8)
    harmless = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Dropout(0.0), nn.ReLU())
    for model, work in (
        (model := with_dropout().eval(), lambda model=model: model(x)),
        (model := with_dropout(), lambda model=model: model(x).sum().backward()),
        (model := with_dropout(), lambda model=model: model[0](x)),
        (harmless, lambda: harmless(x)),
    ):
        assert of(profiled(model, work), "eval_forgotten") == []


def test_an_optimizer_step_implies_a_backward() -> None:
    step = label("Optimizer.step#SGD.step")
    model = with_dropout()
    run = profiled(model, lambda: model(torch.rand(4, 8)))
    assert len(of(run, "eval_forgotten")) == 1
    stepped = run_of([row(number) for number in range(4)] + [row(OUTSIDE, step, cpu_ns=9)])
    assert of(replace(stepped, layers=run.layers), "eval_forgotten") == []


def test_activations_without_a_backward_are_reported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    run = profiled(model, lambda: [model(torch.rand(32, 64)) for _ in range(2)], profile_memory=True)
    (found,) = told(run, "gradients_never_used")
    assert found.layer == "Sequential" and found.gain_ns is None
    assert found.gain_bytes == 32 * 64 * 4 + 32 * 8 * 4  # what ReLU kept (the first product goes), and the result
    assert "most of it in Sequential.1" in found.finding and "inference_mode" in found.remedy


def test_activations_on_several_ranks_are_those_of_a_call_and_the_gain_is_of_all_ranks() -> None:
    """Two calls on each of two ranks leave 100 B each: a call leaves 100 B, and at the peaks there are 200 B."""
    run = run_of([row(0, cpu_ns=100)])
    samples = {
        SampleKey(number, "forward", rank, "cpu", measure): Spread.of([(0, value), (1, value)])
        for rank in (0, 1)
        for number, measure, value in ((0, "cpu_ns", 9), (1, "kept_bytes", 70), (2, "kept_bytes", 30))
    }
    (found,) = of(replace(run, metas=(run.meta, replace(run.meta, rank=1)), samples=samples), "gradients_never_used")
    assert (found.layer, found.gain_bytes) == ("Net", 200)
    assert found.finding == (
        "A forward call leaves 100 B saved for backward on average on each of 2 ranks, most of it in Net.a, but no "
        "backward was recorded."
    )


def test_activations_that_are_used_or_not_kept_are_not_reported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    x = torch.rand(32, 64)
    assert of(profiled(model, lambda: model(x).sum().backward(), profile_memory=True), "gradients_never_used") == []
    with torch.no_grad():
        assert of(profiled(model, lambda: model(x), profile_memory=True), "gradients_never_used") == []
    assert of(profiled(model, lambda: model(x)), "gradients_never_used") == []  # nobody knows


def test_anomaly_detection_is_reported() -> None:
    model = Mlp()
    x = torch.rand(1, 4)
    assert of(profiled(model, lambda: model(x)), "anomaly_detection_on") == []
    with torch.autograd.set_detect_anomaly(True):
        (found,) = told(profiled(model, lambda: model(x)), "anomaly_detection_on")
    assert found.layer == "Mlp"


# Other types on a CPU


def products(measure: str, saved: float = 0.5, *, ns: int = 600_000, autocast: str = "False") -> Run:
    """Two layers of a millisecond: products in the first take ``ns``, and half of that again in its backward. In the
    other type they save this part of the forward, and a half of the backward."""
    layer = Layer(("Net",), "Linear", dtype_bytes=(("float32", 8),))
    rows = [row(0, op("aten::addmm"), calls=2, cpu_ns=ns), row(0, op("aten::mm"), phase=BACKWARD, cpu_ns=ns // 2)]
    rest = row(OUTSIDE, cpu_ns=1_000_000 - ns - ns // 2)
    run = made_run_of([*rows, rest], layers=[layer], wall_ns=1_000_000, switches=(("cpu_autocast", autocast),))
    calls = {(FORWARD, "ordinary_ns"): 1000, (FORWARD, measure): round(1000 * (1 - saved))}
    calls |= {(BACKWARD, "ordinary_ns"): 500, (BACKWARD, measure): 250}
    samples = {SampleKey(0, phase, 0, "cpu", name): Spread.of([(0, value)]) for (phase, name), value in calls.items()}
    return replace(run, samples=samples)


def test_a_cpu_that_is_fast_in_bfloat16_is_named() -> None:
    [found] = of(products("bfloat16_ns", 0.7), "bfloat16_not_used")
    assert found.gain_ns == 0.7 * 600_000 + 0.5 * 300_000 and found.cause == (
        "Products and convolutions in float32 take 90% of the time; this CPU is 2.7 times as fast in bfloat16."
    )


@pytest.mark.parametrize(
    "run",
    [
        products("bfloat16_ns", ns=330_000),  # less than half
        products("bfloat16_ns", 0.2),  # 1.4 times as fast
        products("bfloat16_ns", -1),
        products("bfloat16_ns", autocast="True"),
        products("bfloat16_ns", autocast=""),
        products("ordinary_ns"),
    ],
)
def test_bfloat16_is_not_recommended_where_it_would_not_pay(run: Run) -> None:
    assert of(run, "bfloat16_not_used") == []


@pytest.mark.parametrize(("saved", "found"), [(0.9, [690_000]), (0.2, []), (-1, [])])
def test_half_precision_is_reported_where_float32_is_faster(saved: float, found: list[int]) -> None:
    assert [one.gain_ns for one in of(products("float32_ns", saved), "half_precision_on_the_cpu")] == found


def test_what_was_measured_on_several_ranks_counts_once() -> None:
    run = products("bfloat16_ns", 0.7)
    samples = {**run.samples, **{key._replace(rank=1): spread for key, spread in run.samples.items()}}
    both = replace(run, samples=samples, metas=(run.meta, replace(run.meta, rank=1)))
    assert Evidence(both).measured_again("bfloat16_ns") == {(0, FORWARD): 300, (0, BACKWARD): 250}

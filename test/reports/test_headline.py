"""The headline: its sentences on hand-made runs, and on real runs against the tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from build import hand_made
from build.hand_made import label, op, python_line, row
from torch import nn

import torchprof
from torchprof import Profile
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime
from torchprof.run.words import NOT_SELECTED, OUTSIDE, PHASES, Frame

FORWARD, BACKWARD, RECOMPUTE = PHASES
K3 = "3, 8, kernel_size=(3, 3), stride=(1, 1)"
K1 = "3, 8, kernel_size=(1, 1), stride=(1, 1)"

NET = {
    "Net": "Net",
    "Net.stem": "Stem",
    "Net.body": "Sequential",
    "Net.body.a": ("Conv2d", K3),
    "Net.body.b": ("Conv2d", K3),
    "Net.body.c": ("Conv2d", K1),
    "Net.body.n": "LayerNorm",
}


def run_of(kinds: dict[str, Any], *work: tuple[Any, ...], ranks: int = 1, **meta: Any) -> Run:
    """A run with a row for each of ``work``: (path of a layer or OUTSIDE, phase, frames, {field: value})."""
    layers = []
    for path, kind in kinds.items():
        name, settings = (kind, "") if isinstance(kind, str) else kind
        layers.append(Layer(tuple(path.split(".")), name, settings=settings))
    at = {layer.name: number for number, layer in enumerate(layers)}
    rows = [row(at.get(where, where), *frames, phase=phase, **costs) for where, phase, frames, costs in work]
    run = hand_made.run_of(rows, layers=layers, **meta)
    return replace(run, metas=tuple(replace(run.meta, rank=rank) for rank in range(ranks)))


def took(where: Any, ns: int, *frames: Frame, phase: str = FORWARD, **more: int) -> tuple[Any, ...]:
    return where, phase, frames or (op("aten::x"),), {"cpu_ns": ns, **more}


BODY = [
    took("Net.stem", 380),
    took("Net.body.a", 300),
    took("Net.body.b", 140),
    took("Net.body.c", 100),
    took("Net.body.n", 80),
]


def head(*work: tuple[Any, ...], kinds: dict[str, Any] = NET, **meta: Any) -> str:
    return run_of(kinds, *work, **meta).report("headline")


def test_the_part_with_most_of_the_time(golden: Callable[..., None]) -> None:
    """Each title says which sums the shares are of."""
    blocks = {"Net": "Net", **{f"Net.{name}": "Block" for name in "abc"}}
    linear = {**blocks, **{f"Net.{name}.fc": "Linear" for name in "abc"}}
    in_fc = [took("Net.a.fc", 330), took("Net.b.fc", 300), took("Net.c.fc", 270), took("Net.a", 50), took("Net.c", 50)]
    in_net = took("Net.c", 340)
    fc_of_a = {**blocks, "Net.a.fc": "Linear"}
    in_blocks = [took(f"Net.{name}", 200) for name in ("a", "b", "c", "a.fc")]
    no_time = ("Net.a.fc", FORWARD, (op("aten::x"),), {"cpu_ns": 0})
    deeper = {path.replace("Net.", "Net.body."): kind for path, kind in fc_of_a.items()} | {"Net.body": "Body"}
    in_deeper = [(where.replace("Net.", "Net.body."), *rest) for where, *rest in in_blocks]
    one_block = {"Net": "Net", "Net.a": "Block", "Net.a.fc": "Linear", "Net.b": "Linear", "Net.c": "Other"}
    in_one = [took("Net.a", 350), took("Net.a.fc", 140), took("Net.b", 200), took("Net.c", 310)]
    flat = {"Net": "Net", "Net.stem": "Stem", "Net.a": ("Conv2d", K3), "Net.b": ("Conv2d", K3), "Net.c": "Linear"}
    in_flat = [took("Net.a", 300), took("Net.b", 140), took("Net.stem", 400), took("Net.c", 160)]
    backward = [(where, BACKWARD, frames, costs) for where, _, frames, costs in in_flat]
    one_norm = [took("Net.stem", 380), took("Net.body.a", 100), took("Net.body.b", 100)]
    in_body = [took("Net.body", 700, op("aten::bmm")), took("Net.body", 50, op("aten::add"))]
    rest = [took("Net.body.n", 150), took("Net.stem", 100)]
    in_label = [took("Net", 700, label("MASK")), took("Net.stem", 150), took("Net.body.n", 150)]
    models = {"A": "A", "A.fc": "Linear", "A#2": "A", "A#2.fc": "Linear", "B": "B"}
    said = {
        "body 300 + 140 + 100 + 80 of 1000, its 3×3 convolutions 440": head(*BODY),
        "a single layer of a kind: 220": head(*one_norm, took("Net.body.n", 220), took("Net.body.c", 200)),
        "420 of 1000 is no half: not below body": head(*one_norm, took("Net.body.n", 420)),
        "b 3140 of 4000, aten::slow 3000": head(*BODY, took("Net.body.b", 3_000, op("aten::conv2d"), op("aten::slow"))),
        "500 is not more than half": head(took("Net.stem", 500), took("Net.body.a", 500)),
        "501 is": head(took("Net.stem", 499), took("Net.body.a", 501)),
        "no layer has half, linear ones 900, a 380": head(*in_fc, kinds=linear),
        "linear ones 660, c 340": head(in_fc[0], took("Net.b.fc", 330, op("x")), in_net, kinds=linear),
        "the self of layers with children, 600": head(*in_blocks, took("Net", 200), kinds=fc_of_a),
        "whose children have no time": head(no_time, *in_blocks[:3], took("Net", 400), kinds=fc_of_a),
        "and the same below body, 800": head(*in_deeper, took("Net", 200), kinds=dict(sorted(deeper.items()))),
        "a single layer with a self of 350 and a total of 490": head(*in_one, kinds=one_block),
        "convolutions 440, but the largest layer is the stem with 400": head(*in_flat, kinds=flat),
        "in backward as well": head(*backward, kinds=flat),
        "body 900 of 1000, its self 750": head(*in_body, *rest),
        "the self of the model is in a label": head(*in_label),
        "a model of one layer": head(
            took("Linear", 90, op("aten::addmm")), took("Linear", 10, op("aten::t")), kinds={"Linear": "Linear"}
        ),
        "several models": head(took("A.fc", 200), took("A#2.fc", 700), took("B", 100), kinds=models),
        "several models, none with half": head(took("A.fc", 400), took("A#2.fc", 350), took("B", 250), kinds=models),
    }
    golden(said)


def test_time_between_operators_names_the_most_sampled_line() -> None:
    own = ("Net.stem", FORWARD, (), {"cpu_ns": 900})
    work = [own, took("Net.body.a", 100)]
    assert head(*work) == "90% of the forward is in `stem`, all of it where no operator ran."
    seen = [
        ("Net.stem", FORWARD, (python_line(f"net.py:{line}"),), {"calls": times}) for line, times in [(7, 2), (9, 5)]
    ]
    elsewhere = ("Net.body", FORWARD, (python_line("net.py:1"),), {"calls": 50})
    assert head(*work, *seen, elsewhere) == (
        "90% of the forward is in `stem`, all of it where no operator ran, and 64% at `net.py:9`."
    )


# Which part of a step


def in_phase(phase: str, times: int = 1) -> list[tuple[Any, ...]]:
    return [(where, phase, frames, {"cpu_ns": times * cost["cpu_ns"]}) for where, _, frames, cost in BODY]


def test_the_largest_part_of_a_step(golden: Callable[..., None]) -> None:
    """Parts of less than a twentieth are not mentioned: 1000 of 1052 are 95.06 %, of 1053 they are 94.97 %."""
    optimizer = took(OUTSIDE, 1_500, label("Optimizer.step#AdamW.step"), op("aten::mul"))
    paths = (("Net", "body", "a"),)
    idle = run_of(NET, *BODY, (OUTSIDE, FORWARD, (), {"cpu_ns": 3_000}), wall_ns=4_000)
    assert idle.report("top").splitlines()[2].startswith("75.0%"), "time in which nothing ran, as in the headline"
    said = {
        "backward, 2000 of 3500": head(*BODY, *in_phase(BACKWARD, 2), took(OUTSIDE, 500)),
        "forward, and a small part": head(*BODY, took(OUTSIDE, 52)),
        "forward, and a twentieth": head(*BODY, took(OUTSIDE, 53)),
        "recomputation": head(*in_phase(RECOMPUTE)),
        "outside of layers 2000 of 3000, the optimizer 1500": head(*BODY, optimizer, took(OUTSIDE, 500)),
        "all outside of layers": head(took(OUTSIDE, 10), took(OUTSIDE, 10)),
        "idle": idle.report("headline"),
        "not selected": head(took("Net.body.a", 300), took(NOT_SELECTED, 700), paths=paths),
        "selected": head(took("Net.body.a", 700), took(NOT_SELECTED, 300), paths=paths),
    }
    golden(said)


WAITS = " Most of that is waiting: the process ran on a processor for {} of the time."


@pytest.mark.parametrize(
    ("ran", "delay", "said"),
    [(400, None, WAITS.format("40%")), (401, None, ""), (400, 1, ""), (300, 100, WAITS.format("30%")), (None, 0, "")],
)
def test_a_place_that_waited(ran: int | None, delay: int | None, said: str) -> None:
    """It takes 800 of 1000 ns: if the process ran for 400, it waited for at least 400."""
    work = took("Net.stem", 200), took(OUTSIDE, 800, label("#data"))
    text = head(*work, process_cpu_ns=ran, run_delay_ns=delay, wall_ns=1000)
    assert text == f"80% of the time is outside of all layers, all of it in the label `#data`.{said}"


def test_a_loop_that_waits_for_its_workers() -> None:
    net = nn.Linear(2, 2)
    with Profile(net) as prof:
        net(torch.rand(1, 2))
        time.sleep(0.2)
    assert " Most of that is waiting: the process ran on a processor for " in prof.run.report("headline")


# Which measure


def on_device(cpu: Sequence[tuple[Any, ...]], busy: int, **meta: Any) -> str:
    fields = ("cpu_ns", "device_ns")
    busy_ns = (("cpu", 1_000), ("cuda:0", busy)) if busy else (("cpu", 1_000),)
    given = {"requested": fields, "measured": fields, "device": "cuda", "wall_ns": 1_000, "busy_ns": busy_ns, **meta}
    return head(*cpu, **given)


def test_the_measure_of_the_headline(golden: Callable[..., None]) -> None:
    """On the device a has 300 of 600, which is not more than half; body has 500 of 600. Of an idle device, and without
    its times, times are of the CPU; without times, the headline is of FLOPs."""
    work = [
        took("Net.stem", 900, device_ns=100),
        took("Net.body.a", 100, device_ns=300),
        took("Net.body.b", 0, device_ns=200),
    ]
    two = (("cpu", 1_000), ("cuda:0", 304), ("cuda:1", 200))
    counts: dict[str, Any] = dict.fromkeys(("requested", "measured"), ("macs", "flops", "uncounted"))
    counted = [(where, phase, frames, {"flops": cost["cpu_ns"]}) for where, phase, frames, cost in BODY]
    uncounted = ("Net.body.n", FORWARD, (op("aten::y"),), {"uncounted": 1})
    said = {
        "device": on_device(work, busy=500),
        "idle device": on_device(work[:2], busy=499),
        "idle devices": on_device(work[:2], busy=0, busy_ns=two),
        "nothing ran on the device": on_device([took("Net.stem", 900), took("Net.body.a", 100)], busy=0),
        "device not measured": head(*BODY, requested=("cpu_ns", "device_ns"), device="cuda"),
        "FLOPs": head(*counted, **counts),
        "some FLOPs": head(*counted, uncounted, **counts),
        "no FLOPs": head(uncounted, **counts),
        "nothing": head(),
        "no work": head(wall_ns=1_000, busy_ns=(("cpu", 0),)),
        "an empty block": head((OUTSIDE, FORWARD, (), {"cpu_ns": 6_000})),
    }
    golden(said)


@pytest.mark.parametrize(("span", "short"), [(400, True), (600, False)])
def test_a_device_with_work_in_a_short_part_of_the_time(span: int, short: bool) -> None:
    """It is busy from its first to its last work, so it is not idle: the time before and after is the CPU's."""
    fields = ("cpu_ns", "device_ns")
    meta: dict[str, Any] = {"requested": fields, "measured": fields, "device": "cuda", "wall_ns": 1_000}
    run = run_of(NET, took("Net.stem", 900, device_ns=span), busy_ns=(("cuda:0", span),), **meta)
    run = replace(run, device_times=(DeviceTime("cuda:0", run.meta.rank, span, span, span, 0, 0, 0, ()),))
    said = "`cuda:0` had all of its work within less than half of the recorded time. "
    assert run.report("headline").startswith(said) is short


# Several models and ranks


def test_several_ranks_are_summed_and_mentioned() -> None:
    one = [(where, phase, frames, {**cost, "rank": rank}) for rank in (0, 1) for where, phase, frames, cost in BODY]
    assert run_of(NET, *one, ranks=2).report("headline") == (
        "Over all 2 ranks, 62% of the forward is in `body`, 44% in its 3×3 convolutions."
    )


def test_time_in_which_nothing_ran_is_summed_over_ranks() -> None:
    work = [*BODY, (OUTSIDE, FORWARD, (), {"cpu_ns": 3_000})]
    one = [(where, phase, frames, {**cost, "rank": rank}) for rank in (0, 1) for where, phase, frames, cost in work]
    run = run_of(NET, *one, ranks=2, wall_ns=4_000)
    # 3000 of 4000 on each of both.
    assert run.report("headline").startswith("Over all 2 ranks, 75% of the time is outside of all layers")


# Words


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("Conv1d", "3, 8, kernel_size=(5,), stride=(1,)", "width-5 convolutions"),
        ("Conv3d", "3, 8, kernel_size=(3, 5, 7), stride=(1, 1, 1)", "3×5×7 convolutions"),
        ("ConvTranspose2d", "3, 8, kernel_size=(4, 4), stride=(2, 2)", "4×4 transposed convolutions"),
        ("Conv2d", "", "2D convolutions"),
        ("Linear", "", "linear layers"),
        ("BatchNorm2d", "", "batch norms"),
        ("Attention", "", "`Attention` layers"),
        ("Ev\x1b[31mil", "", "`Ev\\x1b[31mil` layers"),
    ],
)
def test_names_of_kinds_of_layers(kind: str, settings: str, words: str) -> None:
    kinds = {"Net": "Net", "Net.a": (kind, settings), "Net.b": (kind, settings), "Net.c": "Other"}
    work = [took("Net.a", 45), took("Net.b", 45), took("Net.c", 10)]
    assert head(*work, kinds=kinds).startswith(f"90% of the forward is in {words}.")


@pytest.mark.parametrize(
    ("body", "share"), [(999_999, "More than 99%"), (994, "99%"), (1_000_000, "All"), (996, "More than 99%")]
)
def test_only_the_whole_is_called_all(body: int, share: str) -> None:
    rest = 1_000 - body if body < 1_000 else 1_000_000 - body
    assert head(took("Net.body.a", body), took("Net.stem", rest)).startswith(f"{share} of the forward is in `body.a`")


def test_unprintable_names() -> None:
    kinds = {"Net": "Net", "Net.a\nb\udc80": "Linear", "Net.c": "Linear"}
    work = [took("Net.a\nb\udc80", 90, op("evil\x1b[2J" + "x" * 100)), took("Net.c", 10)]
    said = head(*work, kinds=kinds)
    assert said.isprintable() and "`a\\nb\\udc80`" in said and len(said) < 150


# Real models


def test_flops_of_a_real_model_by_hand() -> None:
    model = nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(100, 100, bias=False))
    with torch.no_grad():
        run = torchprof.flops(model, torch.rand(1, 10))
    # 2 · 1000 and 2 · 10000 FLOPs: 20000 of 22000 = 91 %.
    started = "91% of the FLOPs of the forward are in `Sequential.1`, all of it in `aten::"
    assert run.report("headline").startswith(started)


def test_impossible_figures_raise_no_error() -> None:
    run = run_of(NET, took("Net.stem", -5))
    assert run.report("headline") == "No time was recorded."
    negative = replace(
        run.metas[0], wall_ns=-1, busy_ns=(("cuda:0", -5),), device="cuda", measured=("cpu_ns", "device_ns")
    )
    assert replace(run, metas=(negative,)).report("headline") == "Nothing ran on CUDA. No time on the CPU was recorded."

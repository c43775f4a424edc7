"""The headline: its sentences on hand-made runs, and on real runs against the tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
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


def test_the_layer_with_most_of_the_time_and_the_kind_in_it() -> None:
    # body: 300 + 140 + 100 + 80 = 620 of 1000; its 3×3 convolutions 440 of 620 = 71 %.
    assert head(*BODY) == "62% of the forward is in `body`, 44% in its 3×3 convolutions."


def test_a_single_layer_of_a_kind_is_named() -> None:
    work = [took("Net.stem", 380), took("Net.body.a", 100), took("Net.body.b", 100), took("Net.body.n", 420)]
    assert head(*work[:3], took("Net.body.n", 220), took("Net.body.c", 200)) == (
        "62% of the forward is in `body`, 22% in the layer norm `body.n`."
    )
    # 420 of 1000 is less than half: the headline does not descend below body.
    assert head(*work) == "62% of the forward is in `body`, 42% in the layer norm `body.n`."


def test_a_layer_without_children_is_described_by_its_operator() -> None:
    work = [*BODY, took("Net.body.b", 3_000, op("aten::conv2d"), op("aten::slow"))]
    # b: 3140 of 4000; aten::slow 3000 of 3140 = 96 %.
    assert head(*work) == "78% of the forward is in `body.b`, 75% in `aten::slow`."


def test_half_is_not_more_than_half() -> None:
    work = [took("Net.stem", 500), took("Net.body.a", 500)]
    assert head(*work).startswith("50% of the forward is in the `Stem` layer `stem`.")
    assert head(took("Net.stem", 499), took("Net.body.a", 501)) == (
        "50% of the forward is in `body.a`, all of it in `aten::x`."
    )


def test_without_a_layer_of_more_than_half_the_largest_follows_the_kinds() -> None:
    kinds = {
        "Net": "Net",
        **{f"Net.{name}": "Block" for name in "abc"},
        **{f"Net.{name}.fc": "Linear" for name in "abc"},
    }
    work = [took("Net.a.fc", 330), took("Net.b.fc", 300), took("Net.c.fc", 270), took("Net.a", 50), took("Net.c", 50)]
    # fc: 900 of 1000; a: 380.
    assert head(*work, kinds=kinds) == (
        "90% of the forward is in linear layers. The largest layer of the forward is `a`, with 38%."
    )
    assert head(*work[:1], took("Net.b.fc", 330, op("x")), took("Net.c", 340), kinds=kinds) == (
        "66% of the forward is in linear layers. The largest layer of the forward is `c`, with 34%."
    )


def test_layers_with_children_are_described_by_their_self() -> None:
    """All time is in the blocks; their self is 600 of 1000."""
    kinds = {"Net": "Net", **{f"Net.{name}": "Block" for name in "abc"}, "Net.a.fc": "Linear"}
    work = [took("Net.a", 200), took("Net.b", 200), took("Net.c", 200), took("Net.a.fc", 200), took("Net", 200)]
    assert head(*work, kinds=kinds) == (
        "60% of the forward is directly in `Block` layers. The largest layer of the forward is `a`, with 40%."
    )
    idle = [(*work[3][:3], {"cpu_ns": 0}), *work[:3], took("Net", 400)]
    assert head(*idle, kinds=kinds).startswith("60% of the forward is in `Block` layers.")
    inside = {path.replace("Net.", "Net.body."): kind for path, kind in kinds.items()} | {"Net.body": "Body"}
    moved = [(where.replace("Net.", "Net.body."), *rest) for where, *rest in work]
    assert head(*moved, kinds=dict(sorted(inside.items()))) == (
        "80% of the forward is in `body`, 60% directly in its `Block` layers."
    )


def test_a_single_layer_with_children_is_named_with_self_and_total() -> None:
    kinds = {"Net": "Net", "Net.a": "Block", "Net.a.fc": "Linear", "Net.b": "Linear", "Net.c": "Other"}
    work = [took("Net.a", 350), took("Net.a.fc", 140), took("Net.b", 200), took("Net.c", 310)]
    # a: self 350, total with its linear layer 490 of 1000.
    assert head(*work, kinds=kinds) == (
        "35% of the forward is directly in the `Block` layer `a`. The largest layer of the forward is `a`, with 49%."
    )


def test_the_largest_layer_is_the_largest_of_the_phase() -> None:
    """The convolutions have 440 of 1000, but the largest single layer is the stem with 400."""
    work = [took("Net.body.a", 300), took("Net.body.b", 140), took("Net.stem", 400), took("Net.c", 160)]
    kinds = {"Net": "Net", "Net.stem": "Stem", "Net.body": "Sequential", "Net.c": "Linear"}
    kinds |= {path: NET[path] for path in ("Net.body.a", "Net.body.b")}
    flat = {path.replace("body.", "body_"): kind for path, kind in kinds.items() if path != "Net.body"}
    moved = [(where.replace("body.", "body_"), *rest) for where, *rest in work]
    assert head(*moved, kinds=flat) == (
        "44% of the forward is in 3×3 convolutions. The largest layer of the forward is `stem`, with 40%."
    )
    backward = [(where, BACKWARD, frames, costs) for where, _, frames, costs in moved]
    assert head(*backward, kinds=flat).endswith("The largest layer of the backward is `stem`, with 40%.")


def test_the_self_of_a_layer_is_described_by_its_largest_work() -> None:
    work = [took("Net.body", 700, op("aten::bmm")), took("Net.body", 50, op("aten::add")), took("Net.body.n", 150)]
    # body: 900 of 1000, its self 750 = 83 %.
    assert head(*work, took("Net.stem", 100)) == (
        "90% of the forward is in `body`, 75% directly in it, not in layers below, above all in `aten::bmm`."
    )
    assert head(took("Net", 700, label("MASK")), took("Net.stem", 150), took("Net.body.n", 150)) == (
        "70% of the forward is directly in `Net`, not in layers below, above all in the label `MASK`. "
        "The largest layer of the forward is `stem`, with 15%."
    )


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


def test_a_model_of_one_layer() -> None:
    work = [took("Linear", 90, op("aten::addmm")), took("Linear", 10, op("aten::t"))]
    assert head(*work, kinds={"Linear": "Linear"}) == "90% of the forward is in `aten::addmm`."


# Which part of a step


def test_backward_is_described_if_it_is_the_largest_part() -> None:
    backward = [(where, BACKWARD, frames, {"cpu_ns": 2 * cost["cpu_ns"]}) for where, _, frames, cost in BODY]
    # 2000 of 1000 + 2000 + 500 = 57 %.
    assert head(*BODY, *backward, took(OUTSIDE, 500)) == (
        "57% of the time is in the backward, 35% in `body`, and 25% in its 3×3 convolutions."
    )


def test_parts_of_less_than_a_twentieth_are_not_mentioned() -> None:
    # 1000 of 1052 = 95.06 %, of 1053 = 94.97 %.
    assert head(*BODY, took(OUTSIDE, 52)).startswith("62% of the forward is")
    assert head(*BODY, took(OUTSIDE, 53)).startswith("95% of the time is in the forward, 59%")


def test_recomputation() -> None:
    work = [(where, RECOMPUTE, frames, cost) for where, _, frames, cost in BODY]
    assert head(*work) == "62% of the recomputation is in `body`, 44% in its 3×3 convolutions."


def test_work_outside_of_all_layers_is_described_if_it_is_the_largest_part() -> None:
    work = [*BODY, took(OUTSIDE, 1_500, label("Optimizer.step#AdamW.step"), op("aten::mul")), took(OUTSIDE, 500)]
    # 2000 of 3000, 1500 of 2000.
    assert head(*work) == ("67% of the time is outside of all layers, 50% in optimizer (AdamW).")
    assert head(took(OUTSIDE, 10), took(OUTSIDE, 10)) == (
        "All of the time is outside of all layers, all of it in `aten::x`."
    )


def test_time_in_which_nothing_ran_is_outside_of_layers_as_in_top() -> None:
    idle = OUTSIDE, FORWARD, (), {"cpu_ns": 3_000}
    run = run_of(NET, *BODY, idle, wall_ns=4_000)
    assert run.report("headline") == ("75% of the time is outside of all layers, all of it where no operator ran.")
    assert run.report("top").splitlines()[2].startswith("75.0%")


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


def test_layers_that_were_not_selected() -> None:
    paths = (("Net", "body", "a"),)
    assert head(took("Net.body.a", 300), took(NOT_SELECTED, 700), paths=paths) == (
        "70% of the time is in layers that were not selected, all of it in `aten::x`."
    )
    assert head(took("Net.body.a", 700), took(NOT_SELECTED, 300), paths=paths) == (
        "70% of the time is in the forward of the selected layers, all of it in `body.a`, and all of it in `aten::x`."
    )


# Which measure


def on_device(cpu: Sequence[tuple[Any, ...]], busy: int, **meta: Any) -> str:
    fields = ("cpu_ns", "device_ns")
    busy_ns = (("cpu", 1_000), ("cuda:0", busy)) if busy else (("cpu", 1_000),)
    given = {"requested": fields, "measured": fields, "device": "cuda", "wall_ns": 1_000, "busy_ns": busy_ns, **meta}
    return head(*cpu, **given)


def test_device_time_is_used_if_it_was_measured() -> None:
    work = [
        took("Net.stem", 900, device_ns=100),
        took("Net.body.a", 100, device_ns=300),
        took("Net.body.b", 0, device_ns=200),
    ]
    # On the device a has 300 of 600, which is not more than half; body has 500 of 600.
    assert on_device(work, busy=500) == (
        "83% of the CUDA time of the forward is in `body`, all of it in its 3×3 convolutions."
    )


def test_cpu_time_is_used_if_the_device_was_mostly_idle() -> None:
    work = [took("Net.stem", 900, device_ns=100), took("Net.body.a", 100, device_ns=300)]
    assert on_device(work, busy=499) == (
        "`cuda:0` was idle for 50% of the time. 90% of the time on the CPU of the forward is in `stem`, all of it in "
        "`aten::x`."
    )
    two = (("cpu", 1_000), ("cuda:0", 304), ("cuda:1", 200))
    assert on_device(work, busy=0, busy_ns=two).startswith("Every device was idle for at least 69% of the time. 90% of")


def test_a_device_on_which_nothing_ran() -> None:
    assert on_device([took("Net.stem", 900), took("Net.body.a", 100)], busy=0) == (
        "Nothing ran on CUDA. 90% of the time on the CPU of the forward is in `stem`, all of it in `aten::x`."
    )


def test_cpu_time_is_used_if_the_device_was_not_measured() -> None:
    assert head(*BODY, requested=("cpu_ns", "device_ns"), device="cuda").startswith("62% of the forward is in `body`")


def test_flops_are_used_without_times() -> None:
    counts = ("macs", "flops", "uncounted")
    work = [(where, phase, frames, {"flops": cost["cpu_ns"]}) for where, phase, frames, cost in BODY]
    given: dict[str, Any] = {"requested": counts, "measured": counts}
    said = "62% of the FLOPs of the forward are in `body`, 44% in its 3×3 convolutions."
    assert head(*work, **given) == said
    uncounted = ("Net.body.n", FORWARD, (op("aten::y"),), {"uncounted": 1})
    assert head(*work, uncounted, **given) == said.replace("FLOPs", "counted FLOPs")
    assert head(uncounted, **given) == "No FLOPs were counted."


def test_nothing_recorded() -> None:
    assert head() == "No time was recorded."
    assert head(wall_ns=1_000, busy_ns=(("cpu", 0),)) == "No time was recorded."


def test_an_empty_block() -> None:
    assert head((OUTSIDE, FORWARD, (), {"cpu_ns": 6_000})) == "No operator ran, and no layer was called."


# Several models and ranks


def test_several_models() -> None:
    kinds = {"A": "A", "A.fc": "Linear", "A#2": "A", "A#2.fc": "Linear", "B": "B"}
    work = [took("A.fc", 200), took("A#2.fc", 700), took("B", 100)]
    assert head(*work, kinds=kinds) == "70% of the forward is in `A#2.fc`, all of it in `aten::x`."
    even = [took("A.fc", 400), took("A#2.fc", 350), took("B", 250)]
    assert head(*even, kinds=kinds) == ("75% of the forward is in linear layers. The largest model is `A`, with 40%.")


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
    assert run.report("headline").startswith("91% of the FLOPs of the forward are in `1`, all of it in `aten::")


def test_impossible_figures_raise_no_error() -> None:
    run = run_of(NET, took("Net.stem", -5))
    assert run.report("headline") == "No time was recorded."
    negative = replace(
        run.metas[0], wall_ns=-1, busy_ns=(("cuda:0", -5),), device="cuda", measured=("cpu_ns", "device_ns")
    )
    assert replace(run, metas=(negative,)).report("headline") == "Nothing ran on CUDA. No time on the CPU was recorded."

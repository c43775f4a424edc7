"""Runs to compare with each other, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from build.hand_made import op, row, run_of

from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE, PHASES

FORWARD, BACKWARD = PHASES[:2]

COUNTED = ("cpu_ns", "macs", "flops", "uncounted")

MEMORY = ("cpu_ns", "cpu_allocated", "cpu_freed")


def made(layers: Sequence[Layer], rows: Sequence[tuple[Any, ...]], samples: Any = (), **meta: Any) -> Run:
    """A run of these layers; ``row`` names them by their number."""
    run = run_of(rows, **meta)
    return replace(run, layers=tuple(layers), rows=replace(run.rows, layers=tuple(layers)), samples=dict(samples))


def layer(path: str, kind: str = "Module", params: int | None = 0, **what: Any) -> Layer:
    return Layer(tuple(path.split(".")), kind, params, **what)


def calls(*values: int, start: int = 0) -> Spread:
    return Spread.of([(start + number, value) for number, value in enumerate(values)])


def simple(scale: int = 1, **meta: Any) -> Run:
    """Net(a, b(0)): its own 10, a 20, b 5, b.0 40 in forward; backward a 7; outside 3."""
    return run_of(
        [
            row(0, cpu_ns=10 * scale, calls=2),
            row(1, cpu_ns=20 * scale, calls=2),
            row(2, cpu_ns=5 * scale, calls=4),
            row(3, op("aten::x"), cpu_ns=40 * scale, calls=3),
            row(3, calls=2),
            row(1, op("aten::y"), phase=BACKWARD, cpu_ns=7 * scale),
            row(OUTSIDE, op("aten::loss"), cpu_ns=3 * scale),
        ],
        **meta,
    )


FC = {"kind": "Linear", "params": 40, "settings": "4, 8"}

STEP = SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")


def stepped(own: Sequence[int], child: Sequence[int], device: Sequence[int] = ()) -> Run:
    """Steps in which Net itself takes ``own`` and Net.a ``child``; on a device Net.a takes ``device``."""
    both = [mine + below for mine, below in zip(own, child)]
    key = SampleKey(0, FORWARD, 0, "cpu", "step_cpu_ns")
    samples = {STEP: calls(*(2 * value for value in both)), key: calls(*both), key._replace(layer=1): calls(*child)}
    rows = [row(0, calls=len(own), cpu_ns=sum(own)), row(1, calls=len(own), cpu_ns=sum(child))]
    meta: dict[str, Any] = {"steps": len(own)}
    if device:
        for number in (0, 1):
            samples[SampleKey(number, FORWARD, 0, "cuda:0", "step_device_ns")] = calls(*device)
        rows.append(row(1, op("aten::mm"), device="cuda:0", device_ns=sum(device)))
        meta |= {"device": "cuda", "measured": ("cpu_ns", "device_ns"), "requested": ("cpu_ns", "device_ns")}
    return made([layer("Net"), layer("Net.a")], rows, samples, **meta)

"""Runs of single ranks, made by hand row by row, to be merged."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from build import hand_made
from build.hand_made import row as line
from build.random_runs import pipelines
from build.warnings import run_warnings
from hypothesis import strategies as st

from torchprof.run.collectives import Entered, Unfinished
from torchprof.run.layers import Layer
from torchprof.run.lockstep import STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime, Held, Lane, Memory, Spans, Timeline
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, PHASES, Frame, FrameKind

MUL, ADD, MINE = Frame(FrameKind.OP, "mul"), Frame(FrameKind.OP, "add"), Frame(FrameKind.LABEL, "mine")
NET = ("Net", "Net.a", "Net.b")
OF_TWO = GroupOfRanks("0", "default_pg", 2)
ALL_REDUCE = LockstepKey(0, FORWARD, "cpu", "all_reduce", OF_TWO)


def layer(name: str, **fields: Any) -> Layer:
    return Layer(tuple(name.split(".")), "Module", **fields)


def run_of(
    rank: int, *lines: tuple[Any, ...], layers: Sequence[Layer | str] = NET, world: int = 1, **parts: Any
) -> Run:
    """Its table of frames has an entry that no row refers to."""
    run = hand_made.run_of(
        [(*line[:8], rank) for line in lines], layers=[layer(one) if isinstance(one, str) else one for one in layers]
    )
    rows = replace(run.rows, frames=(*run.rows.frames, (ADD, ADD)))
    return replace(run, metas=(Meta(("Net",), rank, world),), rows=rows, **parts)


def calls(*values: int) -> Spread:
    return Spread.of([*enumerate(values)])


def timeline(rank: int, where: int) -> Timeline:
    columns = {name: array("q", [where if name == "layer" else 0]) for name in Timeline.COLUMNS}
    spans = Spans(
        (Lane("cpu", 1),), ("some",), {name: array("q", [where if name == "layer" else 0]) for name in Spans.COLUMNS}
    )
    return Timeline(("cpu",), columns, 0, spans, rank)


SMALL = st.integers(0, 3)
FRAMES = st.lists(st.sampled_from([MUL, ADD, MINE]), max_size=2).map(tuple)
PATHS = ("Net.a", "Net.0", "Net.1", "Net.a.x", "Net.1.y", "Net.b", "Other", "Other.7", "Other.3")


@st.composite
def jobs(draw: st.DrawFn, ranks: int = 4) -> list[Run]:
    """Runs of some ranks. Each has some of the layers, in its own order."""
    numbers = draw(st.lists(st.integers(0, 9), min_size=2, max_size=ranks, unique=True))
    return [draw(runs_of(rank)) for rank in numbers]


@st.composite
def runs_of(draw: st.DrawFn, rank: int) -> Run:
    names = ["Net"]
    for name in draw(st.permutations(PATHS)):
        above = name.rpartition(".")[0]
        if (not above or above in names) and draw(st.booleans()):
            names.append(name)
    counts = st.sampled_from([1, 2, None])
    flags = st.booleans()
    layers = [
        layer(
            name,
            params=draw(counts),
            param_bytes=draw(counts),
            dtype_bytes=draw(st.sampled_from([(), (("float32", 4),)])),
            tied=draw(flags),
            settings=f"of rank {rank}",
        )
        for name in names
    ]
    where = st.integers(NOT_SELECTED, len(layers) - 1)
    around = st.tuples(st.builds(Around, where, st.sampled_from(PHASES), FRAMES))
    one = st.builds(
        lambda where, frames, **options: line(where, *frames, **options),
        where,
        FRAMES,
        phase=st.sampled_from(PHASES),
        within=st.just(()) | around,
        shared=st.just(()) | st.tuples(st.integers(0, len(layers) - 1), st.integers(0, len(layers) - 1)),
        device=st.sampled_from(["cpu", "cuda:0"]),
        calls=SMALL,
        cpu_ns=SMALL,
        cpu_freed=SMALL,
        flops=SMALL,
    )
    keys = st.builds(
        LockstepKey,
        where,
        st.sampled_from([FORWARD, BACKWARD]),
        st.just("cpu"),
        st.sampled_from([WORK, STEP, "all_reduce"]),
        st.just(OF_TWO),
    )
    times = st.lists(SMALL, min_size=1, max_size=2)
    samples = st.dictionaries(
        st.builds(SampleKey, where, st.just(FORWARD), st.just(rank), st.just("cpu"), st.just("cpu_ns")),
        st.lists(SMALL, min_size=1, max_size=3).map(lambda values: calls(*values)),
        max_size=3,
    )
    held = st.lists(st.builds(Held, where, st.just(FORWARD), st.just("inputs"), SMALL, SMALL), max_size=2).map(tuple)
    devices = st.lists(st.sampled_from(["cpu", "cuda:0"]), unique=True)
    warnings = st.lists(
        st.sampled_from([*run_warnings("One."), RunWarning("x", ("Net",)), RunWarning("x", facts={"n": (1,)})])
    )
    run = run_of(
        rank,
        *draw(st.lists(one, max_size=8)),
        layers=layers,
        world=10,
        samples=draw(samples),
        memory=tuple(Memory(device, rank, draw(SMALL), held=draw(held)) for device in draw(devices)),
        timeline=timeline(rank, draw(where)) if draw(flags) else None,
        device_times=tuple(DeviceTime(device, rank, 9, 8, 7, 0, 1, 0, ()) for device in draw(devices)),
        lockstep={key: Lockstep.of(rank, draw(times)) for key in draw(st.lists(keys, max_size=3, unique=True))},
        unfinished=tuple(
            Unfinished(rank, 9, draw(SMALL), draw(where), FORWARD, "", False, (Entered(draw(where), FORWARD, "x", 2),))
            for _ in range(draw(st.integers(0, 1)))
        ),
        pipelines=tuple(draw(pipelines(len(layers), device, rank)) for device in draw(devices)),
    )
    return replace(run, metas=(replace(run.meta, warnings=tuple(draw(warnings))),))

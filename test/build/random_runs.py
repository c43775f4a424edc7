"""Hypothesis strategies for runs with random rows, samples, memory and timelines."""

from __future__ import annotations

from array import array
from dataclasses import replace

from build.forests import SIGNATURES, layer_trees
from build.hand_made import python_line
from hypothesis import strategies as st

from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, SampleKey, Spread
from torchprof.run.meta import Meta, Peak, RunWarning
from torchprof.run.rows import Around, Rows
from torchprof.run.run import Run
from torchprof.run.timeline import ACTIONS, Held, Memory, Pipeline, StageAction, Timeline
from torchprof.run.timeline import KINDS as MEMORY_KINDS
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, PHASES, RECOMPUTE, Frame, FrameKind

WARNINGS = [
    (),
    (
        RunWarning.of(
            "of_a_newer_torchprof", ["Net.“quoted”", "naïve"], count=3, ratio=0.1, names=("a", ("b", 2)), is_so=True
        ),
    ),
    (
        RunWarning.of("never_called", ["Net.a"]),
        replace(RunWarning.of("clock_set", jump_ns=-9, wall_ns=10), added=(((1, 3), 3),)),
    ),
]
"""Stored warnings: of any code, of layers and without, with facts of every kind, and of a sum of runs."""


FRAMES: tuple[tuple[Frame, ...], ...] = (
    (),
    (Frame(FrameKind.OP, "a"),),
    (Frame(FrameKind.OP, "a", SIGNATURES[1]),),
    (Frame(FrameKind.OP, "a"), Frame(FrameKind.OP, "b")),
    (Frame(FrameKind.OP, "a", SIGNATURES[1]), Frame(FrameKind.OP, "b", SIGNATURES[2])),
    (Frame(FrameKind.OP, "a"), Frame(FrameKind.OP, "b"), Frame(FrameKind.OP, "a")),
    (Frame(FrameKind.LABEL, "mine"),),
    (Frame(FrameKind.LABEL, "mine"), Frame(FrameKind.OP, "b")),
    (Frame(FrameKind.LABEL, "a"), Frame(FrameKind.OP, "b"), Frame(FrameKind.LABEL, "mine"), Frame(FrameKind.OP, "b")),
    (Frame(FrameKind.OP, "a"), Frame(FrameKind.KERNEL, "gemm")),
    (Frame(FrameKind.KERNEL, "stray"),),
    (python_line("net.py(3): forward"),),
    (Frame(FrameKind.LABEL, "mine"), python_line("net.py(3): forward")),
)
WITHIN: tuple[tuple[Around, ...], ...] = (
    (),
    (Around(0, FORWARD, (Frame(FrameKind.LABEL, "mine"),)),),
    (
        Around(0, FORWARD, (Frame(FrameKind.OP, "a"),)),
        Around(OUTSIDE, BACKWARD, (Frame(FrameKind.OP, "a"), Frame(FrameKind.OP, "b"))),
    ),
    (Around(OUTSIDE, FORWARD, (Frame(FrameKind.LABEL, "a"), Frame(FrameKind.OP, "b", SIGNATURES[2]))),),
)
MEASURES = ("cpu_ns", "peak_bytes", "kept_bytes", "step_cpu_ns")
SHARED = ((), (0,))


@st.composite
def lines_of_rows(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """One row, with the values of ``Rows.COLUMNS``. A row of a Python line has at least one call and no cost."""
    frames = draw(st.integers(0, len(FRAMES) - 1))
    free = bool(FRAMES[frames]) and FRAMES[frames][-1].kind == "python"
    return (
        draw(st.integers(NOT_SELECTED, layers - 1)),
        draw(st.integers(0, len(PHASES) - 1)),
        draw(st.integers(0, len(SHARED) - 1)),
        draw(st.integers(0, len(WITHIN) - 1)),
        frames,
        draw(st.integers(0, 1)),
        0,
        draw(st.integers(int(free), 5)),
        *(0 if free else draw(st.integers(0, 2**40)) for _ in FIELDS),
    )


@st.composite
def memories(draw: st.DrawFn, layers: int, device: str) -> Memory:
    """The memory of one device, with what was live at its peak."""
    kinds = st.sampled_from([*MEMORY_KINDS, "unknown"])
    size = st.integers(0, 2**40)
    one = st.builds(Held, st.integers(NOT_SELECTED, layers - 1), st.sampled_from(PHASES), kinds, size, size)
    return Memory(
        device,
        0,
        draw(size),
        draw(size),
        tuple(draw(st.lists(one, max_size=3))),
        draw(st.sampled_from([(), (("parameters", 4096), ("gradients", 64))])),
        draw(st.sampled_from([(), (("reserved", 0, 2**21),)])),
    )


@st.composite
def timelines(draw: st.DrawFn, layers: int) -> Timeline:
    """Some allocations and frees."""
    one = st.tuples(
        st.integers(0, 2**50),
        st.integers(-(2**40), 2**40),
        st.integers(0, 1),
        st.integers(NOT_SELECTED, layers - 1),
        st.integers(0, len(PHASES) - 1),
        st.integers(-1, len(MEMORY_KINDS) - 1),
    )
    steps = draw(st.lists(one, max_size=4))
    columns = {name: array("q", (step[at] for step in steps)) for at, name in enumerate(Timeline.COLUMNS)}
    return Timeline(("cpu", "cuda:0"), columns, draw(st.integers(0, 5)))


@st.composite
def pipelines(draw: st.DrawFn, layers: int, device: str = "cpu", rank: int = 0) -> Pipeline:
    """What a rank did for some stages of a pipeline."""
    kept = draw(st.integers(1, 3))
    times = st.lists(st.integers(0, 2**40), min_size=kept, max_size=kept).map(tuple)
    small = st.integers(0, 3)
    actions = draw(st.lists(st.builds(StageAction, small, st.sampled_from(ACTIONS), small, times, times), max_size=4))
    stages = sorted({action.stage for action in actions})
    return Pipeline(
        device,
        rank,
        draw(st.sampled_from(["", "ScheduleGPipe"])),
        draw(st.sampled_from([0, 4])),
        draw(st.sampled_from([(), (0, 1)])),
        tuple((stage, draw(st.integers(NOT_SELECTED, layers - 1))) for stage in stages),
        kept + draw(small),
        draw(times),
        tuple(actions),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run with random rows (any layer, phase, frames and surroundings) and random other parts."""
    paths = draw(layer_trees())
    if draw(st.booleans()):
        paths += tuple(("Other", *path[1:]) for path in paths[:3] if path[:-1] in (*paths[:3], ()) or len(path) == 1)
    layers = tuple(Layer(path, "Module", input_shapes=((1, 2),), shared_with=(path,)) for path in paths)
    count = len(layers)
    lines = draw(st.lists(lines_of_rows(count), max_size=25))
    columns = {name: array("q", (line[at] for line in lines)) for at, name in enumerate(Rows.COLUMNS)}
    rows = Rows(layers, FRAMES, ("cpu", "cuda:0"), columns, WITHIN, SHARED)
    keys = st.tuples(
        st.integers(NOT_SELECTED, count - 1), st.sampled_from([FORWARD, RECOMPUTE]), st.sampled_from(MEASURES)
    )
    calls = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1, max_size=5)
    samples = {
        SampleKey(layer, phase, 0, "cpu", measure): Spread.of(draw(calls))
        for layer, phase, measure in sorted(draw(st.sets(keys, max_size=5)))
        if layer >= 0 or measure.startswith("step_")
    }
    meta = Meta(
        model=("Module",),
        device=draw(st.sampled_from([None, "cuda"])),
        requested=draw(st.sampled_from([("cpu_ns",), FIELDS])),
        measured=draw(st.sampled_from([("cpu_ns",), FIELDS])),
        paths=draw(st.none() | st.just((layers[0].path,))),
        wall_ns=draw(st.integers(0, 10**10)),
        cycles=draw(st.integers(1, 3)),
        steps=draw(st.integers(0, 9)),
        busy_ns=draw(st.sampled_from([(), (("cuda:0", 12_345),)])),
        peaks=draw(st.sampled_from([(), (Peak("cpu", "float32", 2, 1.5e12, 3e10),)])),
        warnings=draw(st.sampled_from(WARNINGS)),
        versions=(("torch", "2.13.0"),),
        flags=(("use_cuda", True),),
        machine="host",
        script="/tmp/x.py",
    )
    memory = tuple(draw(memories(count, device)) for device in draw(st.sampled_from([(), ("cpu",), ("cpu", "cuda:0")])))
    return Run(
        (meta,),
        layers,
        rows,
        samples,
        memory,
        draw(st.none() | timelines(count)),
        pipelines=tuple(draw(st.lists(pipelines(count), max_size=1))),
    )

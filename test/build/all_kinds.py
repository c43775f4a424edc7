"""A run of every kind that there is, by hand where that is possible: for what has to hold of all of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from build.compiled import FC1, Ran, call, graphs_of, region, work
from build.events import function, node
from build.events import kernel as kernel_event
from build.events import label as module
from build.events import op as op_event
from build.hand_made import NET, kernel, label, op, row, run_of
from build.pipelines import equal, one_f_one_b, pipelines_of, run_of_pipelines
from torch import nn, rand

import torchprof
from torchprof.attribute.events import Event
from torchprof.run.layers import Layer
from torchprof.run.meta import RunWarning
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, RECOMPUTE, Frame, FrameKind, Signature

COUNTED = ("cpu_ns", "macs", "flops", "uncounted")
ON_DEVICE = ("cpu_ns", "device_ns", "macs", "flops", "uncounted")
MEMORY = ("cpu_ns", "cpu_allocated", "cpu_freed")


def measured(*fields: str, **more: object) -> dict[str, object]:
    return {"requested": fields, "measured": fields, **more}


def eager() -> Run:
    """Net.b.0 is never called, and work of two kinds is of no layer."""
    mm = op("aten::mm")
    rows = [
        row(0, cpu_ns=100),
        row(1, calls=2, cpu_ns=50),
        row(1, mm, calls=2, cpu_ns=4_000),
        row(2, cpu_ns=7),
        row(OUTSIDE, op("aten::sum"), cpu_ns=30),
    ]
    return run_of(rows)


def training() -> Run:
    """Labels inside a layer, around layers, of one phase alone, and one inside the other."""
    step = Around(OUTSIDE, FORWARD, (label("step"),))
    rows = [
        row(OUTSIDE, label("step"), cpu_ns=10),
        row(0, within=(step,), cpu_ns=100),
        row(0, label("outer"), within=(step,), cpu_ns=20),
        row(0, label("outer"), label("inner"), within=(step,), calls=3, cpu_ns=30),
        row(1, op("aten::mm"), within=(step,), cpu_ns=4_000),
        row(1, op("MmBackward0"), phase=BACKWARD, within=(step,), cpu_ns=9_000),
        row(0, label("hook"), op("aten::mul"), phase=BACKWARD, within=(step,), cpu_ns=500),
        row(2, within=(step,), cpu_ns=5),
    ]
    return run_of(rows)


def recomputed() -> Run:
    engine = Around(0, BACKWARD, (op("CheckpointFunctionBackward"),))
    rows = [
        row(0, cpu_ns=100),
        row(1, cpu_ns=10, flops=64),
        row(1, phase=RECOMPUTE, within=(engine,), cpu_ns=12, flops=64),
        row(1, op("MmBackward0"), phase=BACKWARD, within=(engine,), cpu_ns=40, flops=128),
        row(0, op("CheckpointFunctionBackward"), phase=BACKWARD, cpu_ns=30),
    ]
    return run_of(rows, **measured(*COUNTED))


def without_formulas() -> Run:
    """Net.a: all known; Net.b: nothing known; Net: a part of both."""
    rows = [
        row(0, cpu_ns=100),
        row(0, op("aten::mm", (2, 3), (3, 4)), cpu_ns=1000, macs=24, flops=48),
        row(1, cpu_ns=10),
        row(1, op("aten::addmm", (2, 3), (3, 4)), cpu_ns=2000, macs=24, flops=56),
        row(2, cpu_ns=10),
        row(2, op("mine::scan"), calls=2, cpu_ns=3000, uncounted=2),
        row(3, cpu_ns=10),
        row(OUTSIDE, op("mine::loss"), cpu_ns=20, uncounted=1),
    ]
    return run_of(rows, **measured(*COUNTED))


def memory() -> Run:
    """More was freed than allocated in Net.b, and Net.a frees all that it takes."""
    rows = [
        row(0, cpu_ns=100),
        row(1, op("aten::mm"), cpu_ns=2000, cpu_allocated=4096, cpu_freed=4096),
        row(2, op("aten::relu_"), cpu_ns=300, cpu_allocated=512, cpu_freed=2048),
        row(3, op("aten::relu"), phase=BACKWARD, cpu_ns=300, cpu_allocated=512),
        row(OUTSIDE, cpu_allocated=64),
    ]
    return run_of(rows, **measured(*MEMORY))


def selected() -> Run:
    rows = [
        row(1, cpu_ns=100, flops=8),
        row(NOT_SELECTED, op("aten::mm"), cpu_ns=2000, flops=16),
        row(NOT_SELECTED, label("mine"), op("mine::scan"), cpu_ns=50, uncounted=1),
        row(OUTSIDE, op("aten::sum"), cpu_ns=30, flops=2),
    ]
    return run_of(rows, **measured(*COUNTED, paths=(("Net", "a"),)))


def several_models() -> Run:
    """The second is never called; parameters of the first are not known."""
    layers = [Layer(("Net",), "Net", params=None), Layer(("Net", "a"), "Linear", params=12), Layer(("Mlp",), "Mlp")]
    return run_of([row(0, cpu_ns=10, flops=5), row(1, cpu_ns=20, flops=6)], layers=layers, **measured(*COUNTED))


def on_a_device() -> Run:
    """Of Net.b only the launch was recorded, of Net.b.0 a kernel that no operator launched."""
    mm = op("aten::mm", (2, 3), (3, 4))
    rows = [
        row(0, cpu_ns=500),
        row(1, mm, calls=3, cpu_ns=70_500, macs=24, flops=48),
        row(1, mm, kernel("gemm"), device="cuda:0", calls=3, device_ns=2_000),
        row(2, mm, calls=3, cpu_ns=70_500, macs=24, flops=48),
        row(3, cpu_ns=20),
        row(3, label("triton"), kernel("mine"), device="cuda:0", calls=2, device_ns=900, uncounted=2),
        row(1, op("MmBackward0"), kernel("gemm"), phase=BACKWARD, device="cuda:0", device_ns=5_000),
        row(OUTSIDE, label("(launch not recorded)"), kernel("gemm"), device="cuda:0", device_ns=70, uncounted=1),
    ]
    return run_of(rows, device="cuda", **measured(*ON_DEVICE))


def device_not_recorded() -> Run:
    """It was asked for, and could not be had."""
    rows = [row(0, cpu_ns=10), row(1, op("aten::mm"), cpu_ns=100, macs=24, flops=48)]
    return run_of(rows, device="cuda", requested=ON_DEVICE, measured=COUNTED)


def ranks() -> Run:
    """Rank 1 counted less, called Net.b.0 never, and did not record its device."""
    run = without_formulas()
    columns = {name: array("q", column) for name, column in run.rows.columns.items()}
    for at in range(len(run.rows)):
        if run.rows.columns["layer"][at] in (0, 1, 3):
            for name, column in run.rows.columns.items():
                columns[name].append(1 if name == "rank" else column[at] * (2 if name == "cpu_ns" else 1))
    metas = [
        replace(run.meta, rank=rank, world_size=2, device="cuda", requested=ON_DEVICE, measured=fields)
        for rank, fields in ((0, ON_DEVICE), (1, COUNTED))
    ]
    return replace(run, metas=tuple(metas), rows=replace(run.rows, columns=columns))


SIGNATURES = (
    Signature((), ()),
    Signature(((2, 3), (3, 4)), ("float", "float")),
    Signature(((4,), (2, 3), (3, 4)), ("float",) * 3),
)
BACK = (work("mm", FC1),)


def _of_compiled(ran: Ran, *, by_layers: bool, fields: Sequence[str] = COUNTED) -> Run:
    """With what a session would know besides: FLOPs, and which layers were compiled."""
    called = {layer for (layer, _), (_, calls) in ran.run.rows.by_layer.items() if calls}
    layers = tuple(replace(layer, compiled=at not in called) for at, layer in enumerate(ran.run.layers))
    meta = replace(
        ran.run.meta, requested=tuple(fields), measured=tuple(fields), flags=(("compile_layers", by_layers),)
    )
    return replace(ran.run, metas=(meta,), layers=layers, rows=replace(ran.run.rows, layers=layers))


def _block(at: int, graph: str = "block", sequence: int = 7) -> list[Event]:
    """A call of the first block: a product of fc1, a kernel of fc1 and act, a product of fc2, a sum of the block."""
    return [
        region("0/0", at, at + 200),
        op_event("CompiledFunction", at + 10, at + 190, sequence=sequence, forward_thread=1),
        call(graph, at + 20, at + 180),
        op_event("aten::addmm", at + 30, at + 50, signature=2),
        op_event("cpp_fused_addmm_gelu_0", at + 60, at + 100),
        op_event("aten::addmm", at + 110, at + 140, signature=2),
        op_event("cpp_fused_add_1", at + 150, at + 155),
    ]


def _compiled(*, backward_is_known: bool = True) -> Run:
    backward = [
        node("CompiledFunctionBackward", 2000, 2100, 7),
        function("CompiledFunctionBackward", 2010, 2090, 7),
        call("back" if backward_is_known else "unknown", 2020, 2080),
        op_event("aten::mm", 2030, 2070, signature=1),
    ]
    events = [module("@", 0, 1000), module("@blocks.0", 10, 900), *_block(20), *backward]
    return _of_compiled(Ran(*events, graphs=graphs_of(back=BACK), flops=SIGNATURES), by_layers=True)


def compiled_regions() -> Run:
    """Without asking for layers: what ran of them is in the region."""
    events = [module("@", 0, 1000), module("@blocks.0", 10, 900), *_block(20)]
    return _of_compiled(Ran(*events, flops=SIGNATURES), by_layers=False)


def compiled_fused() -> Run:
    return _compiled()


def compiled_not_attributable() -> Run:
    """Of backward nothing is known."""
    return _compiled(backward_is_known=False)


def replayed() -> Run:
    """A CUDA graph in one block, an eager product in the other."""
    events = [
        module("@", 0, 1000),
        module("@blocks.0", 10, 200),
        op_event("cudaGraphLaunch", 50, 60, correlation=-9),
        module("@blocks.1", 300, 500),
        op_event("aten::mm", 310, 330, correlation=4, signature=1),
        kernel_event("gemm", 2000, 2100, -9),
        kernel_event("norm", 2100, 2150, -9),
        kernel_event("gemm", 2200, 2300, 4),
    ]
    run = _of_compiled(Ran(*events, flops=SIGNATURES), by_layers=False, fields=ON_DEVICE)
    layers = tuple(replace(layer, compiled=False) for layer in run.layers)
    return replace(run, metas=(replace(run.meta, device="cuda"),), layers=layers, rows=replace(run.rows, layers=layers))


def without_layers() -> Run:
    rows = [
        row(OUTSIDE, op("aten::mm"), cpu_ns=30),
        row(OUTSIDE, label("train"), op("aten::add"), cpu_ns=20),
        row(OUTSIDE, Frame(FrameKind.GC, "garbage collection"), calls=2, cpu_ns=7),
    ]
    return run_of(rows, layers=())


def on_meta() -> Run:
    """Counted from shapes alone: nothing was timed."""
    return torchprof.flops(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), rand(2, 3))


def _never_called() -> Run:
    return run_of([], **measured(*COUNTED))


def inlined() -> Run:
    """Inside a ScriptModule layers may run without being called."""
    layers = [Layer(tuple(path.split(".")), "Module", compiled=path != "Net") for path in NET]
    rows = [
        row(0, cpu_ns=100),
        row(0, Frame(FrameKind.OP, "aten::mm"), cpu_ns=1000),
        row(1, op("aten::relu"), cpu_ns=5),
    ]
    return run_of(rows, layers=layers)


def pipelined() -> Run:
    """Two equal stages on two ranks, with so many microbatches that there is nothing to find."""
    return run_of_pipelines(pipelines_of(one_f_one_b(2, 17), [equal()] * 3))


def lost() -> Run:
    """The recording was lost: how often the layers were called is unknown."""
    return run_of([], measured=(), warnings=(RunWarning.of("recording_lost"),))


KINDS: dict[str, Callable[[], Run]] = {
    make.__name__.strip("_"): cache(make)
    for make in (
        eager,
        training,
        recomputed,
        without_formulas,
        memory,
        selected,
        several_models,
        on_a_device,
        device_not_recorded,
        ranks,
        pipelined,
        compiled_regions,
        compiled_fused,
        compiled_not_attributable,
        replayed,
        without_layers,
        on_meta,
        _never_called,
        inlined,
        lost,
    )
}

"""Advice on runs of every kind: no rule fails, whatever a run holds and whatever it lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from build.examples import examples
from build.hand_made import FORWARD, kernel, label, op, python_line, row, run_of
from build.hand_made_ranks import NOWHERE, everybody, run_of_ranks
from build.places import DATA, ROOT, TRACES
from hypothesis import given
from hypothesis import strategies as st

import torchprof
from torchprof import Run
from torchprof.advise import judge, rules
from torchprof.advise.evidence import Evidence
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, Held, Memory
from torchprof.run.words import (
    GARBAGE_COLLECTION,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    Frame,
    FrameKind,
    Signature,
)

SAVED = sorted(DATA.glob("run-schema-*.json"))
FOREIGN = sorted(TRACES.glob("*.json.gz")) if TRACES.is_dir() else []
OURS = ROOT / "examples" / "trace.json.gz"

MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES}
LOADER = label("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
STEP = label("ProfilerStep*")


def failures(run: Run) -> dict[str, Exception]:
    assert run.report("findings")
    return judge(run).failed


# Kinds of runs

KINDS: dict[str, Callable[[], Run]] = {
    "empty": lambda: run_of([]),
    "empty on a device": lambda: run_of([], **CUDA),
    "without time": lambda: run_of([row(0, op("aten::mm"), flops=8)], requested=("flops",), measured=("flops",)),
    "a device alone": lambda: run_of(
        [row(OUTSIDE, label(LAUNCH_NOT_RECORDED), kernel("gemm"), device="cuda:0", device_ns=90)], wall_ns=100, **CUDA
    ),
    "a loader in the steps of torch.profiler": lambda: with_samples(
        run_of([row(OUTSIDE, STEP, LOADER, cpu_ns=90), row(OUTSIDE, STEP, cpu_ns=5)], wall_ns=100, steps=2),
        step_data_ns=[40, 50],
        step_gap_ns=[5, 0],
    ),
    "compiled": lambda: run_of(
        [
            row(
                0,
                Frame(FrameKind.REGION, "0/0"),
                op("CompiledFunction", (8,), (2,), dtypes=["double", "float"]),
                cpu_ns=9,
            ),
            row(0, Frame(FrameKind.REGION, "0/0"), op("CompiledFxGraph"), op("cpp_fused_add_0"), cpu_ns=90),
            row(0, Frame(FrameKind.REGION, "compiling"), cpu_ns=9),
            row(
                0,
                Frame(FrameKind.KERNELS, "fused: a + b"),
                op("triton_0"),
                kernel("triton_0"),
                device="cuda:0",
                device_ns=9,
            ),
        ],
        wall_ns=100,
        flags=(("record_shapes", True),),
        **CUDA,
    ),
    "garbage collection": lambda: run_of(
        [row(OUTSIDE, Frame(FrameKind.GC, GARBAGE_COLLECTION), cpu_ns=90)], wall_ns=100
    ),
    "ranks": lambda: run_of_ranks(
        {("Net", FORWARD): {0: [5, 5], 1: [9, 9]}, (NOWHERE, FORWARD): {0: [1, 1], 1: [1, 1]}},
        {("Net.a", FORWARD, "all_reduce", everybody(2)): {0: [4, 4], 1: [1, 1]}},
        metas={0: {"wall_ns": 20}, 1: {"wall_ns": 20}},
    ),
    "ranks with a device": lambda: run_of_ranks(
        {("Net", FORWARD): {0: [5, 5], 1: [9, 9]}},
        {("Net.a", FORWARD, "all_reduce", None): {0: [4, 4], 1: [1, 1]}},
        device="device",
        metas={0: {"wall_ns": 20, **CUDA}, 1: {"wall_ns": 20, **CUDA}},
    ),
    **{f"saved: {path.stem}": (lambda path=path: torchprof.load(path)) for path in SAVED},
    **{f"trace: {path.stem}": (lambda path=path: torchprof.from_trace(path)) for path in [OURS, *FOREIGN]},
}


def with_samples(run: Run, **values: list[int]) -> Run:
    samples = {
        SampleKey(OUTSIDE, FORWARD, 0, "cpu", measure): Spread.of([*enumerate(of_steps)])
        for measure, of_steps in values.items()
    }
    return replace(run, samples=samples)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_fails_on_any_kind_of_run(kind: str) -> None:
    assert failures(KINDS[kind]()) == {}


# Runs of all that rules look for, put together at random

_NAMES = """
    aten::mm aten::addmm aten::bmm aten::baddbmm aten::softmax aten::_softmax aten::add aten::mul_ aten::item aten::to
    aten::_local_scalar_dense aten::resolve_neg aten::convolution aten::_convolution aten::add_ aten::sum aten::zero_
    aten::convolution_backward aten::_scaled_dot_product_attention_math cudaMemcpyAsync cudaStreamSynchronize
    CompiledFunction torch::autograd::AccumulateGrad record_param_comms c10d::allreduce_ mine::op
"""
NAMES = _NAMES.split()
LABELS = (LOADER.name, "ProfilerStep*", "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "mine")
KERNELS = (
    "ncclDevKernel_AllReduce_Sum_f32",
    "sm80_xmma_gemm_f32f32_f32f32",
    "sgemm",
    "void nchwToNhwcKernel<float>",
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy DtoH (Device -> Pageable)",
)
SHAPES = st.sampled_from([(), (4,), (4, 8), (8, 12), (2, 300, 300), None, ((2, 2), (3,))])
DTYPES = st.sampled_from(["float", "double", "c10::Half", "long int", "", "Scalar", "TensorList"])
SIGNATURES = st.none() | st.lists(st.tuples(SHAPES, DTYPES), max_size=4).map(
    lambda inputs: Signature(tuple(shape for shape, _ in inputs), tuple(dtype for _, dtype in inputs))
)
OPS = st.builds(Frame, st.just("op"), st.sampled_from(NAMES), SIGNATURES)
RANGES = st.sampled_from(
    [
        *map(label, LABELS),
        label(LAUNCH_NOT_RECORDED),
        Frame(FrameKind.REGION, "0/0"),
        Frame(FrameKind.KERNELS, "fused: a + b"),
        Frame(FrameKind.COLLECTIVE, "nccl:all_reduce"),
        Frame(FrameKind.GC, GARBAGE_COLLECTION),
    ]
)
ENDS = st.lists(st.sampled_from([*map(kernel, KERNELS), python_line("net.py:5 forward")]), max_size=1)
CHAINS = st.builds(
    lambda outer, inner, end: (*outer, *inner, *end), st.lists(RANGES, max_size=2), st.lists(OPS, max_size=2), ENDS
)
COSTS = st.sampled_from([0, 1, 10, 10_000, 2**40])
LAYERS = st.integers(NOT_SELECTED, 3)
ROWS = st.builds(
    lambda layer, chain, **options: row(layer, *chain, **options),
    LAYERS,
    CHAINS,
    phase=st.sampled_from(PHASES),
    device=st.sampled_from(["cpu", "cuda:0"]),
    calls=st.integers(0, 200),
    cpu_ns=COSTS,
    device_ns=COSTS,
    cpu_allocated=COSTS,
)
MEASURE_NAMES = ("cpu_ns", "peak_bytes", "kept_bytes", "step_ns", "step_data_ns", "step_gap_ns", "step_copy_ns")
SAMPLES = st.dictionaries(
    st.builds(SampleKey, LAYERS, st.sampled_from(PHASES), st.just(0), st.just("cpu"), st.sampled_from(MEASURE_NAMES)),
    st.lists(COSTS, min_size=1, max_size=4).map(lambda values: Spread.of([*enumerate(values)])),
    max_size=6,
)
KIND_NAMES = st.sampled_from(
    ["Conv2d", "BatchNorm2d", "Softmax", "Sequential", "MultiheadAttention", "Dropout", "Mine", ""]
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    about = CUDA if draw(st.booleans()) else {}
    made = run_of(
        draw(st.lists(ROWS, max_size=8)),
        wall_ns=draw(COSTS),
        steps=draw(st.integers(0, 3)),
        busy_ns=draw(st.sampled_from([(), (("cuda:0", 5),), (("cpu", 7), ("cuda:0", 2**41))])),
        flags=(("record_shapes", draw(st.booleans())),),
        switches=draw(st.sampled_from([(), (("compute_capability", "8.0"), ("float32_matmul_precision", "highest"))])),
        **about,
    )
    layers = tuple(
        replace(
            layer,
            kind=draw(KIND_NAMES),
            params=draw(st.sampled_from([0, 4, None])),
            trainable_params=draw(st.sampled_from([0, 4, None])),
            dtype_bytes=draw(st.sampled_from([(), (("float64", 32),), (("float64", 32), ("float32", 4))])),
            input_shapes=draw(st.sampled_from([(), ((2, 3),)])),
            output_shapes=draw(st.sampled_from([(), ((2, 3),)])),
            training=draw(st.sampled_from([True, False, None])),
            compiled=draw(st.booleans()),
            shared_with=draw(st.sampled_from([(), (("Net", "a"),), (("Other", "x"),)])),
        )
        for layer in made.layers
    )
    held = (Held(draw(LAYERS), FORWARD, "activations", 2**21, 1),)
    return replace(
        made,
        layers=layers,
        rows=replace(made.rows, layers=layers),
        samples=draw(SAMPLES),
        memory=draw(st.sampled_from([(), (Memory("cpu", 0, 2**22, 1, held),)])),
        device_times=draw(st.sampled_from([(), (DeviceTime("cuda:0", 0, 100, 60, 30, 30, 0, 0, ()),)])),
    )


@examples(150)
@given(runs())
def test_no_rule_fails_on_a_random_run(run: Run) -> None:
    found, failed = judge(run)
    assert failed == {}
    recorded = sum(meta.wall_ns for meta in run.metas)
    assert all(one.gain_ns is None or 0 <= one.gain_ns <= recorded for one in found)


@examples(150)
@given(runs())
def test_merging_keeps_the_gains_of_every_rule(run: Run) -> None:
    """Whether layers are merged by pattern alone, or all of them together, the gains of a rule have the same sum."""

    def gains(most: int) -> dict[str, tuple[int, int, list[str]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torchprof.advise, "PER_RULE", most)
            found = {name: list(find(Evidence(run))) for name, find in rules().items()}
        return {
            name: (
                sum(one.gain_ns or 0 for one in advice),
                sum(one.gain_bytes or 0 for one in advice),
                sorted(layer for one in advice for layer in one.layers),
            )
            for name, advice in found.items()
        }

    apart, merged = gains(10**9), gains(0)
    assert merged == apart == gains(3)
    assert all(len(layers) == len(set(layers)) for _, _, layers in merged.values())

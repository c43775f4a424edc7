"""Work with unknown FLOPs: what is uncounted, and the warnings about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from build.compiled import Ran, call, region
from build.events import kernel, label, op, user_label
from build.hand_made import kernel as kernel_frame
from build.hand_made import label as label_frame
from build.hand_made import line, row, run_of
from build.hand_made import op as op_frame

import torchprof
from torchprof.analyze.warnings import about_uncounted
from torchprof.attribute.events import Event
from torchprof.run.words import LAUNCH_NOT_RECORDED, LAUNCHED_BEFORE, OUTSIDE, Frame, FrameKind, Signature

SHAPES = (Signature((), ()), Signature(((2, 3), (3, 4)), ("float", "float")))
MM = 24  # the multiply-accumulates of a product of these


def counts(*events: Event) -> dict[str, tuple[int, int]]:
    """MACs and uncounted calls of the rows that have any, by the names of their frames."""
    ran = Ran(*events, flops=SHAPES)
    rows = ((row, row.cost) for row in ran.run.rows)
    return {
        " / ".join(frame.name for frame in row.frames): (cost.macs, cost.uncounted)
        for row, cost in rows
        if cost.macs or cost.uncounted
    }


def in_a_layer(*events: Event) -> tuple[Event, ...]:
    return (label("@blocks.0", 0, 500), *events)


MULTIPLIES = op("aten::mm", 10, 30, correlation=4, signature=1)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([MULTIPLIES, kernel("gemm", 1000, 1010, 4)], {"aten::mm": (MM, 0)}),
        (
            [MULTIPLIES, op("cuLaunchKernel", 40, 50, correlation=-5), kernel("mine", 1000, 1010, -5)],
            {"aten::mm": (MM, 0), "mine": (0, 1)},
        ),
        (
            [
                user_label("mine", 5, 90),
                op("cuLaunchKernel", 40, 50, correlation=-5),
                kernel("mine", 1000, 1010, -5),
                kernel("mine", 1020, 1030, -5),
            ],
            {"mine / mine": (0, 2)},
        ),
        (
            [op("aten::copy_", 10, 30, correlation=4), kernel("elementwise", 1000, 1010, 4)],
            {},  # it does no arithmetic, whatever kernel carries it out
        ),
        ([kernel("Memcpy DtoH (Device -> Pinned)", 1000, 1010, 77), kernel("ncclKernel_AllReduce", 1020, 1030, 8)], {}),
        ([kernel("gemm", 1000, 1010, 77)], {"(launch not recorded) / gemm": (0, 1)}),
        (
            [
                op("aten::linear", 10, 90, correlation=3),
                op("aten::mm", 20, 30, correlation=4, signature=1),
                kernel("gemm", 1000, 1010, 4),
                kernel("bias", 1020, 1030, 3),  # of an op that stands for others, and is none of these
            ],
            {"aten::linear / aten::mm": (MM, 0), "aten::linear / bias": (0, 1)},
        ),
        (
            [op("mine::op", 10, 30, correlation=4), kernel("mine", 1000, 1010, 4)],
            {"mine::op": (0, 1)},  # once, not for its kernel, too
        ),
    ],
    ids=["op", "python", "label", "copy", "no arithmetic", "launch unknown", "composite", "no formula"],
)
def test_a_kernel_without_an_operator_is_uncounted(
    events: Sequence[Event], expected: dict[str, tuple[int, int]]
) -> None:
    assert counts(*in_a_layer(*events)) == expected


def test_a_row_with_only_a_kernel_is_not_0() -> None:
    """Not where an op around it is uncounted: its row is another, the label's has nothing but the kernel."""
    found = counts(
        *in_a_layer(
            op("mine::op", 10, 90, correlation=4),
            user_label("mine", 20, 80),
            op("cuLaunchKernel", 40, 50, correlation=-5),
            kernel("mine", 1000, 1010, -5),
            kernel("other", 1020, 1030, 4),
        )
    )
    assert found == {"mine::op": (0, 1), "mine::op / mine / mine": (0, 1)}
    inner = label("@blocks.0.fc1", 20, 80)
    found = counts(
        *in_a_layer(
            op("mine::op", 10, 90, correlation=4),
            inner,
            op("cuLaunchKernel", 40, 50, correlation=-5),
            kernel("mine", 1000, 1010, -5),
        )
    )
    assert found == {"mine::op": (0, 1), "mine": (0, 1)}


def test_the_replay_of_a_cuda_graph_is_uncounted() -> None:
    replay = op("cudaGraphLaunch", 50, 60, correlation=-9)
    kernels = [kernel("gemm", 1000, 1010, -9), kernel("gemm", 1020, 1030, -9), kernel("norm", 1040, 1050, -9)]
    copy = kernel("Memcpy DtoD (Device -> Device)", 1060, 1070, -9)
    assert counts(*in_a_layer(replay, *kernels, copy)) == {
        "CUDA graph replay / gemm": (0, 2),
        "CUDA graph replay / norm": (0, 1),
    }
    assert counts(replay, *kernels) == {"CUDA graph replay / gemm": (0, 2), "CUDA graph replay / norm": (0, 1)}
    # Where its kernels were not recorded, the launch stands for them.
    assert counts(*in_a_layer(replay)) == {"cudaGraphLaunch": (0, 1)}


def test_the_replay_of_a_compiled_graph_is_uncounted_in_its_own_row() -> None:
    """The call of the graph is not counted either; but the row of the replay holds nothing besides, so it is no 0."""
    events = [region("0/0", 5, 400), call("block", 10, 300), op("cudaGraphLaunch", 50, 60, correlation=-9)]
    found = counts(*in_a_layer(*events, kernel("gemm", 1000, 1010, -9)))
    assert [uncounted for way, (_, uncounted) in found.items() if "CUDA graph replay" in way] == [1]


def test_a_trace_of_decoding_with_cuda_graphs(tmp_path: Path) -> None:
    """Two steps of a served model: a small product, and a graph that is replayed. What the product does is known, what
    the graph does is not; so the rate of both is a lower bound."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}

    events = []
    for step in range(2):
        at, number = 1000 * step, 10 * step
        events += [
            event("user_annotation", "decode", at, 900),
            event(
                "cpu_op",
                "aten::mm",
                at + 10,
                20,
                **{"External id": number + 1, "Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]},
            ),
            event("cuda_runtime", "cudaLaunchKernel", at + 15, 5, correlation=number + 2),
            event("kernel", "gemm", at + 30, 6, 7, correlation=number + 2, device=0, stream=7),
            event("cuda_runtime", "cudaGraphLaunch", at + 50, 5, correlation=number + 3),
            event("kernel", "gemm", at + 60, 100, 7, correlation=number + 3, device=0, stream=7),
            event(
                "kernel", "Memcpy DtoD (Device -> Device)", at + 170, 4, 7, correlation=number + 3, device=0, stream=7
            ),
        ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    run = torchprof.from_trace(path)
    table = run.report("tree")
    assert line(table, "decode")["FLOPs"] == "≥ 96"  # 2 · 2 · 2·3·4
    assert line(table, "decode")["CUDA total"] == "220.000us"
    assert line(table, "decode")["FLOP/s"] == "≥ 436.36 K"
    assert line(table, "└── (CUDA graph replay)")["FLOPs"] == "–"
    assert "Not counted: 2 kernels that CUDA graphs replayed (in decode)." in table


# The sentences

GRAPH = op_frame("CompiledFxGraph")
REPLAY = Frame(FrameKind.KERNELS, "CUDA graph replay")


def said(*rows: tuple[object, ...]) -> list[str]:
    """Of operators, ``aten::add_`` and ``aten::mul_`` have formulas."""
    return [*map(str, about_uncounted(run_of(rows).rows, {"aten::add_", "aten::mul_"}))]


def test_generated_kernels_have_one_warning() -> None:
    kernels = [
        row(layer, GRAPH, op_frame(f"{lead}cpp_fused_{number}"), uncounted=2)
        for layer in (1, 2)
        for lead in ("", "graph_0_")
        for number in range(4)
    ]
    assert said(*kernels) == ["Not counted: 32 generated kernels of torch.compile (in Net.a, Net.b)."]
    assert said(row(1, GRAPH, uncounted=1)) == ["Not counted: at least 1 operator in compiled graphs (in Net.a)."]


def test_operators_without_shapes_have_one_warning_with_a_remedy() -> None:
    rows = [row(layer, op_frame(name), uncounted=3) for name in ("aten::add_", "aten::mul_") for layer in range(4)]
    assert said(*rows) == [
        "Not counted: 24 calls of aten::add_, aten::mul_ (in Net, Net.a, Net.b and 1 more), recorded without shapes: "
        "use record_shapes=True."
    ]
    with_shapes = row(0, op_frame("aten::add_", (2, 2)), uncounted=1)
    assert said(with_shapes) == ["Not counted: aten::add_ (1 call, in Net)."]


def test_kernels_without_an_operator_have_one_warning() -> None:
    rows = [
        row(0, REPLAY, kernel_frame("gemm"), device="cuda:0", uncounted=4),
        row(1, REPLAY, kernel_frame("norm"), device="cuda:0", uncounted=1),
        row(OUTSIDE, label_frame("mine"), kernel_frame("triton_mine"), device="cuda:0", uncounted=2),
        row(2, op_frame("cudaGraphLaunch"), uncounted=1),
        row(OUTSIDE, label_frame(LAUNCH_NOT_RECORDED), kernel_frame("gemm"), device="cuda:0", uncounted=3),
        row(OUTSIDE, label_frame(LAUNCHED_BEFORE), kernel_frame("gemm"), device="cuda:0", uncounted=9),  # in no sum
    ]
    assert said(*rows) == [
        "Not counted: 5 kernels that CUDA graphs replayed (in Net, Net.a).",
        "Not counted: 3 kernels whose launch was not recorded: gemm (in (outside)).",
        "Not counted: 2 kernels that no operator launched: triton_mine (in (outside)).",
        "Not counted: 1 CUDA graph, whose kernels were not recorded (in Net.b).",
    ]


def test_only_eight_operators_without_a_formula_have_warnings_of_their_own() -> None:
    rows = [row(0, op_frame(f"mine::op_{number}"), uncounted=20 - number) for number in range(11)]
    sentences = said(*rows, row(1, op_frame("mine::" + "long" * 40), uncounted=100))
    assert len(sentences) == 9
    assert sentences[1] == "Not counted: mine::op_0 (20 calls, in Net)."
    assert sentences[-1] == "Not counted: 4 more operators without a FLOPs formula (calls: 46)."  # 13 + 12 + 11 + 10
    assert all(len(sentence) < 200 for sentence in sentences)

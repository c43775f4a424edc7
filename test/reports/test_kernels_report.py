"""The kernels report on hand-made rows, and on hand-made events like those of a GPU; kernel names from real traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build.hand_made import cells, headings, kernel, label, op, row, run_of
from build.raw_events import MARKED, attributed, small_step
from build.warnings import run_warnings

from torchprof import TorchprofError
from torchprof.analyze.operators.kernels import short_kernel_name
from torchprof.analyze.operators.operators import Kernel, kernels
from torchprof.run.words import BACKWARD, LAUNCH_NOT_RECORDED, OUTSIDE, RECOMPUTE

MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES}
STEP = [
    row(1, op("aten::linear"), op("aten::addmm"), cpu_ns=20_000),
    row(1, op("aten::linear"), op("aten::addmm"), kernel("gemm"), device="cuda:0", calls=2, device_ns=4_000),
    row(3, op("aten::addmm"), kernel("gemm"), device="cuda:0", calls=1, device_ns=3_000),
    row(1, op("AddmmBackward0"), op("aten::mm"), kernel("gemm"), phase=BACKWARD, device="cuda:0", device_ns=2_000),
    row(1, op("AddmmBackward0"), phase=BACKWARD, device="cuda:0", calls=0, device_allocated=512),
    row(OUTSIDE, kernel("who launched this"), device="cuda:0", calls=5, device_ns=1_000),
]


def test_the_table() -> None:
    """A row for each kernel, op, layer and phase; shares of all 10 us; idle time."""
    run = run_of(STEP, wall_ns=40_000, busy_ns=(("cuda:0", 8_000),), warnings=run_warnings("Beware."), **CUDA)
    assert run.report("kernels").splitlines() == [
        "cuda:0 was busy for 8.000us of 40.000us, idle for 32.000us (80.0%).",
        "",
        "Kernel            | Operator      | Module    | Phase    | CUDA total      | CUDA avg | Calls",
        "------------------|---------------|-----------|----------|-----------------|----------|------",
        "gemm              | aten::addmm   | Net.a     | forward  | 4.000us (40.0%) | 2.000us  | 2",
        "gemm              | aten::addmm   | Net.b.0   | forward  | 3.000us (30.0%) | 3.000us  | 1",
        "gemm              | aten::mm      | Net.a     | backward | 2.000us (20.0%) | 2.000us  | 1",
        "who launched this | (between ops) | (outside) |          | 1.000us (10.0%) | 0.200us  | 5",
        "",
        "100 % is what all rows took: 10.000us CUDA total.",
        "Beware.",
    ]


def test_selected_layers_one_phase_and_another_order() -> None:
    run = run_of(STEP, wall_ns=40_000, **CUDA)
    table = run.report("kernels", layer="b")
    assert [one[:5] for one in cells_of(table)] == [["gemm", "aten::addmm", "Net.b.0", "forward", "3.000us (100.0%)"]]
    assert [one[2:4] for one in cells_of(run.report("kernels", phase="backward"))] == [["Net.a", "backward"]]
    assert [one[2] for one in cells_of(run.report("kernels", layer="a", phase="forward"))] == ["Net.a"]
    assert cells_of(run.report("kernels", phase="recompute")) == []
    for key in ("Calls", "calls", "count"):
        assert cells_of(run.report("kernels", sort_by=key))[0][0] == "who launched this"
    for key in ("cuda_total", "cuda_time_total", "device_time_total"):
        assert cells_of(run.report("kernels", sort_by=key)) == cells_of(run.report("kernels"))
    assert [one[2] for one in cells_of(run.report("kernels", sort_by="module"))] == [
        *("(outside)", "Net.a", "Net.a", "Net.b.0")
    ]
    assert run.report("kernels", top=1).endswith("\n3 rows are hidden: shown is the largest by CUDA total.")


def cells_of(report: str) -> list[list[str]]:
    """The rows of the table, which follows the lines about the devices."""
    return cells(report.split("\n\n", 1)[1])


def test_several_devices_have_a_column_and_a_line_each() -> None:
    second = [row(1, op("aten::add"), kernel("add"), device="cuda:1", device_ns=7_000)]
    run = run_of([*STEP, *second], wall_ns=10_000, busy_ns=(("cuda:0", 9_000), ("cuda:1", 10_500)), **CUDA)
    report = run.report("kernels")
    assert report.splitlines()[:2] == [
        "cuda:0 was busy for 9.000us of 10.000us, idle for 1.000us (10.0%).",
        "cuda:1 was busy for 10.500us of 10.000us, idle for 0.000us (0.0%).",
    ]
    assert headings(report.split("\n\n")[1])[4] == "Device"
    assert [one[4] for one in cells_of(report)] == ["cuda:1", "cuda:0", "cuda:0", "cuda:0", "cuda:0"]


def test_another_kind_of_device() -> None:
    xpu = [row(1, op("aten::add"), kernel("add"), device="xpu:0", device_ns=7_000)]
    report = run_of(xpu, wall_ns=10_000, **{**CUDA, "device": "xpu"}).report("kernels")
    assert headings(report.split("\n\n")[1])[4:] == ["XPU total", "XPU avg", "Calls"]


def test_a_device_on_which_nothing_ran() -> None:
    report = run_of(STEP[:1], wall_ns=10_000, **CUDA).report("kernels")
    assert report.splitlines()[0] == "Nothing ran on the device in 10.000us."
    assert cells_of(report) == []


def test_kernels_in_a_label_and_in_recompute() -> None:
    run = run_of(
        [
            row(1, op("aten::mm"), label("mine"), kernel("k"), device="cuda:0", device_ns=1),
            row(1, op("aten::mm"), kernel("k"), phase=RECOMPUTE, device="cuda:0", device_ns=2),
        ],
        **CUDA,
    )
    assert [*kernels(run)] == [
        Kernel("k", "mine", "Net.a", "forward", "cuda:0"),
        Kernel("k", "aten::mm", "Net.a", "recompute", "cuda:0"),
    ]


@MARKED
def test_kernels_of_events_as_a_gpu_gives_them() -> None:
    """Every kernel of a training step: its launch, calls and time; and the idle time of the device."""
    _, run = attributed(small_step())
    run = replace(run, metas=(replace(run.meta, **CUDA),))
    found = {kernel: (sums.calls, sums.self.device_ns, sums.total) for kernel, sums in kernels(run).items()}
    truth = {
        ("gemm", "aten::addmm", "Model", "forward"): 2000,
        ("gemm", "aten::mm", "Model", "backward"): 3000,
        ("Memset (Device)", "aten::add_", "Model", "backward"): 4,
        ("Memcpy HtoD (Pageable -> Device)", "aten::copy_", "(outside)", "other"): 100,
        ("reduce", "aten::sum", "(outside)", "other"): 30,
        ("multi_tensor_apply", "aten::_foreach_add_", "(outside)", "other"): 100,
        ("who launched this", LAUNCH_NOT_RECORDED, "(outside)", "other"): 7,
    }
    assert {kernel[:4]: ns for kernel, (_, ns, _) in found.items()} == truth
    assert {calls for calls, _, _ in found.values()} == {1}
    assert {kernel.device for kernel in found} == {"cuda:0"}
    assert all(total.device_ns == ns for _, ns, total in found.values())


# Names


# As in traces of an A100 and of an MI250.
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_sgemm_32x32_sliced1x4_tn", "ampere_sgemm_32x32_sliced1x4_tn"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("Memset (Device)", "Memset (Device)"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::launch_clamp_scalar("
            "at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::ClampLimits)::{lambda()#1}::"
            "operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, at::detail::Array<char*, 2> >"
            "(int, at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar)::"
            "{lambda()#1}::operator()() const::{lambda(float)#1}, at::detail::Array<char*, 2>)",
            "vectorized_elementwise_kernel<4, launch_clamp_scalar>",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float "
            "const*, int, int, int, bool const*, int, bool)",
            "softmax_warp_forward<float, float, float, 10, true, false>",
        ),
        (
            "void cudnn::ops::nchwToNhwcKernel<float, false, (cudnnKernelDataType_t)2>(cudnn::ops::nchw2nhwc_params_t"
            "<float>, float const*, float*)",
            "cudnn::ops::nchwToNhwcKernel<float, false, 2>",
        ),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80_tensorop_s1688gemm_"
            "256x64_16x4_nn_align4::Params)",
            "cutlass::Kernel<cutlass_80_tensorop_s…emm_256x64_16x4_nn_align4>",
        ),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            "ncclKernel_AllReduce_RING_LL_Sum_float",
        ),
        (
            "sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_"
            "g1_tensor16x8x8_execute_kernel_cudnn_infer",
            "sm80_xmma_dgrad_implicit_gemm_tf32f32…execute_kernel_cudnn_infer",
        ),
        ("void mine(float*) [clone .kd]", "mine"),
        ("(odd", "(odd"),
        ("", ""),
    ],
)
def test_short_kernel_names(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


def test_full_names_on_request() -> None:
    """Two kernels with the same short name are two rows."""
    long = [f"void gemm<{'int, ' * 20}{number}{', int' * 20}>(float*)" for number in range(2)]
    run = run_of([row(1, op("aten::mm"), kernel(name), device="cuda:0", device_ns=1) for name in long], **CUDA)
    assert len({one[0] for one in cells_of(run.report("kernels"))}) == 1
    assert len(cells_of(run.report("kernels"))) == 2
    assert [one[0] for one in cells_of(run.report("kernels", full_names=True))] == long


# Bad input


@pytest.mark.parametrize(
    ("meta", "options", "words"),
    [
        ({}, {}, ["recorded no device", 'device="cuda"']),
        ({**CUDA, "measured": ("cpu_ns",)}, {}, ["CUDA was requested", "run.warnings"]),
        (CUDA, {"layer": "c"}, ["No module", "'c'"]),
        (CUDA, {"phase": "fore"}, ["no phase 'fore'"]),
        (CUDA, {"sort_by": "cpu_total"}, ["no column 'cpu_total'", "cuda_total"]),
        (CUDA, {"top": -3}, ["top", "-3"]),
        (CUDA, {"tablefmt": "nice"}, ["no format 'nice'"]),
        (CUDA, {"op": "aten::mm"}, ["no option 'op'"]),
    ],
)
def test_bad_input(meta: dict[str, Any], options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TorchprofError) as error:
        run_of(STEP, **meta).report("kernels", **options)
    for word in words:
        assert word in str(error.value)

"""The kernels report on hand-made rows, and on hand-made events like those of a GPU; kernel names from real traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from build.golden import drawn
from build.hand_made import cells, kernel, label, op, row, run_of
from build.raw_events import MARKED, attributed, small_step
from build.warnings import run_warnings

from torchprof.analyze.device import short_kernel_name
from torchprof.analyze.operators import Kernel, kernels
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


def test_the_table_of_kernels(golden: Callable[..., None]) -> None:
    """A row for each kernel, op, layer and phase; shares of all 10 us; idle time of each device."""
    run = run_of(STEP, wall_ns=40_000, busy_ns=(("cuda:0", 8_000),), warnings=run_warnings("Beware."), **CUDA)
    second = [row(1, op("aten::add"), kernel("add"), device="cuda:1", device_ns=7_000)]
    both = run_of([*STEP, *second], wall_ns=10_000, busy_ns=(("cuda:0", 9_000), ("cuda:1", 10_500)), **CUDA)
    xpu = [row(1, op("aten::add"), kernel("add"), device="xpu:0", device_ns=7_000)]
    other = run_of(xpu, wall_ns=10_000, **{**CUDA, "device": "xpu"})
    idle = run_of(STEP[:1], wall_ns=10_000, **CUDA)
    golden(
        drawn(run, "kernels", top=4),
        drawn(run, "kernels", top=1),
        *(drawn(one, "kernels") for one in (both, other, idle)),
    )


def test_the_cpu_is_no_device() -> None:
    """Its busy time is in the run, too, and says nothing about the device, on which nothing ran here."""
    run = run_of(STEP[:1], wall_ns=10_000, busy_ns=(("cpu", 9_000),), **CUDA)
    assert run.report("kernels").splitlines()[0] == "Nothing ran on the device in 10.000us."


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ({"layer": "b"}, "Net.b.0"),
        ({"phase": "backward"}, "Net.a"),
        ({"layer": "a", "phase": "forward"}, "Net.a"),
        ({"phase": "recompute"}, ""),
        *(({"sort_by": key}, "(outside) Net.a Net.b.0 Net.a") for key in ("Calls", "calls", "count")),
        *(
            ({"sort_by": key}, "Net.a Net.b.0 Net.a (outside)")
            for key in ("cuda_total", "cuda_time_total", "device_time_total")
        ),
        ({"sort_by": "module"}, "(outside) Net.a Net.a Net.b.0"),
    ],
)
def test_selected_layers_one_phase_and_another_order(options: dict[str, str], modules: str) -> None:
    shown = cells_of(run_of(STEP, wall_ns=40_000, **CUDA).report("kernels", **options))
    assert [cells[2] for cells in shown] == modules.split()


def cells_of(report: str) -> list[list[str]]:
    """The rows of the table, which follows the lines about the devices."""
    return cells(report.split("\n\n", 1)[1])


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

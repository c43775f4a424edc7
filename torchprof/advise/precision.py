"""Precision: dtypes that cost more time and memory than needed, and sizes that tensor cores do not support."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from torchprof.advise import WORTH, Advice, Gain, merged, merged_into_one, rule
from torchprof.advise.chains import Among, Frames, always, inside, is_device_work, shape_of_input
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_memory, format_time
from torchprof.run.groups import sets_by_key, sums_by_key
from torchprof.run.torch_names import CONVOLUTIONS, ELEMENTWISE, FACTORS, PRODUCT_KERNELS, recorded_as
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE, Frame, FrameKind, Signature

_DOUBLE = recorded_as("float64", "complex128")
_SINGLE = recorded_as("float32")
_HALF = recorded_as("float16", "bfloat16")
_FLOATS = _DOUBLE | _SINGLE | _HALF | recorded_as("complex64", "complex32")
_FLOATING = ("float", "bfloat", "complex")  # prefixes of torch's floating-point dtypes
_FLOAT32_KERNEL = re.compile(r"sgemm|scudnn|simt|f32f32_f32f32")
_TF32_KERNEL = re.compile(r"tf32|s1688")
_HALF_KERNEL = re.compile(r"[sh]884|h1688|16816|fp16|bf16|half|BFloat16|c10::Half")
_SIZES_SHOWN = 5
_GAIN_OF_FLOAT32 = 0.9  # over float16 on a CPU
_GAIN_OF_TENSOR_CORES = 7 / 8
"""The largest gain from tensor cores, because they are at most eight times as fast as the other cores: A100 156 to 19.5
TFLOP/s in TF32, H100 494 to 67, and 989 to 134 in half precision; V100 125 to 15.7 (NVIDIA's data sheets)."""


class _Switch(NamedTuple):
    """A switch of torch, the value with which it forbids TF32, for which operators, and how to allow it."""

    name: str
    forbids: str
    ops: Collection[str]
    remedy: str


_TF32_SWITCHES = (
    _Switch("float32_matmul_precision", "highest", FACTORS, '`torch.set_float32_matmul_precision("high")`'),
    _Switch("cudnn_tf32", "False", CONVOLUTIONS, "`torch.backends.cudnn.allow_tf32 = True`"),
)


@rule
def double_precision(evidence: Evidence) -> Iterator[Advice]:
    """Layers that compute in float64, by the dtypes of the inputs of their operators; if shapes were not recorded, by
    the dtypes of their own parameters."""
    double_bytes: dict[int, int] = {}  # only of layers that have any
    all_double = set()
    for number, layer in enumerate(evidence.run.layers):
        sizes = dict(layer.dtype_bytes)
        if double := sizes.get("float64", 0) + sizes.get("complex128", 0):
            double_bytes[number] = double
            if double == sum(size for dtype, size in sizes.items() if dtype.startswith(_FLOATING)):
                all_double.add(number)
    if evidence.shapes_recorded:
        took = evidence.took(_is_in_double)
    elif all_double:
        took = {number: work for number, work in evidence.took(always).items() if number in all_double}
    else:
        return
    gains = {
        number: Gain(
            round(ns * _part_of_double(evidence, number)), double_bytes[number] // 2 if number in double_bytes else None
        )
        for number, work in took.items()
        if (ns := evidence.time_of(work))
    }
    for group in merged(evidence, gains):
        size = sum(double_bytes.get(number, 0) for number in group.numbers)
        ns = sum(evidence.time_of(took[number]) for number in group.numbers)
        parameters = f", and {format_memory(size)} of parameters are float64" if size else ""
        yield group.advice(
            f"Computing in float64 takes {format_time(ns)}{parameters}.",
            "Use float32 unless results need float64: `model.float()` for parameters, `x.float()` for inputs (NumPy "
            "arrays are float64 by default).",
        )


def _part_of_double(evidence: Evidence, number: int) -> float:
    """The part of the time in float64 that float32 saves. On a CPU, twice as many values of float32 fit into a register
    and through the memory bus, and oneDNN does not support float64: on two threads a Conv2d took 4.5 times as long, an
    LSTM 3.7 times. On a device it is at most all: consumer GPUs compute float64 at 1/64 of the rate."""
    if evidence.device != "cpu":
        return 1.0
    kind = evidence.run.layers[number].kind if number >= 0 else ""
    return 0.75 if kind.startswith("Conv") or kind in ("LSTM", "GRU", "RNN") else 0.5


@rule
def half_precision_on_the_cpu(evidence: Evidence) -> Iterator[Advice]:
    """Layers in float16, by their own parameters, on a CPU, which has no fast kernels for them: float32 saved 97 % of
    convolutions. bfloat16 is left out: many CPUs compute it fast."""
    if evidence.device != "cpu" or "CUDA" in dict(evidence.run.meta.environment):
        return  # a device may compute it, even if its time was not recorded
    layers = evidence.run.layers
    took = evidence.took(always)
    gains = {
        number: round(took[number].cpu_ns * _GAIN_OF_FLOAT32)
        for number, layer in enumerate(layers)
        if number in took and dict(layer.dtype_bytes).get("float16")
    }
    for group in merged(evidence, gains, least_ns=evidence.notable_ns):
        yield group.advice(
            "It computes in float16, for which the CPU has no fast kernels.",
            "Use `model.float()` on a CPU, or `model.bfloat16()` where the CPU has instructions for it (AMX).",
        )


@rule
def misaligned_half_precision(evidence: Evidence) -> Iterator[Advice]:
    """Matrix products and convolutions in half precision on CUDA with a size of the weights that is not a multiple of 8
    (for a product of two activations: the inner or the last size). Then rows are not aligned to 16 bytes.

    cuBLAS and cuDNN select slower kernels for these sizes, some without tensor cores. Up to four input channels, as of
    an image, are left out because they cannot be changed, and so are depthwise convolutions, which have no matrix
    product. The number of rows (batch, tokens) does not matter. Source: NVIDIA, "Matrix Multiplication Background
    User's Guide", Requirements to Use Tensor Cores.
    """
    if evidence.device != "cuda" or not evidence.shapes_recorded:
        return
    rows = [*evidence.rows(_has_odd_sizes, phases=(FORWARD, RECOMPUTE))]
    if not rows:
        return
    sizes = sets_by_key((row.layer, size) for row in rows for frame in row.frames for size in _odd_sizes(frame))
    backward = evidence.took(_has_half_product, phases=(BACKWARD,)).items()
    times = [*((row.layer, row.device_ns) for row in rows), *((layer, took.device_ns) for layer, took in backward)]
    ns = sums_by_key(times)
    for group in merged(evidence, {number: int(ns[number] * _GAIN_OF_TENSOR_CORES) for number in sizes}):
        odd = sorted(set().union(*(sizes[number] for number in group.numbers)))
        more = f" and {len(odd) - _SIZES_SHOWN} more" if len(odd) > _SIZES_SHOWN else ""
        are = "sizes that are not multiples of 8" if len(odd) > 1 else "a size that is not a multiple of 8"
        yield group.advice(
            f"Half-precision matrix products and convolutions with {are} take "
            f"{format_time(sum(ns[number] for number in group.numbers))}: "
            f"{', '.join(map(str, odd[:_SIZES_SHOWN]))}{more}.",
            "Pad features, classes, vocabulary or sequences to a multiple of 8 (`pad_to_multiple_of=8` in a "
            "tokenizer).",
        )


@rule
def tf32_not_used(evidence: Evidence) -> Iterator[Advice]:
    """Matrix products and convolutions in float32 on a CUDA device of compute capability 8.0 or later, by kernels
    without tensor cores, while torch's switches forbid TF32. For products, that is torch's default."""
    if not (by_layer := _could_be_tf32(evidence)):
        return
    group = merged_into_one(evidence, {number: int(ns * _GAIN_OF_TENSOR_CORES) for number, ns in by_layer.items()})
    remedies = [switch.remedy for switch in _switches_off(evidence)]
    yield group.advice(
        f"float32 matrix products and convolutions without tensor cores take {format_time(sum(by_layer.values()))}: "
        "TF32 is off.",
        f"Set {' and '.join(remedies)} at the start if inputs with 10 bits of mantissa are enough.",
        options="`torch.autocast` saves more.",
    )


@rule
def autocast_not_used(evidence: Evidence) -> Iterator[Advice]:
    """A CUDA device with tensor cores that spends most of its time on matrix products and convolutions in float32, in a
    run without any op or kernel in half precision.

    The threshold is half because autocast changes results slightly and adds casts: it pays if products dominate. No
    finding if TF32 is recommended, the smaller change. Half precision has twice its rate and half the bytes.
    """
    if evidence.device != "cuda" or not evidence.compute_capability:
        return
    whole = evidence.run.rows.total("device_ns")
    if evidence.compute_capability < (7, 0) or sum(_could_be_tf32(evidence).values()) * _GAIN_OF_TENSOR_CORES >= (
        WORTH * evidence.recorded_ns
    ):
        return
    took = evidence.took(Among(_is_product_kernel, partial(_is_in_float32, with_tf32=True)))
    by_layer = {number: work.device_ns for number, work in took.items() if work.device_ns}
    ns = sum(by_layer.values())
    if not ns or ns * 2 < whole or evidence.any_row(_is_half_work):
        return
    has_tf32 = evidence.compute_capability >= (8, 0)
    saved = 1 / 2 if has_tf32 else _GAIN_OF_TENSOR_CORES
    group = merged_into_one(evidence, {number: int(took_ns * saved) for number, took_ns in by_layer.items()})
    yield group.advice(
        f"float32 matrix products and convolutions take {ns / whole:.0%} of the CUDA time ({format_time(ns)}), and "
        "nothing runs in half precision.",
        'Run forward and loss under `torch.autocast("cuda", dtype=torch.bfloat16)`.'
        if has_tf32
        else 'Run forward and loss under `torch.autocast("cuda", dtype=torch.float16)`, with `torch.amp.GradScaler`.',
    )


def _is_in_double(frames: Frames) -> bool:
    """Whether the innermost of these frames with floating-point inputs is an operator of torch that computes in
    float64: all its floating-point inputs are, or any of an elementwise operator, because it promotes the others.

    Compiled graphs, autograd nodes and custom operators do not count: their inputs do not show how they compute.
    """
    for frame in reversed(frames):
        if frame.kind == FrameKind.KERNEL:
            continue
        if frame.kind != FrameKind.OP or not frame.name.startswith("aten::"):
            return False
        if _has_input_of(frame.signature, _FLOATS):
            others = _has_input_of(frame.signature, _FLOATS - _DOUBLE)
            return _has_input_of(frame.signature, _DOUBLE) and (not others or frame.name in ELEMENTWISE)
    return False


def _has_input_of(signature: Signature | None, dtypes: frozenset[str]) -> bool:
    """Whether an input tensor of an op has one of these dtypes, and a dimension (torch passes Python scalars as tensors
    without one) or an unknown shape."""
    if signature is None:
        return False
    return any(dtype in dtypes and shape != () for shape, dtype in zip(signature.shapes, signature.dtypes))


def _odd_sizes(frame: Frame) -> list[int]:
    """The sizes of a product or convolution in half precision that are not multiples of 8."""
    if not _is_half_product(frame):
        return []
    sizes: list[int] = []
    if frame.name in FACTORS:
        left, right = (shape_of_input(frame, index) for index in FACTORS[frame.name])
        sizes = [*left[-1:], *right[-1:]]
    else:
        weight = shape_of_input(frame, 1)
        if len(weight) > 2 and weight[1] > 1:
            sizes = [weight[0], *([weight[1]] if weight[1] > 4 else [])]
    return [size for size in sizes if size > 0 and size % 8]


def _is_half_product(frame: Frame) -> bool:
    return frame.name in PRODUCT_KERNELS and _has_input_of(frame.signature, _HALF)


_has_half_product = Among(inside(*PRODUCT_KERNELS), lambda frames: any(map(_is_half_product, frames)))
_has_odd_sizes = Among(_has_half_product, lambda frames: any(map(_odd_sizes, frames)))
_is_product_kernel = Among(is_device_work, lambda frames: len(frames) > 1 and frames[-2].name in PRODUCT_KERNELS)


def _could_be_tf32(evidence: Evidence) -> dict[int, int]:
    """The device time by layer of the products that TF32 would speed up, but torch's switches forbid it."""
    if evidence.device != "cuda" or evidence.compute_capability < (8, 0):
        return {}
    ops = {op for switch in _switches_off(evidence) for op in switch.ops}
    took = evidence.took(Among(_is_product_kernel, lambda frames: frames[-2].name in ops and _is_in_float32(frames)))
    return {number: work.device_ns for number, work in took.items() if work.device_ns}


def _switches_off(evidence: Evidence) -> list[_Switch]:
    """The switches that forbade TF32 in the run."""
    return [switch for switch in _TF32_SWITCHES if evidence.switches.get(switch.name) == switch.forbids]


def _is_in_float32(frames: Frames, *, with_tf32: bool = False) -> bool:
    """Whether the kernel of a product computes in float32; with ``with_tf32`` also a TF32 kernel. float32 is recognized
    by the op's dtypes if shapes were recorded, else by the kernel's name."""
    kernel, op = frames[-1].name, frames[-2]
    if _HALF_KERNEL.search(kernel):
        return False
    if _TF32_KERNEL.search(kernel):
        return with_tf32
    if op.signature is not None:
        return _has_input_of(op.signature, _SINGLE)
    return _FLOAT32_KERNEL.search(kernel) is not None


def _is_half_work(frames: Frames) -> bool:
    if any(_has_input_of(frame.signature, _HALF) for frame in frames):
        return True
    return bool(frames) and frames[-1].kind == FrameKind.KERNEL and _HALF_KERNEL.search(frames[-1].name) is not None

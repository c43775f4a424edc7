"""Settings: number formats, train and eval mode, gradients on and off, threads, debugging switches."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Set
from functools import partial

from torchprof.advise import WORTH, Advice, Gain, merged, merged_into_one, rule
from torchprof.advise.chains import Among, Frames, always, inside, is_device_work, is_step
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.torch_names import BATCH_NORMS, CONVOLUTIONS, ELEMENTWISE, FACTORS, PRODUCT_KERNELS, recorded_as
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE, FrameKind, Signature

# Number formats

_DOUBLE = recorded_as("float64", "complex128")
_SINGLE = recorded_as("float32")
_HALF = recorded_as("float16", "bfloat16")
_FLOATS = _DOUBLE | _SINGLE | _HALF | recorded_as("complex64", "complex32")
_FLOATING = ("float", "bfloat", "complex")  # prefixes of torch's floating-point dtypes
_FLOAT32_KERNEL = re.compile(r"sgemm|scudnn|simt|f32f32_f32f32")
_TF32_KERNEL = re.compile(r"tf32|s1688")
_HALF_KERNEL = re.compile(r"[sh]884|h1688|16816|fp16|bf16|half|BFloat16|c10::Half")
_FASTER, _TWICE = 1.5, 2.0  # from then on bfloat16 pays, and float32 in place of half precision
_GAIN_OF_TENSOR_CORES = 7 / 8
"""The largest gain from tensor cores, because they are at most eight times as fast as the other cores: A100 156 to 19.5
TFLOP/s in TF32, H100 494 to 67, and 989 to 134 in half precision; V100 125 to 15.7 (NVIDIA's data sheets)."""

_TF32_SWITCHES = (
    ("float32_matmul_precision", "highest", FACTORS, '`torch.set_float32_matmul_precision("high")`'),
    ("cudnn_tf32", "False", CONVOLUTIONS, "`torch.backends.cudnn.allow_tf32 = True`"),
)
"""Switches of torch: the value with which it forbids TF32, for which operators, and how to allow it."""


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
    """Linear layers and convolutions in float16 or bfloat16 on a CPU that computes them faster in float32, as each was
    computed again after the recording, in both types. Below a factor of two, what they gain is lost in other layers."""
    gains, _, faster = _in_another_type(evidence, "float32_ns", {"float16", "bfloat16"})
    if faster >= _TWICE and gains.total() >= evidence.notable_ns:
        yield merged_into_one(evidence, gains).advice(
            f"It computes in half precision; this CPU is {faster:.1f} times as fast in float32.",
            "Use `model.float()` on a CPU.",
        )


@rule
def bfloat16_not_used(evidence: Evidence) -> Iterator[Advice]:
    """Linear layers and convolutions in float32 that take half of the time, on a CPU that computes them much faster
    under autocast in bfloat16, with its casts: each was computed again after the recording, in both types."""
    gains, took_ns, faster = _in_another_type(evidence, "bfloat16_ns", {"float32"})
    if faster < _FASTER or 2 * took_ns < evidence.recorded_ns or evidence.switches.get("cpu_autocast") != "False":
        return
    yield merged_into_one(evidence, gains).advice(
        f"Products and convolutions in float32 take {took_ns / evidence.recorded_ns:.0%} of the time; this CPU is "
        f"{faster:.1f} times as fast in bfloat16.",
        'If 8 bits of mantissa are enough: run forward and loss under `torch.autocast("cpu", dtype=torch.bfloat16)`.',
    )


def _in_another_type(evidence: Evidence, measure: str, dtypes: Set[str]) -> tuple[Counter[int], int, float]:
    """What layers with parameters of these types save in another one, as ``measure`` has it; what their products take
    now; and how many times as fast they are then. Of layers that were not computed again the share is that of the
    others; nothing if these take more than three quarters."""
    layers, ordinary, other = evidence.run.layers, *map(evidence.measured_again, ("ordinary_ns", measure))
    gains, rest, took_ns, saved = Counter[int](), Counter[int](), 0, 0.0
    for phase in (FORWARD, RECOMPUTE, BACKWARD):
        for layer, took in evidence.took(_PRODUCTS_ON_THE_CPU, phases=(phase,)).items():
            key = layer, BACKWARD if phase == BACKWARD else FORWARD
            if key in other:
                gains[layer] += round(took.cpu_ns * (1 - other[key] / ordinary[key]))
                took_ns += took.cpu_ns
            elif layer >= 0 and {dtype for dtype, _ in layers[layer].dtype_bytes} <= dtypes and layers[layer].of_torch:
                rest[layer] += took.cpu_ns
    if not took_ns or rest.total() > 3 * took_ns:
        return Counter(), 0, 1.0
    saved = gains.total() / took_ns
    gains.update({layer: round(ns * saved) for layer, ns in rest.items()})
    return +gains, took_ns + rest.total(), 1 / max(1 - saved, 1e-3)


@rule
def tf32_not_used(evidence: Evidence) -> Iterator[Advice]:
    """Matrix products and convolutions in float32 on a CUDA device of compute capability 8.0 or later, by kernels
    without tensor cores, while torch's switches forbid TF32. For products, that is torch's default."""
    if not (by_layer := _could_be_tf32(evidence)):
        return
    group = merged_into_one(evidence, {number: int(ns * _GAIN_OF_TENSOR_CORES) for number, ns in by_layer.items()})
    remedies = [remedy for *_, remedy in _switches_off(evidence)]
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


_PRODUCTS_ON_THE_CPU = inside(*PRODUCT_KERNELS)
_is_product_kernel = Among(is_device_work, lambda frames: len(frames) > 1 and frames[-2].name in PRODUCT_KERNELS)


def _could_be_tf32(evidence: Evidence) -> dict[int, int]:
    """The device time by layer of the products that TF32 would speed up, but torch's switches forbid it."""
    if evidence.device != "cuda" or evidence.compute_capability < (8, 0):
        return {}
    ops = {op for _, _, ops, _ in _switches_off(evidence) for op in ops}
    took = evidence.took(Among(_is_product_kernel, lambda frames: frames[-2].name in ops and _is_in_float32(frames)))
    return {number: work.device_ns for number, work in took.items() if work.device_ns}


def _switches_off(evidence: Evidence) -> list[tuple[str, str, Collection[str], str]]:
    """The switches that forbade TF32 in the run."""
    return [switch for switch in _TF32_SWITCHES if evidence.switches.get(switch[0]) == switch[1]]


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


# Modes and switches

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
_PROCESSORS_PER_THREAD = 4  # from this ratio on there are too few threads
_LONG_NS = 200_000  # shorter products gain little from threads
_LEAST_SHARE_OF_PRODUCTS = 0.1  # of the recorded time, in long products


@rule
def eval_forgotten(evidence: Evidence) -> Iterator[Advice]:
    """Dropout and batch normalization layers that were called in train mode, in a run without backward and optimizer.

    If the run is inference, its results are random or depend on the rest of the batch, and the running statistics
    change. So it is reported however little time it takes.
    """
    if _trains(evidence):
        return
    numbers = [
        number
        for number, layer in enumerate(evidence.run.layers)
        if layer.training and evidence.forward_calls[number] and _depends_on_mode(layer)
    ]
    if not numbers:
        return
    first = evidence.run.layers[numbers[0]]
    more = f" and {len(numbers) - 1} more layer{'s' * (len(numbers) > 2)} were" if len(numbers) > 1 else " was"
    yield Advice(
        ", ".join(dict.fromkeys(evidence.run.layers[number].path[0] for number in numbers)),
        f"{first.name} ({first.kind}){more} called in train mode, but no backward was recorded.",
        "If this is inference, call `model.eval()` first: otherwise results are random or depend on the batch.",
        layers=tuple(evidence.run.layers[number].name for number in numbers),
    )


@rule
def gradients_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Memory that forward calls saved for a backward that did not run: samples of ``kept_bytes`` in a run without
    backward and optimizer. Under ``no_grad`` they are 0. The memory may be used later, so the remedy is a condition."""
    if _trains(evidence):
        return
    layers = evidence.run.layers
    kept: Counter[int] = Counter()
    by_model: defaultdict[int, set[int]] = defaultdict(set)
    for key, spread in evidence.samples["kept_bytes"]:
        if key.layer >= 0 and spread.sum > 0:
            by_model[layers.lineage(key.layer)[0]].add(key.layer)
            kept[key.layer] += spread.sum
    per_call, gains = {}, {}
    for model, numbers in by_model.items():
        per_call[model] = sum(kept[number] for number in numbers) // max(evidence.timed_calls(model), 1)
        gains[model] = Gain(nbytes=per_call[model] * max(len(evidence.durations(model)), 1))
    for group in merged(evidence, gains):
        nbytes = sum(per_call[model] for model in group.numbers)
        of_each = f" of each of {len(group.numbers)} models" if len(group.numbers) > 1 else ""
        on_rank = f" on each of {len(evidence.run.metas)} ranks" if len(evidence.run.metas) > 1 else ""
        most = max((number for model in group.numbers for number in by_model[model]), key=kept.__getitem__)
        yield group.advice(
            f"A forward call{of_each} leaves {format_memory(nbytes)} saved for backward on average{on_rank}, most "
            f"of it in {evidence.name_of(most)}, but no backward was recorded.",
            "If this is inference, run it under `torch.inference_mode()` or `torch.no_grad()`.",
        )


@rule
def anomaly_detection_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.autograd.set_detect_anomaly`` was on at the end. It is always reported: the whole recording is slower, by
    an unknown amount."""
    if evidence.switches.get("detect_anomaly") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Anomaly detection was on: each forward operator stores its stack, and each backward operator is checked "
            "for NaN.",
            "Remove `torch.autograd.set_detect_anomaly(True)` unless you are looking for a NaN, and measure again.",
            details="All times include that.",
        )


@rule
def few_threads(evidence: Evidence) -> Iterator[Advice]:
    """Operators that run on few of the usable processors: ``torch.set_num_threads(1)`` that was left in a script, or
    OMP_NUM_THREADS=1, which torchrun sets. Two logical processors may be one core: threads on half are enough."""
    threads, usable = (int(evidence.switches.get(name, 0)) for name in ("num_threads", "usable_cpus"))
    run = evidence.run
    if not 0 < threads * _PROCESSORS_PER_THREAD <= usable or evidence.device != "cpu" or run.meta.world_size > 1:
        return
    took = evidence.took(inside(*PRODUCT_KERNELS)).values()
    products = sum(work.cpu_ns for work in took if work.cpu_ns >= _LONG_NS * work.calls)
    if products < _LEAST_SHARE_OF_PRODUCTS * evidence.recorded_ns:
        return
    cores = usable // 2
    yield Advice(
        ", ".join(run.meta.model),
        f"Operators run on {threads} thread{'s' * (threads > 1)}, and {usable} processors are usable.",
        f"`torch.set_num_threads({cores})`, or `OMP_NUM_THREADS={cores}` in the environment.",
        products * (cores - threads) // cores,
        details=f"Long matrix products and convolutions take {format_time(products)}.",
    )


def _trains(evidence: Evidence) -> bool:
    """Whether there was a backward, or the step of an optimizer, whose backward may not have been recorded."""
    return BACKWARD in evidence.run.phases() or evidence.any_row(is_step)


def _depends_on_mode(layer: Layer) -> bool:
    """Whether a layer computes something else in train mode than in eval mode."""
    if layer.kind in BATCH_NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))

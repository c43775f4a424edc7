"""Time outside operators: Python, NumPy, garbage collection, calls that cost more than what they compute."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.chains import (
    Frames,
    always,
    among,
    inside,
    is_collection,
    is_direct,
    is_interruption,
    is_line,
    is_op,
    is_optimizer,
    is_own_time,
    is_step,
)
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.torch_names import BATCH_NORMS, CONVOLUTIONS, FACTORS
from torchprof.run.words import BACKWARD, FORWARD, FSDP_RANGE, OUTSIDE, SourceLine, sampled_line

_SHARE = 0.05
_GAP_NS = 30_000
_TO_NUMPY = "aten::resolve_neg"
_WAITS_FOR_RANKS = ("DistributedDataParallel.", "FullyShardedDataParallel.", FSDP_RANGE)
"""Prefixes of torch's own labels of distributed wrappers, which may wait for other ranks."""
_TORCHS_LAYERS = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d AdaptiveMaxPool2d
AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d
BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d
ConstantPad3d Container Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss
CosineSimilarity CrossEntropyLoss CrossMapLRN2d DataParallel Dropout Dropout1d Dropout2d Dropout3d ELU Embedding
EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell
GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d
InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LazyBatchNorm1d
LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d
LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear LeakyReLU Linear
LinearCrossEntropyLoss LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d
MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish ModuleDict ModuleList MultiLabelMarginLoss MultiLabelSoftMarginLoss
MultiMarginLoss MultiheadAttention NLLLoss NLLLoss2d PReLU PairwiseDistance ParameterDict ParameterList PixelShuffle
PixelUnshuffle PoissonNLLLoss RMSNorm RNN RNNBase RNNCell RNNCellBase RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d
ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU Sigmoid SmoothL1Loss
SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold
Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer TripletMarginLoss
TripletMarginWithDistanceLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d
ZeroPad3d
"""
_OF_TORCH = frozenset(_TORCHS_LAYERS.split())
"""The classes of ``torch.nn``: the Python that runs in them between operators is not the user's."""
_SMALL_NS = 20_000
_FEW_SAMPLES = 8
_BATCH = 64
_MOST_OF_IT = 0.5


class SlowPython(NamedTuple):
    """The calls of a layer (0: unknown), and its time outside operators and outside the layers below."""

    calls: int
    own_ns: int


@rule
def python_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers with much Python of their own, beyond the calls of their operators and layers: a loop over elements,
    NumPy.

    Evidence is the time of a layer outside operators and outside the layers below. The gain is at most all of it,
    because without the loop nothing is called in it. The finding names the line that was sampled most (``torchprof
    run``), and NumPy if the layer turns tensors into arrays, which torch records.
    """
    layers = layers_of_slow_python(evidence)
    if not layers:
        return
    arrays = evidence.took(_is_array, phases=(FORWARD,))
    lines = _lines(evidence)
    layers = {layer: slow for layer, slow in layers.items() if not _is_of_hooks(lines.get(layer, Counter()))}
    whole = sum(slow.own_ns for slow in layers.values())
    gains = {layer: slow.own_ns * evidence.while_idle(whole) // whole for layer, slow in layers.items()}
    for group in merged(evidence, gains, {layer: layer in arrays for layer in layers}):
        ns, calls = (
            sum(column) for column in zip(*((layers[layer].own_ns, layers[layer].calls) for layer in group.numbers))
        )
        sampled = sum((lines[layer] for layer in group.numbers if layer in lines), Counter[SourceLine]()).most_common(1)
        line = f", most often at {sampled[0][0]}" if sampled else ""
        in_calls = (
            f" of {calls:,} call{'s' * (calls != 1)}" if all(layers[layer].calls for layer in group.numbers) else ""
        )
        leaves = sum(arrays[layer].calls for layer in group.numbers if layer in arrays)
        converted = (
            f"Tensors are converted to NumPy or to lists {leaves:,} time{'s' * (leaves != 1)}." if leaves else ""
        )
        yield group.advice(
            f"No operator runs for {format_time(ns)}{in_calls}: this is Python between operators{line}.",
            f"Replace {'NumPy' if leaves else 'the Python loop'} with tensor operations.",
            details=converted,
        )


@rule
def garbage_collection(evidence: Evidence) -> Iterator[Advice]:
    """Collections of the old generations by Python's garbage collector. They have a row of their own, because they
    interrupt whatever code runs."""
    took = evidence.took_outside(is_collection, FORWARD)
    if not took.cpu_ns:
        return
    times = "once" if took.calls == 1 else f"{took.calls:,} times"
    yield Advice(
        evidence.name_of(OUTSIDE),
        f"Python's garbage collector searched the old objects {times}, for {format_time(took.cpu_ns)} in total.",
        "Call `gc.collect()` and `gc.freeze()` once the model and the data exist, so that they are not searched again.",
        evidence.while_idle(took.cpu_ns),
        options="Or call `gc.disable()` before the loop, and `gc.collect()` where a pause does no harm, such as "
        "between epochs. Remove `gc.collect()` from the loop.",
    )


def layers_of_slow_python(evidence: Evidence) -> dict[int, SlowPython]:
    """The layers that ``python_in_layers`` reports, by number.

    Subtracted from their time are 30 us for each call of the layer and each operator and layer that it calls (Python
    and the profiler take 5 to 20 us), and the time of its calls beyond the median call (start-up and interruptions). At
    least 5 % of the recorded time must remain, and more than half of the layer's; many tiny operators have a rule of
    their own.
    """
    if not evidence.ops_recorded:
        return {}
    layers = evidence.run.layers
    slow: dict[int, SlowPython] = {}
    if evidence.of_class.keys() <= _OF_TORCH:
        return slow
    direct = evidence.took(is_direct, phases=(FORWARD,))
    for layer, took in evidence.took(_is_python, phases=(FORWARD,)).items():
        if layer < 0 or took.cpu_ns < _SHARE * evidence.recorded_ns or not has_python(layers[layer]):
            continue
        calls, children = evidence.timed_calls(layer), layers.children[layer]
        gaps = calls + evidence.timed_calls(*children) + (direct[layer].calls if layer in direct else 0)
        unusual = evidence.beyond_median_ns(layer) - evidence.beyond_median_ns(*children)
        left = took.cpu_ns - gaps * _GAP_NS - max(0, unusual)
        if 2 * left > took.cpu_ns and left >= _SHARE * evidence.recorded_ns:
            slow[layer] = SlowPython(calls, took.cpu_ns)
    return slow


def has_python(layer: Layer) -> bool:
    """Whether the user's Python may run in a layer between operators. The ranges of a trace have no class, so they may
    be anything; only torch's own layers have ``settings``."""
    return bool(layer.kind) and not layer.compiled and layer.kind not in _OF_TORCH and not layer.settings


def _is_of_hooks(lines: Counter[SourceLine]) -> bool:
    """Whether most of the sampled lines are in hooks, which have a finding of their own."""
    in_hooks = sum(samples for line, samples in lines.items() if line.is_hook)
    return 2 * in_hooks > lines.total()


@among(is_own_time)
def _is_python(frames: Frames) -> bool:
    """Whether it is a layer's own time, and not that of a distributed wrapper, which may wait for other ranks."""
    return not any(frame.name.startswith(_WAITS_FOR_RANKS) for frame in frames)


@among(is_direct)
def _is_array(frames: Frames) -> bool:
    """Whether it is the operator that Tensor.numpy() and Tensor.tolist() call; models do not call it directly."""
    return frames[-1].name == _TO_NUMPY


@among(is_line)
def _is_line_between_ops(frames: Frames) -> bool:
    return is_own_time(frames[:-1])


def _lines(evidence: Evidence) -> dict[int, Counter[SourceLine]]:
    """The number of Python samples at each source line between the operators of each layer, in forward."""
    lines: defaultdict[int, Counter[SourceLine]] = defaultdict(Counter)
    for row in evidence.rows(_is_line_between_ops, phases=(FORWARD,)):
        if (line := sampled_line(row.frames)) is not None:
            lines[row.layer][line] += row.calls
    return dict(lines)


@rule
def tiny_batches(evidence: Evidence) -> Iterator[Advice]:
    """A model that is called with at most 8 samples, at least ten times, so that the calls of operators take longer
    than their computation: at least half of the recorded time.

    Long operators of optimizers are part of the gain: a larger batch has fewer steps. With 64 samples in a call all of
    that is shared among them: the gain is 63/64 of it for one sample, 7/8 for eight. Only on the CPU; a device has
    ``launches_slower_than_the_device``.
    """
    run, layers = evidence.run, evidence.run.layers
    if evidence.device != "cpu" or len(run.metas) > 1:
        return
    called = [(evidence.forward_calls[root], root) for root in layers.roots]
    calls, root = max(called, default=(0, 0))
    shapes = layers[root].input_shapes if calls >= 10 else ()
    if not shapes or len(shapes[0]) < 2 or not 0 < shapes[0][0] <= _FEW_SAMPLES or not layers[root].same_shapes:
        return
    long_ns = ops = stepping = 0
    for row in evidence.rows(is_op):
        ops += row.calls
        if row.cpu_ns >= _SMALL_NS * row.calls:
            long_ns += row.cpu_ns
            stepping += row.cpu_ns if is_optimizer(row.frames) else 0
    own_ns = evidence.took_outside(is_own_time, FORWARD).cpu_ns
    interrupted = evidence.whole_of(is_interruption).cpu_ns
    python = sum(slow.own_ns for slow in layers_of_slow_python(evidence).values())
    small = evidence.recorded_ns - long_ns - interrupted - python - own_ns
    if not ops or small < _MOST_OF_IT * evidence.recorded_ns:
        return
    samples = f"{shapes[0][0]} sample{'s' * (shapes[0][0] > 1)}"
    yield Advice(
        layers[root].name,
        f"A call gets {samples}, and its operators are small.",
        f"Use a larger batch (`DataLoader(…, batch_size={_BATCH})`), or compile the model: `torch.compile(model)`.",
        (small + stepping) * (_BATCH - shapes[0][0]) // _BATCH,
        layers=(layers[root].name,),
        details=f"A call of the model has {ops // calls:,}, with backward; {format_time(small)} are in short ones and "
        "between them.",
    )


# Modes: train and eval, gradients on and off, torch's own switches for finding errors.

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
_THREADS = 4
_LONG_NS = 200_000  # shorter products gain little from threads
_SHARE_OF_MODES = 0.1


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
    took = evidence.took(always, phases=(FORWARD,))
    first = evidence.run.layers[numbers[0]]
    more = f" and {len(numbers) - 1} more layer{'s' * (len(numbers) > 2)} were" if len(numbers) > 1 else " was"
    yield Advice(
        ", ".join(dict.fromkeys(evidence.run.layers[number].path[0] for number in numbers)),
        f"{first.name} ({first.kind}){more} called in train mode, for "
        f"{format_time(sum(evidence.time_of(took[number]) for number in numbers))}, but no backward was recorded.",
        "If this is inference, call `model.eval()` first: otherwise results are random or depend on the batch.",
        layers=tuple(evidence.run.layers[number].name for number in numbers),
    )


@rule
def gradients_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Memory that forward calls saved for a backward that did not run: samples of ``kept_bytes`` in a run without
    backward and optimizer. Under ``no_grad`` they are all 0. The memory may be used after the recording, so the remedy
    is a condition."""
    if _trains(evidence):
        return
    layers = evidence.run.layers
    kept: Counter[int] = Counter()
    by_model: defaultdict[int, set[int]] = defaultdict(set)
    for key, spread in evidence.samples("kept_bytes"):
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
    """Operators that run on a quarter of the usable processors or fewer: ``torch.set_num_threads(1)`` that was left in
    a script, or OMP_NUM_THREADS=1, which torchrun sets.

    Two logical processors may be one core, so threads on half of them are enough, and the gain is as if long matrix
    products and convolutions ran on that many.
    """
    threads, usable = (int(evidence.switches.get(name, 0)) for name in ("num_threads", "usable_cpus"))
    run = evidence.run
    if not 0 < threads * _THREADS <= usable or evidence.device != "cpu" or run.meta.world_size > 1:
        return
    took = evidence.took(inside(*FACTORS, *CONVOLUTIONS)).values()
    products = sum(work.cpu_ns for work in took if work.cpu_ns >= _LONG_NS * work.calls)
    if products < _SHARE_OF_MODES * evidence.recorded_ns:
        return
    cores = usable // 2
    yield Advice(
        ", ".join(run.meta.model),
        f"Operators run on {threads} thread{'s' * (threads > 1)}, and {usable} processors are usable.",
        f"`torch.set_num_threads({cores})`, or `OMP_NUM_THREADS={cores}` in the environment.",
        products * (cores - threads) // cores,
        details=f"Long matrix products and convolutions take {format_time(products)}.",
    )


@rule
def deterministic_algorithms_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.use_deterministic_algorithms`` was on at the end. It is always reported, because the time of the faster
    kernels is unknown."""
    if evidence.switches.get("deterministic_algorithms") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Deterministic algorithms were on: some operators use slower kernels, and memory from `torch.empty` is "
            "filled.",
            "Remove `torch.use_deterministic_algorithms(True)` unless results must be bitwise reproducible.",
            options="If they must, set `torch.utils.deterministic.fill_uninitialized_memory = False`.",
        )


def _trains(evidence: Evidence) -> bool:
    """Whether there was a backward, or the step of an optimizer, whose backward may not have been recorded."""
    return BACKWARD in evidence.run.phases() or evidence.any_row(is_step)


def _depends_on_mode(layer: Layer) -> bool:
    if layer.kind in BATCH_NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))

"""How the modes and switches of torch are set: train and eval, gradients on and off, threads, debugging switches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.chains import always, inside, is_step
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.torch_names import BATCH_NORMS, PRODUCT_KERNELS
from torchprof.run.words import BACKWARD, FORWARD

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
    """Whether a layer computes something else in train mode than in eval mode."""
    if layer.kind in BATCH_NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))

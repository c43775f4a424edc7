"""Modes: train and eval, gradients on and off, torch's own switches for finding errors; when the recording began."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, Gain, merged, rule
from torchprof.analyze.advice.chains import always, has_no_launch, inside, is_step
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.formats import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.torch_names import BATCH_NORMS, CONVOLUTIONS, FACTORS
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
_RARELY = 0.9
_THREADS = 4
_LONG_NS = 200_000  # shorter products gain little from threads
_SHARE = 0.1
_SHARE_LEFT_OVER = 0.05


@rule
def eval_forgotten(evidence: Evidence) -> Iterator[Advice]:
    """Dropout and batch normalization layers that were called in train mode, in a run without backward and optimizer.

    If the run is inference, its results are random or depend on the rest of the batch, and the running statistics
    change. So it is reported however little time it takes. A dropout with p=0 and a norm without running statistics do
    the same in both modes. The gain is unknown; the finding has the time of these layers.
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
    backward and optimizer.

    Under ``no_grad`` they are all 0. The gain is what all layers keep in an average call of their model, on all ranks.
    That memory may be used after the recording, so the remedy is a condition. Needs memory.
    """
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
    """``torch.autograd.set_detect_anomaly`` was on at the end: each backward op is checked for NaN, and each forward op
    stores its stack.

    It is always reported: the whole recording is slower, by an unknown amount.
    """
    if evidence.switches.get("detect_anomaly") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Anomaly detection was on: each forward operator stores its stack, and each backward operator is checked "
            "for NaN. All times include that.",
            "Remove `torch.autograd.set_detect_anomaly(True)` unless you are looking for a NaN, and measure again.",
        )


@rule
def evaluates_often(evidence: Evidence) -> Iterator[Advice]:
    """Forward calls without gradients in a run that trains, about one for each step, for at least 10 % of the recorded
    time: an evaluation in each step.

    Evidence: their number, 4/5 to 5/4 of the steps, and their time, of models that are called with gradients, too.
    A target network looks the same, so the finding is a condition. The gain is nine tenths of their time.
    """
    called = evidence.run.rows.forward_calls
    # A model that is only called without gradients is no model that trains.
    spreads = {key.layer: spread for key, spread in evidence.samples("no_grad_ns") if called(key.layer) > spread.count}
    calls, ns = sum(spread.count for spread in spreads.values()), sum(spread.sum for spread in spreads.values())
    steps = evidence.steps
    if (
        evidence.device == "cpu"
        and 4 * steps <= 5 * calls
        and 4 * calls <= 5 * steps
        and ns >= _SHARE * evidence.recorded_ns > 0
    ):
        models = tuple(map(evidence.name_of, spreads))
        yield Advice(
            ", ".join(models),
            f"{calls:,} forward calls without gradients in {steps:,} steps take {format_time(ns)}.",
            "If they evaluate the model, do it less often (`if step % 100 == 0:`), or with fewer samples.",
            round(_RARELY * ns),
            layers=models,
        )


@rule
def few_threads(evidence: Evidence) -> Iterator[Advice]:
    """Operators that run on a quarter of the usable processors or fewer: ``torch.set_num_threads(1)`` that was left in
    a script, or OMP_NUM_THREADS=1, which torchrun sets.

    Evidence: torch's settings at the end, and matrix products and convolutions of 200 us or more, for at least 10 % of
    the recorded time of the only process of a job. Two logical processors may be one core, so threads on half of them
    are enough, and the gain is as if these products ran on that many: it is at most that.
    """
    threads, usable = (int(evidence.switches.get(name, 0)) for name in ("num_threads", "usable_cpus"))
    run = evidence.run
    if not 0 < threads * _THREADS <= usable or evidence.device != "cpu" or run.meta.world_size > 1:
        return
    took = evidence.took(inside(*FACTORS, *CONVOLUTIONS)).values()
    products = sum(work.cpu_ns for work in took if work.cpu_ns >= _LONG_NS * work.calls)
    if products < _SHARE * evidence.recorded_ns:
        return
    cores = usable // 2
    yield Advice(
        ", ".join(run.meta.model),
        f"Operators run on {threads} thread{'s' * (threads > 1)}, and {usable} processors are usable. Long matrix "
        f"products and convolutions take {format_time(products)}.",
        f"`torch.set_num_threads({cores})`, or `OMP_NUM_THREADS={cores}` in the environment.",
        products * (cores - threads) // cores,
    )


@rule
def deterministic_algorithms_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.use_deterministic_algorithms`` was on at the end: torch selects slower kernels, and fills all memory that
    ``torch.empty`` returns.

    It is always reported, because the time of the faster kernels is unknown.
    """
    if evidence.switches.get("deterministic_algorithms") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Deterministic algorithms were on: some operators use slower kernels, and memory from `torch.empty` is "
            "filled.",
            "Remove `torch.use_deterministic_algorithms(True)` unless results must be bitwise reproducible. If they "
            "must, set `torch.utils.deterministic.fill_uninitialized_memory = False`.",
        )


def _trains(evidence: Evidence) -> bool:
    """Whether there was a backward, or the step of an optimizer, whose backward may not have been recorded."""
    return BACKWARD in evidence.run.phases() or evidence.any_row(is_step)


def _depends_on_mode(layer: Layer) -> bool:
    if layer.kind in BATCH_NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))


@rule
def leftover_kernels(evidence: Evidence) -> Iterator[Advice]:
    """Kernels whose launch is not in the recording, for at least 5 % of the device's time. They cannot be attributed to
    a layer or a step.

    The usual cause: the recording began while the device still ran work launched before. The remedy saves no time, it
    makes the figures complete. There is no finding if operators were not recorded, because then no launch is known.
    Needs the time of a device.
    """
    ns = evidence.run.left_over.device_ns + evidence.whole_of(has_no_launch).device_ns
    whole = sum(evidence.run.rows.columns["device_ns"]) if ns else 0
    if not ns or ns < _SHARE_LEFT_OVER * whole or not evidence.ops_recorded:
        return
    yield Advice(
        evidence.name_of(OUTSIDE),
        f"Kernels without a recorded launch take {format_time(ns)} of {evidence.device} time ({ns / whole:.0%}). They "
        "cannot be attributed to a layer.",
        "Start the profiler before these kernels are launched: record more steps after warm-up steps "
        "(`torch.profiler.schedule(wait=1, warmup=1, active=3)`), or call `torch.cuda.synchronize()` before it starts.",
    )

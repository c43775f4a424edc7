"""Modes: train and eval, gradients on and off, and torch's own switches for finding errors."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.cost import format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.words import BACKWARD, FORWARD, OPTIMIZER_STEP

_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


@rule
def eval_forgotten(evidence: Evidence) -> Iterator[Advice]:
    """Dropout and batch normalisation that were called in train mode, in a run without any backward and any optimizer.

    If that is inference, its results are random, or depend on what else is in the batch, and the running statistics
    change: so it is said however little time it takes. A dropout of p=0 and a norm without running statistics do the
    same in both modes. One finding for each model. How much time it would save is unknown; what the dropouts took is
    in the evidence.
    """
    if _trains(evidence):
        return
    calls = evidence.took(lambda frames: not frames, phases=(FORWARD,))
    by_model: dict[str, list[int]] = {}
    for number, layer in enumerate(evidence.run.layers):
        if layer.training and _minds_the_mode(layer) and number in calls and calls[number].calls:
            by_model.setdefault(layer.path[0], []).append(number)
    if not by_model:
        return
    took = evidence.took(lambda frames: True, phases=(FORWARD,))
    for model, numbers in by_model.items():
        first = evidence.run.layers[numbers[0]]
        ns = sum(evidence.time_of(took[number]) for number in numbers)
        more = f" and {len(numbers) - 1} more layers were" if len(numbers) > 1 else " was"
        yield Advice(
            model,
            f"No backward was recorded, but {first.name} ({first.kind}){more} called in train mode, "
            f"for {format_time(ns)}.",
            "If this is inference, call model.eval() first: otherwise its results are random or depend on the batch.",
            None,
            None,
            "eval_forgotten",
        )


@rule
def gradients_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Memory that forward calls left for a backward that never came: samples of ``kept_bytes`` in a run without any
    backward and any optimizer.

    Under ``no_grad`` they are all 0. What it could save is what all layers kept in an average call of their model.
    What is held after the run may be used outside of it: then this is no fault, so it says "if". Needs memory.
    """
    if _trains(evidence):
        return
    kept: dict[str, int] = {}
    largest: dict[str, tuple[int, int]] = {}
    calls = {
        evidence.run.layers[key.layer].path[0]: spread.count
        for key, spread in evidence.samples("cpu_ns")
        if key.layer >= 0 and key.phase == FORWARD and len(evidence.run.layers[key.layer].path) == 1
    }
    for key, spread in evidence.samples("kept_bytes"):
        if key.layer >= 0 and spread.sum > 0:
            model = evidence.run.layers[key.layer].path[0]
            kept[model] = kept.get(model, 0) + spread.sum
            largest[model] = max(largest.get(model, (0, 0)), (spread.sum, key.layer))
    for model, nbytes in kept.items():
        per_call = nbytes // max(calls.get(model, 1), 1)
        yield Advice(
            model,
            f"Each call left {format_memory(per_call)} for backward, most of it in "
            f"{evidence.name_of(largest[model][1])}, and no backward was recorded.",
            "If this is inference, run it under torch.inference_mode() (or torch.no_grad()).",
            None,
            per_call,
            "gradients_never_used",
        )


@rule
def anomaly_detection_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.autograd.set_detect_anomaly`` was on at the end: each backward op is checked for NaN, and each forward op
    remembers its stack.

    It is said at any size: all that was recorded is slower than it would be, by an unknown amount.
    """
    if evidence.switches.get("detect_anomaly") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Anomaly detection was on: each op of forward stores its stack, each of backward is checked for NaN.",
            "Unless you look for a NaN, remove torch.autograd.set_detect_anomaly(True), and measure again.",
            None,
            None,
            "anomaly_detection_on",
        )


@rule
def deterministic_algorithms_on(evidence: Evidence) -> Iterator[Advice]:
    """``torch.use_deterministic_algorithms`` was on at the end, which takes slower kernels, and fills all memory that
    ``torch.empty`` hands out.

    Said at any size, since the time of the others is unknown.
    """
    if evidence.switches.get("deterministic_algorithms") == "True":
        yield Advice(
            ", ".join(evidence.run.meta.model),
            "Deterministic algorithms were on: some ops take slower kernels, and memory from torch.empty is filled.",
            "Unless results must repeat to the bit, remove torch.use_deterministic_algorithms(True); or keep it with "
            "torch.utils.deterministic.fill_uninitialized_memory = False.",
            None,
            None,
            "deterministic_algorithms_on",
        )


def _trains(evidence: Evidence) -> bool:
    """Whether there was any backward, or the step of an optimizer, whose backward may have run out of sight."""
    return BACKWARD in evidence.run.phases() or any(
        True for _ in evidence.rows(lambda frames: any(frame.name.startswith(OPTIMIZER_STEP) for frame in frames))
    )


def _minds_the_mode(layer: Layer) -> bool:
    if layer.kind in _NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))

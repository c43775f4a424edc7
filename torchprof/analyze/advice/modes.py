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
    """Dropout and batch normalization layers that were called in train mode, in a run without backward and optimizer.

    If the run is inference, its results are random or depend on the rest of the batch, and the running statistics
    change. So it is reported however little time it takes. A dropout with p=0 and a norm without running statistics do
    the same in both modes. One finding per model. The gain is unknown; the finding has the time of these layers.
    """
    if _trains(evidence):
        return
    calls = evidence.took(lambda frames: not frames, phases=(FORWARD,))
    by_model: dict[str, list[int]] = {}
    for number, layer in enumerate(evidence.run.layers):
        if layer.training and _depends_on_mode(layer) and number in calls and calls[number].calls:
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
    """Memory that forward calls saved for a backward that did not run: samples of ``kept_bytes`` in a run without
    backward and optimizer.

    Under ``no_grad`` they are all 0. The gain is what all layers keep in an average call of their model. That memory
    may be used after the recording, so the remedy is a condition. Needs memory.
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
    stores its stack.

    It is always reported: the whole recording is slower, by an unknown amount.
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
    """``torch.use_deterministic_algorithms`` was on at the end: torch selects slower kernels, and fills all memory that
    ``torch.empty`` returns.

    It is always reported, because the time of the faster kernels is unknown.
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
    """Whether there was a backward, or the step of an optimizer, whose backward may not have been recorded."""
    return BACKWARD in evidence.run.phases() or any(
        True for _ in evidence.rows(lambda frames: any(frame.name.startswith(OPTIMIZER_STEP) for frame in frames))
    )


def _depends_on_mode(layer: Layer) -> bool:
    if layer.kind in _NORMS:
        return "track_running_stats=False" not in layer.settings
    return layer.kind in _DROPOUTS and not layer.settings.startswith(("p=0,", "p=0.0,"))

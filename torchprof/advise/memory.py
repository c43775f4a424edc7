"""The layer that causes the peak of memory, and how it could allocate less."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.evidence import Evidence
from torchprof.run.formats import format_memory
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED

_OF_PEAK = 1 / 3
_LEAST_BYTES = 2**20
_KINDS = ("activations", "temporaries")
_SMALL = 0.01  # parts below this share of the layer's bytes are not named


@rule
def layer_that_makes_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """One layer, or the code outside all layers, that allocated much of the live memory at the peak of a device:
    activations (saved for backward or returned) and temporaries.

    It has at least a third of all live memory, that of the model before the recording included if it is known; in a
    model of a few layers, at least twice its equal share; and at least 1 MB.
    """
    called = sum(key.phase == FORWARD for key, _ in evidence.samples["cpu_ns"])
    share = max(_OF_PEAK, 2 / max(called, 1))
    peaks: dict[str, int] = {}
    incomplete: set[str] = set()
    at_peak: defaultdict[int, dict[str, Counter[tuple[str, str]]]] = defaultdict(dict)
    for memory in evidence.run.memory:
        whole = memory.peak_bytes + sum(size for _, size in memory.before or ())
        device = memory.device if len(evidence.run.metas) == 1 else f"{memory.device} of rank {memory.rank}"
        by_layer: dict[int, Counter[tuple[str, str]]] = {}
        for held in memory.held:
            if held.nbytes > 0 and held.layer != NOT_SELECTED and held.kind in _KINDS:
                by_layer.setdefault(held.layer, Counter())[held.kind, held.phase] += held.nbytes
        for layer, sums in by_layer.items():
            if sum(sums.values()) >= max(share * whole, _LEAST_BYTES):
                peaks[device] = whole
                incomplete |= {device} if memory.before is None else set()
                at_peak[layer][device] = sums
    gains = {layer: Gain(nbytes=sum(map(Counter.total, by_device.values()))) for layer, by_device in at_peak.items()}
    remedies = {}
    for layer, by_device in at_peak.items():
        [((kind, _), _)] = sum(by_device.values(), Counter[tuple[str, str]]()).most_common(1)
        remedies[layer] = _remedy(evidence, kind)
    for group in merged(evidence, gains, remedies):
        devices = dict.fromkeys(device for layer in group.numbers for device in at_peak[layer])
        sums = sum((live for layer in group.numbers for live in at_peak[layer].values()), Counter[tuple[str, str]]())
        whole, nbytes = sum(peaks[device] for device in devices), sums.total()
        where = f"the peak of {next(iter(devices))}" if len(devices) == 1 else f"the peaks of {len(devices)} devices"
        above = " above the start" if incomplete & devices.keys() else ""
        parts = ", ".join(
            f"{format_memory(size)} {kind} of {phase}"
            for (kind, phase), size in sums.most_common()
            if size >= _SMALL * nbytes
        )
        yield group.advice(
            f"{nbytes / whole:.0%} of {where} ({format_memory(whole)}{above}) was allocated here: {parts}.",
            remedies[group.numbers[0]],
        )


def _remedy(evidence: Evidence, kind: str) -> str:
    if kind == "temporaries":
        return "Compute in parts (`torch.chunk`), in place, or with an operator without this intermediate result."
    if BACKWARD in evidence.run.phases():
        return (
            "Use activation checkpointing (`torch.utils.checkpoint`), half precision (`torch.autocast`), or smaller "
            "micro-batches with gradient accumulation."
        )
    return "Use smaller batches, or return fewer tensors."

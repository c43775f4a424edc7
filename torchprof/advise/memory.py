"""The layer that causes the peak of memory, and how it could allocate less."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.evidence import Evidence
from torchprof.advise.gradients import could_be_fused
from torchprof.analyze.memory import name_of_device
from torchprof.run.formats import format_memory
from torchprof.run.groups import sums_by_key
from torchprof.run.timeline import Memory
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE_NAME

_LEAST_SHARE = 1 / 3  # of the live memory at the peak
_LEAST_BYTES = 2**20
_KINDS = ("activations", "temporaries")
_LEAST_OF_KIND = 0.05  # of the live memory at the peak, of a kind with a remedy of its own
_SMALL_PART = 0.01  # smaller parts of a layer's bytes are not named

_Bytes = Counter[tuple[str, str]]
"""Live bytes by their kind and the phase that allocated them."""


@rule
def layer_that_makes_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """One layer, or the code outside all layers, that allocated much of the live memory at the peak of a device:
    activations (saved for backward or returned) and temporaries."""
    large = _large_at_peak(evidence)
    bytes_of = {layer: sum(by_peak.values(), _Bytes()) for layer, by_peak in large.items()}
    remedies = {}
    for layer, live in bytes_of.items():
        [((kind, _), _)] = live.most_common(1)
        remedies[layer] = _remedy(evidence, kind)
    gains = {layer: Gain(nbytes=live.total()) for layer, live in bytes_of.items()}
    for group in merged(evidence, gains, remedies):
        peaks = [evidence.run.memory[index] for index in {index for layer in group.numbers for index in large[layer]}]
        live, all_bytes = sum((bytes_of[layer] for layer in group.numbers), _Bytes()), sum(map(_bytes_at_peak, peaks))
        [device, *others] = (name_of_device(evidence.run, memory) for memory in peaks)
        where = f"the peaks of {len(peaks)} devices" if others else f"the peak of {device}"
        above = " above the start" if any(memory.before is None for memory in peaks) else ""
        parts = ", ".join(
            f"{format_memory(nbytes)} {kind} of {phase}"
            for (kind, phase), nbytes in live.most_common()
            if nbytes >= _SMALL_PART * live.total()
        )
        yield group.advice(
            f"{live.total() / all_bytes:.0%} of {where} ({format_memory(all_bytes)}{above}) was allocated here: "
            f"{parts}.",
            remedies[group.numbers[0]],
        )


@rule
def weight_casts_at_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """Casts of weights that autocast keeps, in calls without gradients, that are live at the peak of a device.

    Measured with eight ``Linear(1024, 1024)`` on a CPU: the peak is 16.21 MB above the start and a call takes 3.1 ms,
    2.20 MB and 2.8 ms without the cache, 0.20 MB and 1.8 ms with weights in bfloat16.
    """
    for memory, casts in _live_of_kind(evidence, "weight casts"):
        yield Advice(
            ", ".join(evidence.run.meta.model),
            f"{casts.total() / _bytes_at_peak(memory):.0%} of the peak of {name_of_device(evidence.run, memory)} are "
            "casts of weights, which `torch.autocast` keeps until its context ends.",
            "Use `torch.autocast(…, cache_enabled=False)`, or weights in the smaller type (`model.bfloat16()`).",
            gain_bytes=casts.total(),
            layers=tuple(evidence.name_of(layer) for layer, nbytes in casts.most_common() if layer >= 0),
        )


@rule
def optimizer_temporaries_at_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """Temporaries of optimizers that are live at the peak of a device, and that have a fused step there.

    Measured with Adam, a model of 12 MB and a largest parameter of 8 MB, on a CPU: a step lifts the peak by 16.00 MB,
    with ``foreach=True`` by 12.04 MB, with ``fused=True`` by 0.03 MB.
    """
    if not (names := could_be_fused(evidence)):
        return
    for memory, temporaries in _live_of_kind(evidence, "optimizer temporaries"):
        yield Advice(
            OUTSIDE_NAME,
            f"{temporaries.total() / _bytes_at_peak(memory):.0%} of the peak of {name_of_device(evidence.run, memory)} "
            f"are temporaries of the optimizer ({', '.join(names)}).",
            f"Use {' and '.join(f'`torch.optim.{name}(…, fused=True)`' for name in names)}, which has none.",
            gain_bytes=temporaries.total(),
        )


def _live_of_kind(evidence: Evidence, kind: str) -> Iterator[tuple[Memory, Counter[int]]]:
    """The peaks of which memory of a kind is a large part, with its bytes by layer."""
    for memory in evidence.run.memory:
        live = sums_by_key((held.layer, held.nbytes) for held in memory.held if held.kind == kind)
        if live.total() >= max(_LEAST_OF_KIND * _bytes_at_peak(memory), _LEAST_BYTES):
            yield memory, live


def _large_at_peak(evidence: Evidence) -> dict[int, dict[int, _Bytes]]:
    """The live bytes of the layers that have enough of them, by layer and the index of the peak in ``Run.memory``."""
    called = sum(key.phase == FORWARD for key, _ in evidence.samples["cpu_ns"])
    share = max(_LEAST_SHARE, 2 / max(called, 1))
    large: defaultdict[int, dict[int, _Bytes]] = defaultdict(dict)
    for index, memory in enumerate(evidence.run.memory):
        bytes_of: defaultdict[int, _Bytes] = defaultdict(Counter)
        for held in memory.held:
            if held.nbytes > 0 and held.layer != NOT_SELECTED and held.kind in _KINDS:
                bytes_of[held.layer][held.kind, held.phase] += held.nbytes
        for layer, live in bytes_of.items():
            if live.total() >= max(share * _bytes_at_peak(memory), _LEAST_BYTES):
                large[layer][index] = live
    return large


def _bytes_at_peak(memory: Memory) -> int:
    """All live bytes, with those of the model before the recording if they are known."""
    return memory.peak_bytes + sum(nbytes for _, nbytes in memory.before or ())


def _remedy(evidence: Evidence, kind: str) -> str:
    """How to allocate less memory of this kind."""
    if kind == "temporaries":
        return "Compute in parts (`torch.chunk`), in place, or with an operator without this intermediate result."
    if BACKWARD in evidence.run.phases():
        return (
            "Use activation checkpointing (`torch.utils.checkpoint`), half precision (`torch.autocast`), or smaller "
            "micro-batches with gradient accumulation."
        )
    return "Use smaller batches, or return fewer tensors."

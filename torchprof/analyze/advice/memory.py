"""The layer that causes the peak of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.cost import format_memory
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED

_SHARE = 1 / 3
_LEAST_BYTES = 2**20
_KINDS = ("activations", "temporaries")
_SMALL = 0.01  # parts below this share of the layer's bytes are not named


@rule
def layer_that_makes_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """One layer, or the code outside all layers, that allocated much of the live memory at the peak of a device.

    Evidence: the activations (saved for backward or returned) and temporaries that were live at the peak, by the layer
    that allocated them. A layer is reported if it has at least a third of all live memory, that of the model before the
    recording included if it is known; in a model of a few layers, at least twice its equal share; and at least 1 MB.
    Parameters, gradients, the optimizer's state and the model's inputs do not count. The gain is at most all of these
    bytes. Needs a run with memory.
    """
    called = sum(key.phase == FORWARD for key, _ in evidence.samples("cpu_ns"))
    share = max(_SHARE, 2 / max(called, 1))
    for memory in evidence.run.memory:
        whole = memory.peak_bytes + sum(size for _, size in memory.before or ())
        above = "" if memory.before is not None else " above the start"
        device = memory.device if len(evidence.run.metas) == 1 else f"{memory.device} of rank {memory.rank}"
        by_layer: dict[int, Counter[tuple[str, str]]] = {}
        for held in memory.held:
            if held.nbytes > 0 and held.layer != NOT_SELECTED and held.kind in _KINDS:
                by_layer.setdefault(held.layer, Counter())[held.kind, held.phase] += held.nbytes
        for layer, sums in by_layer.items():
            nbytes = sum(sums.values())
            if nbytes >= max(share * whole, _LEAST_BYTES):
                parts = ", ".join(
                    f"{format_memory(size)} {kind} of {phase}"
                    for (kind, phase), size in sums.most_common()
                    if size >= _SMALL * nbytes
                )
                yield Advice(
                    evidence.name_of(layer),
                    f"When {device} holds most, {format_memory(whole)}{above}, {nbytes / whole:.0%} of that was made "
                    f"here: {parts}.",
                    _remedy(evidence, sums.most_common(1)[0][0][0]),
                    None,
                    nbytes,
                    "layer_that_makes_the_peak",
                )


def _remedy(evidence: Evidence, kind: str) -> str:
    if kind == "temporaries":
        return "Work in parts (torch.chunk), in place, or with an operator that needs no such intermediate result."
    if BACKWARD in evidence.run.phases():
        return (
            "Compute it again in backward (torch.utils.checkpoint), keep it in half precision (torch.autocast), or "
            "work on a part of the batch at a time."
        )
    return "Work on a part of the batch at a time, or return less."

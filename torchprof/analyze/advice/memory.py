"""What makes the peak of memory."""

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
_CRUMB = 0.01  # of what the layer made: less is not named


@rule
def layer_that_makes_the_peak(evidence: Evidence) -> Iterator[Advice]:
    """One layer, or the code outside all layers, that made much of what is alive when a device holds most.

    Evidence is what was alive at the peak: what one place made, activations (kept for backward or returned) and
    temporaries, is told from a third of all that the device held on, what the model had there before included, where
    that is known; in a model of a few layers, from twice what each would hold if all held the same; and from 1 MB on.
    Parameters, gradients and the optimizer's state are no such thing, nor is what the model was given. The gain is all
    of it, at most. Needs a run with memory.
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
                    if size >= _CRUMB * nbytes
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

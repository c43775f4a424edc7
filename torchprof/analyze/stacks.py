"""A run as stacks for flame graphs: from the model inward to an operator or a kernel, each with its self cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchprof.errors import TorchprofError, suggest
from torchprof.run.cost import FIELDS
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import PHASES, Frame, FrameKind

Step = int | Frame
"""A layer, by its index (negative for none), or an operator, label or kernel."""

Stack = tuple[Step, ...]


def stacks(run: Run, measure: str) -> dict[tuple[int, str], Counter[Stack]]:
    """The self cost of each stack, by rank and phase; ``measure`` is a field of ``Cost``.

    Σ over the stacks is Σ over the rows of that rank and phase. A stack starts at the model, and each layer of the path
    is one step. An operator or label around the call of a layer comes after the layer that it belongs to, or first if
    it belongs to no layer of the path. So the sum of the stacks with a layer in them is the layer's total, and of those
    with an operator in them the operator's total in this phase. Stacks that cost nothing are left out.

    Raises TorchprofError for what was not measured, and for a file with negative costs.
    """
    known = measured(run)
    if measure not in known:
        what = f"{measure!r} was not measured in this run" if measure in FIELDS else f"There is no measure {measure!r}"
        raise TorchprofError(f"{what}. {suggest(str(measure), known)}")
    paths: list[Stack] = [run.layers.lineage(index) for index in range(len(run.layers))]
    chains = [tuple(frame._replace(signature=None) for frame in frames) for frames in run.rows.frames]
    sums_of: dict[tuple[int, str], Counter[Stack]] = {}
    sums = run.rows.summed(("rank", "phase", "layer", "within", "frames"), measure)
    for (rank, phase, layer, within, chain), value in sums.items():
        if value:
            path = paths[layer] if layer >= 0 else (layer,)
            if run.rows.within[within]:
                path = _with_surroundings(path, run.rows.within[within], PHASES[phase])
            stack = (*path, *chains[chain])
            sums_of.setdefault((rank, PHASES[phase]), Counter())[stack] += value
    if any(value < 0 for sums in sums_of.values() for value in sums.values()):
        raise TorchprofError(f"In this run {measure!r} is less than 0 somewhere, and no graph of stacks can show that.")
    return {key: sums_of[key] for key in sorted(sums_of, key=lambda key: (key[0], PHASES.index(key[1])))}


def measured(run: Run) -> list[str]:
    """The measures of this run that stacks can show."""
    known = {name for meta in run.metas for name in meta.measured}
    return [name for name in FIELDS if name in known]


def _with_surroundings(path: Stack, within: Sequence[Around], phase: str) -> Stack:
    """A path with the operators and labels that its layers were called in. Operators of another phase are left out;
    labels have no phase."""
    inside: dict[int | None, list[Frame]] = {}
    for around in within:
        of = around.layer if around.layer in path else None
        inside.setdefault(of, []).extend(
            frame._replace(signature=None)
            for frame in around.frames
            if frame.kind == FrameKind.LABEL or around.phase == phase
        )
    steps: list[Step] = [*inside.get(None, ())]
    for layer in path:
        steps.append(layer)
        if isinstance(layer, int):
            steps.extend(inside.get(layer, ()))
    return tuple(steps)

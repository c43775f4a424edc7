"""Whether all forward calls of a layer had inputs of the same shapes. Only then can a mean be shown with a shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torchprof.run.run import Run
from torchprof.run.words import FORWARD, FrameKind

_Path = tuple[str, ...]


def varying_calls(run: Run) -> dict[_Path, bool | None]:
    """For each layer, whether the shapes in its forward calls varied from call to call, layers below it included. A
    layer that is used twice in each call of the model, on two shapes, varies.

    True: the model was called with different shapes (``Layer.same_shapes``), or an operator ran on some shapes only in
    some of the calls. None: unknown. The shapes of operators are known with ``record_shapes`` or ``with_flops``.
    """
    return _varying(run, of_model=False)


def varying_work(run: Run) -> dict[_Path, bool | None]:
    """For each layer, whether its work, layers below included, varied from one forward call of the model to the next:
    in shapes, as for ``varying_calls``, or in how often a layer was called. None: unknown.

    Numbers of calls that vary are not detected if their sum is a multiple of the model's calls.
    """
    return _varying(run, of_model=True)


def _varying(run: Run, of_model: bool) -> dict[_Path, bool | None]:
    calls, ran, counts = _counts(run)
    lineages = [run.layers.lineage(index) for index in range(len(run.layers))]
    groups: defaultdict[int, list[Counter[object]]] = defaultdict(list)  # of operators at or below a layer
    for (index, _), by_shapes in counts.items():
        for around in lineages[index]:
            groups[around].append(by_shapes)
    busy = {around for index in ran for around in lineages[index]}
    uneven: set[int] = set()  # the number of calls varies between calls of the model, for it or a layer below
    for index, (model, *_) in enumerate(lineages):
        if of_model and calls[model] and calls[index] % calls[model]:
            uneven.update(lineages[index])
    varies: dict[_Path, bool | None] = {}
    for index, layer in enumerate(run.layers):
        model = lineages[index][0]
        times = calls[model if of_model else index]
        state = _state(groups[index], times) if index in busy else None if calls[index] > 1 else False
        if layer.same_shapes is False or index in uneven:
            state = True
        elif state is None and run.layers[model].same_shapes and times == calls[model]:
            state = False
        varies[layer.path] = state
    return varies


def _state(groups: Iterable[Counter[object]], calls: int) -> bool | None:
    """Whether some operator had different shapes in some calls; None: unknown. ``groups``: for each operator, its calls
    by shapes."""
    if calls <= 1:
        return False
    groups = list(groups)
    if any(len(by_shapes) > 1 and any(count % calls for count in by_shapes.values()) for by_shapes in groups):
        return True
    # Two calls of a layer, an operator twice on each of two shapes: each call may have used both shapes, or only one.
    return None if not groups or any(len(by_shapes) > 1 for by_shapes in groups) else False


def _counts(run: Run) -> tuple[Counter[int], set[int], dict[tuple[int, object], Counter[object]]]:
    """In forward: the calls of each layer; the layers in which operators ran; and the calls of each operator by shapes,
    keyed by its layer and the names of the operators around it."""
    names = [tuple((frame.kind, frame.name) for frame in chain) for chain in run.rows.frames]
    calls: Counter[int] = Counter()
    ran: set[int] = set()
    counts: defaultdict[tuple[int, object], Counter[object]] = defaultdict(Counter)
    for (layer, chain), count in run.rows.summed(("layer", "frames"), "calls", phase=FORWARD).items():
        if layer < 0:
            continue
        frames = run.rows.frames[chain]
        if not frames:
            calls[layer] += count
            continue
        if frames[-1].kind == FrameKind.PYTHON:
            continue
        ran.add(layer)
        signature = frames[-1].signature
        if signature is not None and (frames[-1].kind != FrameKind.COLLECTIVE or signature.shapes[0] is not None):
            counts[layer, names[chain]][signature.shapes] += count
    return calls, ran, counts

"""Tensors that a layer makes anew in each call, though they depend only on sizes: masks, positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, merged, rule
from torchprof.analyze.advice.chains import Frames, among, calling, inside, is_node, node_of, outermost_op
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.words import BACKWARD, FORWARD

_SHARE = 0.03
_MAKES = inside(
    "aten::arange",
    "aten::linspace",
    "aten::eye",
    "aten::tril",
    "aten::triu",
    "aten::tril_indices",
    "aten::triu_indices",
)
_OF_POSITIONS = calling({"aten::sin", "aten::cos", "aten::exp", "aten::pow", "aten::cat", "aten::stack"})
_OF_PARAMETERS = {"tril", "triu"}  # nodes


@rule
def constants_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers that make the same tensors in each call, for at least 3 % of the recorded time: masks, positions.

    Evidence: ``arange``, ``linspace``, ``eye``, ``tril`` and ``triu`` in a layer of a model that gets inputs of the
    same shapes in at least two calls. Where gradients flow through the layer, ``sin``, ``cos``, ``exp``, ``pow``,
    ``cat`` and ``stack`` without a node in its backward count, too: their inputs depend on no parameter. A layer with a
    node of ``tril`` or ``triu`` is left out: they are of a parameter. What they are made of is not recorded, so the
    remedy is a condition. The gain is the time of all of these.
    """
    times = constants(evidence)
    if sum(times.values()) < _SHARE * evidence.recorded_ns:
        return
    for group in merged(evidence, times):
        yield group.advice(
            f"Tensors such as masks or positions are made in each call, for {group.time}.",
            "If they depend only on sizes, make them once, in `__init__`: `self.register_buffer('mask', mask, "
            "persistent=False)`. Slice the buffer where an input is shorter.",
        )


def constants(evidence: Evidence) -> dict[int, int]:
    """The time in which each layer makes tensors that depend only on sizes, by its number."""
    layers, calls = evidence.run.layers, evidence.forward_calls
    times = {
        number: evidence.time_of(took)
        for number, took in evidence.took(_MAKES, phases=(FORWARD,)).items()
        if number >= 0 and layers[layers.lineage(number)[0]].same_shapes and 2 <= calls[number] <= took.calls
    }
    if not times:
        return times
    nodes: defaultdict[int, set[str]] = defaultdict(set)
    columns = evidence.run.rows.columns
    for frames, rows in evidence.rows_of_chains(is_node, phases=(BACKWARD,)):
        node = node_of(frames) or ""
        for row in rows:
            nodes[columns["layer"][row]].add(node)
    for frames, rows in evidence.rows_of_chains(_may_be_constant, phases=(FORWARD,)):
        name = (outermost_op(frames) or "").removeprefix("aten::")
        for row in rows:
            number = columns["layer"][row]
            if number in times and number in nodes and name not in nodes[number]:
                times[number] += evidence.times[row]
    return {number: ns for number, ns in times.items() if not nodes[number] & _OF_PARAMETERS}


@among(_OF_POSITIONS)
def _may_be_constant(frames: Frames) -> bool:
    return not _MAKES(frames)

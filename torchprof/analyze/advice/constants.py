"""Tensors that a layer makes anew in each call, though they depend only on sizes; and embeddings of large tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod

from torchprof.analyze.advice import Advice, merged, rule
from torchprof.analyze.advice.chains import (
    Frames,
    always,
    among,
    calling,
    inside,
    is_node,
    is_optimizer,
    node_of,
    outermost_op,
)
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.layers import Layer
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
_SIZES = re.compile(r"(\d+), (\d+)")
_FEW_ROWS = 1 / 4  # a call that uses a larger part of the rows gains little


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
            "persistent=False)`.",
            options="Slice the buffer where an input is shorter.",
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
    for row in evidence.rows(is_node, phases=(BACKWARD,)):
        nodes[row.layer].add(node_of(row.frames) or "")
    for row in evidence.rows(_may_be_constant, phases=(FORWARD,)):
        name, number = (outermost_op(row.frames) or "").removeprefix("aten::"), row.layer
        if number in times and number in nodes and name not in nodes[number]:
            times[number] += evidence.time_of(row)
    return {number: ns for number, ns in times.items() if not nodes[number] & _OF_PARAMETERS}


@among(_OF_POSITIONS)
def _may_be_constant(frames: Frames) -> bool:
    return not _MAKES(frames)


@rule
def dense_embedding_gradients(evidence: Evidence) -> Iterator[Advice]:
    """Embeddings of which a call uses few rows: backward writes a gradient of all rows, and the optimizer updates all.

    Evidence: the number of rows of the table in its settings, and of indices in its input, at most a quarter of them.
    The gain is the layer's backward and its part of the optimizers' time, by its part of the trainable parameters,
    without the rows in use.
    """
    layers = evidence.run.layers
    backward = evidence.took(always, phases=(BACKWARD,))
    stepped = evidence.time_of(evidence.took_outside(is_optimizer, FORWARD))
    gains = {}
    for number in evidence.of_class.get("Embedding", ()):
        layer = layers[number]
        rows, used = _rows_of(layer), _indices_of(layer)
        if not rows or not used or used > _FEW_ROWS * rows or number not in backward or layer.tied:
            continue
        ns = evidence.time_of(backward[number])
        if stepped and layer.trainable_params:
            ns += stepped * layer.trainable_params // evidence.trainable_params
        gains[number] = round(ns * (1 - used / rows))
    for group in merged(evidence, gains):
        first = layers[group.numbers[0]]
        yield group.advice(
            f"The gradient is dense, for all {_rows_of(first):,} rows, and a call uses at most {_indices_of(first):,}.",
            "Use `torch.nn.Embedding(…, sparse=True)`, with `torch.optim.SparseAdam` or `torch.optim.SGD` for it.",
        )


def _rows_of(layer: Layer) -> int:
    sizes = _SIZES.match(layer.settings)
    return int(sizes[1]) if sizes and "sparse=True" not in layer.settings else 0


def _indices_of(layer: Layer) -> int:
    return prod(layer.input_shapes[0]) if layer.input_shapes else 0

"""The description of the page's layers: class, parameters, shapes and memory traffic."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from math import prod
from operator import attrgetter
from typing import Any

from torchprof.analyze.varying import varying_calls
from torchprof.reports.page.tree import Tree
from torchprof.run.layers import Layer
from torchprof.run.run import Run

_READ = attrgetter(
    "kind",
    "settings",
    "params",
    "dtype_bytes",
    "input_shapes",
    "output_shapes",
    "training",
    "shared_with",
    "param_bytes",
    "output_bytes",
    "tied",
)
"""All that the description of a layer is made of."""


def layer_data(run: Run, tree: Tree, take: int) -> dict[str, Any]:
    """The description of the layers in one take. Equal ones are once in ``described``; ``of`` has the index of each
    node's, -1 for layers that the take does not have. ``params``: those of each node and all below it, -1 if unknown.
    """
    numbers: dict[Hashable, int] = {}
    described: list[dict[str, Any]] = []
    of, params = [-1] * len(tree.layers), [-1] * len(tree.layers)
    totals = run.total_params()
    varying = varying_calls(run)
    for index, layer in enumerate(run.layers):
        varies = varying[layer.path] is not False
        number = numbers.setdefault((varies, *_READ(layer)), len(described))
        if number == len(described):
            described.append(_described(layer, varies))
        node, total = tree.nodes[take][index], totals[layer.path]
        of[node], params[node] = number, -1 if total is None else total
    return {"described": described, "of": array("q", of), "params": array("q", params)}


def _described(layer: Layer, varies: bool) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "settings": layer.settings,
        "params": layer.params,
        "dtypes": ", ".join(dtype for dtype, _ in layer.dtype_bytes),
        "inputs": layer.input_shapes,
        "outputs": layer.output_shapes,
        "shapesVary": varies,
        "training": layer.training,
        "sharedWith": [".".join(path) for path in layer.shared_with],
        "traffic": None if varies else traffic_bytes(layer),
    }


def traffic_bytes(layer: Layer) -> int | None:
    """The minimum memory traffic of a forward call: parameters, inputs and outputs of the layer, each once.

    Inputs are assumed to have the type of the outputs. None if unknown: with a dynamic size, outputs of unknown or of
    several types, parameters that cannot be counted, or parameters that are counted at another layer.
    """
    sizes = [*layer.input_shapes, *layer.output_shapes]
    if (
        layer.param_bytes is None
        or layer.tied
        or not layer.output_bytes
        or not layer.input_shapes
        or any(-1 in size for size in sizes)
    ):
        return None
    of_outputs = sum(prod(shape) for shape in layer.output_shapes)
    if not of_outputs or layer.output_bytes % of_outputs:
        return None
    itemsize = layer.output_bytes // of_outputs
    return layer.param_bytes + layer.output_bytes + itemsize * sum(prod(shape) for shape in layer.input_shapes)

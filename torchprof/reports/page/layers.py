"""The description of the page's layers: class, parameters, shapes and memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torchprof.analyze.varying import varying_calls
from torchprof.reports.page.tree import Tree
from torchprof.run.layers import Layer
from torchprof.run.run import Run


def layer_data(run: Run, tree: Tree, take: int) -> dict[str, list[Any]]:
    """The description of the layers in one take, as lists by node; None for layers that the take does not have."""
    layers: list[Layer | None] = [None] * len(tree.layers)
    for index, layer in enumerate(run.layers):
        layers[tree.nodes[take][index]] = layer
    selected = None if run.meta.paths is None else set(run.meta.paths)

    varying = varying_calls(run)

    def each(describe: Callable[[Layer], Any]) -> list[Any]:
        return [None if layer is None else describe(layer) for layer in layers]

    return {
        "kind": each(lambda layer: layer.kind),
        "settings": each(lambda layer: layer.settings),
        "params": each(lambda layer: layer.params),
        "dtypes": each(lambda layer: ", ".join(dtype for dtype, _ in layer.dtype_bytes)),
        "inputs": each(lambda layer: layer.input_shapes),
        "outputs": each(lambda layer: layer.output_shapes),
        "shapesVary": each(lambda layer: varying[layer.path] is not False),
        "training": each(lambda layer: layer.training),
        "compiled": each(lambda layer: layer.compiled),
        "selected": each(lambda layer: selected is None or layer.path in selected),
        "sharedWith": each(lambda layer: [".".join(path) for path in layer.shared_with]),
        "traffic": each(lambda layer: None if varying[layer.path] is not False else traffic_bytes(layer)),
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

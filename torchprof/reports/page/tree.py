"""The layer tree of the page: the layers of all its runs, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED

LEFT_OVER = -3
"""The index of a layer for work that was launched before the recording."""

Path = tuple[str, ...]


class Take(NamedTuple):
    """A run on the page, with its name. ``paths``: the path in the page's tree by the layer's own path, for layers that
    have another path in another run."""

    name: str
    run: Run
    paths: Mapping[Path, Path] = {}


@dataclass(frozen=True)
class Tree:
    """The layers of all takes, each once, depth first."""

    layers: tuple[Layer, ...]
    names: tuple[str, ...]
    parents: tuple[int, ...]
    nodes: tuple[dict[int, int], ...]  # by take: the index of a layer in its run → its node

    @classmethod
    def of(cls, takes: Sequence[Take]) -> Tree:
        layers: dict[Path, Layer] = {}
        for take in reversed(takes):  # if several takes have a layer, the first one describes it
            for layer in take.run.layers:
                layers[take.paths.get(layer.path, layer.path)] = layer
        order: dict[Path, list[Path]] = {(): []}
        for take in takes:
            for layer in take.run.layers:
                path = take.paths.get(layer.path, layer.path)
                if path not in order:
                    order[path] = []
                    order[path[:-1]].append(path)
        paths: list[Path] = []
        waiting = order[()][::-1]
        while waiting:
            path = waiting.pop()
            paths.append(path)
            waiting.extend(reversed(order[path]))
        number = {path: index for index, path in enumerate(paths)}
        return cls(
            tuple(layers[path] for path in paths),
            tuple(path[-1] for path in paths),
            tuple(number.get(path[:-1], -1) for path in paths),
            tuple(
                {index: number[take.paths.get(layer.path, layer.path)] for index, layer in enumerate(take.run.layers)}
                | {-1: len(paths), NOT_SELECTED: len(paths) + 1, LEFT_OVER: len(paths) + 2}
                for take in takes
            ),
        )

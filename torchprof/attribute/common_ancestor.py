"""Where work for several layers at once belongs: to their nearest common ancestor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torchprof.attribute.places import Place, Places
from torchprof.run.paths import common_prefix
from torchprof.run.words import NOT_SELECTED, OUTSIDE, OUTSIDE_NAME


class CommonAncestor:
    """The places and names of work for several layers at once. ``selected``: the layers with own rows, None for all."""

    def __init__(self, places: Places, paths: Sequence[tuple[str, ...]], selected: Set[int] | None) -> None:
        self._places = places
        self._paths = paths
        self._index = {path: index for index, path in enumerate(paths)}
        self._selected = selected

    def place(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of the layers' work: their nearest common ancestor that is selected."""
        path = self._path(layers)
        layer = self._index.get(path, OUTSIDE)
        while self._selected is not None and layer not in self._selected:
            path = path[:-1]
            layer = self._index.get(path, NOT_SELECTED)
            if layer == NOT_SELECTED:
                break
        shared = layers if len(layers) > 1 else ()
        if (layer, phase, shared) == (around.layer, around.phase, around.shared):
            return around
        return self._places.of_layer(layer, phase, around if around.layer != OUTSIDE or around.frame else None, shared)

    def names(self, layers: tuple[int, ...], most: int | None = None, below: int | None = None) -> str:
        """The paths of the layers, relative to their nearest common ancestor, or to the layer they are ``below``. A
        negative layer is outside all. ``most``: how many are named, None for all."""
        common = self._path(layers if below is None else (*layers, below)) if min(layers) >= 0 else ()
        paths = [self._paths[layer] if layer >= 0 else (OUTSIDE_NAME,) for layer in layers]
        named = paths if most is None or len(paths) <= most + 1 else paths[:most]
        more = [f"{len(paths) - len(named)} more"] if len(named) < len(paths) else []
        return " + ".join([*(".".join(path[len(common) :]) or "itself" for path in named), *more])

    def _path(self, layers: Iterable[int]) -> tuple[str, ...]:
        """The path of the nearest common ancestor; ``()`` if the layers are in different models."""
        return common_prefix(self._paths[layer] for layer in layers)


def nearest(paths: Sequence[tuple[str, ...]], layers: Sequence[int], caller: int) -> int:
    """The layer of a module with several paths: the one whose path has most steps in common with its caller's. The
    first layer if none has any, or if it has no caller (negative)."""
    if caller < 0:
        return layers[0]
    return max(layers, key=lambda layer: len(common_prefix((paths[layer], paths[caller]))))

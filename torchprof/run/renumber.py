"""Moves a run to other layers: changes every layer index in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchprof.run.layers import Layer, Layers
from torchprof.run.words import NOT_SELECTED, OUTSIDE

if TYPE_CHECKING:
    from torchprof.run.run import Run


def on_layers(run: Run, layers: Iterable[Layer]) -> Run:
    """The same run with other layers, matched by path. Work of a layer that has no match becomes work of no layer."""
    layers = Layers.of(layers)
    return renumbered(run, [layers.index_of.get(layer.path, OUTSIDE) for layer in run.layers], layers)


def renumbered(run: Run, numbers: Sequence[int], layers: Iterable[Layer]) -> Run:
    """The same run with these layers. ``numbers``: for each old layer its index among the new ones."""
    layers = Layers.of(layers)
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    if all(number == index for index, number in enumerate(numbers)):
        return run
    to = [*numbers, NOT_SELECTED, OUTSIDE]  # negative numbers keep their meaning: Python counts them from the end

    def column(columns: Mapping[str, array[int]]) -> dict[str, array[int]]:
        return {**columns, "layer": array("q", map(to.__getitem__, columns["layer"]))}

    within = tuple(tuple(around._replace(layer=to[around.layer]) for around in chain) for chain in run.rows.within)
    shared = tuple(tuple(to[layer] for layer in by) for by in run.rows.shared)
    timeline = run.timeline
    if timeline is not None:
        spans = timeline.spans
        if spans is not None:
            spans = replace(spans, columns=column(spans.columns))
        timeline = replace(timeline, columns=column(timeline.columns), spans=spans)
    return replace(
        run,
        rows=replace(run.rows, columns=column(run.rows.columns), within=within, shared=shared),
        samples={key._replace(layer=to[key.layer]): spread for key, spread in run.samples.items()},
        memory=tuple(
            replace(memory, held=tuple(held._replace(layer=to[held.layer]) for held in memory.held))
            for memory in run.memory
        ),
        timeline=timeline,
        lockstep={key._replace(layer=to[key.layer]): lockstep for key, lockstep in run.lockstep.items()},
        unfinished=tuple(
            replace(
                one, layer=to[one.layer], entered=tuple(each._replace(layer=to[each.layer]) for each in one.entered)
            )
            for one in run.unfinished
        ),
    )

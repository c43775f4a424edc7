"""The HTML page of a comparison: the icicle is colored by change, and tables have each figure before and after."""

from __future__ import annotations

from typing import Any

from torchprof.analyze.compare.diff import Change, Diff
from torchprof.analyze.compare.layers import MOVED
from torchprof.analyze.compare.table import changes_of_layers, diff_headline, whole_of
from torchprof.analyze.report import report
from torchprof.reports.html import page
from torchprof.reports.page.tree import Path, Take, Tree
from torchprof.run.words import OUTSIDE_NAME, PHASES

_MOVED_AWAY = "moved away"


@report("html", "the page in the colors of what changed", suffix=".html", of="diff")
def diff_html(diff: Diff) -> str:
    """The page of ``Run.report("html")`` over the layers of both runs, with figures before and after.

    A renamed layer is one row, under its new name. Removed layers are at their old place, and moved layers at both
    places, so that the figures of each run add up. If the diff is for one call or one step, so are the figures of the
    page.
    """
    before, after = _paths(diff)
    takes = [Take("after", diff.after, after), Take("before", diff.before, before)]
    tree = Tree.of(takes)
    more = {
        "headline": diff_headline(diff),
        "largest": None,
        "comparison": {
            "scale": [1 / count if diff.unit else 1 for count in reversed(diff.counts)],
            "per": diff.unit,
            "notes": [*diff.notes, *diff.warnings],
            "whole": whole_of(diff),
            "layerChanges": [[what, lines] for what, lines in changes_of_layers(diff)],
            "quantities": [
                {
                    "key": one.key,
                    "heading": one.heading,
                    "unit": one.unit.value,
                    "phase": PHASES.index(one.phase),
                    "self": one.is_self,
                    "field": one.measure.fields[0][0] if one.measure else one.what,
                }
                for one in diff.quantities
            ],
            "pairs": _pairs(diff, tree, takes),
        },
    }
    return page(", ".join(diff.after.meta.model) or "torchprof", takes, more, diff.after)


def _paths(diff: Diff) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """The path on the page of each layer of ``before`` and of ``after``, by its own path. A layer of both runs has one
    path on the page, unless it moved to another parent."""
    pairs = [pair for pair in diff.walk() if pair.is_layer]
    after = {pair.after.path: pair.after.path for pair in pairs if pair.after}
    before: dict[Path, Path] = {}
    taken = set(after)
    of_before = {pair.before.path: pair for pair in pairs if pair.before}
    for layer in diff.before.layers:
        pair = of_before[layer.path]
        above = before.get(layer.path[:-1], ())
        if pair.after and pair.after.path[:-1] == above:
            before[layer.path] = pair.after.path
            continue
        path = (*above, layer.path[-1])
        while path in taken:  # if another layer has this path after
            path = (*path[:-1], f"{path[-1]} (before)")
        taken.add(path)
        before[layer.path] = path
    return before, after


def _pairs(diff: Diff, tree: Tree, takes: list[Take]) -> list[dict[str, Any]]:
    """By node: how the layer is matched, and each quantity before and after."""
    numbers = [
        {layer.path: take_nodes[index] for index, layer in enumerate(take.run.layers)}
        for take, take_nodes in zip(takes, tree.nodes)
    ]
    outside = len(tree.layers)
    # Work launched before the recording is not compared.
    found: list[dict[str, Any]] = [{"how": "same", "differs": (), "changes": {}} for _ in range(outside + 3)]
    for pair in diff.walk():
        data = {
            "how": pair.how,
            "was": pair.before.name if pair.before else None,
            "is": pair.after.name if pair.after else None,
            "differs": pair.differs,
            "changes": {key: _change(change) for key, change in pair.changes.items()},
        }
        if not pair.is_layer:
            found[outside + (pair.name != OUTSIDE_NAME)] = data
            continue
        at_before = numbers[1][pair.before.path] if pair.before else None
        at_after = numbers[0][pair.after.path] if pair.after else None
        if at_before is not None:
            found[at_before] = data if at_after is None else {**data, "how": _MOVED_AWAY}
        if at_after is not None:
            moved_along = at_before not in (None, at_after) and pair.how == "same"  # its parent moved
            found[at_after] = {**data, "how": MOVED} if moved_along else data
    return found


def _change(change: Change) -> list[Any]:
    return [change.before, change.after, change.difference, change.verdict, change.at_least]

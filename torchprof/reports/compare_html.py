"""Two runs compared, as one HTML page: the icicle in the colours of what changed, and what each layer was and is."""

from __future__ import annotations

from typing import Any

from torchprof.attribute import PHASES
from torchprof.cost import Measure
from torchprof.diff import Change, Diff, Pair
from torchprof.reports import report
from torchprof.reports.compare import headline
from torchprof.reports.html import page
from torchprof.reports.page_data import Path, Take, Tree
from torchprof.run import OUTSIDE_NAME


@report("html", suffix=".html", of="diff")
def compare_html(diff: Diff) -> str:
    """The page of ``Run.report("html")`` over the layers of both runs, with what each was before and is after.

    Moved and renamed layers stand where they stand after, removed ones under what they stood under. Where the diff is
    for one call or one step, so are the figures of the page.
    """
    paths: dict[int, Path] = {}  # by the identity of a pair
    taken: set[Path] = set()
    waiting: list[tuple[Pair, Path]] = [(pair, ()) for pair in reversed(diff.pairs) if pair.is_layer]
    while waiting:
        pair, above = waiting.pop()
        path = (*above, pair.name)
        while path in taken:  # where another of that name stands after
            path = (*path[:-1], f"{path[-1]} (before)")
        taken.add(path)
        paths[id(pair)] = path
        waiting.extend((child, path) for child in reversed(pair.children))
    layers = [pair for pair in diff.walk() if pair.is_layer]
    takes = [
        Take("after", diff.after, {pair.after.path: paths[id(pair)] for pair in layers if pair.after}),
        Take("before", diff.before, {pair.before.path: paths[id(pair)] for pair in layers if pair.before}),
    ]
    tree = Tree.of(takes)
    scale = [1 / count if diff.unit else 1 for count in reversed(diff.counts)]
    more = {
        "headline": headline(diff),
        "comparison": {
            "scale": scale,
            "of": diff.unit,
            "notes": diff.notes,
            "quantities": [
                {
                    "key": one.key,
                    "heading": one.heading,
                    "unit": one.unit.value,
                    "phase": PHASES.index(one.phase),
                    "self": one.is_self,
                    "field": one.what.fields[0][0] if isinstance(one.what, Measure) else one.what,
                }
                for one in diff.quantities
            ],
            "pairs": _pairs(diff, tree, takes),
        },
    }
    return page(", ".join(diff.after.meta.model) or "torchprof", takes, more, diff.after)


def _pairs(diff: Diff, tree: Tree, takes: list[Take]) -> list[dict[str, Any]]:
    """By node: how the layer is matched, and what each quantity was and is."""
    number_of = [{layer.path: index for index, layer in enumerate(take.run.layers)} for take in takes]
    found: dict[int, dict[str, Any]] = {}
    outside = len(tree.layers)
    for pair in diff.walk():
        if pair.after is not None:
            node = tree.nodes[0][number_of[0][pair.after.path]]
        elif pair.before is not None:
            node = tree.nodes[1][number_of[1][pair.before.path]]
        else:
            node = outside + (pair.name != OUTSIDE_NAME)
        was = ".".join(pair.before.path) if pair.before is not None else None
        found[node] = {
            "how": pair.how,
            "was": was,
            "differs": pair.differs,
            "changes": {key: _change(change) for key, change in pair.changes.items()},
        }
    return [found.get(node, {"how": "same", "was": None, "differs": (), "changes": {}}) for node in range(outside + 2)]


def _change(change: Change) -> list[Any]:
    return [change.before, change.after, change.difference, change.verdict]

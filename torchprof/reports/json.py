"""The run itself, as JSON that ``torchprof.load`` reads (docs/run-file.md), and a comparison (docs/compare.md)."""

from __future__ import annotations

from json import dumps
from typing import Any

from torchprof.analyze.compare.diff import Change, Diff, Pair
from torchprof.analyze.compare.table import diff_headline
from torchprof.analyze.report import report
from torchprof.run.file import json_of_run, stripped
from torchprof.run.run import Run
from torchprof.run.warnings import RunWarning


@report("json", "the run as data; torchprof.load reads it", suffix=".json")
def json(run: Run, *, strip: bool = False) -> str:
    """The file of the run, with all of its warnings, also those that ``load`` computes from the run.

    ``strip=True`` leaves the names of files and machines out.
    """
    run = stripped(run) if strip else run
    return json_of_run(run, strip=strip, computed={"warnings": map(_data, run.warnings)})


def _data(warning: RunWarning) -> dict[str, Any]:
    return {**warning.to_json(), "ranks": warning.ranks, "sentence": str(warning)}


_SCHEMA = 1
"""It grows by one whenever a reader of the old format would misread the new one."""
_FORMAT = "torchprof-diff"


@report("json", "the comparison as data", suffix=".json", of="diff")
def diff_json(diff: Diff) -> str:
    """All data of a diff, layer by layer; unknown figures are null. docs/compare.md describes the keys."""
    layers: list[dict[str, Any]] = []
    waiting: list[tuple[Pair, int | None]] = [(pair, None) for pair in reversed(diff.pairs)]
    while waiting:
        pair, parent = waiting.pop()
        number = len(layers)
        layers.append(
            {
                "path": pair.path,
                "parent": parent,
                "how": pair.how if pair.is_layer else None,
                "before": None if pair.before is None else {"path": pair.before.path, "kind": pair.before.kind},
                "after": None if pair.after is None else {"path": pair.after.path, "kind": pair.after.kind},
                "differs": [{"what": what, "before": was, "after": now} for what, was, now in pair.differs],
                "changes": {key: _change(change) for key, change in pair.changes.items()},
            }
        )
        waiting.extend((child, number) for child in reversed(pair.children))
    document = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "headline": diff_headline(diff),
        "counted": diff.counted,
        "unit": diff.unit,
        "counts": {"before": diff.counts[0], "after": diff.counts[1]},
        "quantities": [
            {
                "key": quantity.key,
                "heading": quantity.heading,
                "unit": quantity.unit.value,
                "phase": quantity.phase,
                "is_self": quantity.is_self,
            }
            for quantity in diff.quantities
        ],
        "whole": {key: _change(change) for key, change in diff.whole.items()},
        "layers": layers,
        "notes": diff.notes,
        "warnings": diff.warnings,
    }
    return dumps(document, separators=(",", ":"))


def _change(change: Change) -> dict[str, Any]:
    noise = change.noise
    return {
        "before": change.before,
        "after": change.after,
        "before_at_least": change.at_least[0],
        "after_at_least": change.at_least[1],
        "difference": change.difference,
        "ratio": change.ratio,
        "verdict": change.verdict,
        "noise": None if noise is None else noise._asdict(),
    }

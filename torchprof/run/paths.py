"""Paths of modules: those that users write, and what several have in common. Imports only the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from torchprof.errors import TorchprofError, suggest

_Step = TypeVar("_Step")

_ROOT = re.compile(r"(?P<kind>[^#]+?)( \(stage (?P<stage>\d+)\))?(#\d+)?")
"""The name of a model: its class, the stage of a pipeline that calls it, and a number for the second of a name."""


def root_of_stage(kind: str, stage: int) -> str:
    """The name of the model of this class that a stage of a pipeline calls."""
    return f"{kind} (stage {stage})"


def kind_of_root(name: str) -> str:
    """The class of a model, by its name: "Net" of "Net#2" and of "Net (stage 1)"."""
    match = _ROOT.fullmatch(name)
    return name if match is None else match["kind"]


def stage_of_root(name: str) -> int | None:
    """The stage of a pipeline that calls a model, by the name of the model; None for others."""
    match = _ROOT.fullmatch(name)
    return None if match is None or match["stage"] is None else int(match["stage"])


def find(path: Any, known: Sequence[tuple[tuple[str, ...], ...]]) -> set[int]:
    """The indices of the entries of ``known`` that a path matches, at least one.

    An entry holds the paths of one module: the real path, and the path that users see. ``path`` is a tuple of steps or
    a dotted string, with or without the root; ``*`` matches one step. Raises TorchprofError if nothing matches (the
    message has the nearest real paths) or if ``path`` is not a path.
    """
    steps = tuple(path.split(".")) if isinstance(path, str) else path
    if not isinstance(steps, (tuple, list)) or not steps or not all(isinstance(step, str) for step in steps):
        raise TorchprofError(
            f"{path!r} is not a path of a module. Write a tuple of names, ('Net', 'features', '3'), or a dotted "
            "string, 'features.3'; '*' matches any one step."
        )
    indices = matching(steps, known) or matching(steps, known, without=1)
    if not indices:
        dotted = [".".join(names[-1]) for names in known]
        raise TorchprofError(f"No module of the model matches the path {path!r}. {suggest('.'.join(steps), dotted)}")
    return indices


def matching(steps: Sequence[str], known: Sequence[tuple[tuple[str, ...], ...]], without: int = 0) -> set[int]:
    """The indices of the entries with a path of exactly these steps. Its first ``without`` steps are ignored."""
    return {
        number
        for number, names in enumerate(known)
        for name in names
        if len(name) - without == len(steps)
        and all(wanted in ("*", step) for wanted, step in zip(steps, name[without:]))
    }


def common_prefix(paths: Iterable[tuple[_Step, ...]]) -> tuple[_Step, ...]:
    """The steps that all paths begin with."""
    prefix, *others = paths
    for other in others:
        prefix = tuple(step for step, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, other)))
    return prefix

"""Warnings as data: a code, the layers and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchprof.errors import some
from torchprof.run.sentences import SENTENCES, Fact


@dataclass(frozen=True)
class Caveat:
    """A warning about the figures of a run. ``str()`` is its sentence.

    - ``code``: what it is about. ``layers``: the layers concerned, by dotted name. ``facts``: everything else, by name.
    - ``added``: one entry for each sum of runs that it has passed through, the last sum first: the numbers of the runs
      that had it, from 1 on, and how many runs were added.
    - ``ranks``: the ranks that it is of, in ``Run.warnings``; empty in ``Meta.warnings``.

    A code of a newer torchprof has no sentence here: ``str()`` shows the code with its layers and facts.
    """

    code: str
    layers: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    added: tuple[tuple[tuple[int, ...], int], ...] = ()
    ranks: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.code, self.layers, frozenset(self.facts.items()), self.added, self.ranks))

    def __str__(self) -> str:
        return "".join(map(_of_the_runs_added, self.added)) + self._sentence()

    def _sentence(self) -> str:
        try:
            return SENTENCES[self.code](list(self.layers), **self.facts)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # of a newer torchprof
            facts = [f"{name}={value!r}" for name, value in self.facts.items()]
            about = "; ".join([*([some(list(self.layers))] if self.layers else []), *facts])
            return f"{self.code}: {about}" if about else self.code


def caveat(code: str, layers: Sequence[str] = (), **facts: Fact) -> Caveat:
    """A caveat with these facts."""
    return Caveat(code, tuple(layers), facts)


def sharing_key(warning: Caveat) -> tuple[Any, ...]:
    """Equal for two warnings only if they are written alike: one object, and one entry of a file, can serve for both.

    Stricter than ``==``, for which 1, 1.0 and True are equal.
    """
    return warning.code, warning.layers, repr([*warning.facts.items()]), warning.added, warning.ranks


def _of_the_runs_added(added: tuple[Sequence[int], int]) -> str:
    numbers, count = added
    if len(numbers) == count:
        return f"Each of the {count} runs added: "
    return f"Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of the {count} added: "

"""Warnings as data: a code, the layers and the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchprof.errors import some
from torchprof.run.layers import Layers
from torchprof.run.part import demand, read_as, read_list
from torchprof.run.sentences import RANKS_CHOSEN, SENTENCES, WITHOUT_SHAPES, Fact


@dataclass(frozen=True)
class RunWarning:
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

    @classmethod
    def of(cls, code: str, layers: Sequence[str] = (), **facts: Fact) -> RunWarning:
        """A warning with these facts."""
        return cls(code, tuple(layers), facts)

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

    def to_json(self) -> dict[str, Any]:
        """``added`` is left out if it is empty: only sums of runs have it."""
        fields = {"code": self.code, "layers": self.layers, "facts": self.facts}
        return {**fields, "added": self.added} if self.added else fields

    @classmethod
    def from_json(cls, stored: Any, names: Sequence[str]) -> RunWarning:
        """A warning of a file, with any code: a newer torchprof may have more codes. ``names``: of all layers."""
        demand(isinstance(stored, dict), f"{stored!r:.80} instead of a warning")
        demand({"code"} <= {*stored} <= {"code", "layers", "facts", "added"}, f"the parts of a warning: {stored!r:.80}")
        facts = stored.get("facts", {})
        demand(isinstance(facts, dict), f"{facts!r:.80} instead of the facts of a warning")
        added = read_as(tuple[tuple[tuple[int, ...], int], ...], stored.get("added", []))
        for numbers, of in added:
            is_valid = numbers and [*numbers] == sorted({*numbers}) and numbers[0] >= 1 and numbers[-1] <= of
            demand(is_valid, f"the runs {added!r:.80}")
        layers = read_list(stored.get("layers", []))
        are_known = all(type(layer) is not int or 0 <= layer < len(names) for layer in layers)
        demand(are_known, f"the layers of a warning: {layers!r:.80}")
        layers = [names[layer] if type(layer) is int else layer for layer in layers]
        if stored["code"] == WITHOUT_SHAPES:  # analyze.warnings computes with these
            read_as(tuple[str, ...], facts.get("names", []))
        if stored["code"] == RANKS_CHOSEN:  # so does analyze.ranks
            for name in ("slow", "late"):
                read_as(tuple[int, ...], facts[name])
            read_as(bool, facts["may_be_chance"])
        facts = {name: read_as(Any, fact) for name, fact in facts.items()}
        return cls(read_as(str, stored["code"]), read_as(tuple[str, ...], layers), facts, added)


def sharing_key(warning: RunWarning) -> tuple[Any, ...]:
    """Equal for two warnings only if they are written alike: one object, and one entry of a file, can serve for both.
    Stricter than ``==``, for which 1, 1.0 and True are equal."""
    return warning.code, warning.layers, repr([*warning.facts.items()]), warning.added, warning.ranks


class StoredWarnings:
    """The distinct warnings of all ranks, as a file has them: metadata refers to them by number, from 0 on."""

    def __init__(self) -> None:
        self._numbered: dict[tuple[Any, ...], tuple[int, RunWarning]] = {}

    def number_of(self, warning: RunWarning) -> int:
        return self._numbered.setdefault(sharing_key(warning), (len(self._numbered), warning))[0]

    def to_json(self, layers: Layers) -> Iterator[dict[str, Any]]:
        """The warnings, with the index of each layer in place of its name: every rank may have a list of thousands,
        each different. The name stays if no layer has it, or two have."""
        names = Counter(layer.name for layer in layers)
        index_of = {layer.name: index for index, layer in enumerate(layers) if names[layer.name] == 1}
        for _, warning in self._numbered.values():
            yield {**warning.to_json(), "layers": [index_of.get(name, name) for name in warning.layers]}


def _of_the_runs_added(added: tuple[Sequence[int], int]) -> str:
    numbers, count = added
    if len(numbers) == count:
        return f"Each of the {count} runs added: "
    return f"Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of the {count} added: "

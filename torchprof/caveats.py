"""The warnings that follow from what a run holds, and those of several recordings of one process, added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchprof.doubts import about_compiled, about_left_over, about_processors, about_start
from torchprof.run import Run
from torchprof.uncounted import about_uncounted


def following_from(run: Run, has_formula: Callable[[str], bool]) -> Iterator[str]:
    """The warnings that need nothing but the run of one rank: computed anew for a sum, they hold for all of it.

    ``has_formula``: see ``about_uncounted``.
    """
    yield from about_start(run)
    yield from about_left_over(run)
    yield from about_compiled(run)
    yield from about_uncounted(run.rows, has_formula)
    yield from about_processors(run.meta)


def of_sum(total: Run, of_parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The warnings of a sum of runs: those that follow from it, and for each run that was added what else it said.

    ``of_parts``: ``not_following`` of each. Such a sentence speaks of one recording, and says of which: a layer that
    was never called in one of them may be called in the next.
    """
    numbers: dict[str, list[int]] = {}
    for number, said in enumerate(of_parts, 1):
        for text in said:
            numbers.setdefault(text, []).append(number)
    count = len(of_parts)
    others = [
        f"Each of the {count} runs added: {text}"
        if len(found) == count
        else f"Run{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of the {count} added: {text}"
        for text, found in numbers.items()
    ]
    return (*others, *following_from(total, _nobody_knows))


def not_following(run: Run) -> list[str]:
    """The warnings of a run that do not follow from what it holds, each once."""
    if not run.meta.warnings:
        return []
    following = {*following_from(run, _nobody_knows)}
    return [text for text in dict.fromkeys(run.meta.warnings) if text not in following]


def _nobody_knows(operator: str) -> bool:
    """Which operators have a formula, torch says: saved runs are read without it. All are listed by their names then,
    and what a run said of shapes that were not recorded stays, as a sentence of that run."""
    return False

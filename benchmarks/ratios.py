"""Run variants alternately, compute the ratios of their times, and show these in tables with their limits."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of neighboring measurements, its quartiles, and a confidence interval of the median.

    ``least`` and ``most``: the 95% confidence interval of the median, from order statistics, for any distribution. The
    quartiles show how single ratios vary.
    """

    median: float
    quartiles: tuple[float, float]
    least: float
    most: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """The ratios of two variants that ran alternately: the n-th time of one by the n-th time of the other."""
        ratios = sorted(our / their for our, their in zip(ours, theirs))
        low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        aside = math.ceil(0.98 * math.sqrt(len(ratios)))  # ranks from the middle: 1.96 deviations of a fair coin
        middle = len(ratios) // 2
        return cls(median, (low, high), ratios[max(middle - aside, 0)], ratios[min(middle + aside, len(ratios) - 1)])

    def __str__(self) -> str:
        return f"{self.median:.3f}x"

    @property
    def spread(self) -> str:
        return " to ".join(f"{quartile:.3f}" for quartile in self.quartiles)

    def verdict(self, limit: float, at_least: bool = False) -> str:
        """Whether the median is within its limit, and whether noise alone could have decided that."""
        noise = ", within noise" if self.least <= limit <= self.most else ""
        return verdict(self.median, limit, at_least) + noise


def verdict(value: float, limit: float, at_least: bool = False) -> str:
    """Whether a figure is within its limit."""
    kept = value >= limit if at_least else value <= limit
    return f"{'at least' if at_least else 'at most'} {limit:g}: {'met' if kept else 'MISSED'}"


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int, task: str) -> dict[str, list[float]]:
    """The results (seconds) of each variant in each round.

    Each round begins with another variant than the previous one, so that none has an advantage from its position. As in
    ``timeit``, the garbage collector is off, so that no variant collects another's garbage. A collection runs before
    each variant, which leaves the CPU's caches equally cold: else the first in a round is up to a third slower.
    """
    took: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        say(f"{task}: {number + 1} of {rounds}", again=number > 0)
        for name in names:
            gc.collect()
            gc.disable()
            try:
                took[name].append(ways[name]())
            finally:
                gc.enable()
        names.append(names.pop(0))
    return took


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print one table."""
    say("")
    print(f"\n{title}\n")
    aligned = ["left"] + ["right"] * (len(headings) - 2) + ["left"]
    print(tabulate(rows, headings, disable_numparse=True, colalign=aligned))
    if note:
        print(f"\n{note}")
    sys.stdout.flush()


def say(progress: str, again: bool = False) -> None:
    """Show the progress on stderr: on a terminal in one line that is overwritten, else in one line for each task.

    ``again``: the task is the same as in the previous call.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)
    elif progress and not again:
        print(progress, file=sys.stderr, flush=True)


def asked_quick(about: str | None) -> bool:
    """Read the command line of one question. Its only option is ``--quick``."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    return bool(parser.parse_args().quick)


def median_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"

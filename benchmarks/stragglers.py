"""How often the ranks report names a rank: in simulated jobs without a straggler, and with one, or with a slow host.

The own work of a step is that of some layers, each with a noise of its own. All ranks share the length of a step, which
varies. Now and then a rank takes several times as long in a step. Beside the rates: what the test takes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from benchmarks.ratios import say, show, verdict
from torchprof.ranks.significance import stragglers

LAYERS = 12
STEPS = 20
HICCUPS = 0.02
JOBS = {8: 200, 64: 200, 1024: 200, 4096: 20}
SLOWER = {"5%": 1.05, "10%": 1.1}
FOUND = {"5%": 0.9, "10%": 0.99}
OF_A_HOST = 8


def job(
    chance: random.Random, ranks: int, steps: int, *, slow: Sequence[int] = (), slower: float = 1.0
) -> list[list[int]]:
    """The own work of each rank in each step, in ns: the sum of layers with a noise of 3 % each."""
    lengths = [1e7 * chance.lognormvariate(0, 0.1) for _ in range(steps)]
    noise = 0.03 / LAYERS**0.5  # that of a sum of independent layers
    return [
        [
            round(
                length
                * (slower if rank in slow else 1)
                * chance.gauss(1, noise)
                * (1 + chance.expovariate(1 / 4) if chance.random() < HICCUPS else 1)
            )
            for length in lengths
        ]
        for rank in range(ranks)
    ]


def named(ranks: int, jobs: int, slow: Sequence[int] = (), slower: float = 1.0) -> tuple[float, float]:
    """The share of jobs in which exactly these ranks are named, or any if there is no slow one; and the seconds of a
    test."""
    chance = random.Random(ranks)
    hits = 0
    seconds = 0.0
    for _ in range(jobs):
        times = job(chance, ranks, STEPS, slow=slow, slower=slower)
        start = time.perf_counter()
        result = stragglers(times)
        seconds += time.perf_counter() - start
        assert result is not None
        hits += result.slow == tuple(slow) if slow else bool(result.slow)
    return hits / jobs, seconds / jobs


def measure(quick: bool) -> None:
    rows = []
    for ranks, jobs in JOBS.items():
        jobs = 2 if quick else jobs
        say(f"simulating jobs of {ranks:,} ranks")
        share, seconds = named(ranks, jobs)
        rows.append([f"{ranks:,}", "none, but any is named", f"{share:.1%}", verdict(share, 0), f"{seconds:.3f} s"])
        for words, slower in SLOWER.items():
            share, seconds = named(ranks, jobs, [3], slower)
            limit = verdict(share, FOUND[words], at_least=True)
            rows.append(["", f"one, {words} slower", f"{share:.1%}", limit, f"{seconds:.3f} s"])
        if ranks > 2 * OF_A_HOST:
            share, seconds = named(ranks, jobs, range(OF_A_HOST, 2 * OF_A_HOST), 1.05)
            rows.append(["", f"a host of {OF_A_HOST}, 5% slower", f"{share:.1%}", "", f"{seconds:.3f} s"])
    show(
        f"Jobs of {STEPS} steps in which exactly the slow ranks are named",
        ["Ranks", "Slow ranks", "Jobs", "Limits", "One test takes"],
        rows,
        f"{LAYERS} layers with 3% noise each; in {HICCUPS:.0%} of its steps a rank takes several times as long.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two jobs of each kind: shows that it runs")
    measure(parser.parse_args().quick)


if __name__ == "__main__":
    main()

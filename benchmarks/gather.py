"""What comparing the ranks of a large job inside of it takes: ``prof.gather()`` of more than 64 ranks, over a TCPStore.

One process plays all ranks, one after the other, so the store is as busy as in a job, but none of them waits. Counted
are bytes and requests; measured is the rank that gathers: it takes what the others sent, merges and compares it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.ratios import say, show, verdict

RANKS = (64, 256, 1024, 4096)
STEPS = 20
SECONDS = 1.0  # what the store takes, at 4,096 ranks
WORK_NS = 100_000_000


class Counting:
    """A store that counts requests and the bytes that are written."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = self.bytes = 0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def counted(*given: Any) -> Any:
            self.requests += 1
            if name == "set":
                self.bytes += len(given[1])
            start = time.perf_counter()
            result = function(*given)
            self.seconds += time.perf_counter() - start
            return result

        return counted


def recorded(ranks: int) -> Iterator[Any]:
    """The runs of the ranks of a job, as far as they are compared. One of them is 5 % slower."""
    from torchprof.run.layers import Layers
    from torchprof.run.lockstep import EXCHANGES, STEP, GroupOfRanks, Lockstep, LockstepKey
    from torchprof.run.meta import Meta
    from torchprof.run.rows import rows_of_lines
    from torchprof.run.run import Run
    from torchprof.run.samples import SampleKey, Spread
    from torchprof.run.words import FORWARD, OUTSIDE

    chance = random.Random(ranks)
    group = GroupOfRanks("0", "default_pg", ranks)
    rows = rows_of_lines((), {}, [()], [], [()], [()])
    for rank in range(ranks):
        slower = 1.05 if rank == ranks // 3 else 1
        times = [round(WORK_NS * slower * chance.gauss(1, 0.01)) for _ in range(STEPS)]
        waits = [round(1.3 * WORK_NS) - ns for ns in times]
        meta = Meta(("Net",), rank, ranks, wall_ns=STEPS * 2 * WORK_NS, steps=STEPS, machine=f"node{rank // 8:04}")
        samples = {SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns"): Spread.of([(0, round(1.5 * WORK_NS))])}
        lockstep = {
            LockstepKey(OUTSIDE, FORWARD, "cpu", STEP): Lockstep.of(rank, times),
            LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group): Lockstep.of(rank, waits),
        }
        yield Run((meta,), Layers(), rows, samples, lockstep=lockstep)


def of_so_many(ranks: int) -> list[str]:
    from torch import distributed

    from torchprof import merge
    from torchprof.analyze.ranks.selection import chosen_ranks
    from torchprof.profile.gather import RunsInStore
    from torchprof.profile.sigterm import DelayedSigterm

    runs = [*recorded(ranks)]
    server = distributed.TCPStore("localhost", 0, 1, True)
    sending, taking = Counting(server), Counting(server)
    with DelayedSigterm() as sigterm:
        for run in runs[1:]:
            RunsInStore(sending, 100, sigterm, ranks).put_comparison(run.meta.rank, run)
        start = time.perf_counter()
        others = [*RunsInStore(taking, 100, sigterm, ranks).take_comparisons([*range(1, ranks)])]
        taken = time.perf_counter()
        merged = merge([runs[0], *others])
        together = time.perf_counter()
        chosen = chosen_ranks(merged)
        end = time.perf_counter()
    assert ranks // 3 in chosen
    store = sending.seconds + taking.seconds
    return [
        f"{ranks:,}",
        f"{sending.bytes / (ranks - 1):,.0f}",
        f"{sending.requests + taking.requests:,}",
        f"{store:.2f} s",
        verdict(store, SECONDS),
        f"{taken - start - taking.seconds:.2f} s",
        f"{together - taken:.2f} s",
        f"{end - together:.2f} s",
    ]


def measure(quick: bool) -> None:
    rows = []
    for ranks in (65, 130) if quick else RANKS:
        say(f"comparing {ranks:,} ranks")
        rows.append(of_so_many(ranks))
    show(
        f"Comparing the ranks of a job of {STEPS} steps inside of it",
        ["Ranks", "Bytes a rank", "Requests", "In the store", "Limits", "Reading", "Merging", "Comparing"],
        rows,
        "In the store: the sum over all requests of all ranks, one after the other.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few ranks: shows that it runs, not what it costs")
    measure(parser.parse_args().quick)


if __name__ == "__main__":
    main()

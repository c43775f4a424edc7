"""What comparing the ranks of a large job inside of it takes, over a TCPStore: ``prof.gather()`` of more than 64 ranks,
and ``log_stragglers`` in each cycle of a training.

One process plays all ranks, one after the other, so the store is as busy as in a job, but none of them waits. Counted
are bytes and requests; measured is the rank that gathers or logs: it takes what the others sent, merges and compares
it. And a training that records 10 of 200 steps and logs, beside the same training without a profiler.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any
from unittest.mock import patch

from benchmarks.ratios import Ratio, median_ms, say, show, take_turns, verdict

RANKS = (64, 256, 1024, 4096)
STEPS = 20
SECONDS = 1.0  # what the store takes, at 4,096 ranks
WORK_NS = 100_000_000
STEP_NS = 150_000_000
CYCLE = 200  # the steps from one line of the log to the next
RECORDED = 10  # of these, in the training
SENDING = 1e-4  # of the time of a cycle, for a rank that sends
LOGGING = 0.1  # the same for rank 0 of 4,096, for which the others wait
TRAINING = 1.05  # the time of the training that records and logs, relative to the one without a profiler


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
    from torchprof.run.measures import SampleKey, Spread
    from torchprof.run.meta import Meta
    from torchprof.run.rows import rows_of_lines
    from torchprof.run.run import Run
    from torchprof.run.words import FORWARD, OUTSIDE

    chance = random.Random(ranks)
    group = GroupOfRanks("0", "default_pg", ranks)
    rows = rows_of_lines((), {})
    for rank in range(ranks):
        slower = 1.05 if rank == ranks // 3 else 1
        times = [round(WORK_NS * slower * chance.gauss(1, 0.01)) for _ in range(STEPS)]
        waits = [round(1.3 * WORK_NS) - ns for ns in times]
        meta = Meta(("Net",), rank, ranks, wall_ns=STEPS * 2 * WORK_NS, steps=STEPS, machine=f"node{rank // 8:04}")
        samples = {SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns"): Spread.of([(0, STEP_NS)])}
        lockstep = {
            LockstepKey(OUTSIDE, FORWARD, "cpu", STEP): Lockstep.of(rank, times),
            LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group): Lockstep.of(rank, waits),
        }
        yield Run((meta,), Layers(), rows, samples, lockstep=lockstep)


def of_so_many(ranks: int) -> list[str]:
    from torch import distributed

    from torchprof import merge
    from torchprof.profile.gather import RunsInStore
    from torchprof.profile.signals import DelayedSigterm
    from torchprof.ranks.sentences import chosen_ranks

    runs = [*recorded(ranks)]
    server = distributed.TCPStore("localhost", 0, 1, True)
    sending, taking = Counting(server), Counting(server)
    with DelayedSigterm() as sigterm:
        for run in runs[1:]:
            RunsInStore(sending, 100, sigterm, ranks).put_comparison(run.meta.rank, run)
        start = time.perf_counter()
        table = RunsInStore(taking, 100, sigterm, ranks)
        others = [*table.take_comparisons(table.wait_for_comparisons([*range(1, ranks)], ranks - 1))]
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


def in_each_cycle(ranks: int) -> list[str]:
    """A line of the log in three cycles. From the third on, ranks also delete what they sent two cycles before."""
    from torch import distributed

    from torchprof.profile import gather

    server = distributed.TCPStore("localhost", 0, 1, True)
    stores: list[Counting] = []

    def store_of_job(prefix: str) -> Counting:
        stores.append(Counting(distributed.PrefixStore(prefix, server)))
        return stores[-1]

    runs = [*recorded(ranks)]
    took = [0.0] * ranks
    with patch.object(gather, "store_of_job", store_of_job), patch.object(gather, "_numbers", repeat(0)):
        of_ranks = [gather.Comparisons() for _ in runs]
        for cycle in range(3):
            stores.clear()
            for rank in reversed(range(ranks)):
                start = time.perf_counter()
                of_ranks[rank].add(runs[rank], CYCLE * cycle, (CYCLE * cycle, CYCLE * (cycle + 1) - 1), rank, ranks)
                took[rank] = time.perf_counter() - start
    of_cycle = CYCLE * STEP_NS / 1e9
    sending = statistics.median(took[1:])
    return [
        f"{ranks:,}",
        f"{sum(store.bytes for store in stores) / (ranks - 1):,.0f}",
        f"{sending * 1e3:.2f} ms",
        f"{sending / of_cycle:.5%}",
        verdict(sending / of_cycle, SENDING),
        f"{took[0]:.2f} s",
        f"{took[0] / of_cycle:.2%}",
        verdict(took[0] / of_cycle, LOGGING),
    ]


def training(quick: bool) -> list[str]:
    """The time of a step of a training on one rank, with and without."""
    import torch
    from torch import nn

    import torchprof
    from torchprof.record.this_process import Job

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.rand(128, 512)

    def steps(prof: torchprof.Profile | None) -> float:
        start = time.perf_counter()
        for _ in range(CYCLE):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if prof is not None:
                prof.step()
        return (time.perf_counter() - start) / CYCLE

    def with_log() -> float:
        schedule = torch.profiler.schedule(wait=CYCLE - RECORDED - 1, warmup=1, active=RECORDED)
        with torchprof.Profile(model, schedule=schedule, on_trace_ready=torchprof.log_stragglers) as prof:
            return steps(prof)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with patch("torchprof.profile.cycle.this_job", lambda *_: Job(0, 2)):  # what ranks of a job record
        took = take_turns({"with": with_log, "without": lambda: steps(None)}, 2 if quick else 6, "training")
    torch.distributed.destroy_process_group()
    ratio = Ratio.of(took["with"], took["without"])
    return [median_ms(took["without"]), median_ms(took["with"]), str(ratio), ratio.spread, ratio.verdict(TRAINING)]


def measure(quick: bool) -> None:
    logging.getLogger("torchprof").disabled = True
    ranks_of_jobs = (65, 130) if quick else RANKS
    rows, of_cycles = [], []
    for ranks in ranks_of_jobs:
        say(f"comparing {ranks:,} ranks")
        rows.append(of_so_many(ranks))
        of_cycles.append(in_each_cycle(ranks))
    show(
        f"Comparing the ranks of a job of {STEPS} steps inside of it",
        ["Ranks", "Bytes a rank", "Requests", "In the store", "Limits", "Reading", "Merging", "Comparing"],
        rows,
        "In the store: the sum over all requests of all ranks, one after the other.",
    )
    show(
        f"A line of the log every {CYCLE} steps of {STEP_NS / 1e6:.0f} ms",
        ["Ranks", "Bytes a rank", "A rank sends", "of a step", "Limit", "Rank 0 compares", "of a step", "Limit"],
        of_cycles,
        "Of a step: the time divided by that of all steps from one line to the next.",
    )
    show(
        f"A step of a training in which {RECORDED} of {CYCLE} steps are recorded, and a line is logged",
        ["Without", "With", "Ratio", "Quartiles", "Limit"],
        [training(quick)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few ranks: shows that it runs, not what it costs")
    measure(parser.parse_args().quick)


if __name__ == "__main__":
    main()

"""Runs of jobs in which one rank has more work than the others, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from build.hand_made_ranks import NOWHERE, everybody, lockstep, run_of_ranks

from torchprof.ranks import Balance
from torchprof.ranks.compared import OneRank
from torchprof.run.lockstep import GAP, WORK, GroupOfRanks, LockstepKey
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

FOUR = range(4)

PAIR = GroupOfRanks("7", "mesh_tp", 2, "[0, 1]")


def even(ns: int, ranks: Any = FOUR, steps: int = 5) -> dict[int, list[int]]:
    return {rank: [ns] * steps for rank in ranks}


def rank(balance: Balance, number: int) -> OneRank:
    (found,) = [one for one in balance.ranks if one.rank == number]
    return found


def planted(steps: int = 20) -> Run:
    """Rank 2 takes 13 ms instead of 4 in Net.b.0, in 18 of 20 steps; in the other two rank 0 takes 30. All others wait
    for it in the all-reduce that Net asks for, which takes 1 ms of those who come last."""
    here = {number: [4_000_000] * steps for number in FOUR}
    here[2] = [13_000_000] * 18 + [4_000_000] * (steps - 18)
    here[0] = [4_000_000] * 18 + [30_000_000] * (steps - 18)
    own = {
        ("Net.a", FORWARD): even(10_000_000, steps=steps),
        ("Net.b.0", BACKWARD): here,
        (NOWHERE, FORWARD): even(2_000_000, steps=steps),
    }
    reduced = {
        number: [1_000_000 + max(ns[at] for ns in here.values()) - here[number][at] for at in range(steps)]
        for number in FOUR
    }
    return run_of_ranks(own, {("Net", BACKWARD, "allreduce", everybody(4)): reduced})


MS = 1_000_000


def fed_slowly(steps: int = 8, ranks: int = 4, more: int = 60, **others: Any) -> Run:
    """All ranks compute for 10 ms on the device; rank 2 begins 60 ms later, in each step of 75, and all others wait for
    it in the all-reduce of 4 ms."""
    late = {number: [more * MS if number == 2 else 0] * steps for number in range(ranks)}
    reduced = {number: [(4 + more - late[number][0] // MS) * MS] * steps for number in range(ranks)}
    device = run_of_ranks(
        {("Net.a", FORWARD): even(10 * MS, range(ranks), steps)},
        {("Net", BACKWARD, "allreduce", everybody(ranks)): reduced},
        device="device",
        parts={"step_ns": even(75 * MS, range(ranks), steps), **others},
    )
    cpu = run_of_ranks({("Net.a", FORWARD): even(8 * MS, range(ranks), steps)})
    gaps = {number: [2 * MS + ns for ns in times] for number, times in late.items()}
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", GAP)
    where = key if not others else key._replace(what=WORK)
    return replace(device, lockstep={**cpu.lockstep, **device.lockstep, where: lockstep(gaps, where)})


def experts() -> Run:
    """Two experts, one on each rank; that of rank 1 gets three quarters of the work."""
    own = {
        ("Net.a", FORWARD): even(50, range(2)),
        ("Net.b.0", FORWARD): {0: [100] * 5},
        ("Net.b.1", FORWARD): {1: [300] * 5},
    }
    flops = {("Net.a", FORWARD, 0): 70, ("Net.a", FORWARD, 1): 70}
    flops |= {("Net.b.0", FORWARD, 0): 1_000, ("Net.b.1", FORWARD, 1): 3_000}
    peaks = {("Net.b", FORWARD, 0): 4096, ("Net.b", FORWARD, 1): 12288, ("Net.b.0", FORWARD, 0): 4096}
    return run_of_ranks(own, flops=flops, peaks=peaks, ranks_of={"Net.b.0": (0,), "Net.b.1": (1,)})

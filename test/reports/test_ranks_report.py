"""The ranks report: its sentences and its tables, cell by cell, on hand-made runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from build.golden import drawn
from build.hand_made_ranks import NOWHERE, everybody, lockstep, run_of_ranks
from build.jobs import PAIR, even, experts, fed_slowly, planted
from build.warnings import run_warnings

import torchprof
from torchprof import Run, TorchprofError
from torchprof.first_screen.verdict import lines_of_run
from torchprof.ranks import balance_of
from torchprof.ranks.sentences import chosen_ranks, hanging_ranks, straggler, with_comparison
from torchprof.ranks.slow import Slow
from torchprof.run.collectives import Entered, Unfinished
from torchprof.run.lockstep import GAP, STEP, Lockstep, LockstepKey
from torchprof.run.merge import add_cycle
from torchprof.run.meta import MeshDim
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

MS = 1_000_000
RANKS, LAYERS, COLLECTIVES = 1, 2, 3  # which section of the report


def section(run: Run, number: int, **options: Any) -> list[str]:
    return run.report("ranks", **options).split("\n\n")[number].splitlines()


def table(run: Run, number: int, **options: Any) -> list[dict[str, str]]:
    lines = section(run, number, **options)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(rows[0], row)) for row in rows[2:] if len(row) == len(rows[0])]


def notes(run: Run, number: int, **options: Any) -> list[str]:
    return [line for line in section(run, number, **options)[2:] if "|" not in line]


def sentence(run: Run) -> str:
    return "\n".join(section(run, 0))


def line(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def of_work(*ns: int, steps: int = 4, **meta: Any) -> Run:
    """A run of one layer in which each rank works for so many ns in each step."""
    return run_of_ranks({("Net.a", FORWARD): {rank: [one] * steps for rank, one in enumerate(ns)}}, **meta)


# Sentences


def test_the_text_of_ranks(golden: Callable[..., None]) -> None:
    """test_balance.py calculates these figures. Net.b.0 in backward takes 6.6, 4, 12.1 and 4 ms: 26.7 in all, so the
    mean is 6.675 and the imbalance 1.81. In the all-reduce of Net the ranks wait for 8.1, 10.7, 2.6 and 10.7 ms."""
    golden(drawn(planted(), "ranks"), drawn(planted(), "ranks", top=2, depth=0))


def of_flops(more: int) -> Run:
    flops = {("Net.a", FORWARD, rank): 10 + more * (rank == 2) for rank in range(3)}
    return of_work(10 * MS, 10 * MS, 14 * MS, flops=flops)


CALLED = (Entered(0, BACKWARD, "all_reduce", 1),)
WAITING = [Unfinished(rank, 9_000 * MS, 8_900 * MS, 0, BACKWARD, "all_reduce", True, CALLED) for rank in (0, 2)]


def test_the_sentences_on_ranks(golden: Callable[..., None]) -> None:
    """test_balance.py calculates these figures. What a slow rank costs: 2 ms of a step of 25."""
    few = {("Net.a", FORWARD): {0: [100, 120, 90], 1: [100, 90, 110]}}
    costs = {("Net.a", FORWARD): {0: [10 * MS] * 5, 1: [12 * MS] * 5}}
    fed = fed_slowly(step_data_ns={rank: [(63 if rank == 2 else 3) * MS] * 8 for rank in range(4)})
    runs = {
        "as many FLOPs, 1.4 times as many": [of_flops(0), of_flops(4)],
        "all steps are alike: the limit is 2 %": [of_work(10 * MS, 10_100_000)],
        "steps vary, or are few": [run_of_ranks(few), run_of_ranks({("Net.a", FORWARD): {0: [100], 1: [105]}})],
        "costs 2 of 25 ms": [run_of_ranks(costs, parts={"step_ns": even(25 * MS, range(2))})],
        "late, also in loading data, perhaps by chance": [fed_slowly(), fed, fed_slowly(steps=1)],
        "without all ranks": [torchprof.merge(fed_slowly().of_rank(rank) for rank in range(3))],
        "without collectives": [run_of_ranks({("Net.a", FORWARD): even(10 * MS)})],
        "4 ms more own work, but it waits for 58 ms": [with_more_work(14, [58, 62, 2, 62])],
        "60 ms late": [with_more_work(50, [2, 62, 42, 62, 62, 62])],
        "late, though its kernels are not slow": [with_more_work(14, [2, 62, 42, 62, 62, 62])],
        "rank 2 is late by less than the additional work of rank 0": [with_more_work(50, [22, 22, 2, 22, 22, 22])],
        "a hang": [hung(WAITING[0], Unfinished(1, 8_950 * MS, 8_940 * MS, 1, FORWARD), WAITING[1])],
        "a hang in an operator": [hung(*(replace(one, name="aten::mm", waits=False) for one in WAITING))],
        "no hang: a step that had just begun, one as long as others, work after the last step": [
            hung(*(Unfinished(rank, 20 * MS, 19 * MS, 0, FORWARD) for rank in range(3))),
            hung(Unfinished(0, 9_000 * MS, 100 * MS, 1, FORWARD)),
            hung(Unfinished(0, 9_000 * MS, 8_900 * MS, OUTSIDE, FORWARD)),
        ],
    }
    verdicts = {
        "straggler": planted(),
        "late": with_more_work(14, [58, 62, 2, 62]),
        "none": of_work(10 * MS, 10_100_000),
    }
    golden(
        {title: "\n".join(map(sentence, those)) for title, those in runs.items()},
        {f"verdict: {title}": "\n".join(lines_of_run(run)) for title, run in verdicts.items()},
    )


def test_missing_ranks_and_the_mesh(golden: Callable[..., None]) -> None:
    def mesh(rank: int) -> dict[str, Any]:
        return {"mesh": (MeshDim("dp", 3, rank // 2), MeshDim("tp", 2, rank % 2))}

    warned = run_warnings("A warning of several ranks is shown once.")
    golden(
        of_work(1000, 1000, world_size=6, metas={0: mesh(0), 1: mesh(1)}, warnings=warned).report("ranks"),
        of_work(1000, 1000, world_size=3, metas={1: mesh(1)}).report("ranks"),
    )


def test_without_steps_times_are_of_a_cycle_or_of_all(golden: Callable[..., None]) -> None:
    cycles = of_work(10 * MS, 20 * MS, steps=2, metas={rank: {"steps": 0, "cycles": 2} for rank in range(2)})
    once = of_work(10 * MS, 20 * MS, steps=1, metas={rank: {"steps": 0} for rank in range(2)})
    golden(cycles.report("ranks"), once.report("ranks"))


def test_a_single_rank_is_not_compared(golden: Callable[..., None]) -> None:
    golden(of_work(1000).report("ranks"), of_work(1000, world_size=8).report("ranks"))


def with_more_work(ms: int, reduced: Sequence[int]) -> Run:
    """In each step of 80 ms, rank 0 has kernels of ``ms`` ms and the others of 10 ms. ``reduced``: each rank's time in
    the all-reduce."""
    ranks = range(len(reduced))
    return run_of_ranks(
        {("Net.a", FORWARD): {rank: [(10 if rank else ms) * MS] * 8 for rank in ranks}},
        {
            ("Net", BACKWARD, "all_reduce", everybody(len(ranks))): {
                rank: [ns * MS] * 8 for rank, ns in enumerate(reduced)
            }
        },
        device="device",
        parts={"step_ns": even(80 * MS, ranks, 8)},
    )


def hung(*where: Unfinished, steps: int = 4) -> Run:
    run = run_of_ranks(
        {("Net.a", FORWARD): even(10 * MS, range(3), steps)},
        {("Net", BACKWARD, "all_reduce", everybody(3)): even(MS, range(3), steps)},
        parts={"step_ns": even(12 * MS, range(3), steps)},
    )
    return replace(run, unfinished=where)


@pytest.mark.parametrize("calls_of_rank_0", [1, 2])
def test_a_step_in_two_cycles_has_the_collectives_of_both(calls_of_rank_0: int) -> None:
    """Rank 1 called the all-reduce once, before its last cycle began; all hang in Net.a. Ranks 0 and 2 have one
    cycle."""
    alone = Unfinished(0, 9_000 * MS, 8_900 * MS, 1, FORWARD, entered=(Entered(0, BACKWARD, "all_reduce", 1),))
    more = replace(alone, entered=(Entered(0, BACKWARD, "all_reduce", calls_of_rank_0),))
    run = hung(more, replace(alone, rank=1, ns=MS, since_ns=MS), replace(alone, rank=2))
    last_cycle = hung(replace(alone, rank=1, entered=(), began_before=True)).of_rank(1)
    text = sentence(torchprof.merge([run.of_rank(0), add_cycle(run.of_rank(1), last_cycle), run.of_rank(2)]))
    assert "at the end of the recording, after 9.001s: ranks 0 to 2 were in Net.a in forward for 8.900s." in text
    missed = "Ranks 1 and 2 had not called all_reduce of Net in backward, which others had."
    assert (missed in text) == ("had not called" in text) == (calls_of_rank_0 == 2)


def test_a_comparison_of_all_ranks_knows_a_hang_and_chooses_the_rank_that_the_others_wait_for() -> None:
    run = hung(WAITING[0], Unfinished(1, 8_950 * MS, 8_940 * MS, 1, FORWARD), WAITING[1])
    comparison = run.to_compare(layers=True)
    missed = "Rank 1 had not called all_reduce of Net in backward"
    assert f"{missed}, which others had." in sentence(comparison)
    assert hanging_ranks(comparison) == [1] and 1 in chosen_ranks(comparison)
    assert missed in str(with_comparison(run.of_rank(1), comparison).warnings[0])
    assert hanging_ranks(hung()) == []


def test_a_certain_late_rank_is_named_before_one_that_may_be_slow_by_chance() -> None:
    run = fed_slowly()
    balance = balance_of(run)
    slow = Slow((1,), (20 * MS,), 10.0 * MS, may_be_chance=True)
    assert balance.late is not None and not balance.late.may_be_chance
    assert straggler(run, replace(balance, slow=slow)).startswith("Rank 2 is the straggler")


# The table of ranks


def test_memory_and_flops_of_ranks(golden: Callable[..., None]) -> None:
    flops = {("Net.a", FORWARD, rank): 1000 * (rank + 1) for rank in range(3)}
    memory = {(0, "cuda:0"): 4096, (1, "cuda:1"): 2048, (2, "cuda:2"): 1024, (1, "cpu"): 512}
    run = of_work(1000, 1000, 1000, flops=flops, uncounted={("Net.a", FORWARD, 1): 2}, memory=memory)
    golden(run.report("ranks"))


def test_with_many_ranks_the_slowest_and_the_fastest_are_shown(golden: Callable[..., None]) -> None:
    """Min, median and max are of all ranks, not only of those shown."""
    run = of_work(*((20 - rank) * MS for rank in range(17)))
    golden(*("\n".join(section(run, RANKS, **options)) for options in ({}, {"top": 1})))
    assert len(table(of_work(*[MS] * 16), RANKS)) == 16 + 3


def test_notes_name_the_device() -> None:
    run = of_work(10 * MS, 10 * MS, 20 * MS, device="device", metas={rank: {"device": "cuda"} for rank in range(3)})
    assert notes(run, RANKS) == ["Own work is time of the CUDA, without communication."]
    assert "Rank 2 is the straggler: its own work takes 20.000ms a step" in sentence(run)
    assert line(table(run, LAYERS), Module="Net.a")["Max"] == "20.000ms"


def test_of_many_steps_a_sample_is_compared() -> None:
    """300 steps: the sum is over all of them, whichever are in the sample."""
    runs = [
        replace(one, lockstep={key: Lockstep.of(rank, [10 * MS + 5 * MS * rank] * 300)})
        for key in [LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)]
        for rank, one in enumerate(of_work(MS, MS, steps=300).of_rank(rank) for rank in range(2))
    ]
    run = torchprof.merge(runs)
    rows = table(run, RANKS)
    assert (rows[0]["Rank"], rows[0]["Own work a step"], rows[0]["Slowest"]) == ("1", "15.000ms", "256 of 256")
    assert "are of 256 steps or calls: a random sample" in notes(run, RANKS)[-1]
    assert not any("a random sample" in note for note in notes(of_work(10, 20), RANKS))


# The table of layers


def by_several_columns() -> Run:
    """In forward Net.a takes 80 ms on both ranks; in backward Net.b.0 90 and 10 ms, Net itself 1 and 50."""
    own = {
        ("Net.a", FORWARD): {0: [80 * MS], 1: [80 * MS]},
        ("Net.b.0", BACKWARD): {0: [90 * MS], 1: [10 * MS]},
        ("Net", BACKWARD): {0: [MS], 1: [50 * MS]},
    }
    flops = {("Net.a", FORWARD, 0): 300, ("Net.a", FORWARD, 1): 100, ("Net", FORWARD, 1): 200}
    return run_of_ranks(own, {("Net.b.1", FORWARD, "all_gather", PAIR): {0: [9 * MS], 1: [MS]}}, flops=flops)


@pytest.mark.parametrize(
    ("sort_by", "heading", "figures"),
    [
        ("min", "Min", ["80.000ms", "80.000ms", "60.000ms", "10.000ms", "10.000ms", "–", "–"]),
        ("Max", "Max", ["91.000ms", "90.000ms", "90.000ms", "80.000ms", "80.000ms", "–", "–"]),
        ("max/mean", "Max/mean", ["1.80", "1.80", "1.21", "1.00", "1.00", "–", "–"]),
        ("flops_max/mean", "FLOPs max/mean", ["1.50", "1.00", "–", "–", "–", "–", "–"]),
        ("waiting", "Waiting", ["8.000ms", "8.000ms", "8.000ms", "", "", "", ""]),
    ],
)
def test_layers_are_sorted_by_another_column(sort_by: str, heading: str, figures: list[str]) -> None:
    assert [row[heading] for row in table(by_several_columns(), LAYERS, sort_by=sort_by)] == figures


def test_layers_that_only_some_ranks_have(golden: Callable[..., None]) -> None:
    """0.1 and 0.3 us: the layer above has 1.5 times the mean in time, in FLOPs and in memory."""
    golden(experts().report("ranks"))


def test_flops_that_some_ranks_counted_partly() -> None:
    flops = {("Net.a", FORWARD, 0): 300, ("Net.a", FORWARD, 1): 100}
    run = of_work(10, 10, flops=flops, uncounted={("Net.a", FORWARD, 1): 2})
    assert line(table(run, LAYERS), Module="Net.a")["FLOPs max/mean"] == "1.50"
    assert notes(run, LAYERS)[-1] == "FLOPs are lower bounds: some operators have no formula."
    not_measured = of_work(10, 10, flops=flops, metas={1: {"measured": ("cpu_ns",)}})
    assert line(table(not_measured, LAYERS), Module="Net.a")["FLOPs max/mean"] == "–"
    with pytest.raises(TorchprofError, match="was not measured"):
        not_measured.report("ranks", sort_by="flops_max/mean")


# The table of collectives


def test_waiting_that_is_unknown_or_a_lower_bound(golden: Callable[..., None]) -> None:
    own = {("Net.a", FORWARD): even(50, range(2))}
    collectives: dict[Any, Any] = {
        ("Net.a", FORWARD, "all_reduce", everybody(4)): {0: [3000] * 5, 1: [1000] * 5},
        (NOWHERE, BACKWARD, "barrier", None): {0: [3000] * 5, 1: [1000] * 5},
        ("Net.b", FORWARD, "all_gather", PAIR): {0: [3000] * 5, 1: [1000] * 4},
    }
    run = run_of_ranks(own, collectives, world_size=4)
    golden(drawn(run, "ranks"), "\n".join(section(run, COLLECTIVES, top=1)))


def test_a_rank_that_is_slow_outside_of_operators() -> None:
    """For example, a rank that waits for data: that time has its own row, and the sentence names it."""
    run = of_work(1_000_000, 1_000_000)
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)
    idle = {0: [500_000] * 4, 1: [30_000_000] * 4}
    whole = {rank: [ns + 1_000_000 for ns in times] for rank, times in idle.items()}
    gaps = key._replace(what=GAP)
    more = {key: lockstep(whole, key), gaps: lockstep(idle, gaps)}
    run = replace(run, lockstep={**run.lockstep, **more})
    assert "Most of the difference is in no operator (Python, or waiting for data): 29.500ms a step." in sentence(run)
    assert "(in no operator)" in run.report("ranks")


def test_flops_without_those_of_missing_ranks_are_a_lower_bound() -> None:
    flops = {("Net.a", FORWARD, rank): 10 for rank in range(2)}
    run = run_of_ranks({("Net.a", FORWARD): even(50, range(2))}, flops=flops, world_size=3)
    assert "FLOPs of all ranks together: ≥ 20." in run.report("ranks")

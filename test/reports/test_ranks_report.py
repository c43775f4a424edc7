"""The ranks report: its sentences and its tables, cell by cell, on hand-made runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from build.hand_made_ranks import NOWHERE, everybody, lockstep, run_of_ranks
from build.jobs import PAIR, even, experts, fed_slowly, planted
from build.warnings import run_warnings

import torchprof
from torchprof import Run, TorchprofError
from torchprof.analyze.first_screen.verdict import ran
from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.ranks.hangs import hanging_ranks
from torchprof.analyze.ranks.selection import chosen_ranks, with_comparison
from torchprof.analyze.ranks.sentences import _straggler
from torchprof.analyze.ranks.slow import Slow
from torchprof.run.cycles import add_cycle
from torchprof.run.lockstep import GAP, STEP, Lockstep, LockstepKey
from torchprof.run.meta import MeshDim
from torchprof.run.unfinished import Entered, Unfinished
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


def test_the_slow_ranks_in_words() -> None:
    """test_balance.py calculates these figures."""
    assert sentence(planted()) == (
        "4 ranks. Rank 2 is the straggler: its own work takes 25.000ms a step, that of the others 16.000ms (median). "
        "It was the slowest in 18 of 20 steps and the last to arrive in 18 of 20 collectives. The others wait in "
        "collectives for 10.700ms a step (median). Most of the difference is Net.b.0 in backward: 9.000ms a step."
    )


def test_the_verdict_names_the_straggler() -> None:
    assert ran(planted())[-1] == (
        "Rank 2 is the straggler: its own work takes 25.000ms a step, that of the others 16.000ms (median)."
    )
    assert "straggler" not in "\n".join(ran(of_work(10 * MS, 10_100_000)))


def test_one_slow_rank_in_words() -> None:
    run = of_work(10 * MS, 10 * MS, 14 * MS, flops={("Net.a", FORWARD, rank): 4_000 for rank in range(3)})
    assert sentence(run) == (
        "3 ranks. Rank 2 is the straggler: its own work takes 14.000ms a step, that of the others 10.000ms (median). "
        "It was the slowest in 4 of 4 steps. Most of the difference is Net.a in forward: 4.000ms a step. It has as "
        "many FLOPs as the others (median): the same work takes longer there."
    )
    more = of_work(
        10 * MS, 10 * MS, 14 * MS, flops={("Net.a", FORWARD, rank): 10 + 4 * (rank == 2) for rank in range(3)}
    )
    assert sentence(more).endswith(" It has more work: 1.40 times the FLOPs of the others (median).")


def test_no_rank_stands_out() -> None:
    """All steps are alike, so nothing is left to chance, and the limit is 2 %."""
    run = of_work(10 * MS, 10_100_000)
    assert sentence(run) == (
        "2 ranks. No straggler found: own work takes 10.000ms to 10.100ms a step (medians over the steps). A rank "
        "whose own work takes 2% longer would most likely have been found."
    )


def test_how_slow_a_rank_must_be_if_steps_vary_or_are_few() -> None:
    own = {("Net.a", FORWARD): {0: [100, 120, 90], 1: [100, 90, 110]}}
    assert sentence(run_of_ranks(own)).endswith(
        "Only a rank whose own work takes many times as long would have been found."
    )
    assert sentence(run_of_ranks({("Net.a", FORWARD): {0: [100], 1: [105]}})).endswith(
        "Steps are too few, or were not kept or not matched between ranks: only a rank whose own work takes 10% "
        "longer would have been named."
    )


def test_what_a_slow_rank_costs_in_words() -> None:
    own = {("Net.a", FORWARD): {0: [10 * MS] * 5, 1: [12 * MS] * 5}}
    run = run_of_ranks(own, parts={"step_ns": even(25 * MS, range(2))})
    assert sentence(run).startswith(
        "2 ranks. Rank 1 is the straggler: its own work takes 12.000ms a step, that of the others 10.000ms (median); "
        "without that, a step would be up to 8% shorter. It was the slowest in 5 of 5 steps."
    )


def test_missing_ranks_and_the_mesh() -> None:
    def mesh(rank: int) -> dict[str, Any]:
        return {"mesh": (MeshDim("dp", 3, rank // 2), MeshDim("tp", 2, rank % 2))}

    run = of_work(1000, 1000, world_size=6, metas={0: mesh(0), 1: mesh(1)})
    assert sentence(run).startswith("2 ranks; mesh: dp 3 × tp 2. Ranks 2 to 5 of 6 are missing in this run. No ")
    assert "missing" not in "".join(section(run, -1))
    rows = table(run, RANKS)
    assert [(row["Rank"], row["dp"], row["tp"]) for row in rows[:2]] == [("0", "0", "0"), ("1", "0", "1")]
    assert "Rank 2 of 3 is missing in this run." in sentence(of_work(1000, 1000, world_size=3))
    one_knows = of_work(1000, 1000, metas={1: mesh(1)})
    assert [row["tp"] for row in table(one_knows, RANKS)[:2]] == ["–", "1"]


def test_without_steps_times_are_of_a_cycle_or_of_all() -> None:
    run = of_work(10 * MS, 20 * MS, steps=2, metas={rank: {"steps": 0, "cycles": 2} for rank in range(2)})
    assert "takes 20.000ms a cycle" in sentence(run)
    assert "the slowest in 2 of 2 cycles" in sentence(run)
    assert table(run, RANKS)[0]["Own work a cycle"] == "20.000ms"
    once = of_work(10 * MS, 20 * MS, steps=1, metas={rank: {"steps": 0} for rank in range(2)})
    assert "takes 20.000ms, that of the others 10.000ms (median). This may be chance: " in sentence(once)
    assert table(once, RANKS)[0]["Own work"] == "20.000ms"


def test_a_single_rank_is_not_compared() -> None:
    assert of_work(1000).report("ranks") == (
        "This run has only rank 0: there is no other rank to compare. torchprof.merge, or `torchprof show` with the "
        "files of all ranks, makes one run of them; prof.gather() does so inside of the job."
    )
    assert "only rank 0, of the 8 of the job: there is no other rank to compare. Ranks 1 to 7 gave no run" in of_work(
        1000, world_size=8
    ).report("ranks")


def test_own_work_that_no_rank_measured() -> None:
    run = run_of_ranks({("Net.a", FORWARD): even(10, range(2))})
    unknown = Run(run.metas, run.layers, run.rows, {})
    assert sentence(unknown) == "2 ranks. Stragglers are unknown: so is the own work of all ranks."
    assert [row["Own work a step"] for row in table(unknown, RANKS)] == ["–"] * 5
    assert [row["Slowest"] for row in table(unknown, RANKS)] == ["–", "–", "", "", ""]
    assert table(unknown, LAYERS) == []


def test_a_late_rank_in_words() -> None:
    """Its kernels are as fast as those of the others, so its device time is not longer."""
    assert sentence(fed_slowly()) == (
        "4 ranks. Rank 2 is the straggler: in collectives the others wait 60.000ms a step longer than it (median), 80% "
        "of a step. Most of the difference is in no operator (Python, or waiting for data): 60.000ms a step."
    )
    fed = fed_slowly(step_data_ns={rank: [(63 if rank == 2 else 3) * MS] * 8 for rank in range(4)})
    assert sentence(fed).endswith(" Most of the difference is loading data: 60.000ms a step.")
    assert "This may be chance: too few steps" in sentence(fed_slowly(steps=1))


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


def test_the_rank_that_costs_more_time_is_named_first() -> None:
    """Rank 0 has 4 ms more own work than the others, but it waits for 58 ms in each step."""
    assert sentence(with_more_work(14, [58, 62, 2, 62])) == (
        "4 ranks. Rank 2 is the straggler: in collectives the others wait 60.000ms a step longer than it (median), 75% "
        "of a step. The own work of rank 0 takes longer, too: 14.000ms a step, that of the others 10.000ms (median). "
        "It was the slowest in 8 of 8 steps, but the last to arrive in 0 of 8 collectives. Most of the difference is "
        "Net.a in forward: 4.000ms a step."
    )


@pytest.mark.parametrize(
    ("ms", "reduced"),
    [
        (50, [2, 62, 42, 62, 62, 62]),  # rank 0 is 60 ms late
        (14, [2, 62, 42, 62, 62, 62]),  # late, though its kernels are not slow
        (50, [22, 22, 2, 22, 22, 22]),  # rank 2 is late by less than the additional work of rank 0
    ],
)
def test_a_late_rank_that_costs_less_time_is_named_second(ms: int, reduced: Sequence[int]) -> None:
    text = sentence(with_more_work(ms, reduced))
    assert text.startswith(f"6 ranks. Rank 0 is the straggler: its own work takes {ms}.000ms a step")
    assert " Rank 2 is late, too: in collectives the others wait 20.000ms a step longer than it" in text


def hung(*where: Unfinished, steps: int = 4) -> Run:
    run = run_of_ranks(
        {("Net.a", FORWARD): even(10 * MS, range(3), steps)},
        {("Net", BACKWARD, "all_reduce", everybody(3)): even(MS, range(3), steps)},
        parts={"step_ns": even(12 * MS, range(3), steps)},
    )
    return replace(run, unfinished=where)


def test_the_places_of_ranks_in_a_hang() -> None:
    called = (Entered(0, BACKWARD, "all_reduce", 1),)
    waiting = [Unfinished(rank, 9_000 * MS, 8_900 * MS, 0, BACKWARD, "all_reduce", True, called) for rank in (0, 2)]
    run = hung(waiting[0], Unfinished(1, 8_950 * MS, 8_940 * MS, 1, FORWARD), waiting[1])
    assert sentence(run).startswith(
        "3 ranks. A step was still running at the end of the recording, after 9.000s: ranks 0 and 2 were in "
        "all_reduce of Net in backward for 8.900s; rank 1 was in Net.a in forward for 8.940s. Rank 1 had not "
        "called all_reduce of Net in backward, which others had. No straggler found"
    )
    in_op = hung(*(replace(one, name="aten::mm", waits=False) for one in waiting))
    assert "ranks 0 and 2 were in aten::mm of Net in backward for 8.900s. No straggler" in sentence(in_op)


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
    called = (Entered(0, BACKWARD, "all_reduce", 1),)
    waiting = [Unfinished(rank, 9_000 * MS, 8_900 * MS, 0, BACKWARD, "all_reduce", True, called) for rank in (0, 2)]
    run = hung(waiting[0], Unfinished(1, 8_950 * MS, 8_940 * MS, 1, FORWARD), waiting[1])
    comparison = run.to_compare(layers=True)
    assert "Rank 1 had not called all_reduce of Net in backward, which others had." in sentence(comparison)
    assert hanging_ranks(comparison) == [1] and 1 in chosen_ranks(comparison)
    warning = with_comparison(run.of_rank(1), comparison).warnings[0]
    assert "Rank 1 had not called all_reduce of Net in backward" in str(warning)
    assert hanging_ranks(hung()) == []


def test_without_all_ranks_it_is_unknown_for_whom_others_wait() -> None:
    """Rank 2 loads data for 60 ms in each step, and all others wait for it. Without rank 3 nothing tells."""
    unknown = "Whether others wait for a rank is unknown: ranks are missing, or groups or steps are unknown."
    assert "Rank 2 is the straggler" in sentence(fed_slowly()) and unknown not in sentence(fed_slowly())
    text = sentence(torchprof.merge(fed_slowly().of_rank(rank) for rank in range(3)))
    assert "No straggler found" in text and unknown in text
    assert unknown not in sentence(run_of_ranks({("Net.a", FORWARD): even(10 * MS)}))


def test_a_certain_late_rank_is_named_before_one_that_may_be_slow_by_chance() -> None:
    run = fed_slowly()
    balance = balance_of(run)
    slow = Slow((1,), (20 * MS,), 10.0 * MS, may_be_chance=True)
    assert balance.late is not None and not balance.late.may_be_chance
    assert _straggler(run, replace(balance, slow=slow)).startswith("Rank 2 is the straggler")


def test_without_a_hang_there_is_no_sentence_on_places() -> None:
    """A step that had just begun, a step as long as the others, and work after the last step."""
    assert "still running" not in sentence(hung(*(Unfinished(rank, 20 * MS, 19 * MS, 0, FORWARD) for rank in range(3))))
    saved = Unfinished(0, 9_000 * MS, 8_900 * MS, OUTSIDE, FORWARD)
    assert "still running" not in sentence(hung(saved))
    evaluated = Unfinished(0, 9_000 * MS, 100 * MS, 1, FORWARD)
    assert "still running" not in sentence(hung(evaluated))


# The table of ranks


def test_a_row_for_each_rank_the_slowest_first() -> None:
    rows = table(planted(), RANKS)
    assert [row["Rank"] for row in rows] == ["2", "0", "1", "3", "(min)", "(median)", "(max)"]
    assert rows[0] == {
        "Rank": "2",
        "Steps": "20",
        "Own work a step": "24.100ms",
        "Median": "25.000ms",
        "Slowest": "18 of 20",
        "Waiting a step": "2.600ms",
        "Last to arrive": "18 of 20",
    }
    assert [row["Own work a step"] for row in rows[-3:]] == ["16.000ms", "17.300ms", "24.100ms"]
    assert [row["Waiting a step"] for row in rows[-3:]] == ["2.600ms", "9.400ms", "10.700ms"]
    assert notes(planted(), RANKS) == ["Own work is time of the CPU, without communication."]


def test_memory_and_flops_of_ranks() -> None:
    flops = {("Net.a", FORWARD, rank): 1000 * (rank + 1) for rank in range(3)}
    memory = {(0, "cuda:0"): 4096, (1, "cuda:1"): 2048, (2, "cuda:2"): 1024, (1, "cpu"): 512}
    run = of_work(1000, 1000, 1000, flops=flops, uncounted={("Net.a", FORWARD, 1): 2}, memory=memory)
    rows = table(run, RANKS)
    assert [row["CUDA peak"] for row in rows] == ["4.00 KB", "2.00 KB", "1.00 KB", "1.00 KB", "2.00 KB", "4.00 KB"]
    assert [row["CPU peak"] for row in rows] == ["–", "512 B", *["–"] * 4]
    assert [row["FLOPs"] for row in rows] == ["1.00 K", "≥ 2.00 K", "3.00 K", "≥ 1.00 K", "≥ 2.00 K", "≥ 3.00 K"]
    assert notes(run, RANKS)[0] == "FLOPs of all ranks together: ≥ 6.00 K."


def test_with_many_ranks_the_slowest_and_the_fastest_are_shown() -> None:
    run = of_work(*((20 - rank) * MS for rank in range(17)))
    rows = table(run, RANKS)
    assert [row["Rank"] for row in rows] == [*map(str, range(8)), "15", "16", "(min)", "(median)", "(max)"]
    # Of all ranks, not only of those shown.
    assert [row["Own work a step"] for row in rows[-3:]] == ["4.000ms", "12.000ms", "20.000ms"]
    assert notes(run, RANKS)[0] == "7 ranks are hidden: shown are the 8 slowest and the 2 fastest."
    assert [row["Rank"] for row in table(run, RANKS, top=1)][:-3] == ["0", "15", "16"]
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


def test_figures_of_layers_by_hand() -> None:
    """Net.b.0 in backward takes 6.6, 4, 12.1 and 4 ms: 26.7 in all, so the mean is 6.675 and the imbalance 1.81. In the
    all-reduce of Net the ranks wait for 8.1, 10.7, 2.6 and 10.7 ms."""
    rows = table(planted(), LAYERS)
    assert line(rows, Module="Net.b.0", Phase="backward") == {
        "Module": "Net.b.0",
        "Phase": "backward",
        "Min": "4.000ms",
        "Median": "5.300ms",
        "Max": "12.100ms",
        "Max/mean": "1.81",
        "Slowest rank": "2",
        "How often": "18 of 20",
        "Waiting": "",
        "Waits most": "",
    }
    assert line(rows, Module="Net", Phase="backward")["Waiting"] == "32.100ms"
    assert line(rows, Module="Net", Phase="backward")["Waits most"] == "1"
    even_ones = line(rows, Module="(outside)")
    assert (even_ones["Max/mean"], even_ones["Slowest rank"], even_ones["How often"]) == ("1.00", "", "")


def test_layers_that_differ_most_come_first_and_how_many_are_hidden() -> None:
    rows = table(planted(), LAYERS)
    assert [row["Phase"] for row in rows] == ["backward"] * 3 + ["forward"] * 2 + [""]
    assert len(table(planted(), LAYERS, top=2)) == 2
    first, hidden = notes(planted(), LAYERS, top=2)
    assert (
        first == "Min, Median and Max are of own work a step over the ranks that have the layer, all below it included."
    )
    assert hidden == "4 rows are hidden: shown are the 2 largest by how far Max is above the mean."


def test_depth_limits_the_table_of_layers() -> None:
    assert [row["Module"] for row in table(planted(), LAYERS, depth=0)] == ["Net", "Net", "(outside)"]
    assert "Net.b" in [row["Module"] for row in table(planted(), LAYERS, depth=1)]
    assert "Net.b.0" not in [row["Module"] for row in table(planted(), LAYERS, depth=1)]


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


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(TorchprofError, match=r"no column 'speed'.*'max/mean'"):
        planted().report("ranks", sort_by="speed")
    with pytest.raises(TorchprofError, match="top is a number of rows"):
        planted().report("ranks", top=-1)
    with pytest.raises(TorchprofError, match="depth is a number of levels"):
        planted().report("ranks", depth="all")
    with pytest.raises(TorchprofError, match="no format"):
        planted().report("ranks", tablefmt="gibtsnicht")


def test_layers_that_only_some_ranks_have() -> None:
    """0.1 and 0.3 us: the layer above has 1.5 times the mean in time, in FLOPs and in memory."""
    run = experts()
    rows = table(run, LAYERS)
    above = line(rows, Module="Net.b")
    assert [above[name] for name in ("Max/mean", "FLOPs max/mean", "Peak max/mean", "Slowest rank", "Ranks")] == [
        *["1.50"] * 3,
        "1",
        "all",
    ]
    for name, number in (("Net.b.0", "0"), ("Net.b.1", "1")):
        alone = line(rows, Module=name)
        assert [alone[key] for key in ("Max/mean", "FLOPs max/mean", "Slowest rank", "How often")] == ["–"] * 4
        assert alone["Ranks"] == number
    assert sentence(run).endswith(" Some layers are only on some ranks: their work differs by design.")


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


def test_waiting_in_collectives() -> None:
    (row,) = table(planted(), COLLECTIVES)
    assert row == {
        "Module": "Net",
        "Phase": "backward",
        "Collective": "allreduce",
        "Group": "default_pg",
        "Ranks": "[0, 1, 2, 3]",
        "Calls of all": "80",
        "Waiting a step": "32.100ms",
        "Waits most": "1",
        "Last to arrive": "2",
        "How often": "18 of 20",
    }


def test_waiting_that_is_unknown_or_a_lower_bound() -> None:
    own = {("Net.a", FORWARD): even(50, range(2))}
    collectives: dict[Any, Any] = {
        ("Net.a", FORWARD, "all_reduce", everybody(4)): {0: [3000] * 5, 1: [1000] * 5},
        (NOWHERE, BACKWARD, "barrier", None): {0: [3000] * 5, 1: [1000] * 5},
        ("Net.b", FORWARD, "all_gather", PAIR): {0: [3000] * 5, 1: [1000] * 4},
    }
    run = run_of_ranks(own, collectives, world_size=4)
    rows = table(run, COLLECTIVES)
    assert line(rows, Collective="all_reduce")["Waiting a step"] == "≥ 2.000us"
    barrier = line(rows, Collective="barrier")
    assert (barrier["Module"], barrier["Group"], barrier["Ranks"]) == ("(outside)", "–", "–")
    for row in (barrier, line(rows, Collective="all_gather")):
        assert [row[name] for name in ("Waiting a step", "Waits most", "Last to arrive", "How often")] == ["–"] * 4
    assert [note.partition(":")[0] for note in notes(run, COLLECTIVES)[1:]] == ["– under Waiting", "– under Group", "≥"]
    assert [row["Waiting a step"] for row in table(run, RANKS)[:2]] == ["≥ 2.000us", "≥ 0.000us"]
    assert line(table(run, LAYERS), Module="Net.b")["Waiting"] == "–"
    assert notes(run, COLLECTIVES, top=1)[1] == ("2 rows are hidden: shown are the 1 in which ranks wait longest.")


def test_without_collectives_there_is_no_table_of_them() -> None:
    run = of_work(10, 20)
    assert len(run.report("ranks").split("\n\n")) == 3
    assert "Waiting" not in run.report("ranks")


def test_warnings_of_several_ranks_are_shown_once() -> None:
    run = of_work(10, 20, warnings=run_warnings("A warning."), world_size=3)
    assert run.report("ranks").endswith("\n\nA warning.")


def test_every_table_has_the_format_of_tabulate() -> None:
    assert "<table>" in planted().report("ranks", tablefmt="html")


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

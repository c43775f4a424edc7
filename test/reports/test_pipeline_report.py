"""What is said of pipelines, cell by cell: the report of its own, that of ranks, the first screen and the findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from build.golden import drawn
from build.hand_made import op, row, run_of
from build.hand_made_ranks import everybody, lockstep
from build.pipelines import MS, Orders, equal, interleaved, one_f_one_b, pipelines_of, run_of_pipelines, unequal

import torchprof
from torchprof import Run
from torchprof.advise import Advice, advise
from torchprof.advise.evidence import Evidence
from torchprof.analyze.steps import time_parts
from torchprof.first_screen.verdict import lines_of_run, short_gain
from torchprof.ranks import balance_of
from torchprof.ranks.compared import Compared
from torchprof.ranks.pipeline_report import layers_of_stage, numbered_layers
from torchprof.ranks.sentences import chosen_ranks, verdict_on_ranks, with_comparison
from torchprof.ranks.slow import Slow
from torchprof.run.layers import Layer
from torchprof.run.lockstep import EXCHANGES, LockstepKey
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import Pipeline
from torchprof.run.words import FORWARD, OUTSIDE, StepEnd

FOUR = [4, 4, 6, 4]
"""Blocks of four stages: the third is the slow one."""


def four_stages(**options: Any) -> tuple[Pipeline, ...]:
    return pipelines_of(one_f_one_b(4, 8), [unequal({2: 1.5})] * 5, link_ns=100_000, **options)


def part(run: Run, number: int, **options: Any) -> str:
    return run.report("pipeline", **options).split("\n\n")[number]


def about(run: Run) -> str:
    return part(run, 0)


# Sentences


def test_what_is_said_of_pipelines(golden: Callable[..., None]) -> None:
    """Of the slow stage: the work is 108 ms on four ranks, of a step of 44.3 ms. That of equal stages would take
    37.125 ms, 11/8 of the work, and that of these stages 43.5 ms without the time of what is sent."""
    two_stages, four, one_stage = one_f_one_b(2, 4), one_f_one_b(4, 4), one_f_one_b(1, 4)
    in_some_steps = [unequal({1: 3}), unequal({1: 3}), equal(), unequal({1: 3}), equal()]
    of_several, equally, three = {1: 1.2, 3: 1.1}, {1: 1.5, 2: 1.52}, {1: 1.5, 2: 1.5, 3: 1.5}
    interleave = interleaved(2, 2, 4)
    alone = [pipelines_of(one_stage, [unequal({0: 1 + (rank == 3)})] * 5, ranks=[rank]) for rank in range(4)]
    several = {
        "equal stages": pipelines_of(interleave, [equal()], schedule="ScheduleInterleaved1F1B"),
        "a slow rank with two stages, either may be as fast": pipelines_of(interleave, [unequal(of_several)] * 2),
        "two stages are equally slow": pipelines_of(four, [unequal(equally)] * 3),
        "three of four are slow": pipelines_of(four, [unequal(three)] * 3),
        "a stage that is slow in some steps": pipelines_of(two_stages, in_some_steps),
    }
    golden(
        {
            "a slow stage": about(run_of_pipelines(four_stages(), blocks=FOUR)),
            **{title: about(run_of_pipelines(pipelines)) for title, pipelines in several.items()},
            "ranks of one stage, of which the last is slow": about(run_of_pipelines(*alone)),
            "the same ranks are compared": run_of_pipelines(*alone).report("ranks").split("\n\n")[0],
        }
    )


@pytest.mark.parametrize("stage, where", [(None, "all stages"), (1, "stage 1")])
def test_a_microbatch_that_takes_longer(stage: int | None, where: str) -> None:
    def takes(of: int, what: str, number: int) -> int:
        return equal()(of, what, number) * (3 if number == 5 and stage in (None, of) else 1)

    run = run_of_pipelines(pipelines_of(one_f_one_b(2, 8), [takes] * 3))
    assert about(run).endswith(f"Microbatch 5 takes 3.0 times as long as the others (median) in {where}.")
    few = run_of_pipelines(pipelines_of(one_f_one_b(2, 8), [takes]))
    assert about(few).endswith(f"in {where}; that may be chance.")
    assert stage == 1 or "microbatches that differ add 12%" in about(run)


def test_a_rank_alone_and_a_pipeline_without_ranks(golden: Callable[..., None]) -> None:
    """A run of one rank has no comparison, but its own times."""
    alone = run_of_pipelines(four_stages()[1:2], blocks=FOUR)
    golden(alone.report("pipeline"))
    assert lines_of_run(alone) and not any("idle" in line for line in lines_of_run(alone))
    assert "This run recorded no pipeline" in replace(alone, pipelines=()).report("pipeline")


def test_times_of_the_cpu_on_a_device_are_called_so() -> None:
    """With kernels of the device in the run, but none of the pipeline, it ran on the CPU."""
    run = run_of_pipelines(four_stages(), blocks=FOUR)
    not_measured = replace(run, metas=tuple(replace(meta, device="cuda") for meta in run.metas))
    assert "is unknown: times are of the CPU, which only launches the work of the device." in about(not_measured)
    assert "slow one" not in about(not_measured)
    metas = tuple(replace(meta, device="cuda", measured=("cpu_ns", "device_ns")) for meta in run.metas)
    assert about(replace(run, metas=metas)) == about(run)


@pytest.mark.parametrize(
    "paths, layers, movable",
    [
        (["embed", "layers", "layers.0", "layers.1", "layers.1.0", "norm"], "embed, layers.0–layers.1, norm", 2),
        (["0", "1", "2"], "0–2", 3),
        (["model", "model.layers", "model.layers.10", "model.layers.9"], "model.layers.9–model.layers.10", 2),
        (["layers", "layers.3"], "layers.3", 1),
        (["a", "b"], "Net (stage 1)", 0),
        ([], "Net (stage 1)", 0),
    ],
)
def test_what_a_stage_has(paths: list[str], layers: str, movable: int) -> None:
    root = "Net (stage 1)"
    tree = [Layer((root, *path.split(".")), "Module") for path in paths]
    run = run_of([], layers=[Layer((root,), "Module"), *tree])
    assert layers_of_stage(run, 0) == layers
    assert len(numbered_layers(run.layers, 0)) == movable
    assert layers_of_stage(run, -1) == ""


# Tables


def test_the_tables_of_stages(golden: Callable[..., None]) -> None:
    """Stage 0 waits for the gradients of three microbatches for 2.2, 0 and 1.2 ms in the first pipeline, where what is
    sent travels for 100 us, and for 5, 3 and 4 ms in the second. Stage 1 waits for inputs for 1.1 and 0.2 ms, and for
    1 ms. Backward in two parts, for inputs (2 ms) and weights (3 ms), has two columns."""
    orders = one_f_one_b(2, 3)
    fast = pipelines_of(orders, [equal()] * 3, link_ns=100_000)
    slow = pipelines_of(orders, [unequal({1: 2})] * 3, ranks=[2, 3])
    parted: Orders = [[(0, "F", 0), (0, "I", 0), (0, "W", 0)], [(1, "F", 0), (1, "B", 0)]]

    def takes(stage: int, what: str, number: int) -> int:
        return {"F": 1, "I": 2, "W": 3, "B": 4}[what] * MS

    golden(part(run_of_pipelines(fast, slow), 1), part(run_of_pipelines(pipelines_of(parted, [takes])), 1))


def test_many_microbatches_stages_and_pipelines_are_hidden(golden: Callable[..., None]) -> None:
    """Of many pipelines some are simulated."""

    def takes(stage: int, what: str, number: int) -> int:
        return (100 + number + 10 * stage) * 1000

    run = run_of_pipelines(pipelines_of(one_f_one_b(10, 20), [takes]), blocks=[2] * 10)
    groups = [[2 * number, 2 * number + 1] for number in range(40)]
    pipelines = (pipelines_of(one_f_one_b(2, 2), [equal()], ranks=ranks) for ranks in groups)
    many = run_of_pipelines(*pipelines, with_rows=False)
    golden(part(run, 3), part(run, 3, top=1), about(many), part(many, 2))


def test_two_pipelines_that_differ_have_tables_of_their_own() -> None:
    small = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    large = pipelines_of(one_f_one_b(2, 8), [equal()] * 3, ranks=[2, 3])
    run = run_of_pipelines(small, large)
    tables = run.report("pipeline").data["tables"]
    assert [(table["name"], table["pipeline"]) for table in tables] == [
        (name, number) for number in (0, 1) for name in ("stages", "pipelines", "microbatches")
    ]
    assert "(4 microbatches, 1F1B)" in about(run) and "(8 microbatches, 1F1B)" in part(run, 4)


# Ranks


def test_a_stage_with_more_work_is_no_straggler(golden: Callable[..., None]) -> None:
    run = run_of_pipelines(four_stages(), blocks=FOUR)
    balance = balance_of(run)
    assert balance.slow is balance.late is None
    assert "straggler" not in run.report("ranks").split("\n\n")[0].lower()
    golden(lines_of_run(run)[-1], drawn(run, "ranks", depth=0))


def replicas(*slow: int, count: int = 3, by: float = 1.2, steps: int = 5) -> Run:
    """So many pipelines of two stages, of which the second takes twice as long. ``slow``: the ranks that are slow."""

    def takes(first: int) -> Any:
        factors = {stage: (1 + stage) * (by if first + stage in slow else 1) for stage in (0, 1)}
        return [unequal(factors)] * steps

    groups = [[2 * number, 2 * number + 1] for number in range(count)]
    return run_of_pipelines(*(pipelines_of(one_f_one_b(2, 4), takes(group[0]), ranks=group) for group in groups))


def test_a_straggler_is_slow_among_the_ranks_of_its_stage() -> None:
    """Rank 2 takes less than all ranks of stage 1, and more than those of stage 0. Without slow ranks, 2 % of a step
    are 4.5 % of the work of stage 0."""
    slow = balance_of(replicas(2)).slow
    assert slow is not None
    assert (slow.ranks, slow.work_ns, slow.others_ns, slow.stages) == ((2,), (14_400_000,), 12 * MS, (0,))
    assert slow.slowest_in == (5, 5) and slow.costs is None
    assert (
        replicas(2)
        .report("ranks")
        .startswith(
            "6 ranks. Rank 2 is the straggler: its own work takes 14.400ms a step, that of the others with stage 0 "
            "12.000ms (median)"
        )
    )
    assert balance_of(replicas()).slow is None
    assert (
        "No straggler found among ranks with the same stages of a pipeline. A rank whose own work takes 5% longer would"
        in (replicas().report("ranks"))
    )


def test_of_slow_ranks_of_several_stages_those_that_differ_most_are_named() -> None:
    slow = balance_of(replicas(2, 5)).slow
    assert slow is not None and (slow.ranks, slow.stages) == ((5,), (1,))


def test_a_certain_straggler_counts_before_a_larger_difference_that_may_be_chance() -> None:
    """Rank 4 takes 10 % longer than the others with stage 0 in each step; rank 5 takes 29 % longer than those with
    stage 1, whose times vary."""
    stage_1 = [[0.97, 1.14, 0.91, 1.05, 0.88], [0.96, 1.09, 1.07, 0.95, 0.97], [1.26, 1.16, 1.29, 1.42, 1.15]]

    def slow_of(stage_0: list[float]) -> Slow | None:
        return balance_of(
            run_of_pipelines(
                *(
                    pipelines_of(
                        one_f_one_b(2, 4), [unequal({0: first, 1: ns}) for ns in second], ranks=[2 * n, 2 * n + 1]
                    )
                    for n, (first, second) in enumerate(zip(stage_0, stage_1))
                )
            )
        ).slow

    larger, certain = slow_of([1, 1, 1]), slow_of([1, 1, 1.1])
    assert larger is not None and (larger.ranks, larger.may_be_chance) == ((5,), True)
    assert certain is not None and (certain.ranks, certain.may_be_chance) == ((4,), False)
    assert larger.work_ns[0] - larger.others_ns > certain.work_ns[0] - certain.others_ns


def test_the_step_of_some_ranks_is_theirs_whatever_was_asked_before() -> None:
    """The pipelines have other numbers of microbatches: steps of 15 and 27 ms."""
    small, large = (
        pipelines_of(one_f_one_b(2, count), [equal()] * 3, ranks=ranks, schedule=f"Of{count}")
        for count, ranks in ((4, [0, 1]), (8, [2, 3]))
    )
    compared, asked = Compared.of(run_of_pipelines(small, large)), Compared.of(run_of_pipelines(small, large))
    assert asked.step_ns == 21 * MS
    assert asked.among((2, 3)).step_ns == compared.among((2, 3)).step_ns == 27 * MS


def test_single_steps_are_compared_among_the_ranks_of_a_stage() -> None:
    """With two steps there is no test: the rank must be the slowest in most steps."""
    slow = balance_of(replicas(2, steps=2)).slow
    assert slow is not None and slow.may_be_chance and slow.slowest_in == (2, 2)


def test_ranks_wait_for_each_other_by_design_if_their_stages_differ() -> None:
    """In a collective of all ranks, those of the first stage come last: they end the step. In one of the ranks of a
    stage, a rank that comes last is late."""

    def with_exchanges(waits: dict[int, int]) -> Run:
        run = replicas()
        key = LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, everybody(len(waits)))
        times = lockstep({rank: [ns] * 5 for rank, ns in waits.items()}, key)
        return replace(run, lockstep={**run.lockstep, key: times})

    of_all = with_exchanges({rank: 10 * MS * (rank % 2) for rank in range(6)})
    assert balance_of(of_all).late is None
    late = balance_of(with_exchanges({0: 10 * MS, 2: 0, 4: 10 * MS})).late
    assert late is not None and late.ranks == (2,)


def test_a_comparison_of_a_job_knows_the_stages() -> None:
    """The pipeline of the straggler is chosen whole, and ranks of the same stage: the report of these names it, too."""
    run = replicas(9, count=8)
    comparison = torchprof.merge(rank.to_compare() for rank in run.of_ranks(range(16)))
    chosen = chosen_ranks(comparison)
    assert {8, 9} <= {*chosen} and sum(rank % 2 for rank in chosen) == len(chosen) - 1 == 3
    some = with_comparison(torchprof.merge(run.of_ranks(chosen)), comparison)
    assert "Rank 9 is the straggler: its own work takes" in some.report("ranks")
    assert verdict_on_ranks(comparison)[1].startswith("Rank 9 is the straggler: its own work takes")
    assert comparison.report("pipeline").startswith("A comparison of ranks has no times of pipelines")
    slow = balance_of(comparison).slow
    assert slow is not None and slow.ranks == (9,)
    assert balance_of(replicas(count=8).to_compare()).slow is None


def test_the_steps_of_a_rank_have_no_rows_of_the_stages_of_others() -> None:
    text = run_of_pipelines(four_stages(), blocks=FOUR).report("steps").data["tables"]
    names = {table["rank"]: [row["module"] for row in table["rows"]] for table in text if table["name"] == "layers"}
    assert names[1] == ["Stage1", "Stage1.layers", *(f"Stage1.layers.{number}" for number in range(4, 8))]
    parts = {table["rank"]: [row["part"] for row in table["rows"]] for table in text if table["name"] == "parts"}
    assert [part for part in parts[2] if "Stage" in part] == ["Stage2, forward", "Stage2, backward"]


# Findings


@pytest.mark.parametrize("after_ns", [0, 1_000 * MS], ids=["nothing after the loop", "work after the loop"])
def test_the_gain_of_a_step_is_of_all_passes_of_a_loop_that_marks_none(after_ns: int) -> None:
    """The schedule runs five times on four ranks; the first pass of the loop is in no step."""
    run = run_of_pipelines(four_stages(), blocks=FOUR)
    samples = {
        SampleKey(OUTSIDE, FORWARD, pipeline.rank, "cpu", "step_ns"): Spread.of([*enumerate(pipeline.step_ns[1:])])
        for pipeline in run.pipelines
    }
    metas = [replace(meta, steps=4, step_end=StepEnd.OPTIMIZER, wall_ns=meta.wall_ns + after_ns) for meta in run.metas]
    run = replace(run, samples=samples, metas=tuple(metas))
    gain_ns = 5 * 4 * 4_500_000
    share = gain_ns / sum(meta.wall_ns for meta in run.metas)
    assert (
        short_gain(Advice("Stage2", "", "", gain_ns, layers=("Stage2",)), Evidence(run))
        == f"Up to {share:.0%} (4.5ms a step)"
    )


def test_waiting_for_other_stages_is_no_python() -> None:
    """Each of five steps has 20.3, 18.2, 4.1 and 13 ms of it on four ranks, and 1 ms of Python."""
    run = run_of_pipelines(four_stages(), blocks=FOUR)
    waited = [20_300_000, 18_200_000, 4_100_000, 13_000_000]
    assert [pipeline.waited_ns for pipeline in run.pipelines] == [5 * ns for ns in waited]
    relu = op("aten::relu")

    def with_python(pipelines: tuple[Pipeline, ...]) -> Run:
        own = [row(OUTSIDE, rank=rank, cpu_ns=5 * (ns + MS)) for rank, ns in enumerate(waited)]
        with_rows = run_of([row(2, relu, calls=9, cpu_ns=5 * 108 * MS), *own], layers=run.layers)
        return replace(run, rows=with_rows.rows, pipelines=pipelines)

    parts = time_parts(with_python(run.pipelines), "cpu_ns")
    assert parts == {"forward": 540 * MS, "waiting for other stages": 5 * sum(waited), "other": 20 * MS}
    assert time_parts(with_python(()), "cpu_ns")["other"] == 5 * sum(waited) + 20 * MS
    rules, rules_of_stages = ({advice.rule for advice in advise(with_python(of))} for of in ((), run.pipelines))
    assert "python_in_the_loop" in rules - rules_of_stages

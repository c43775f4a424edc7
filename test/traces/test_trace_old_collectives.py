"""Collectives in traces of torch before 2.2: neither kernels nor ops contain the sizes or the group. Hand-made events,
sums by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from build.hand_made import cells
from build.trace_files import session, trace_event, write

import torchprof
from torchprof import Run
from torchprof.ranks import balance_of

ALL_REDUCE_KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)"


def old_collectives(durations: Sequence[float], streams: Sequence[int] = (20,), by_launch: bool = False) -> list[Any]:
    """One all-reduce of 3 × 4 floats for each duration of a kernel. Each kernel refers to the op that launched it, or
    with ``by_launch`` only to its launch."""
    events: list[Any] = [trace_event("user_annotation", "layer", 1, 1000 * len(durations))]
    for call, took in enumerate(durations):
        at, number = 1000.0 * call + 10, 100 * call
        about = {"Input_Dims": [[3, 4]], "Input_type": ["float"]}
        launch = number + 5
        linked = launch if by_launch else number + 2
        events += [
            trace_event("cpu_op", "c10d::allreduce_", at, 90, External_id=number + 1),
            trace_event("cpu_op", "record_param_comms", at + 1, 80, External_id=number + 2),
            trace_event("user_annotation", "nccl:all_reduce", at + 2, 60, External_id=number + 3, **about),
            trace_event("cuda_runtime", "cudaLaunchKernel", at + 3, 5, correlation=launch, External_id=launch),
            trace_event(
                "kernel",
                ALL_REDUCE_KERNEL,
                at + 50,
                took,
                External_id=linked,
                correlation=launch,
                device=0,
                stream=streams[call % len(streams)],
            ),
        ]
    return events


def old_rank(folder: Path, rank: int, world: int, events: list[Any], **more: Any) -> Run:
    about = {"backend": "nccl", "rank": rank, "world_size": world, **more}
    return torchprof.from_trace(
        write(folder / f"old{rank}.json", {"distributedInfo": about, "traceEvents": [session(0, 9000), *events]})
    )


@pytest.mark.parametrize("by_launch", [False, True], ids=["by the op", "by the launch"])
def test_an_old_collective_is_the_one_that_its_range_names(by_launch: bool, tmp_path: Path) -> None:
    """12 floats are 48 bytes. The kernel of 6 us belongs to the range that began in the op that launched it."""
    run = old_rank(tmp_path, 0, 2, old_collectives([6], by_launch=by_launch))
    (row,) = [row for row in run.rows if row.frames and row.frames[-1].kind == "kernel"]
    assert [frame.name for frame in row.frames] == [
        "c10d::allreduce_",
        "record_param_comms",
        "nccl:all_reduce",
        ALL_REDUCE_KERNEL,
    ]
    (line,) = cells(run.report("collectives").split("\n\n")[0])
    assert line[0] == "all_reduce"
    assert line[3:9] == ["Float", "48 B", "48 B", "1", "6.000us", "6.000us"]


def test_with_two_ranges_in_one_op_the_collective_of_a_kernel_is_unknown(tmp_path: Path) -> None:
    events = old_collectives([6])
    events.insert(4, {**events[3], "name": "nccl:broadcast", "ts": events[3]["ts"] + 0.5})
    run = old_rank(tmp_path, 0, 2, events)
    (row,) = [row for row in run.rows if row.frames and row.frames[-1].kind == "kernel"]
    assert [frame.name for frame in row.frames][:-1] == ["c10d::allreduce_", "record_param_comms"]


def collectives_table(run: Run) -> list[list[str]]:
    """The last table of the report of ranks: the collectives. Notes follow below it."""
    return [line for line in cells(run.report("ranks").split("\n\n")[3]) if len(line) > 1]


def test_if_all_ranks_made_the_same_calls_the_group_is_the_world(tmp_path: Path) -> None:
    """Rank 2 comes last in 2 of 3 calls and rank 0 in one: the rank with the shortest time did not wait."""
    took = [[9, 2, 10], [8, 5, 4], [4, 9, 1]]  # of each rank, the calls
    runs = [old_rank(tmp_path, rank, 3, old_collectives(times)) for rank, times in enumerate(took)]
    least = [min(times) for times in zip(*took)]
    run = torchprof.merge(runs)
    assert run == torchprof.merge([torchprof.merge([runs[2], runs[0]]), runs[1]])
    balance = balance_of(run)
    (one,) = balance.collectives
    assert (one.name, one.calls) == ("all_reduce", 9)
    assert one.waiting is not None and one.came_last is not None
    assert one.waiting.values == tuple(1000 * (sum(times) - sum(least)) for times in took)
    assert one.came_last.values == (1, 0, 2)
    assert balance.inferred == 9
    assert "All 3 ranks of the job made the same calls" in run.report("ranks")
    (line,) = collectives_table(run)
    assert line[3:5] == ["all ranks (inferred)", "3"]
    assert line[8:10] == ["2", "2 of 3"]


@pytest.mark.parametrize("why", ["a rank is missing", "other calls", "several streams", "several groups"])
def test_if_the_groups_are_unknown_no_rank_is_the_last(why: str, tmp_path: Path) -> None:
    """All make the same calls in groups of two: rank 3 waits for rank 2 and not for rank 0."""
    calls = [[9.0, 2.0], [8.0, 5.0], [4.0, 9.0], [4.0, 4.0]]
    about: dict[str, Any] = {}
    if why == "other calls":
        calls[1].append(3.0)
    if why == "several groups":
        ranks = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
        about = {"pg_config": [{"pg_name": "0", "pg_size": 4, "ranks": [0, 1, 2, 3]}]}
    runs = []
    for rank, times in enumerate(calls):
        events = old_collectives(times, (20, 24) if why == "several streams" else (20,))
        if why == "several groups":
            of_two = {"pg_name": "1", "pg_size": 2, "ranks": ranks[rank]}
            runs.append(old_rank(tmp_path, rank, 4, events, pg_config=[*about["pg_config"], of_two]))
        else:
            runs.append(old_rank(tmp_path, rank, 4, events))
    balance = balance_of(torchprof.merge(runs[: 3 if why == "a rank is missing" else 4]))
    assert balance.inferred == 0
    assert [(one.group, one.waiting, one.came_last) for one in balance.collectives] == [(None, None, None)]
    assert [one.last_in for one in balance.ranks] == [None] * len(balance.ranks)

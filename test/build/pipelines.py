"""Runs of pipelines that are put together by hand: the order of a schedule, and how long each action takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

from build.hand_made import row, run_of
from build.hand_made_ranks import run_of_ranks

from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.timeline import Pipeline, StageAction
from torchprof.run.words import BACKWARD, FORWARD

MS = 1_000_000
Key = tuple[int, str, int]  # stage, what, microbatch
Orders = list[list[Key]]  # by rank
Takes = Callable[[int, str, int], int]  # ns


def gpipe(ranks: int, microbatches: int) -> Orders:
    return [[(rank, what, number) for what in "FB" for number in range(microbatches)] for rank in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> Orders:
    """As torch's Schedule1F1B runs it: as many forwards first as there are stages from this one on."""
    orders: Orders = []
    for rank in range(ranks):
        first = min(ranks - rank, microbatches)
        order = [(rank, "F", number) for number in range(first)]
        for number in range(microbatches):
            order.append((rank, "B", number))
            if first + number < microbatches:
                order.append((rank, "F", first + number))
        orders.append(order)
    return orders


def interleaved(ranks: int, chunks: int, microbatches: int) -> Orders:
    """Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, SC 2021,
    figure 4: rank r has the stages r, r + ranks, …; microbatches are a multiple of the ranks."""
    orders: Orders = []
    for rank in range(ranks):
        count = chunks * microbatches
        forwards = [
            (number // ranks % chunks, number // (ranks * chunks) * ranks + number % ranks) for number in range(count)
        ]
        todo = [(chunk * ranks + rank, "F", microbatch) for chunk, microbatch in forwards]
        backwards = [((chunks - 1 - chunk) * ranks + rank, "B", microbatch) for chunk, microbatch in forwards]
        first = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, count)
        order = todo[:first]
        for number in range(count):
            order += todo[first + number : first + number + 1] + backwards[number : number + 1]
        orders.append(order)
    return orders


def needed_by(action: Key, stages: int) -> list[list[Key]]:
    """What an action waits for: one of each list."""
    stage, what, number = action
    if what == "F":
        return [[(stage - 1, "F", number)]] if stage else []
    if what == "W":
        return [[(stage, "I", number)]]
    after = [[(stage + 1, "B", number), (stage + 1, "I", number)]] if stage + 1 < stages else []
    return [[(stage, "F", number)], *after]


def starts_of(orders: Sequence[Sequence[Key]], takes: Takes, stages: int, link_ns: int = 0) -> dict[Key, int]:
    """When each action starts, by brute force: all start at 0, and those that start too early are moved until none
    does. ``link_ns``: how long what is sent between ranks travels."""
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    starts = dict.fromkeys(rank_of, 0)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            for number, action in enumerate(order):
                ends = [starts[before] + takes(*before) for before in order[max(number - 1, 0) : number]]
                for choices in needed_by(action, stages):
                    [need] = [choice for choice in choices if choice in starts]
                    ends.append(starts[need] + takes(*need) + link_ns * (rank_of[need] != rank))
                if (start := max(ends, default=0)) > starts[action]:
                    starts[action], is_moving = start, True
    return starts


def pipelines_of(
    orders: Sequence[Sequence[Key]],
    steps: Sequence[Takes],
    *,
    ranks: Sequence[int] | None = None,
    schedule: str = "Schedule1F1B",
    link_ns: int = 0,
    host_ns: int = 0,
    device: str = "cpu",
) -> tuple[Pipeline, ...]:
    """What the ranks of one pipeline recorded in these steps. ``host_ns``: the time of each rank after its last action,
    in which it does not wait. The layers of the stages are unknown."""
    ranks = range(len(orders)) if ranks is None else ranks
    stages = 1 + max(stage for order in orders for stage, _, _ in order)
    starts = [starts_of(orders, takes, stages, link_ns) for takes in steps]
    pipelines = []
    for rank, order in zip(ranks, orders):
        actions = []
        for before, action in zip([None, *order], order):
            free = [0 if before is None else start[before] + takes(*before) for start, takes in zip(starts, steps)]
            took = tuple(takes(*action) for takes in steps)
            waited = tuple(start[action] - since for start, since in zip(starts, free))
            actions.append(StageAction(*action, took, waited))
        ends = [
            max(start[action] + takes(*action) for action in start) + host_ns for start, takes in zip(starts, steps)
        ]
        own = sorted({stage for stage, _, _ in order})
        pipelines.append(
            Pipeline(
                device,
                rank,
                schedule,
                stages,
                tuple(ranks),
                tuple((stage, -2) for stage in own),
                len(steps),
                tuple(ends),
                tuple(actions),
            )
        )
    return tuple(pipelines)


def equal(forward: int = MS, backward: int = 2 * MS) -> Takes:
    return lambda stage, what, number: forward if what == "F" else backward


def unequal(factors: Mapping[int, float], forward: int = MS, backward: int = 2 * MS) -> Takes:
    """Stages that take so many times as long as the others."""
    return lambda stage, what, number: round(factors.get(stage, 1) * (forward if what == "F" else backward))


def run_of_pipelines(
    *pipelines: Sequence[Pipeline], blocks: Sequence[int] = (), with_rows: bool = True, **meta: Any
) -> Run:
    """A run of these pipelines, one rank after the other. The model of stage s is ``Stage<s>``, with so many numbered
    ``blocks``, numbered through the whole model, and ``head`` in the last stage, that share the time of its actions
    equally."""
    flat = [pipeline for of_group in pipelines for pipeline in of_group]
    stages = max(max(pipeline.stages, 1 + stage) for pipeline in flat for stage, _ in pipeline.roots)
    blocks = blocks or [2] * stages
    paths, first = [], 0
    for stage, count in enumerate(blocks):
        paths += [f"Stage{stage}", f"Stage{stage}.layers"]
        paths += [f"Stage{stage}.layers.{number}" for number in range(first, first + count)]
        first += count
    of_stage = {stage: [p for p in flat if stage in dict(p.roots)] for stage in range(stages)}
    layers = tuple(
        Layer(
            tuple(path.split(".")),
            "Module",
            ranks=tuple(sorted(p.rank for p in of_stage[int(path.split(".")[0].removeprefix("Stage"))])),
        )
        for path in paths
    )
    index = {path: number for number, path in enumerate(paths)}
    flat = [replace(p, roots=tuple((stage, index[f"Stage{stage}"]) for stage, _ in p.roots)) for p in flat]
    rows = []
    for pipeline in flat if with_rows else ():
        for action in pipeline.actions:
            inside = [path for path in paths if path.startswith(f"Stage{action.stage}.layers.")]
            for path in inside:
                phase = FORWARD if action.what == "F" else BACKWARD
                ns = sum(action.took_ns) // len(inside)
                calls = len(action.took_ns) if action.what == "F" else 0
                rows.append(row(index[path], phase=phase, rank=pipeline.rank, calls=calls, cpu_ns=ns))
    work = {p.rank: [sum(times) for times in zip(*(action.took_ns for action in p.actions))] for p in flat}
    step_ns = {p.rank: p.step_ns for p in flat}
    meta.setdefault("world_size", len({rank for p in flat for rank in (p.rank, *p.group)}))
    run = run_of_ranks({("(outside)", FORWARD): work}, parts={"step_ns": step_ns}, paths=paths, **meta)
    metas = tuple(replace(m, wall_ns=sum(step_ns[m.rank])) for m in run.metas)
    return replace(run, metas=metas, layers=layers, rows=run_of(rows, layers=layers).rows, pipelines=tuple(flat))


def of_torch(how: str, ranks: int, chunks: int, microbatches: int) -> Orders:
    """The order of those of torch's schedules that make it from the number of stages on each rank."""
    from torch.distributed.pipelining import schedules

    stages = [
        MagicMock(group_size=ranks, group_rank=0, num_stages=ranks * chunks, stage_index=n) for n in range(chunks)
    ]
    for stage in stages:
        stage.stage_index_to_group_rank = {number: number % ranks for number in range(ranks * chunks)}
    schedule: Any = schedules.get_schedule_class(how)(stages, microbatches)
    return [
        [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None
            for part in (getattr(action, "sub_actions", None) or (action,))
            if part.is_compute_op
        ]
        for rank in range(ranks)
    ]

"""Runs of several ranks that are put together by hand, from what each did in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from build.hand_made import row, run_of

from torchprof.run.layers import Layer
from torchprof.run.lockstep import EXCHANGES, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.timeline import Memory
from torchprof.run.words import FORWARD, OUTSIDE, PHASES

PATHS = ("Net", "Net.a", "Net.b", "Net.b.0", "Net.b.1")
NOWHERE = "(outside)"

Place = tuple[str, str]  # the path of a layer, or NOWHERE, and a phase
Steps = Mapping[int, Sequence[int]]  # by rank, the ns of each step


def everybody(size: int) -> GroupOfRanks:
    return GroupOfRanks("0", "default_pg", size, str(list(range(size))))


def lockstep(times: Steps, key: LockstepKey) -> Lockstep:
    """Ranks that did something so often, each time so long."""
    ranks = sorted(times)
    counts = tuple(len(times[rank]) for rank in ranks)
    last_ns: tuple[int, ...] = ()
    last_rank: tuple[int, ...] = ()
    is_paired = len(set(counts)) == 1 and (not key.is_collective or key.group is not None)
    if is_paired:
        together = [[times[rank][at] for rank in ranks] for at in range(counts[0])]
        last_ns = tuple((min if key.is_collective else max)(values) for values in together)
        last_rank = tuple(
            ranks[values.index(ns)] if values.count(ns) == 1 else -1 for values, ns in zip(together, last_ns)
        )
    several = len(ranks) > 1
    return Lockstep(
        tuple(ranks),
        counts,
        tuple(sum(times[rank]) for rank in ranks),
        (0,) * len(ranks),
        last_ns,
        last_rank,
        medians=() if key.is_collective or not several else tuple(median_low(times[rank]) for rank in ranks),
        values=tuple(tuple(times[rank]) for rank in ranks) if key.keeps_values and several and is_paired else (),
    )


def run_of_ranks(
    own: Mapping[Place, Steps],
    collectives: Mapping[tuple[str, str, str, GroupOfRanks | None], Steps] | None = None,
    *,
    paths: Sequence[str] = PATHS,
    ranks_of: Mapping[str, tuple[int, ...]] | None = None,
    device: str = "cpu",
    flops: Mapping[tuple[str, str, int], int] | None = None,
    uncounted: Mapping[tuple[str, str, int], int] | None = None,
    peaks: Mapping[tuple[str, str, int], int] | None = None,
    memory: Mapping[tuple[int, str], int] | None = None,
    metas: Mapping[int, Mapping[str, Any]] | None = None,
    parts: Mapping[str, Steps] | None = None,
    **meta: Any,
) -> Run:
    """A run in which ranks worked so long in layers themselves, and took so long in collectives, step by step.

    ``ranks_of`` says who has a layer, ``flops``, ``uncounted`` and ``peaks`` (in bytes) what there was of these in a
    layer and phase on a rank, ``memory`` what rose on the devices of a rank, ``metas`` how a rank's meta differs,
    ``parts`` how long a part of the step took on a rank, by its measure.
    """
    layers = tuple(Layer(tuple(path.split(".")), "Module", ranks=(ranks_of or {}).get(path, ())) for path in paths)
    ranks = sorted({rank for steps in own.values() for rank in steps})
    length = {rank: max(len(steps[rank]) for steps in own.values() if rank in steps) for rank in ranks}

    def index(path: str) -> int:
        return OUTSIDE if path == NOWHERE else paths.index(path)

    found: dict[LockstepKey, Lockstep] = {}
    for path in (*paths, NOWHERE):
        for phase in PHASES:
            below = [
                steps
                for (of, of_phase), steps in own.items()
                if of_phase == phase and (of == path or of.startswith(path + "."))
            ]
            times = {
                rank: [sum(steps[rank][at] for steps in below if rank in steps) for at in range(length[rank])]
                for rank in ranks
                if any(rank in steps for steps in below)
            }
            if times:
                key = LockstepKey(index(path), phase, device, WORK)
                found[key] = lockstep(times, key)
    if own:
        whole = {
            rank: [sum(steps[rank][at] for steps in own.values() if rank in steps) for at in range(length[rank])]
            for rank in ranks
        }
        key = LockstepKey(OUTSIDE, FORWARD, device, STEP)
        found[key] = lockstep(whole, key)
    together: dict[LockstepKey, dict[int, list[int]]] = {}
    for (path, phase, name, group), steps in (collectives or {}).items():
        key = LockstepKey(index(path), phase, device, name, group)
        found[key] = lockstep(steps, key)
        if group is not None:
            of_group = together.setdefault(LockstepKey(OUTSIDE, FORWARD, device, EXCHANGES, group), {})
            for rank, times_of_rank in steps.items():
                sums = of_group.setdefault(rank, [0] * length[rank])
                for at, ns in enumerate(times_of_rank):  # as many in each step
                    sums[min(at * length[rank] // len(times_of_rank), length[rank] - 1)] += ns
    found |= {key: lockstep(times, key) for key, times in together.items()}

    measured = ["device_ns" if device == "device" else "cpu_ns", "cpu_ns"]
    measured += ["flops", "macs"] if flops is not None else []
    measured += ["cpu_allocated", "cpu_freed"] if peaks is not None else []
    rows = [
        row(index(path), phase=phase, rank=rank, **{name: count})
        for name, counts in (("flops", flops), ("uncounted", uncounted))
        for (path, phase, rank), count in (counts or {}).items()
    ]
    samples = {
        SampleKey(index(path), phase, rank, "cpu", "peak_bytes"): Spread.of([(0, nbytes // 2), (1, nbytes)])
        for (path, phase, rank), nbytes in (peaks or {}).items()
    }
    for measure, steps in (parts or {}).items():
        for rank, times_of_rank in steps.items():
            samples[SampleKey(OUTSIDE, FORWARD, rank, "cpu", measure)] = Spread.of([*enumerate(times_of_rank)])
    about = {"requested": tuple(dict.fromkeys(measured)), "measured": tuple(dict.fromkeys(measured)), **meta}
    about.setdefault("world_size", len(ranks))
    return Run(
        tuple(
            Meta(("Net",), **{"rank": rank, "steps": length[rank], **about, **(metas or {}).get(rank, {})})
            for rank in ranks
        ),
        layers,
        run_of(rows, layers=layers).rows,
        samples,
        tuple(Memory(name, rank, nbytes) for (rank, name), nbytes in (memory or {}).items()),
        lockstep=found,
    )

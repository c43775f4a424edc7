"""What ranks of a job exchange, where nothing is computed meanwhile, or where it is slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.collectives import collective_of, shows_collective
from torchprof.run.cost import format_count, format_memory, format_time
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.lockstep import NOT_RECORDED
from torchprof.run.words import Frame

_SHARE = 0.05
_LARGE = 2**20  # bytes of one call: below, it takes as long as it takes to start it
_SLOW = 2e9  # bytes per second


@dataclass
class _Exchanged:
    """Calls of one collective: the time of their kernels; of those whose size is known (``sized``), their number, time
    and bytes; and the device time by the layer that asked for them."""

    ns: int = 0
    sized: int = 0
    sized_ns: int = 0
    nbytes: int = 0
    layers: Counter[int] = field(default_factory=Counter)


@rule
def exposed_communication(evidence: Evidence) -> Iterator[Advice]:
    """A device that communicates while it computes nothing, for at least 5 % of the recorded time.

    Evidence is, for each device, how long kernels of communication ran and none that computes. That is the gain, at
    most: exchanges that overlap with computing cost next to nothing. A kernel of communication also waits for the
    slowest rank, and no overlap saves that. Needs the time of a device.
    """
    times = evidence.run.device_times
    exposed = sum(time.exposed_ns for time in times)
    exchanged = _exchanged(evidence)
    if not exchanged or exposed <= _SHARE * evidence.recorded_ns:
        return
    span = sum(time.span_ns for time in times)
    name, most = max(exchanged.items(), key=lambda item: item[1].ns)
    communication = sum(time.communication_ns for time in times)
    yield Advice(
        evidence.name_of(most.layers.most_common(1)[0][0]),
        f"For {format_time(exposed)} of the {format_time(span)} ({exposed / span:.0%}) from its first work to its last "
        f"{evidence.device} communicates and computes nothing; in all it communicates for "
        f"{format_time(communication)}, most of it in {name}. This includes waiting for other ranks.",
        'See whether ranks wait for one that is slow (the report "ranks" of the runs of all). Exchange less often '
        "(no_sync() while gradients are accumulated), less (gradients in half precision: DDP's "
        "communication hooks), or earlier, beside computing (bucket_cap_mb of DDP, prefetching of FSDP).",
        exposed,
        None,
        "exposed_communication",
    )


@rule
def slow_collectives(evidence: Evidence) -> Iterator[Advice]:
    """Collectives of at least 1 MB a call, on average, whose kernels take at least 5 % of the recorded time, at less
    than 2 GB/s.

    Most links between GPUs are several times as fast: PCIe 3.0 with 16 lanes has 16 GB/s, a network of 100 Gbit/s 12.5,
    of which an all-reduce over a ring gets half. The bandwidth is the algorithm bandwidth of NCCL's tests, as in the
    report ``collectives``. From the time is taken what ranks waited for the last to come, where runs of several ranks
    tell that; where they do not, the bandwidth is a lower bound, and the finding says so. What faster links would save
    depends on them, so the gain is not known. Needs kernels of collectives that tell their size.
    """
    waited = _waited(evidence)
    for name, one in _exchanged(evidence).items():
        waiting = waited.get(name)
        ns = one.sized_ns - (waiting or 0)
        if not one.sized or one.nbytes < _LARGE * one.sized or ns < _SHARE * evidence.recorded_ns:
            continue
        bandwidth = one.nbytes * 1e9 / ns
        if bandwidth >= _SLOW:
            continue
        waits = "with their waiting for other ranks" if waiting is None else "without their waiting for other ranks"
        bound = " or more" if waiting is None else ""
        yield Advice(
            evidence.name_of(one.layers.most_common(1)[0][0]),
            f"{one.sized} calls of {name}, {format_memory(one.nbytes // one.sized)} each, take {format_time(ns)} "
            f"{waits}: {format_count(bandwidth)}B/s{bound}.",
            "See which way NCCL takes (NCCL_DEBUG=INFO): sockets in place of InfiniBand, NVLink or PCIe peer-to-peer "
            'are slow. If ranks come late, the report "ranks" says which.',
            None,
            None,
            "slow_collectives",
        )


def _exchanged(evidence: Evidence) -> dict[str, _Exchanged]:
    """What kernels of communication took, by the name of their collective."""
    found: defaultdict[str, _Exchanged] = defaultdict(_Exchanged)
    rows, columns = evidence.run.rows, evidence.run.rows.columns
    for at in evidence.rows(_is_communication):
        frames = rows.frames[columns["frames"][at]]
        calls, ns = columns["calls"][at], columns["device_ns"][at]
        collective = collective_of(frames)
        one = found["communication" if collective is None else collective.name]
        one.ns += ns
        one.layers[columns["layer"][at]] += ns
        sizes = () if collective is None else (collective.bytes_in, collective.bytes_out)
        known = [size for size in sizes if size is not None]
        if known:
            one.sized += calls
            one.sized_ns += ns
            one.nbytes += calls * max(known)
    return dict(found)


def _waited(evidence: Evidence) -> dict[str, int]:
    """How long ranks waited in kernels of a collective for the last to come, by its name, where all of that is
    known: one that is not here may have come even later."""
    found: dict[str, int | None] = {}
    of_job = max(meta.world_size for meta in evidence.run.metas)
    for key, lockstep in evidence.run.lockstep.items():
        if not key.is_collective or key.device == "cpu":
            continue
        size = of_job if key.group is None or key.group.size is None else key.group.size
        is_known = len(lockstep.ranks) >= max(size, 2) and key.group != NOT_RECORDED
        waits = [lockstep.waiting_ns(rank) if is_known else None for rank in lockstep.ranks]
        known = [wait for wait in waits if wait is not None]
        before = found.get(key.what, 0)
        found[key.what] = None if before is None or len(known) < len(waits) else before + sum(known)
    return {name: ns for name, ns in found.items() if ns is not None}


def _is_communication(frames: Sequence[Frame]) -> bool:
    if not frames or frames[-1].kind != "kernel":
        return False
    return shows_collective(frames[-1]) or kind_of_work(frames[-1].name) is KernelWork.COMMUNICATION

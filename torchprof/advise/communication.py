"""Ranks that wait for each other: communication that nothing overlaps, or that is slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchprof.advise import Advice, rule
from torchprof.advise.chains import Frames, among, is_device_work
from torchprof.advise.evidence import Evidence
from torchprof.run.collectives import collective_of, shows_collective
from torchprof.run.formats import format_count, format_memory, format_time
from torchprof.run.lockstep import NOT_RECORDED
from torchprof.run.torch_names import KernelWork, kind_of_work

_SHARE = 0.05
_LARGE = 2**20  # bytes per call: smaller calls take only the time of a launch
_SLOW = 2e9  # bytes per second


@dataclass
class _Exchanged:
    """The calls of one collective: the time of their kernels; the number, time and bytes of those with a known size
    (``sized``); and the device time by the layer that called them."""

    ns: int = 0
    sized: int = 0
    sized_ns: int = 0
    nbytes: int = 0
    layers: Counter[int] = field(default_factory=Counter)


@rule
def exposed_communication(evidence: Evidence) -> Iterator[Advice]:
    """A device that communicates without computing, for at least 5 % of the recorded time.

    The gain is at most that time: communication that overlaps with computation costs almost nothing. A communication
    kernel also waits for the slowest rank, which no overlap saves.
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
        f"Exposed communication takes {format_time(exposed)} of the {format_time(span)} ({exposed / span:.0%}) between "
        f"the first and the last work of {evidence.device}: it communicates, and computes nothing.",
        "Look for a straggler (the report `ranks` of the runs of all ranks).",
        exposed,
        details=f"All communication takes {format_time(communication)}, most of it in {name}. Waiting for other ranks "
        "is included.",
        options="Communicate less often (`no_sync()` with gradient accumulation), send less (half-precision gradients: "
        "DDP's communication hooks), or overlap communication with computation (`bucket_cap_mb` of DDP, prefetching in "
        "FSDP).",
    )


@rule
def slow_collectives(evidence: Evidence) -> Iterator[Advice]:
    """Collectives of at least 1 MB per call, on average, whose kernels take at least 5 % of the recorded time, at less
    than 2 GB/s.

    Most links between GPUs are several times as fast: PCIe 3.0 with 16 lanes has 16 GB/s, a network with 100 Gbit/s has
    12.5 GB/s, and a ring all-reduce gets half of that. The bandwidth is the algorithm bandwidth of NCCL's tests, as in
    the report ``collectives``; a lower bound unless the run has the waiting for the last rank. The gain is unknown: it
    depends on the faster link.
    """
    exchanged = _exchanged(evidence)
    waited = _waited(evidence) if exchanged else {}
    for name, sums in exchanged.items():
        waiting = waited.get(name)
        ns = sums.sized_ns - (waiting or 0)
        if not sums.sized or sums.nbytes < _LARGE * sums.sized or ns < _SHARE * evidence.recorded_ns:
            continue
        bandwidth = sums.nbytes * 1e9 / ns
        if bandwidth >= _SLOW:
            continue
        waits = "including" if waiting is None else "without"
        bound = "at least " if waiting is None else ""
        yield Advice(
            evidence.name_of(sums.layers.most_common(1)[0][0]),
            f"{sums.sized:,} call{'s' * (sums.sized != 1)} of {name} ({format_memory(sums.nbytes // sums.sized)} on "
            f"average) take{'s' * (sums.sized == 1)} {format_time(ns)}, {waits} waiting for other ranks: a bandwidth "
            f"of {bound}{format_count(bandwidth)}B/s.",
            "Find out which transport NCCL uses (`NCCL_DEBUG=INFO`): sockets are slower than InfiniBand, NVLink and "
            "PCIe peer-to-peer.",
            options="If ranks arrive late, the report `ranks` names them.",
        )


def _exchanged(evidence: Evidence) -> dict[str, _Exchanged]:
    """The calls of communication kernels, by the name of their collective."""
    by_name: defaultdict[str, _Exchanged] = defaultdict(_Exchanged)
    for layer, _, frames, calls, _, ns, _ in evidence.rows(_is_communication):
        collective = collective_of(frames)
        sums = by_name["communication" if collective is None else collective.name]
        sums.ns += ns
        sums.layers[layer] += ns
        sizes = () if collective is None else (collective.bytes_in, collective.bytes_out)
        known = [size for size in sizes if size is not None]
        if known:
            sums.sized += calls
            sums.sized_ns += ns
            sums.nbytes += calls * max(known)
    return dict(by_name)


def _waited(evidence: Evidence) -> dict[str, int]:
    """The waiting of ranks in the kernels of a collective for the last rank, by its name; only if all of it is known: a
    missing rank may have come even later."""
    waited: dict[str, int | None] = {}
    of_job = max(meta.world_size for meta in evidence.run.metas)
    for key, lockstep in evidence.run.lockstep.items():
        if not key.is_collective or key.device == "cpu":
            continue
        size = of_job if key.group is None or key.group.size is None else key.group.size
        is_known = len(lockstep.ranks) >= max(size, 2) and key.group != NOT_RECORDED
        waits = [lockstep.waiting_ns(rank) if is_known else None for rank in lockstep.ranks]
        known = [wait for wait in waits if wait is not None]
        before = waited.get(key.what, 0)
        waited[key.what] = None if before is None or len(known) < len(waits) else before + sum(known)
    return {name: ns for name, ns in waited.items() if ns is not None}


@among(is_device_work)
def _is_communication(frames: Frames) -> bool:
    return shows_collective(frames[-1]) or kind_of_work(frames[-1].name) is KernelWork.COMMUNICATION

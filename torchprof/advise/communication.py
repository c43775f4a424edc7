"""Where the CPU, the device and the ranks wait for each other: copies, synchronization, slow launches, collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add

from torchprof.advise import Advice, MergedLayers, merged, rule
from torchprof.advise.chains import (
    Among,
    Frames,
    Holds,
    inside,
    is_compiling,
    is_device_work,
    is_interruption,
    is_loading,
    is_op,
    is_wait_in_the_loop,
)
from torchprof.advise.evidence import Evidence, MatchingRow
from torchprof.run.collectives import collective_of, shows_collective
from torchprof.run.formats import format_count, format_memory, format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.lockstep import NOT_RECORDED
from torchprof.run.torch_names import BETWEEN_HOST_AND_DEVICE, COPYING, WAITING, KernelWork, kind_of_work
from torchprof.run.words import OPTIMIZER_RANGE, OUTSIDE, Frame, FrameKind

# The CPU and the device

_READS_A_VALUE = inside("aten::item", "aten::_local_scalar_dense", "aten::nonzero")
"""The ops that give Python a value of a tensor, or make a tensor whose size depends on values. All other ops that wait
for a value (``aten::is_nonzero``, ``aten::masked_select``, …) call one of these."""
_is_runtime = Among(
    is_op, lambda frames: bool(COPYING.fullmatch(frames[-1].name) or WAITING.fullmatch(frames[-1].name))
)
"""It is a call of the device's runtime in which the CPU copies or waits."""
_is_copy = Among(
    is_device_work,
    lambda frames: BETWEEN_HOST_AND_DEVICE.fullmatch(frames[-1].name) is not None and not _READS_A_VALUE(frames),
)
"""It is a copy between host and device, not of a single value."""
_is_pageable = Among(_is_copy, lambda frames: frames[-1].name.startswith("Memcpy HtoD (Pageable"))

_LEAST_IDLE = 1 / 3  # the share of the recorded time for which a device is idle that is launch-bound
_LONGEST_LAUNCH_NS = 200_000  # CPU time per kernel; what takes longer is not the launch alone


@dataclass
class _Transfers:
    """The copies or waits of one layer: their number, their times, and the ops that made them (with the source line if
    it was recorded)."""

    copies: int = 0
    waits: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    ops: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: _Transfers) -> _Transfers:
        return _Transfers(*map(add, vars(self).values(), vars(other).values()))

    @property
    def calls(self) -> int:
        return max(self.copies, self.waits)  # reading a value is a copy and a wait, or both in one call

    @property
    def most_often(self) -> str:
        """The op that did it most often, as a part of a sentence."""
        ops = self.ops.most_common()
        return f" ({'most often' if len(ops) > 1 else 'all'} in {ops[0][0]})" if ops else ""

    @property
    def both_times(self) -> str:
        return f"{format_time(self.cpu_ns)} on the CPU and {format_time(self.device_ns)} on the device"

    @property
    def effect(self) -> str:
        """What waits do, as a sentence."""
        return f"It waits {format_time(self.cpu_ns)}, and then the device waits for work."


@rule
def copies_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Copies between host and device inside layers: a constant that each forward makes on the CPU, a ``.cpu()``. Torch
    records these copies only of CUDA, HIP and MUSA devices."""
    copies_in = {layer: copies for layer, copies in _copies(evidence).items() if layer >= 0}
    limit = evidence.idle_ns + sum(copies.device_ns for copies in copies_in.values())
    for group, copies in _merged(evidence, copies_in, limit):
        yield group.advice(
            f"{_number(copies.copies, 'copy', 'copies')} between CPU and {evidence.device}{_in_calls(evidence, group)}"
            f"{copies.most_often} take{'s' * (copies.copies == 1)} {copies.both_times}.",
            "Create tensors on the device (`device=x.device`), store constants with `register_buffer`, and copy "
            "results to the CPU after the step, not in forward.",
        )


@rule
def pageable_batches(evidence: Evidence) -> Iterator[Advice]:
    """Batches that each step copies to the device from memory that is not pinned: the CPU takes part in these copies
    and waits for them. Without steps, a batch looks like the model that is moved to the device once."""
    steps = evidence.steps
    copies = _copies(evidence, _is_pageable).get(OUTSIDE)
    if copies is None or steps < 2 or copies.copies < steps:
        return
    in_steps = sum(
        spread.sum
        for measure in ("step_copy_ns", "step_wait_ns")
        for key, spread in evidence.samples[measure]
        if key.device == "cpu"
    )
    yield Advice(
        evidence.name_of(OUTSIDE),
        f"{copies.copies:,} copies from pageable memory to {evidence.device} in {steps:,} steps{copies.most_often} "
        f"take {copies.both_times}.",
        "Pin batches (`DataLoader(…, pin_memory=True)`), and copy them with `.to(device, non_blocking=True)`: the CPU "
        "then does not wait for the copy.",
        min(copies.cpu_ns, in_steps, evidence.idle_ns + copies.device_ns),
    )


@rule
def waits_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers in which the CPU waits until the device has computed a value: ``.item()``, ``if`` on a tensor,
    ``nonzero``, masks as indices, ``torch.cuda.synchronize()``. If the device is always busy, nothing is lost."""
    waits_in = {layer: waits for layer, waits in _waits(evidence).items() if layer >= 0}
    for group, waits in _merged(evidence, waits_in, evidence.idle_ns):
        yield group.advice(
            f"The CPU synchronizes with {evidence.device} {_number(waits.calls, 'time')}{_in_calls(evidence, group)}"
            f"{waits.most_often}.",
            "Keep values on the device: use `torch.where` instead of `if`, multiply by a mask instead of indexing with "
            "it, and use sizes that do not depend on the values of a tensor.",
            details=waits.effect,
        )


@rule
def waits_outside(evidence: Evidence) -> Iterator[Advice]:
    """Waits for a value outside all layers: ``loss.item()`` in each step. A ``torch.cuda.synchronize()`` alone is left
    out: it belongs to a measurement of time, or to the end of the recording."""
    waits_outside = {layer: waits for layer, waits in _waits(evidence).items() if layer == OUTSIDE}
    for group, waits in _merged(evidence, waits_outside, evidence.idle_ns):
        steps = evidence.steps
        yield group.advice(
            f"The CPU synchronizes with {evidence.device} {_number(waits.calls, 'time')} to read a value"
            f"{f' in {steps:,} steps' if steps else ''}{waits.most_often}.",
            "Keep the value as a tensor (`total += loss.detach()`), and read it once in many steps.",
            details=waits.effect,
        )


@rule
def launches_slower_than_the_device(evidence: Evidence) -> Iterator[Advice]:
    """A device that is idle because the CPU does not launch its work fast enough.

    A launch takes 5 to 50 us: more than 200 us per kernel is the CPU's own work, and other rules cover it. The device
    must be idle for a third of the time: less may be due to the profiler, which slows only the CPU.
    """
    launches, _, took_ns, _ = evidence.whole_of(is_device_work)
    if evidence.device == "cpu" or not launches:
        return
    waiting = sum(row.cpu_ns for row in evidence.rows(_is_runtime))
    loading = evidence.whole_of(is_loading).cpu_ns
    unusual = evidence.beyond_median_ns(*evidence.run.layers.roots)
    interrupted = evidence.whole_of(is_interruption).cpu_ns + evidence.whole_of(is_compiling).cpu_ns
    waiting += evidence.whole_of(is_wait_in_the_loop).cpu_ns
    launching = evidence.run.rows.total("cpu_ns") - waiting - loading - unusual - interrupted
    idle, span = evidence.idle_ns, sum(time.span_ns for time in evidence.busiest)
    # Loading and start-up may be before the first kernel: they take from the idle time of the whole recording.
    busy = sum(max(meta.busy_devices.values(), default=0) for meta in evidence.run.metas)
    gain = min(idle, evidence.recorded_ns - busy - loading - unusual - interrupted, launching)
    if gain <= _LEAST_IDLE * span or launching > _LONGEST_LAUNCH_NS * launches:
        return
    by_layer, layers = evidence.took(is_device_work).items(), evidence.run.layers
    launched_by = sums_by_key((layers[layer].path[0], took.calls) for layer, took in by_layer if layer >= 0)
    yield Advice(
        launched_by.most_common(1)[0][0] if launched_by else evidence.name_of(OUTSIDE),
        f"{evidence.device} is idle for {idle / span:.0%} of the time from its first to its last work: the program is "
        "launch-bound.",
        'Launch fewer kernels: `torch.compile(model, mode="reduce-overhead")` uses CUDA graphs.',
        gain,
        details=f"On average of {launches:,} kernels, the CPU takes {format_time(launching / launches)} per kernel, "
        f"and a kernel runs for {format_time(took_ns / launches)}. The profiler slows down the CPU: without it, the "
        "device is idle for less time.",
        options="Or use a larger batch, so that each kernel does more.",
    )


def _copies(evidence: Evidence, holds: Holds = _is_copy) -> dict[int, _Transfers]:
    """The copies between host and device that match, by layer."""
    by_layer: defaultdict[int, _Transfers] = defaultdict(_Transfers)
    around_copies = set()
    for row in evidence.rows(holds):
        transfers = by_layer[row.layer]
        transfers.copies += row.calls
        transfers.device_ns += row.device_ns
        transfers.ops[_op_of(row.frames)] += row.calls
        around_copies.add(_surroundings(row))
    for row in evidence.rows(_is_runtime) if around_copies else ():
        if _surroundings(row) in around_copies:
            by_layer[row.layer].cpu_ns += row.cpu_ns
    return by_layer


def _surroundings(row: MatchingRow) -> tuple[int, str, tuple[Frame, ...]]:
    """What a copy on the device, and the call of the runtime that launched it, have in common: the layer, the phase and
    the frames around them."""
    return row.layer, row.phase, row.frames[:-1]


def _waits(evidence: Evidence) -> dict[int, _Transfers]:
    """The waits of the CPU for the device, by layer, without those of copies; outside all layers only for values."""
    by_layer: dict[int, _Transfers] = {}
    around_copies = {*map(_surroundings, evidence.rows(_is_copy))}
    for row in evidence.rows(_is_runtime) if evidence.device != "cpu" else ():
        layer, frames = row.layer, row.frames
        is_wait = WAITING.fullmatch(frames[-1].name) is not None
        if _READS_A_VALUE(frames):
            if layer == OUTSIDE and frames[0].kind == FrameKind.LABEL and frames[0].name.startswith(OPTIMIZER_RANGE):
                continue
        elif not is_wait or layer == OUTSIDE or _surroundings(row) in around_copies:
            continue
        transfers = by_layer.setdefault(layer, _Transfers())
        transfers.waits += row.calls if is_wait else 0
        transfers.copies += 0 if is_wait else row.calls
        transfers.cpu_ns += row.cpu_ns
        transfers.ops[_op_of(frames)] += row.calls
    return by_layer


def _op_of(frames: Frames) -> str:
    """The op that the user's code calls, with the source line if it was recorded."""
    for frame in frames:
        if frame.kind == FrameKind.OP:
            stack = frame.signature.stack if frame.signature else ()
            return f"{frame.name} at {stack[0]}" if stack else frame.name
    return "no operator"


def _in_calls(evidence: Evidence, group: MergedLayers) -> str:
    """In how many forward calls of its layers; "" if that is unknown."""
    calls = [*map(evidence.timed_calls, group.numbers)]
    return f" in {_number(sum(calls), 'forward call')}" if all(calls) else ""


def _number(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _merged(
    evidence: Evidence, by_layer: Mapping[int, _Transfers], limit: int
) -> Iterator[tuple[MergedLayers, _Transfers]]:
    """The layers that share a finding, and the sum of their transfers. The gain of all layers is at most ``limit``."""
    if not (all_ns := sum(transfers.cpu_ns for transfers in by_layer.values())):
        return
    gains = {layer: transfers.cpu_ns * min(all_ns, limit) // all_ns for layer, transfers in by_layer.items()}
    for group in merged(evidence, gains):
        yield group, sum((by_layer[layer] for layer in group.numbers), _Transfers())


# Ranks that wait for each other

_LARGE_CALL = 2**20  # bytes: smaller calls take only the time of a launch
_SLOW_RATE = 2e9  # bytes per second
_is_communication = Among(
    is_device_work,
    lambda frames: shows_collective(frames[-1]) or kind_of_work(frames[-1].name) is KernelWork.COMMUNICATION,
)


@dataclass
class _CollectiveCalls:
    """The calls of one collective: the time of their kernels; the number, time and bytes of those with a known size
    (``sized``); and the device time by the layer that called them."""

    ns: int = 0
    sized: int = 0
    sized_ns: int = 0
    nbytes: int = 0
    layers: Counter[int] = field(default_factory=Counter)


_NEARLY_ALL = 0.95


@rule
def exposed_communication(evidence: Evidence) -> Iterator[Advice]:
    """A device that communicates without computing: communication that overlaps with computation costs almost nothing.
    A communication kernel also waits for the slowest rank, which no overlap saves. The place is a layer with nearly
    all communication, else the model."""
    times = evidence.run.device_times
    exposed = sum(time.exposed_ns for time in times)
    calls_of = _calls_by_collective(evidence)
    if not calls_of or exposed <= evidence.notable_ns:
        return
    span = sum(time.span_ns for time in times)
    name = max(calls_of, key=lambda name: calls_of[name].ns)
    communication = sum(time.communication_ns for time in times)
    of_layers = sum((calls.layers for calls in calls_of.values()), Counter[int]())
    layer, most = max(of_layers.items(), key=lambda item: item[1], default=(OUTSIDE, 0))
    roots = {evidence.run.layers.lineage(number)[0] if number >= 0 else number for number in of_layers}
    if most < _NEARLY_ALL * of_layers.total():  # the time is that of all communication
        layer = roots.pop() if len(roots) == 1 else OUTSIDE
    yield Advice(
        evidence.name_of(layer),
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
    """Collectives of large tensors at less than 2 GB/s: the algorithm bandwidth of NCCL's tests, as in the report
    ``collectives``; a lower bound unless the run has the waiting for the last rank.

    Most links between GPUs are several times as fast: PCIe 3.0 with 16 lanes has 16 GB/s, a network with 100 Gbit/s has
    12.5 GB/s, and a ring all-reduce gets half of that. The gain is unknown: it depends on the faster link.
    """
    calls_of = _calls_by_collective(evidence)
    waiting_ns = _waiting_by_collective(evidence) if calls_of else {}
    for name, sums in calls_of.items():
        waiting = waiting_ns.get(name)
        ns = sums.sized_ns - (waiting or 0)
        if not sums.sized or sums.nbytes < _LARGE_CALL * sums.sized or ns < evidence.notable_ns:
            continue
        bandwidth = sums.nbytes * 1e9 / ns
        if bandwidth >= _SLOW_RATE:
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


def _calls_by_collective(evidence: Evidence) -> dict[str, _CollectiveCalls]:
    """The calls of communication kernels, by the name of their collective."""
    by_name: defaultdict[str, _CollectiveCalls] = defaultdict(_CollectiveCalls)
    for layer, _, frames, calls, _, ns, _ in evidence.rows(_is_communication):
        collective = collective_of(frames)
        sums = by_name["communication" if collective is None else collective.name]
        sums.ns += ns
        sums.layers[layer] += ns
        sizes = () if collective is None else (collective.bytes_in, collective.bytes_out)
        if known := [size for size in sizes if size is not None]:
            sums.sized += calls
            sums.sized_ns += ns
            sums.nbytes += calls * max(known)
    return dict(by_name)


def _waiting_by_collective(evidence: Evidence) -> dict[str, int]:
    """For how long ranks waited in the kernels of a collective for the last rank, by its name; only if all of it is
    known: a missing rank may have come even later."""
    waiting_ns: dict[str, int | None] = {}
    ranks_of_job = max(meta.world_size for meta in evidence.run.metas)
    for key, lockstep in evidence.run.lockstep.items():
        if not key.is_collective or key.device == "cpu":
            continue
        size = ranks_of_job if key.group is None or key.group.size is None else key.group.size
        is_known = len(lockstep.ranks) >= max(size, 2) and key.group != NOT_RECORDED
        waits = [lockstep.waiting_ns(rank) if is_known else None for rank in lockstep.ranks]
        known = [wait for wait in waits if wait is not None]
        before = waiting_ns.get(key.what, 0)
        waiting_ns[key.what] = None if before is None or len(known) < len(waits) else before + sum(known)
    return {name: ns for name, ns in waiting_ns.items() if ns is not None}

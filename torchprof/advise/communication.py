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
from torchprof.run.formats import format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.torch_names import BETWEEN_HOST_AND_DEVICE, COPYING, WAITING, KernelWork, kind_of_work
from torchprof.run.words import NOT_SELECTED, OPTIMIZER_RANGE, OUTSIDE, Frame, FrameKind

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
def waits_for_values(evidence: Evidence) -> Iterator[Advice]:
    """The CPU waits until the device has computed a value: in layers ``.item()``, ``if`` on a tensor, ``nonzero``,
    masks as indices, ``torch.cuda.synchronize()``; outside of layers ``loss.item()`` in each step. If the device is
    always busy, nothing is lost. A ``torch.cuda.synchronize()`` outside of layers is left out: it belongs to a
    measurement of time, or to the end of the recording."""
    for group, waits in _merged(evidence, _waits(evidence), evidence.idle_ns):
        is_outside, steps = OUTSIDE in group.numbers, evidence.steps
        where = f" in {steps:,} steps" if steps and is_outside else _in_calls(evidence, group)
        yield group.advice(
            f"The CPU synchronizes with {evidence.device} {_number(waits.calls, 'time')}"
            f"{' to read a value' * is_outside}{where}{waits.most_often}.",
            "Keep the value as a tensor (`total += loss.detach()`), and read it once in many steps."
            if is_outside
            else "Keep values on the device: use `torch.where` instead of `if`, multiply by a mask instead of indexing "
            "with it, and use sizes that do not depend on the values of a tensor.",
            details=f"It waits {format_time(waits.cpu_ns)}, and then the device waits for work.",
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
            is_optimizers = frames[0].kind == FrameKind.LABEL and frames[0].name.startswith(OPTIMIZER_RANGE)
            if layer == NOT_SELECTED or (layer == OUTSIDE and is_optimizers):
                continue
        elif not is_wait or layer < 0 or _surroundings(row) in around_copies:
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

_is_communication = Among(
    is_device_work,
    lambda frames: shows_collective(frames[-1]) or kind_of_work(frames[-1].name) is KernelWork.COMMUNICATION,
)


@rule
def exposed_communication(evidence: Evidence) -> Iterator[Advice]:
    """A device that communicates without computing: communication that overlaps with computation costs almost nothing.
    A communication kernel also waits for the slowest rank, which no overlap saves."""
    times = evidence.run.device_times
    exposed = sum(time.exposed_ns for time in times)
    by_collective = _time_by_collective(evidence)
    if not by_collective or exposed <= evidence.notable_ns:
        return
    span = sum(time.span_ns for time in times)
    name = max(by_collective, key=lambda name: by_collective[name].total())
    communication = sum(time.communication_ns for time in times)
    layers = {layer for of_layers in by_collective.values() for layer in of_layers}
    roots = {evidence.run.layers.lineage(layer)[0] if layer >= 0 else layer for layer in layers}
    yield Advice(
        evidence.name_of(roots.pop() if len(roots) == 1 else OUTSIDE),
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


def _time_by_collective(evidence: Evidence) -> dict[str, Counter[int]]:
    """The device time of communication kernels by layer, by the name of their collective."""
    by_name: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for row in evidence.rows(_is_communication):
        collective = collective_of(row.frames)
        by_name["communication" if collective is None else collective.name][row.layer] += row.device_ns
    return dict(by_name)

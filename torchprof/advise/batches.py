"""Batches: too small, or loaded too slowly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torchprof.advise import Advice, rule
from torchprof.advise.chains import (
    depth_of_label,
    is_interruption,
    is_loading,
    is_op,
    is_optimizer,
    is_own_time,
    is_wait,
)
from torchprof.advise.evidence import Evidence
from torchprof.advise.python import functions, own_time_of_slow_python
from torchprof.run.formats import format_time
from torchprof.run.measures import Spread
from torchprof.run.words import FORWARD, LOADING, OUTSIDE

# Small batches

_FEW_SAMPLES = 8
_FEWEST_CALLS = 10
_BATCH = 64  # the recommended number of samples
_LONG_NS = 20_000  # an operator from this time on computes for longer than its call takes
_LEAST_SHARE = 0.5  # of the recorded time, in short operators and between operators


@rule
def tiny_batches(evidence: Evidence) -> Iterator[Advice]:
    """A model that is called with few samples, so that the calls of operators take longer than their computation.

    Long operators of optimizers are part of the gain: a larger batch has fewer steps. With 64 samples in a call all of
    that is shared among them. Only on the CPU; a device has ``launches_slower_than_the_device``.
    """
    run, layers = evidence.run, evidence.run.layers
    if evidence.device != "cpu" or len(run.metas) > 1:
        return
    calls, root = max(((evidence.forward_calls[root], root) for root in layers.roots), default=(0, 0))
    shapes = layers[root].input_shapes if calls >= _FEWEST_CALLS else ()
    samples = shapes[0][0] if shapes and len(shapes[0]) > 1 else 0
    if not 0 < samples <= _FEW_SAMPLES or not layers[root].same_shapes:
        return
    long_ns = ops = long_steps_ns = 0
    for row in evidence.rows(is_op):
        ops += row.calls
        if row.cpu_ns >= _LONG_NS * row.calls:
            long_ns += row.cpu_ns
            long_steps_ns += row.cpu_ns if is_optimizer(row.frames) else 0
    outside_ns = evidence.took_outside(is_own_time, FORWARD).cpu_ns
    interrupted_ns = evidence.whole_of(is_interruption).cpu_ns + evidence.whole_of(is_wait).cpu_ns
    python_ns = sum(own_time_of_slow_python(evidence).values())
    short_ns = evidence.recorded_ns - long_ns - interrupted_ns - python_ns - outside_ns
    if not ops or short_ns < _LEAST_SHARE * evidence.recorded_ns:
        return
    yield Advice(
        layers[root].name,
        f"A call gets {samples} sample{'s' * (samples > 1)}, and its operators are small.",
        f"Use a larger batch (`DataLoader(…, batch_size={_BATCH})`), or compile the model: `torch.compile(model)`.",
        (short_ns + long_steps_ns) * (_BATCH - samples) // _BATCH,
        layers=(layers[root].name,),
        details=f"A call of the model has {ops // calls:,}, with backward; {format_time(short_ns)} are in short ones "
        "and between them.",
    )


# Data loading

_FEWEST_FETCHES = 10
_PASSING_NS = 500_000
"""What a batch from a worker process takes in the process of the loop: measured on two cores, 0.3 to 1.0 ms."""
_HARDLY_LONGER = 3  # times that


class _Loading(NamedTuple):
    """Fetching batches in the loop: its time, the part of it in no operator, how often a batch was fetched, and the
    label of torch around most of these fetches."""

    ns: int
    in_no_op_ns: int
    fetches: int
    label: str


@rule
def waiting_for_data(evidence: Evidence) -> Iterator[Advice]:
    """A training loop that waits for its DataLoader.

    Two things are not part of the gain: the start of the workers, which is what the first batch takes longer than any
    other, and some 0.5 ms to get a batch from another process. Where the loop waits hardly longer for its workers, to
    have none may be faster.

    Torch's label is also around the call that ends an epoch without a batch, and a run does not record which calls
    these were. So the time is per step, if steps were marked, and not per batch.
    """
    loading = _loading(evidence)
    if not loading.ns:
        return
    has_workers = "MultiProcessing" in loading.label
    in_steps = [spread for _, spread in evidence.samples["step_data_ns"]]
    steps = sum(spread.count for spread in in_steps)
    start = sum(map(_start_of_workers, in_steps)) if has_workers else 0
    gain, each = loading.ns - start, ""
    if steps:
        of_step = (sum(spread.sum for spread in in_steps) - start) / steps
        each = f" ({format_time(of_step)} per step on average)"
        if has_workers:  # the pass before the first step may start them: it counts as an average one
            gain = min(gain, round(of_step * max(evidence.passes, steps)))
    waits = f"{format_time(gain)}{each}"
    details = options = ""
    if has_workers:
        if not in_steps and loading.fetches < _FEWEST_FETCHES:
            return
        cause = f"The loop waits {waits} for the workers of its DataLoader"
        details = f"The first batch takes another {format_time(start)}." if start > loading.ns // 10 else ""
        if gain < _HARDLY_LONGER * _PASSING_NS * loading.fetches:
            cause += ", hardly longer than to pass a batch."
            action = "Use larger batches (`batch_size=…`)."
            options = (
                "If a batch takes less than a millisecond to make, load it in the process itself: `num_workers=0`."
            )
        else:
            cause += ": they are too slow."
            action = "Use more workers (`DataLoader(…, num_workers=…)`), or do less work per batch."
    else:
        cause = f"The loop waits {waits} for data loading."
        action = "Load batches in worker processes: `DataLoader(…, num_workers=4, persistent_workers=True)`."
        if "SingleProcess" in loading.label:
            longest = next(iter(functions(evidence, is_loading)), None)
            most = f", above all at {longest.at}" if longest is not None and 4 * longest.ns > loading.ns else ""
            cause = f"The loop loads each batch itself{most}: its DataLoader has no workers."
            details = f"That takes {waits}. {loading.in_no_op_ns / loading.ns:.0%} of that time is in no operator."
            gain -= _PASSING_NS * loading.fetches
    gain = evidence.while_idle(gain)
    if gain > evidence.notable_ns:
        yield Advice(evidence.name_of(OUTSIDE), cause, action, gain, details=details, options=options)


def _start_of_workers(waits: Spread) -> int:
    """By how much the first wait of a loop is longer than all later ones: the workers start."""
    *_, longest = 0, *waits.sample[:-1]
    return max(0, waits.first - longest) if waits.first == waits.max and waits.count > 1 else 0


def _loading(evidence: Evidence) -> _Loading:
    """The sums of all work outside layers in torch's label of a loader."""
    fetches: Counter[str] = Counter()
    ns = in_no_op_ns = 0
    for row in evidence.rows(is_loading):
        if row.layer == OUTSIDE:
            frames = row.frames[depth_of_label(row.frames, LOADING) :]
            ns += row.cpu_ns
            in_no_op_ns += row.cpu_ns if is_own_time(frames) else 0
            fetches[frames[0].name] += row.calls if len(frames) == 1 else 0
    return _Loading(ns, in_no_op_ns, fetches.total(), next((label for label, _ in fetches.most_common(1)), ""))

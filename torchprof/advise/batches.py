"""Batches: too small, or loaded too slowly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from torchprof.advise import Advice, rule
from torchprof.advise.chains import (
    depth_of_label,
    in_label,
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
from torchprof.run.torch_names import aten
from torchprof.run.words import AUTOGRAD_ENGINE, FORWARD, LOADING, OUTSIDE, PHASES, FrameKind

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
    long_ns = long_steps_ns = 0
    for row in evidence.rows(is_op):
        if row.cpu_ns >= _LONG_NS * row.calls and row.frames[-1].name != AUTOGRAD_ENGINE:  # which is between nodes
            long_ns += row.cpu_ns
            long_steps_ns += row.cpu_ns if is_optimizer(row.frames) else 0
    outside_ns = evidence.took_outside(is_own_time, FORWARD).cpu_ns
    interrupted_ns = evidence.whole_of(is_interruption).cpu_ns + evidence.whole_of(is_wait).cpu_ns
    python_ns = sum(own_time_of_slow_python(evidence).values())
    short_ns = evidence.recorded_ns - long_ns - interrupted_ns - python_ns - outside_ns
    if not evidence.ops_recorded or short_ns < _LEAST_SHARE * evidence.recorded_ns:
        return
    yield Advice(
        layers[root].name,
        f"A call gets {samples} sample{'s' * (samples > 1)}, and its operators are small.",
        f"Use a larger batch (`DataLoader(…, batch_size={_BATCH})`), or compile the model: `torch.compile(model)`.",
        (short_ns + long_steps_ns) * (_BATCH - samples) // _BATCH,
        layers=(layers[root].name,),
        details=f"{format_time(short_ns)} of the loop are in short operators and between them.",
    )


_MUCH_PADDING, _MIXED_LENGTHS = 0.25, 0.5  # of the positions


@rule
def padded_batches(evidence: Evidence) -> Iterator[Advice]:
    """Models of whose first batch a large part is padding. What is padding in all sequences can be cut off; the rest
    depends on which sequences are together."""
    layers, totals = evidence.run.layers, evidence.times_with_below(PHASES)
    for root in layers.roots:
        below = [layer.padding for number, layer in enumerate(layers) if layers.lineage(number)[0] == root]
        positions, padded, common = max(filter(None, below), default=(1, 0, 0))
        can_be_cut = common >= _MUCH_PADDING * positions
        share = (common if can_be_cut else padded) / positions
        if can_be_cut or share >= _MIXED_LENGTHS:
            yield Advice(
                layers[root].name,
                f"{share:.0%} of the positions in its first batch are padding"
                f"{' in all sequences' if can_be_cut else ': its sequences differ in length'}.",
                "Pad each batch only to its longest sequence, not to a fixed length: `pad_sequence` in `collate_fn=`; "
                '`padding="longest"` in transformers.'
                if can_be_cut
                else "Put sequences of similar length into a batch (`group_by_length=True` in transformers).",
                round(totals[root] * share),
                layers=(layers[root].name,),
            )


# Data loading

_FEWEST_FETCHES = 10
_PASSING_NS = 500_000
"""What a batch from a worker process takes in the process of the loop: measured on two cores, 0.3 to 1.0 ms."""
_HARDLY_LONGER = 3  # times that
_SELECTS, _COLLATES = aten("select index"), aten("stack cat empty")
_MOST_OF_OPERATORS = 0.8
_LONG_WAIT, _LONG_WAIT_NS = 10, 5_000_000
"""A wait for workers is long if it takes so many times the median wait, and at least 5 ms."""
_MOST_OF_WAITS = 0.6
_ITEMS, _ITEM_NS = 8, 100_000
"""So many rows that are selected for a batch, each in less time: indexing takes longer than what it copies."""
_MOST_WORKERS = 4


class _Loading(NamedTuple):
    """Fetching batches in the loop with loaders of one kind: the label of torch around it, its time, the part of it in
    no operator, how often a batch was fetched, how often a row of a tensor was selected, and how many operators were
    called for the items."""

    label: str
    ns: int
    in_no_op_ns: int
    fetches: int
    selections: int
    operators: int


@rule
def waiting_for_data(evidence: Evidence) -> Iterator[Advice]:
    """A training loop that waits for its DataLoader: loaders with workers and those without are findings of their own.

    Without workers: rows of tensors that are selected one by one can be indexed by batch; else workers load while the
    loop computes, if it leaves them a processor, but to pass a batch takes some 0.5 ms. With workers, their start does
    not count: what the first batch takes longer than any other. Torch's label is also around the call that ends an
    epoch without a batch: so the time is per step, if steps were marked, and not per batch.
    """
    in_steps = [spread for _, spread in evidence.samples["step_data_ns"]]
    kinds = [*_loadings(evidence)]
    for loading in kinds:
        find = _with_workers if "MultiProcessing" in loading.label else _without_workers
        advice = find(evidence, loading, in_steps if len(kinds) == 1 else [])
        if advice is not None and (advice.gain_ns or 0) > evidence.notable_ns:
            yield advice


def _without_workers(evidence: Evidence, loading: _Loading, in_steps: Sequence[Spread]) -> Advice:
    """The finding on a loader that loads in the process of the loop."""
    steps = sum(spread.count for spread in in_steps)
    each = f" ({format_time(sum(spread.sum for spread in in_steps) / steps)} per step on average)" if steps else ""
    waits = f"{format_time(loading.ns)}{each}"
    place = evidence.name_of(OUTSIDE)
    usable = int(evidence.switches.get("usable_cpus", 0)) or _MOST_WORKERS + 1
    workers = f"DataLoader(…, num_workers={min(_MOST_WORKERS, max(usable - 1, 1))}, persistent_workers=True)"
    action = f"Load batches in worker processes: `{workers}`."
    if "SingleProcess" not in loading.label:
        gain = evidence.while_idle(loading.ns)
        return Advice(place, f"The loop waits {waits} for data loading.", action, gain)
    longest = next(iter(functions(evidence, in_label(loading.label))), None)
    most = f", above all at {longest.at}" if longest is not None and 4 * longest.ns > loading.ns else ""
    details = f"That takes {waits}. {loading.in_no_op_ns / loading.ns:.0%} of that time is in no operator."
    a_batch = loading.selections // max(loading.fetches, 1)
    is_indexing = loading.selections >= _MOST_OF_OPERATORS * loading.operators
    if a_batch >= _ITEMS and loading.ns < _ITEM_NS * loading.selections and is_indexing:
        return Advice(
            place,
            f"The loop makes each batch row by row{most}: {a_batch:,} selections of a row, which are then stacked.",
            "Index whole batches: `DataLoader(data, sampler=BatchSampler(sampler, size, False), batch_size=None)` if "
            "`data[indices]` takes a list, as a TensorDataset does; or `x[indices]` without a loader.",
            evidence.while_idle(loading.ns * (a_batch - 1) // a_batch),
            details=details,
        )
    gain = loading.ns - _PASSING_NS * loading.fetches
    # On two processors, workers made loops that use both 5 to 44 % slower.
    cause = f"The loop loads each batch itself{most}: its DataLoader has no workers."
    uses_all = evidence.device == "cpu" and int(evidence.switches.get("num_threads", 0)) >= usable
    if uses_all and 2 * loading.ns < evidence.recorded_ns:
        action = "Do less for each item: prepare what is the same in each epoch once, before the loop."
        gain = loading.ns
    return Advice(place, cause, action, evidence.while_idle(gain), details=details)


def _with_workers(evidence: Evidence, loading: _Loading, in_steps: Sequence[Spread]) -> Advice | None:
    """The finding on a loader with worker processes; None if too little is known."""
    steps = sum(spread.count for spread in in_steps)
    if not steps and loading.fetches < _FEWEST_FETCHES:
        return None
    place, start, gain, each = evidence.name_of(OUTSIDE), sum(map(_start_of_workers, in_steps)), loading.ns, ""
    if steps:
        of_step = (sum(spread.sum for spread in in_steps) - start) / steps
        each = f" ({format_time(of_step)} per step on average)"
        # The pass before the first step may start them: it counts as an average one.
        gain = min(gain - start, round(of_step * max(evidence.passes, steps)))
    epochs, long_ns = _long_waits(in_steps, loading.fetches - round(evidence.passes))
    if epochs:
        return Advice(
            place,
            f"{epochs} batches take {format_time(long_ns / epochs)} each, as many as passes over the data begin: the "
            "workers of its DataLoader start then, or have nothing ready.",
            "Keep the workers: `DataLoader(…, persistent_workers=True)`; or let one pass over the data be longer.",
            evidence.while_idle(long_ns),
        )
    cause = f"The loop waits {format_time(gain)}{each} for the workers of its DataLoader"
    details = f"The first batch takes another {format_time(start)}." if start > loading.ns // 10 else ""
    gain = evidence.while_idle(gain)
    if gain < _HARDLY_LONGER * _PASSING_NS * loading.fetches:
        return Advice(
            place,
            f"{cause}, hardly longer than to pass a batch.",
            "Use larger batches (`batch_size=…`).",
            gain,
            details=details,
            options="If a batch takes less than a millisecond to make, load it in the process itself: `num_workers=0`.",
        )
    action = "Use more workers (`DataLoader(…, num_workers=…)`), or do less work per batch."
    return Advice(place, f"{cause}: they are too slow.", action, gain, details=details)


def _long_waits(waits: Sequence[Spread], epochs: int) -> tuple[int, int]:
    """How many steps waited long for a batch, and for how long in all, if these are about as many as there were passes
    over the data, and most of the waiting; else 0."""
    values = [ns for spread in waits for ns in spread.sample]
    least = max(_LONG_WAIT * median(values), _LONG_WAIT_NS) if values else 0
    long = [ns for ns in values if ns >= least]
    is_each_pass = len(long) >= 2 and abs(len(long) - epochs) <= 1 + epochs // 4
    if not is_each_pass or sum(long) < _MOST_OF_WAITS * sum(values):
        return 0, 0
    return len(long), round(sum(long))


def _start_of_workers(waits: Spread) -> int:
    """By how much the first wait of a loop is longer than all later ones: the workers start."""
    *_, longest = 0, *waits.sample[:-1]
    return max(0, waits.first - longest) if waits.first == waits.max and waits.count > 1 else 0


def _loadings(evidence: Evidence) -> Iterator[_Loading]:
    """The sums of all work outside layers in each of torch's labels of loaders, the longest first."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in evidence.rows(is_loading):
        if row.layer == OUTSIDE:
            frames = row.frames[depth_of_label(row.frames, LOADING) :]
            of_label = sums[frames[0].name]
            of_label["ns"] += row.cpu_ns
            of_label["in_no_op_ns"] += row.cpu_ns if is_own_time(frames) else 0
            of_label["fetches"] += row.calls if len(frames) == 1 else 0
            is_direct_op = len(frames) == 2 and frames[1].kind == FrameKind.OP and frames[1].name not in _COLLATES
            of_label["operators"] += row.calls if is_direct_op else 0
            of_label["selections"] += row.calls if is_direct_op and frames[1].name in _SELECTS else 0
    for label, of_label in sorted(sums.items(), key=lambda item: -item[1]["ns"]):
        if of_label["ns"]:
            yield _Loading(label, *(of_label[name] for name in _Loading._fields[1:]))

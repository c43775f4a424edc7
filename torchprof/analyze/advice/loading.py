"""Waiting for the data loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.chains import depth_of_label, is_loading, is_own_time
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.advice.lines import functions
from torchprof.run.formats import format_time
from torchprof.run.words import LOADING, OUTSIDE

_SHARE = 0.05
_FEW = 10
_PASSING_NS = 500_000
"""What a batch from a worker process takes in the process of the loop: measured on two cores, 0.3 to 1.0 ms."""
_LIGHT = 3


@rule
def waiting_for_data(evidence: Evidence) -> Iterator[Advice]:
    """A training loop that waits for its DataLoader.

    Evidence: the time inside the label that torch puts around each batch, outside all layers. It is reported from 5 %
    of the recorded time, because every loop takes some time to fetch batches. The name of the label shows whether the
    loader has workers. Workers have to start: with marked steps, the wait of the first step beyond the median is not
    part of the gain; without, fewer than 10 batches give no finding. To get a batch from another process takes some 0.5
    ms: that is not gained by workers, and where the loop waits hardly longer for its workers, to have none may be
    faster. The gain is at most the idle time of a device: while it works, nothing is lost. Loaders other than torch's
    have no such label.

    The label is also around the call that ends an epoch without a batch, and a run does not record which calls these
    were. So the time is per step, if steps were marked, and not per batch.
    """
    labels: Counter[str] = Counter()
    whole = in_no_op = 0
    for layer, _, frames, calls, cpu_ns, *_ in evidence.rows(is_loading):
        if layer != OUTSIDE:
            continue
        inside = frames[depth_of_label(frames, LOADING) :]
        whole += cpu_ns
        labels[inside[0].name] += calls if len(inside) == 1 else 0
        in_no_op += cpu_ns if is_own_time(inside) else 0
    if not whole:
        return
    label = labels.most_common(1)[0][0]
    times = sum(labels.values())
    gain = whole
    in_steps = [spread for _, spread in evidence.samples("step_data_ns")]
    steps = sum(spread.count for spread in in_steps)
    each = f" ({format_time(sum(spread.sum for spread in in_steps) / steps)} per step on average)" if steps else ""
    waits = f"{format_time(whole)}{each}"
    seen = f"The loop waits {waits} for data loading."
    details = options = ""
    remedy = "Load batches in worker processes: `DataLoader(…, num_workers=4, persistent_workers=True)`."
    if "MultiProcessing" in label:
        if not in_steps and times < _FEW:
            return
        gain -= sum(max(0, spread.first - round(spread.median)) for spread in in_steps)
        seen = f"The loop waits {waits} for the workers of its DataLoader: they are too slow."
        remedy = "Use more workers (`DataLoader(…, num_workers=…)`), or do less work per batch."
        if gain < _LIGHT * _PASSING_NS * times:
            seen = f"The loop waits {waits} for the workers of its DataLoader, hardly longer than to pass a batch."
            remedy = "Use larger batches (`batch_size=…`)."
            options = (
                "If a batch takes less than a millisecond to make, load it in the process itself: `num_workers=0`."
            )
    elif "SingleProcess" in label:
        function = next(iter(functions(evidence, is_loading)), None)
        most = f", above all at {function.at}" if function is not None and 4 * function.ns > whole else ""
        seen = f"The loop loads each batch itself{most}: its DataLoader has no workers."
        details = f"That takes {waits}. {in_no_op / whole:.0%} of that time is in no operator."
        gain -= _PASSING_NS * times
    gain = evidence.while_idle(gain)
    if gain > _SHARE * evidence.recorded_ns:
        yield Advice(evidence.name_of(OUTSIDE), seen, remedy, gain, details=details, options=options)

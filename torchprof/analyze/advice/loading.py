"""Batches that the loop waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.advice.host import idle_ns, inside_loading, is_loading
from torchprof.analyze.advice.python import is_own_time
from torchprof.run.cost import format_time
from torchprof.run.words import OUTSIDE

_SHARE = 0.05
_FEW = 10


@rule
def waiting_for_data(evidence: Evidence) -> Iterator[Advice]:
    """A loop that waits for its DataLoader.

    Evidence is the time inside the label that torch puts around each batch, outside all layers, from 5 % of the
    recorded time on: to fetch a batch takes some time in every loop. The label's name tells whether the loader has
    workers. They have to start, too: where steps were marked, what the first waited longer than the median is no gain,
    and where none were, nothing is said of fewer than 10 batches. With a device the gain is no more than it is idle:
    where it works on meanwhile, nobody waits. A loader that is not torch's has no such label.

    The label is around the call that ends an epoch without a batch, too, and a run does not tell which calls these
    were. So time is given for each step, where steps were marked, and not for each batch.
    """
    rows, columns = evidence.run.rows, evidence.run.rows.columns
    labels: Counter[str] = Counter()
    whole = in_no_op = 0
    for at in evidence.rows(is_loading):
        if columns["layer"][at] != OUTSIDE:
            continue
        frames = rows.frames[columns["frames"][at]]
        inside = inside_loading(frames)
        whole += columns["cpu_ns"][at]
        labels[inside[0].name] += columns["calls"][at] if len(inside) == 1 else 0
        if is_own_time(inside):
            in_no_op += columns["cpu_ns"][at]
    if not whole:
        return
    label = labels.most_common(1)[0][0]
    times = sum(labels.values())
    gain = whole
    in_steps = [spread for _, spread in evidence.samples("step_data_ns")]
    seen = f"The loop waits for its DataLoader {format_time(whole)}"
    seen += f" ({whole / evidence.recorded_ns:.0%} of the recorded time)" if evidence.recorded_ns else ""
    if in_steps:
        steps = sum(spread.count for spread in in_steps)
        seen += f", {format_time(sum(spread.sum for spread in in_steps) / steps)} a step on average"
    seen += "."
    remedy = "Let other processes make the next batches meanwhile: DataLoader(..., num_workers=4)."
    if "MultiProcessing" in label:
        if not in_steps and times < _FEW:
            return
        gain -= sum(max(0, spread.first - round(spread.median)) for spread in in_steps)
        seen += " It has workers, and they are too slow for it."
        remedy = "Give it more workers (num_workers=), or give them less to do for a batch."
    elif "SingleProcess" in label:
        seen += f" It has no workers: the loop makes each batch itself, {in_no_op / whole:.0%} of that in no operator."
    if evidence.device != "cpu":
        gain = min(gain, idle_ns(evidence))
    if gain > _SHARE * evidence.recorded_ns:
        yield Advice(evidence.name_of(OUTSIDE), seen, remedy, gain, None, "waiting_for_data")

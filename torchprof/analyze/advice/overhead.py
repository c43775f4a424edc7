"""Calls that cost more than what they compute, on a CPU: batches of few samples."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.chains import is_collection, is_op, is_optimizer, is_own_time
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.advice.python import layers_of_slow_python
from torchprof.run.cost import format_time
from torchprof.run.words import FORWARD

_SMALL_NS = 20_000
_FEW = 8
_BATCH = 64
_MOST = 0.5


@rule
def tiny_batches(evidence: Evidence) -> Iterator[Advice]:
    """A model that is called with at most 8 samples, at least ten times, so that the calls of operators take longer
    than their computation.

    Evidence: the first dimension of the model's first input, and the time that is not in operators of 20 us or more on
    average, nor in Python outside the layers or of a slow layer, nor in garbage collections; it is at least half of the
    recorded time. Long operators of optimizers are part of the gain: a larger batch has fewer steps. With 64 samples in
    a call all of that is shared among them: the gain is 63/64 of it for one sample, 7/8 for eight. Only on the CPU; a
    device has ``launches_slower_than_the_device``.
    """
    run, layers = evidence.run, evidence.run.layers
    if evidence.device != "cpu" or len(run.metas) > 1:
        return
    called = [(evidence.forward_calls[root], root) for root in layers.roots]
    calls, root = max(called, default=(0, 0))
    shapes = layers[root].input_shapes if calls >= 10 else ()
    if not shapes or len(shapes[0]) < 2 or not 0 < shapes[0][0] <= _FEW or not layers[root].same_shapes:
        return
    long_ns = ops = stepping = 0
    columns = run.rows.columns
    for row in evidence.rows(is_op):
        ns, times = columns["cpu_ns"][row], columns["calls"][row]
        ops += times
        if ns >= _SMALL_NS * times:
            long_ns += ns
            stepping += ns if is_optimizer(run.rows.frames[columns["frames"][row]]) else 0
    own_ns = evidence.took_outside(is_own_time, FORWARD).cpu_ns
    collecting = sum(took.cpu_ns for took in evidence.took(is_collection).values())
    python = sum(slow.own_ns for slow in layers_of_slow_python(evidence).values())
    small = evidence.recorded_ns - long_ns - collecting - python - own_ns
    if not ops or small < _MOST * evidence.recorded_ns:
        return
    samples = f"{shapes[0][0]} sample{'s' * (shapes[0][0] > 1)}"
    yield Advice(
        layers[root].name,
        f"A call gets {samples}, and its operators are small. A call of the model has {ops // calls:,}, with backward; "
        f"{format_time(small)} are in short ones and between them.",
        f"Use a larger batch (`DataLoader(…, batch_size={_BATCH})`), or compile the model: `torch.compile(model)`.",
        (small + stepping) * (_BATCH - shapes[0][0]) // _BATCH,
        layers=(layers[root].name,),
    )

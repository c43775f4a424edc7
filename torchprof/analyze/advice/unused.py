"""Work whose result nothing uses: layers that no backward reaches, and graphs that no backward consumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, merged, rule
from torchprof.analyze.advice.chains import is_outermost
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.words import BACKWARD, FORWARD

_GRAPH = 0.55
"""The part of a forward call that a graph costs: measured with 24 blocks of two linear layers, 41 % with one thread and
76 % with two. Most of it is memory that is not used again."""
_NODES = {
    "Linear": ("AddmmBackward0", "MmBackward0"),
    "Conv1d": ("ConvolutionBackward0",),
    "Conv2d": ("ConvolutionBackward0",),
    "Conv3d": ("ConvolutionBackward0",),
    "LayerNorm": ("NativeLayerNormBackward0",),
    "Embedding": ("EmbeddingBackward0",),
}
"""By class, the node that each forward call makes once, with any shape."""


@rule
def layers_without_backward(evidence: Evidence) -> Iterator[Advice]:
    """Layers with trainable parameters that no backward reaches, in a model that trains: an auxiliary head, a branch
    that the loss leaves out.

    Evidence: forward calls with gradients enabled and no backward at or below the layer, while its parent has some. The
    gain is their forward. It may be needed for its values, so the remedy is a condition.
    """
    run, layers = evidence.run, evidence.run.layers
    if BACKWARD not in run.phases():
        return
    forward = evidence.times_with_below([FORWARD])
    backward = evidence.times_with_below([BACKWARD])
    trainable = layers.roll_up([layer.trainable_params or 0 for layer in layers])
    gains = {}
    for number in range(len(layers)):
        above = layers.parent[number]
        if above < 0 or not backward[above] or backward[number] or not trainable[number]:
            continue
        if forward[number] and layers[number].grad_calls and not layers[number].compiled:
            gains[number] = forward[number]
    for group in merged(evidence, gains):
        yield group.advice(
            f"No gradient reaches it, so no loss trains it, and its forward takes {group.time}.",
            "Leave it out in training if no loss needs its values; else call it under `torch.no_grad()`.",
        )


@rule
def graphs_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Forward calls of a model that record a graph for a backward that does not run, and others that train:
    evaluation without ``torch.no_grad()``.

    Evidence: the calls of a model with gradients enabled, and how often backward ran through its linear layers,
    convolutions, norms and embeddings, each of whose calls makes one node. The gain is 55 % of these calls: what the
    graph and the memory that it keeps cost, measured for small layers. Needs a run of one rank. In a run without any
    backward, ``gradients_never_used`` has the memory.
    """
    run, layers = evidence.run, evidence.run.layers
    if BACKWARD not in run.phases() or len(run.metas) > 1:
        return
    passes = _passes(evidence)
    forward_ns = evidence.times_with_below([FORWARD])
    gains, seen = {}, {}
    for root in layers.roots:
        graphs, calls = layers[root].grad_calls, run.rows.forward_calls(root)
        if not graphs or not calls:
            continue
        most = 0.0  # the calls that backward ran through, by the layer that has most
        for number, times in passes.items():
            its_calls = run.rows.forward_calls(number)
            if its_calls and layers[number].trainable_params and layers.lineage(number)[0] == root:
                most = max(most, times * calls / its_calls)
        unused = min(graphs, calls) - round(most)
        if most and unused >= 2:
            gains[root] = round(forward_ns[root] * unused / calls * _GRAPH)
            seen[root] = unused, calls
    for group in merged(evidence, gains):
        unused, calls = (sum(seen[root][index] for root in group.numbers) for index in (0, 1))
        yield group.advice(
            f"{unused:,} of {calls:,} forward calls record a graph for a backward that never runs.",
            "If these calls evaluate the model, run them under `torch.inference_mode()` or `torch.no_grad()`.",
        )


def _passes(evidence: Evidence) -> dict[int, int]:
    """How often backward ran through each layer of ``_NODES``."""
    rows, columns, layers = evidence.run.rows, evidence.run.rows.columns, evidence.run.layers
    passes: Counter[int] = Counter()
    for row in evidence.rows(is_outermost, phases=(BACKWARD,)):
        number = columns["layer"][row]
        if number >= 0 and layers[number].kind in _NODES:
            name = rows.frames[columns["frames"][row]][0].name
            if name.rpartition(" ")[2] in _NODES[layers[number].kind]:
                passes[number] += columns["calls"][row]
    return dict(passes)

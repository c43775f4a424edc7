"""Avoidable work for gradients: slow optimizer steps, recomputation, and gradients and graphs that nothing uses."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from math import ceil

from torchprof.advise import PER_RULE, Advice, merged, merged_into_one, rule
from torchprof.advise.chains import (
    ACCUMULATE,
    Among,
    always,
    depth_of_label,
    in_label,
    inside,
    is_op,
    is_optimizer,
    is_outermost,
    is_step,
    node_of,
)
from torchprof.advise.evidence import Evidence
from torchprof.analyze.lines import lines_of_code
from torchprof.run.formats import format_memory, format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.torch_names import FOREACH, FUSED, aten
from torchprof.run.words import BACKWARD, FORWARD, OPTIMIZER_STEP, OUTSIDE_NAME, RECOMPUTE, ZERO_GRAD, FrameKind

# The optimizer: its steps, and how it resets gradients

_zeroes = in_label(ZERO_GRAD, inside("aten::zero_", "aten::_foreach_zero_"))
_adds_to_gradient = Among(
    inside(ACCUMULATE), lambda frames: "aten::add_" in [*dropwhile(ACCUMULATE.__ne__, (frame.name for frame in frames))]
)
_HAVE_FUSED = {"cpu": {"SGD", "Adam", "AdamW", "Adagrad"}, "cuda": {"SGD", "Adam", "AdamW"}}
_NOT_FUSED = aten("_coalesce _indices _nnz _values sparse_coo_tensor sparse_mask view_as_real")
"""Ops that are called for sparse gradients and complex parameters: fused steps raise an error for both."""
_FEWEST_TENSORS = 10
_SMALL_NS = 30_000  # SGD gains from a fused step only where its operators take less


@dataclass
class _Steps:
    """The steps of one class of optimizers: their number and time, the calls of the ops directly in them by name, and
    the CPU time in ops."""

    steps: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    op_ns: int = 0
    cannot_be_fused: bool = False


@rule
def optimizer_step_per_tensor(evidence: Evidence) -> Iterator[Advice]:
    """Steps of torch's optimizers that call their ops once per tensor.

    On the CPU the remedy is ``fused=True``. Measured on two threads with 40 to 200 tensors of 64 to a million elements,
    torch 2.4 and 2.13: Adam, AdamW and Adagrad take 10 to 60% of the time. SGD takes 40 to 60% if its ops are shorter
    than 30 µs on average, and hardly less if they are longer. foreach=True was slower than the loop as often as faster.
    """
    on_cpu = evidence.device == "cpu"
    for name, done in _steps_by_class(evidence).items():
        has_fused = name in _HAVE_FUSED["cpu" if on_cpu else "cuda"]
        updates_many_at_once = any(op.startswith(FUSED if on_cpu else (FUSED, FOREACH)) for op in done.calls)
        if updates_many_at_once or done.cannot_be_fused or not has_fused:
            continue
        ops = done.calls.total()
        is_slow_sgd = on_cpu and name == "SGD" and done.op_ns > _SMALL_NS * ops
        if max(done.calls.values(), default=0) < _FEWEST_TENSORS * done.steps or is_slow_sgd:
            continue
        ns = max(done.cpu_ns, done.device_ns)
        yield Advice(
            OUTSIDE_NAME,
            f"{name} updates tensors one by one.",
            f"Use `torch.optim.{name}(…, fused=True)`: one kernel for all tensors.",
            int(ns * (1 / 2 if name == "SGD" else 3 / 4)),
            details=f"A step takes {format_time(ns / done.steps)} on average.",
        )


@rule
def gradients_zeroed(evidence: Evidence) -> Iterator[Advice]:
    """``zero_grad(set_to_none=False)`` of an optimizer: ops that write zeros into gradients, in its label. Backward
    then adds to these gradients, which is part of the gain; further additions accumulate gradients on purpose. Layers
    that no gradient reaches have gradients of zeros, which momentum and weight decay turn into updates."""
    if not (rows := [*evidence.rows(_zeroes)]):
        return
    label = next(frame.name for frame in rows[0].frames if frame.name.startswith(ZERO_GRAD))
    updated, ns = _updated_with_zeros(evidence), sum(map(evidence.time_of, rows))
    trained = sum(evidence.run.layers[number].trainable_params or 0 for number in updated)
    ns += (optimizer_ns(evidence) - ns) * trained // max(evidence.trainable_params, 1)
    writes = sum(row.calls for row in rows if row.frames[-1].name == "aten::zero_")
    added = evidence.took(_adds_to_gradient, phases=(BACKWARD,)).values()
    if additions := sum(work.calls for work in added):
        ns += sum(map(evidence.time_of, added)) * min(writes, additions) // additions
    before = [size for memory in evidence.run.memory for kind, size in memory.before or () if kind == "gradients"]
    more = f" and {len(updated) - PER_RULE} more" if len(updated) > PER_RULE else ""
    named = f"{', '.join(map(evidence.name_of, updated[:PER_RULE]))}{more}"
    also = f"; the optimizer also updates layers that no gradient reaches: {named}" if updated else ""
    name = label.removeprefix(ZERO_GRAD).partition(".")[0]
    yield Advice(
        OUTSIDE_NAME,
        f"`zero_grad` of {name} fills gradients with zeros ({writes:,} write{'s' * (writes != 1)}), and backward adds "
        f"to them{also}.",
        "Use `zero_grad(set_to_none=True)`, the default: it frees the gradients, and backward writes new ones.",
        ns,
        sum(before) or None,
    )


def _updated_with_zeros(evidence: Evidence) -> list[int]:
    """The layers with parameters of their own alone that an optimizer has changed, and that no backward of their model
    reaches. A layer that was not called may lend its parameters to the one above."""
    run, layers = evidence.run, evidence.run.layers
    backward, sums = (evidence.took(holds, phases=(BACKWARD,)) for holds in (always, inside(ACCUMULATE)))
    models = {layers.lineage(number)[0] for number in backward if number >= 0 and len(run.metas) == 1}
    return [
        number
        for number, layer in enumerate(layers)
        if layer.updated_params
        and not (layer.compiled or layer.tied or layer.shared_with)
        and number not in backward
        and (run.rows.forward_calls(number) or evidence.called_above[number] not in sums)
        and layers.lineage(number)[0] in models
    ]


def could_be_fused(evidence: Evidence) -> list[str]:
    """The classes of optimizers that have a fused step on the device, and do not use it."""
    have = _HAVE_FUSED["cpu" if evidence.device == "cpu" else "cuda"]
    steps = _steps_by_class(evidence).items()
    of_have = [(name, done) for name, done in steps if name in have and not done.cannot_be_fused]
    return [name for name, done in of_have if not any(op.startswith(FUSED) for op in done.calls)]


def optimizers_of(evidence: Evidence) -> list[str]:
    """The classes of the optimizers that stepped."""
    return [*_steps_by_class(evidence)]


def _steps_by_class(evidence: Evidence) -> dict[str, _Steps]:
    """The steps of optimizers, by the name of their class."""
    by_class: defaultdict[str, _Steps] = defaultdict(_Steps)
    for _, _, frames, calls, cpu_ns, device_ns, _ in evidence.rows(is_step):
        depth = depth_of_label(frames, OPTIMIZER_STEP)
        done = by_class[frames[depth].name.removeprefix(OPTIMIZER_STEP).partition(".")[0]]
        done.cpu_ns += cpu_ns
        done.device_ns += device_ns
        if depth == len(frames) - 1:
            done.steps += calls
            continue
        done.op_ns += cpu_ns
        done.cannot_be_fused |= any(frame.name in _NOT_FUSED for frame in frames[depth + 1 :])
        if depth == len(frames) - 2 and frames[-1].kind == FrameKind.OP and frames[-1].name.startswith("aten::"):
            done.calls[frames[-1].name] += calls
    return {name: done for name, done in by_class.items() if done.steps}


# Layers with and without gradients

_GRAPH_SHARE = 0.75
"""The part of a forward call that a graph costs: measured with 24 blocks of two linear layers, 41 and 98 % with one
thread on two machines, 76 % with two threads. Most of it is memory that is not used again."""
_MORE_THAN_ONCE = 1.5
_CLEARED, _SAME = 1.5, 1.2
_WEIGHT_AND_BIAS = re.compile(r"Linear|Conv(Transpose)?[123]d|(Layer|Group)Norm|BatchNorm[123]d|Embedding")
_is_gradient = Among(is_outermost, lambda frames: frames[0].name.endswith(ACCUMULATE))
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
def recomputed_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers whose forward is computed again in backward (activation checkpointing): the time that it costs, and the
    most memory that it saves. The size of the device's memory is unknown here, so the remedy is a condition."""
    if RECOMPUTE not in evidence.run.phases():
        return
    layers = evidence.run.layers
    recomputed = ((key.layer, spread) for key, spread in evidence.samples["cpu_ns"] if key.phase == RECOMPUTE)
    calls = sums_by_key((layer, spread.count) for layer, spread in recomputed if layer >= 0)
    times: Counter[int] = Counter()
    for layer, took in evidence.took(always, phases=(RECOMPUTE,)).items():
        outermost = next((number for number in layers.lineage(layer) if number in calls), None)
        if outermost is not None:
            times[outermost] += evidence.time_of(took)
    if times.total() <= evidence.notable_ns:
        return
    saves = {layer: _saved_by_recomputing(evidence, layer, calls[layer]) for layer in times}
    for group in merged(evidence, times):
        again = sum(calls[layer] for layer in group.numbers)
        known = [nbytes for layer in group.numbers if (nbytes := saves[layer]) is not None]
        saved = f"It saves up to {format_memory(sum(known))}." if len(known) == len(group.numbers) else ""
        yield group.advice(
            f"Activation checkpointing runs forward again in backward {again:,} time{'s' * (again != 1)}, for "
            f"{group.time} in total.",
            "If memory is left, checkpoint fewer layers: only those that save much memory and take little time.",
            details=saved,
        )


def _saved_by_recomputing(evidence: Evidence, layer: int, calls: int) -> int | None:
    """The most memory that checkpointing a layer saves: the peak of a recomputed call for each in one forward of its
    model; None if memory was not recorded."""
    rises = [
        spread.max for key, spread in evidence.samples["peak_bytes"] if key.layer == layer and key.phase == RECOMPUTE
    ]
    passes = evidence.timed_calls(evidence.run.layers.lineage(layer)[0])
    return max(rises) * ceil(calls / max(passes, 1)) if rises else None


@rule
def frozen_layers_with_gradients(evidence: Evidence) -> Iterator[Advice]:
    """Frozen layers at the front of a model through which gradients flow, because the model's input requires grad.

    If something trainable runs before a frozen layer, gradients must flow through the layer. So evidence is the
    backward of layers that are called before the first layer with trainable (or unknown) parameters, and once in each
    call of the model: a layer that is called twice may also run after. If the whole model is frozen, the gradient of
    its input is the purpose; of two trained models, one may feed the other. Code before the model is unknown, so the
    remedy is a condition. A layer whose parameters did not change while others did counts as frozen, too, unless an
    optimizer is fused: torch does not count its changes.
    """
    layers = evidence.run.layers
    backward = evidence.took(always, phases=(BACKWARD,))
    front = [layer for layer in _before_trained(evidence) if layer in backward]
    frozen = [layer for layer in front if layers[layer].params]
    ns = sum(evidence.time_of(backward[layer]) for layer in front)
    if not frozen or ns <= evidence.notable_ns:
        return
    is_frozen = all(layers[number].trainable_params == 0 for number in frozen)
    what = "are frozen" if is_frozen else "no optimizer updates"
    group = merged_into_one(evidence, {layer: evidence.time_of(backward[layer]) for layer in front})
    yield group.advice(
        f"Backward runs through layers that {what}, for {format_time(ns)} in total.",
        "If the gradient of the model's input is not needed, create the input with `requires_grad=False`, or run the "
        "frozen layers under `torch.no_grad()`."
        if is_frozen
        else "If they are not to be trained, freeze them: `layer.requires_grad_(False)`.",
        details="Nothing trainable in the model runs before them.",
        options="" if is_frozen else "Otherwise give their parameters to the optimizer.",
    )


def _before_trained(evidence: Evidence) -> list[int]:
    """The layers without children that are called before the first trained layer, once in each call of the one model
    that is trained; none if several are, or if no layer is frozen."""
    layers = evidence.run.layers
    if any(frame.name.startswith(FUSED) for chain in evidence.run.rows.frames for frame in chain):
        layers = Layers(replace(layer, updated_params=None) for layer in layers)
    if not any(layer.params and not _is_trained(layer) for layer in layers):
        return []
    called = {layer: None for layer in evidence.run.rows.summed("layer", "calls", phase=FORWARD) if layer >= 0}
    trained = _trained(layers, called)
    models = {layers[number].path[:1] for number in trained}
    if len(models) != 1:
        return []
    [model] = models
    passes = evidence.timed_calls(layers.index_of[model])
    return [
        layer
        for layer in takewhile(lambda layer: layer not in trained, called)
        if layers[layer].path[:1] == model and not layers.children[layer] and evidence.timed_calls(layer) == passes
    ]


def _trained(layers: Layers, called: Collection[int]) -> set[int]:
    """The layers that have, or may have, trainable parameters.

    These are also layers with unknown parameters; other paths of a trainable layer; layers without parameters whose
    class has parameters elsewhere, because they may share a weight; and instead of a layer that is never called, the
    layer around it, which uses its parameters directly.
    """
    numbers = layers.index_of
    kinds = {layer.kind for layer in layers if layer.params != 0}
    trained = set()
    for number, layer in enumerate(layers):
        at_other_paths = (layers[numbers[path]] for path in layer.shared_with if path in numbers)
        if any(map(_is_trained, (layer, *at_other_paths))) or (
            layer.params == 0 and not layer.shared_with and layer.kind in kinds
        ):
            lineage = layers.lineage(number)
            trained.add(next((above for above in reversed(lineage) if above in called), lineage[0]))
    return trained


def _is_trained(layer: Layer) -> bool:
    """Whether it has, or may have, trainable parameters that an optimizer updates."""
    return layer.trainable_params != 0 and layer.updated_params != 0


def optimizer_ns(evidence: Evidence, layer: Layer | None = None) -> int:
    """The time of the optimizers; of a layer, as large a part as it has of the trainable parameters."""
    whole_ns = evidence.time_of(evidence.took_outside(is_optimizer, FORWARD))
    return whole_ns if layer is None else whole_ns * (layer.trainable_params or 0) // max(evidence.trainable_params, 1)


@rule
def layers_without_backward(evidence: Evidence) -> Iterator[Advice]:
    """Layers with trainable parameters that no backward reaches, in a model that trains, while their parent has some:
    an auxiliary head, a branch that the loss leaves out. Their values may be needed, so the remedy is a condition."""
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
def backward_repeated(evidence: Evidence) -> Iterator[Advice]:
    """Nodes of autograd that run more than once for one forward operator: ``backward()`` goes through a graph again,
    which ``retain_graph=True`` or a state that is not detached has kept. Usual is 1. Nothing is said where autograd was
    asked for gradients of some inputs, or with a graph: a Jacobian, a penalty, a physics-informed loss need that."""
    if not _is_plain(evidence):
        return
    nodes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    calls: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for row in evidence.rows(is_outermost, phases=(BACKWARD,)):
        if (name := node_of(row.frames)) is not None:
            nodes[row.layer][name] += row.calls
    for row in evidence.rows(is_op, phases=(FORWARD, RECOMPUTE)) if nodes else ():
        calls[row.layer][row.frames[-1].name.removeprefix("aten::").replace("_", "")] += row.calls
    times: dict[int, float] = {}
    for layer, of_layer in nodes.items():
        known = [name for name in of_layer if name in calls[layer]]
        ran, made = sum(of_layer[name] for name in known), sum(calls[layer][name] for name in known)
        if made and ran >= _MORE_THAN_ONCE * made:
            times[layer] = ran / made
    took = evidence.took(always, phases=(BACKWARD,))
    gains = {layer: round(evidence.time_of(took[layer]) * (1 - 1 / factor)) for layer, factor in times.items()}
    if not gains or sum(gains.values()) < evidence.notable_ns:
        return
    found = merged_into_one(evidence, gains)
    line = next((line for line in lines_of_code(evidence.run) if line.work.get(BACKWARD)), None)
    where = f" from {line.text}" if line is not None else ""
    yield found.advice(
        f"Backward{where} goes through graphs again: a node runs {times[found.numbers[0]]:.1f} times.",
        "Detach what goes from one pass to the next (`state = state.detach()`), add up losses before one `backward()`, "
        "and leave out `retain_graph=True`.",
    )


@rule
def gradients_cleared(evidence: Evidence) -> Iterator[Advice]:
    """Models whose gradients backward computes more often than the steps of their optimizer make use of, where others
    are trained by another optimizer: its loss reaches them, too, as that of a GAN's discriminator reaches the
    generator. Gradients that are added up over several batches are all used. What else reads them is unknown."""
    if not _is_plain(evidence):
        return
    layers = evidence.run.layers
    scales = [passes.count / max(passes.recorded, 1) for passes in evidence.run.passes if passes.gradients] or [1]
    scale = max(scales)  # rows are of all passes, and steps of those that were recorded
    if scale > _SAME * min(scales):
        return
    computed = evidence.took(_is_gradient, phases=(BACKWARD,))
    backward = evidence.times_with_below([BACKWARD])
    gains, times = {}, {}
    trained = {layer.path[:depth] for layer in layers if layer.used_gradients for depth in (1, 2)}
    models = [root for root in evidence.noted if layers[root].path in trained]
    # Of one model alone, others may read its gradients: to perturb weights (SAM), or to weigh losses.
    for root in models if len(models) > 1 else ():
        for number in sorted(layers.at_or_below({root})):
            layer = layers[number]
            if number not in computed or not layer.used_gradients or not _WEIGHT_AND_BIAS.fullmatch(layer.kind):
                continue
            often, used = computed[number].calls / _tensors_in(layer), layer.used_gradients * scale
            if often >= _CLEARED * used and often >= used + 2 and not layer.tied:
                part = 1 / 2 if layers[root].grad_inputs else 1  # what it passes on is needed
                gains[root], times[root] = round(backward[root] * (1 - used / often) * part), often / used
    for group in merged(evidence, gains, {root: bool(layers[root].grad_inputs) for root in gains}):
        passes_on = bool(layers[group.numbers[0]].grad_inputs)
        yield group.advice(
            f"Backward computes its gradients {times[group.numbers[0]]:.1f} times as often as a step of its optimizer "
            "uses them.",
            "If another model is trained through it then, switch its own gradients off: `model.requires_grad_(False)`."
            if passes_on
            else "If another model is trained on its output then, detach it there (`discriminator(fake.detach())`), or "
            "call it under `torch.no_grad()`.",
        )


def _is_plain(evidence: Evidence) -> bool:
    """Whether ``backward()`` alone computed gradients, and all of them; False if that is unknown."""
    return evidence.switches.get("partial_backward") == "False"


def _tensors_in(layer: Layer) -> int:
    """The number of the parameters of a layer of ``_WEIGHT_AND_BIAS``."""
    return 1 if layer.kind == "Embedding" or "bias=False" in layer.settings else 2


@rule
def graphs_never_used(evidence: Evidence) -> Iterator[Advice]:
    """Forward calls of a model that record a graph for a backward that does not run, and others that train: evaluation
    without ``torch.no_grad()``. In a run without any backward, ``gradients_never_used`` has the memory."""
    run, layers = evidence.run, evidence.run.layers
    if BACKWARD not in run.phases() or len(run.metas) > 1:
        return
    forward_ns, calls_with_backward = evidence.times_with_below([FORWARD]), _calls_with_backward(evidence)
    gains, unused, calls = {}, {}, {}
    for root in layers.roots:
        calls[root] = run.rows.forward_calls(root)
        unused[root] = run.grad_calls(root) - calls_with_backward[root]
        if root in calls_with_backward and unused[root] >= 2 and not layers[root].repeated_calls:
            gains[root] = round(forward_ns[root] * unused[root] / calls[root] * _GRAPH_SHARE)
    for group in merged(evidence, gains):
        unused_calls, all_calls = (sum(counts[root] for root in group.numbers) for counts in (unused, calls))
        yield group.advice(
            f"{unused_calls:,} of {all_calls:,} forward calls record a graph for a backward that never runs.",
            "If nothing trains on their results, run them under `torch.inference_mode()` or `torch.no_grad()`.",
        )


def _calls_with_backward(evidence: Evidence) -> Counter[int]:
    """Through how many forward calls of each model backward ran: by the layer of ``_NODES`` with most nodes a call, or
    with most gradients of parameters, where a layer was also called without its model."""
    rows, layers = evidence.run.rows, evidence.run.layers
    nodes: Counter[int] = Counter()
    passes: Counter[int] = Counter()
    for number, _, frames, times, *_ in evidence.rows(is_outermost, phases=(BACKWARD,)):
        layer = layers[number] if number >= 0 else None
        node = frames[0].name.rpartition(" ")[2]
        if layer is not None and node in _NODES.get(layer.kind, ()):
            nodes[number] += times
        elif layer is not None and node == ACCUMULATE and layer.kind in _NODES:
            passes[number] += times // _tensors_in(layer)
    most: defaultdict[int, float] = defaultdict(float)
    for number, times in nodes.items():
        root, calls = layers.lineage(number)[0], rows.forward_calls(number)
        if calls and layers[number].trainable_params:
            most[root] = max(most[root], times * rows.forward_calls(root) / calls, passes[number])
    return Counter({root: round(times) for root, times in most.items() if times})

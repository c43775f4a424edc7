"""Layers for which there is a cheaper way to do the same, such as one operator instead of a loop over time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from math import prod

from torchprof.advise import Advice, merged, merged_into_one, rule
from torchprof.advise.chains import (
    Among,
    always,
    calling,
    inside,
    is_device_work,
    is_node,
    is_optimizer,
    is_own_time,
    is_step,
    node_of,
    outermost_op,
)
from torchprof.advise.evidence import Evidence, Took
from torchprof.advise.gradients import optimizer_ns
from torchprof.run.groups import sets_by_key
from torchprof.run.layers import Layer
from torchprof.run.torch_names import aten
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, PHASES

_LAYER_OF_CELL = {"LSTMCell": "LSTM", "GRUCell": "GRU", "RNNCell": "RNN"}
_FEWEST_STEPS = 8  # calls of a cell in a call of the layer above
_SAVED_BY_ONE_CALL = 0.8
"""The part of the time of cells that the fused layer saves: measured with 100 steps of 64 units on two cores, 69 to
85 %, backward included."""
_FEWEST_ITEMS = 20  # calls of a layer in a call of the layer above
_LONGEST_ITEM_NS = 400_000  # forward and backward
_FEWEST_GROWTHS = 10  # concatenations in one layer, or calls with a longer input
_SLOWER = 5  # times as long as an equal layer
_SHORT_CALL_NS = 100_000  # a call of less is bound by its dispatch
_SLOWER_THAN_EQUALS = "Its forward takes {:.0f} times as long as that of a layer of equal class, settings and shapes."
_MANY_EQUAL = 16  # layers
_backward_of_slices = Among(is_node, lambda frames: node_of(frames) in ("select", "slice"))
_overhead_of_optimizers = Among(is_optimizer, is_own_time)
_CONVERSION = re.compile(r"nchwto\w*nhwc|nhwcto\w*nchw", re.IGNORECASE)
"""cuDNN's names; nhwcToFoldedNhwc is not such a conversion."""
_is_conversion = Among(is_device_work, lambda frames: _CONVERSION.search(frames[-1].name) is not None)


@rule
def layers_in_a_loop(evidence: Evidence) -> Iterator[Advice]:
    """Layers with parameters that are called for one item, or one point in time, after the other: one call of all has
    the same computation, and one overhead. An activation without parameters may be shared by many layers. Whether an
    input depends on an earlier output is not recorded: the finding is a condition. Of cells only those in float32 have
    a fused kernel on a CPU: in float64, the whole sequence took 28 % longer. What the layer above does itself in the
    loop is saved, too."""
    layers, calls, called_above = evidence.run.layers, evidence.forward_calls, evidence.called_above
    often = {
        number: calls[number] // calls[above]
        for number, above in enumerate(called_above)
        if above >= 0 and calls[number] >= _FEWEST_STEPS * calls[above] and not layers[number].compiled
    }
    if not often:
        return
    totals, own = evidence.times_with_below(PHASES), evidence.took(always)
    params = layers.roll_up([layer.params or 0 for layer in layers])
    gains, cells = {}, {number: _LAYER_OF_CELL.get(layers[number].kind, "") for number in often}
    for number, times in often.items():
        is_short = times >= _FEWEST_ITEMS and totals[number] < _LONGEST_ITEM_NS * calls[number]
        has_kernel = evidence.device != "cpu" or {dtype for dtype, _ in layers[number].dtype_bytes} <= {"float32"}
        if params[number] and (has_kernel if cells[number] else is_short):
            of_loop = evidence.time_of(own.get(called_above[number], Took()))
            in_loop = sum(called_above[other] == called_above[number] for other in often)
            gains[number] = round(_SAVED_BY_ONE_CALL * (totals[number] + of_loop / in_loop))
    for group in merged(evidence, gains, cells, least_ns=evidence.notable_ns):
        first = group.numbers[0]
        cause = f"It is called {often[first]:,} times in a call of {layers[called_above[first]].name}, one"
        if cells[first]:
            yield group.advice(
                f"{cause} time step after the other.",
                f"If all inputs are known before the first step: `torch.nn.{cells[first]}(…, batch_first=True)`, one "
                "operator for the whole sequence, with the same weights and results.",
            )
        else:
            yield group.advice(
                f"{cause} item after the other.",
                "If no item depends on an earlier one, call it once: `layer(torch.cat(items)).split(sizes)`, or pad "
                "them to a batch (`torch.nn.utils.rnn.pad_sequence`).",
            )


# Calls that were not needed


@rule
def calls_repeated(evidence: Evidence) -> Iterator[Advice]:
    """Models that are called again with the very tensors of the call before, unchanged, between two steps of the
    optimizers, in the same mode. Dropout has another output; other states of a module are not recorded: the finding is
    a condition."""
    if not evidence.any_row(is_step):
        return  # a loop that calls a model again and again may be a measurement
    totals = evidence.times_with_below(PHASES)
    draws = evidence.took(inside("aten::bernoulli_", "aten::native_dropout"), phases=(FORWARD,))
    is_random = evidence.run.layers.roll_up([number in draws for number in range(len(evidence.run.layers))])
    for root in evidence.noted:
        layer = evidence.run.layers[root]
        noted, again = layer.noted_calls or 0, layer.repeated_calls or 0
        if not noted or not again or is_random[root]:
            continue
        is_model = root in evidence.run.layers.roots
        without = noted - layer.grad_calls if is_model and layer.grad_calls is not None else 0
        no_grad_ns = sum(spread.sum for key, spread in evidence.samples["no_grad_ns"] if key.layer == root)
        yield Advice(
            layer.name,
            f"{again / noted:.0%} of its forward calls have the same input as the call before, and nothing has "
            "changed its values or the weights.",
            "If the rest of its state is the same, too, so is the output: keep that of the first call, with its loss "
            "in the same `backward()`.",
            totals[root] * again // noted if without < again else round(no_grad_ns * again / without),
            layers=(layer.name,),
        )


@rule
def items_again(evidence: Evidence) -> Iterator[Advice]:
    """Models without backward that are called with a sequence that is longer by one item in most calls, where the code
    around them concatenates tensors as often: the items before are computed again. Inputs that are sorted by length
    are new ones. The gain is what calls take beyond the shortest one."""
    if BACKWARD in evidence.run.phases():
        return
    joined = evidence.took(inside("aten::cat"), phases=(FORWARD,))
    for root in evidence.noted:
        layer, noted = evidence.run.layers[root], evidence.run.layers[root].noted_calls or 0
        longer = layer.longer_calls or 0
        around = {OUTSIDE, *evidence.run.layers.lineage(root)} - {root}
        joins = sum(took.calls for number, took in joined.items() if number in around)
        if longer < _FEWEST_GROWTHS or 2 * longer < noted or 2 * joins < longer:
            continue
        shortest_ns = sum(spread.min * spread.count for spread in evidence.durations(root))
        yield Advice(
            layer.name,
            f"Its input is longer by one in {longer:,} of {noted:,} calls: each call computes the earlier items again.",
            "Keep what earlier items left (a KV cache, `use_cache=True` in transformers; the state of a recurrent "
            "layer), and pass only the new item.",
            round(sum(spread.sum for spread in evidence.durations(root)) - shortest_ns),
            layers=(layer.name,),
        )


@rule
def slower_than_usual(evidence: Evidence) -> Iterator[Advice]:
    """A layer that takes many times as long as its equals: the same class, settings and shapes; or as it takes itself
    on ordinary values, measured after the recording. So it is its values, or how they lie in memory."""
    if evidence.device != "cpu":
        return
    layers, calls = evidence.run.layers, evidence.forward_calls
    gains, factors = Counter[int](), dict[int, tuple[float, str]]()
    for (number, phase), ns in evidence.measured_again("ordinary_ns").items():  # forward is before backward
        of_call = min((each.quantile(0.25) for each in evidence.durations(number) if each.count > 2), default=0)
        if phase == FORWARD and of_call >= _SLOWER * max(ns, _SHORT_CALL_NS):
            factors[number] = of_call / ns, "Its forward takes {:.0f} times as long as on ordinary values."
        took = evidence.took(always, phases=(phase,)).get(number, Took())
        gains[number] += max(took.cpu_ns - ns * calls[number], 0) if number in factors else 0
    groups: defaultdict[Hashable, list[tuple[float, int]]] = defaultdict(list)
    for number, layer in enumerate(layers):
        has_one_shape = layers[layers.lineage(number)[0]].same_shapes and "Embedding" not in layer.kind
        if has_one_shape and layer.settings and layer.params and evidence.durations(number):
            of_call = min(spread.median for spread in evidence.durations(number))
            groups[layer.kind, layer.settings, layer.input_shapes, layer.dtype_bytes].append((of_call, number))
    totals = evidence.times_with_below([FORWARD])
    for group in groups.values():
        usual = min(group)[0]
        for of_call, number in group:
            if of_call >= _SLOWER * max(usual, _SHORT_CALL_NS) and number not in factors:
                factors[number] = of_call / usual, _SLOWER_THAN_EQUALS
                gains[number] = min(round((of_call - usual) * calls[number]), totals[number])
    if not factors or gains.total() < evidence.notable_ns:
        return
    found = merged_into_one(evidence, +gains)
    factor, cause = factors[found.numbers[0]]
    yield found.advice(
        cause.format(factor),
        "Look at its values: numbers near 1e-40 (denormals) are slow on a CPU, and `torch.set_flush_denormal(True)` "
        "makes them 0; or at the strides of its input (`x.contiguous()`).",
    )


@rule
def indexing_in_a_loop(evidence: Evidence) -> Iterator[Advice]:
    """Layers that take slices of a tensor in a loop: the backward of each fills a tensor of the whole size with zeros,
    and all of these are added up."""
    took = evidence.took(_backward_of_slices, phases=(BACKWARD,))
    gains, calls = {}, {}
    for number, nodes in took.items():
        often = evidence.calls.get(number, 0) if number >= 0 else max(evidence.steps, 1)
        if often and nodes.calls >= _FEWEST_ITEMS * often:
            calls[number] = nodes.calls // often
            gains[number] = evidence.time_of(nodes)
    for group in merged(evidence, gains, least_ns=evidence.notable_ns):
        yield group.advice(
            f"Slices are taken one by one ({calls[group.numbers[0]]:,} a call), and the backward of each fills a "
            f"tensor of the size of the whole with zeros: {group.time}.",
            "If they are parts of one tensor that do not overlap, split it once, before the loop: "
            "`for item in x.unbind(1):`, or `x.split(size, 1)`.",
        )


@rule
def equal_layers_one_by_one(evidence: Evidence) -> Iterator[Advice]:
    """Many equal, small layers of one parent that get the same tensor or parts of it, such as one for each column of a
    table. So they are not a chain. The time of the layer above, and what optimizers take for each layer in no operator,
    are saved, too."""
    if evidence.device != "cpu":
        return
    layers, calls = evidence.run.layers, evidence.forward_calls
    equal: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        above, shapes = evidence.called_above[number], (layer.input_shapes, layer.output_shapes)
        is_called_once = layer.params and layer.settings and above >= 0 and calls[number] == calls[above]
        if is_called_once and layer.input_number is not None:
            equal[above, layer.kind, shapes, layer.input_number].append(number)
    totals, own = evidence.times_with_below(PHASES), evidence.took(always)
    overhead_ns = evidence.took_outside(_overhead_of_optimizers, FORWARD).cpu_ns
    for numbers in equal.values():
        above = evidence.called_above[numbers[0]]
        siblings = sum(len(others) for others in equal.values() if evidence.called_above[others[0]] == above)
        around = own.get(above, Took()).cpu_ns / siblings
        around += overhead_ns / max(sum(bool(layer.trainable_params) for layer in layers), 1)
        gains = {
            number: round(_SAVED_BY_ONE_CALL * (totals[number] + around))
            for number in numbers
            if totals[number] < _LONGEST_ITEM_NS * calls[number]
        }
        if len(gains) >= _MANY_EQUAL and sum(gains.values()) >= evidence.notable_ns:
            kind = layers[numbers[0]].kind
            yield merged_into_one(evidence, gains).advice(
                f"{len(gains)} equal small layers ({kind}) are called one after the other in {layers[above].name}.",
                "Stack their weights, and compute all at once: `torch.baddbmm` or `torch.einsum`; embeddings can be "
                "one table, with an offset for each.",
            )


@rule
def costly_dropout(evidence: Evidence) -> Iterator[Advice]:
    """Dropout on a CPU, where random numbers are drawn one after the other. On a device a kernel draws them at once."""
    if evidence.device != "cpu":
        return
    layers = evidence.run.layers
    drops = evidence.took(inside("aten::dropout", "aten::native_dropout", "aten::bernoulli_"), phases=(FORWARD,))
    backward = evidence.took(always, phases=(BACKWARD,))
    times = {number: evidence.time_of(took) for number, took in drops.items() if number >= 0}
    for number in times:
        times[number] += evidence.time_of(backward.get(number, Took())) if "Dropout" in layers[number].kind else 0
    if not times or sum(times.values()) < evidence.notable_ns:
        return
    yield merged_into_one(evidence, times).advice(
        "Dropout draws a random number for each element.",
        "Leave it out (`p=0`), or drop whole channels: `torch.nn.Dropout1d`.",
    )


@rule
def tensors_that_grow(evidence: Evidence) -> Iterator[Advice]:
    """Layers that concatenate a tensor with an earlier one in each of many calls without backward: keys and values of
    earlier tokens, which are all copied for each new one. Whether it grows is not recorded: the finding is a
    condition."""
    if BACKWARD in evidence.run.phases():
        return
    took = evidence.took(inside("aten::cat"), phases=(FORWARD,))
    times = {
        number: evidence.time_of(work)
        for number, work in took.items()
        if number >= 0 and work.calls >= _FEWEST_GROWTHS and evidence.gets_one_token(number)
    }
    for group in merged(evidence, times, least_ns=evidence.notable_ns):
        calls = sum(took[number].calls for number in group.numbers)
        yield group.advice(
            f"`torch.cat` copies all of its inputs {calls:,} times, for {group.time}: if a tensor "
            "grows by it, as a cache of keys and values, each call copies all earlier ones.",
            "Preallocate it (`torch.empty(batch, most, size)`), write into a slice (`cache[:, at : at + n] = new`), "
            "and use a view of what is filled.",
        )


@rule
def channels_last_missed(evidence: Evidence) -> Iterator[Advice]:
    """Kernels that convert between NCHW and NHWC around a convolution: tensor cores need channels last, so cuDNN
    converts other layouts. On the CPU oneDNN reorders inside an op, where it is not recorded."""
    took = evidence.took(_is_conversion)
    for group in merged(evidence, {number: work.device_ns for number, work in took.items()}):
        calls = sum(took[number].calls for number in group.numbers)
        yield group.advice(
            f"{calls:,} kernel{'s convert' if calls != 1 else ' converts'} between NCHW and NHWC around convolutions, "
            f"for {group.time} in total.",
            "Use channels last: `model = model.to(memory_format=torch.channels_last)`, and the same for the input.",
        )


# Tensors that are made in each call

_LEAST_SHARE_OF_CONSTANTS = 0.03  # of the recorded time
_MAKES_CONSTANTS = inside(*aten("arange linspace eye tril triu tril_indices triu_indices"))
_USED_FOR_POSITIONS = Among(calling(aten("sin cos exp pow cat stack")), lambda frames: not _MAKES_CONSTANTS(frames))
_NODES_OF_MASKED_PARAMETERS = {"tril", "triu"}


@rule
def constants_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers that make the same tensors in each call, for at least 3 % of the recorded time: masks, positions. What
    they are made of is not recorded, so the remedy is a condition."""
    for group in merged(evidence, constants(evidence), least_ns=_LEAST_SHARE_OF_CONSTANTS * evidence.recorded_ns):
        yield group.advice(
            f"Tensors such as masks or positions are made in each call, for {group.time}.",
            "If they depend only on sizes, make them once, in `__init__`: `self.register_buffer('mask', mask, "
            "persistent=False)`.",
            options="Slice the buffer where an input is shorter.",
        )


def constants(evidence: Evidence) -> dict[int, int]:
    """The time in which each layer makes tensors that depend only on sizes, by its number.

    Its model gets inputs of the same shapes in at least two calls. Where gradients flow through the layer, operators
    that compute positions (``sin``, ``exp``, …) count, too, if backward has no node of them: then their inputs depend
    on no parameter. A layer with a node of ``tril`` or ``triu`` is left out: it masks a parameter.
    """
    layers, calls = evidence.run.layers, evidence.forward_calls
    times = {
        number: evidence.time_of(took)
        for number, took in evidence.took(_MAKES_CONSTANTS, phases=(FORWARD,)).items()
        if number >= 0 and layers[layers.lineage(number)[0]].same_shapes and 2 <= calls[number] <= took.calls
    }
    if not times:
        return times
    nodes = sets_by_key((row.layer, node_of(row.frames) or "") for row in evidence.rows(is_node, phases=(BACKWARD,)))
    for row in evidence.rows(_USED_FOR_POSITIONS, phases=(FORWARD,)):
        name, number = (outermost_op(row.frames) or "").removeprefix("aten::"), row.layer
        if number in times and number in nodes and name not in nodes[number]:
            times[number] += evidence.time_of(row)
    return {number: ns for number, ns in times.items() if not nodes[number] & _NODES_OF_MASKED_PARAMETERS}


# Embeddings of large tables

_SIZES = re.compile(r"(\d+), (\d+)")
_FEW_ROWS = 1 / 4  # a call that uses a larger part of the rows gains little


@rule
def dense_embedding_gradients(evidence: Evidence) -> Iterator[Advice]:
    """Embeddings of which a call uses few rows: backward writes gradients of all, and the optimizer updates all."""
    layers = evidence.run.layers
    backward = evidence.took(always, phases=(BACKWARD,))
    gains = {}
    for number in evidence.of_class.get("Embedding", ()):
        layer = layers[number]
        rows, used = _rows_of(layer), _indices_in(layer)
        if not rows or not used or used > _FEW_ROWS * rows or number not in backward or layer.tied:
            continue
        ns = evidence.time_of(backward[number]) + optimizer_ns(evidence, layer)
        gains[number] = round(ns * (1 - used / rows))
    for group in merged(evidence, gains):
        first = layers[group.numbers[0]]
        yield group.advice(
            f"The gradient is dense, for all {_rows_of(first):,} rows, and a call uses at most {_indices_in(first):,}.",
            "Use `torch.nn.Embedding(…, sparse=True)`, with an optimizer of its own: `torch.optim.SparseAdam`, or SGD "
            "(Adam and AdamW raise an error for sparse gradients).",
        )


def _rows_of(layer: Layer) -> int:
    """The number of rows of an embedding, from its settings: "10000, 64"; 0 if they are unknown or already sparse."""
    sizes = _SIZES.match(layer.settings)
    return int(sizes[1]) if sizes and "sparse=True" not in layer.settings else 0


def _indices_in(layer: Layer) -> int:
    """The number of indices in a call, which use at most as many rows; 0 if unknown."""
    return prod(layer.input_shapes[0]) if layer.input_shapes else 0

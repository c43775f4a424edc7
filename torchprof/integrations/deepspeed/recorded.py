"""The figures of a recording, layer by layer, by DeepSpeed's convention: which operators count, and how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from torchprof import Profile, Run
from torchprof.integrations.convention import Counted, CountingRule, count, input_elements, input_shape, zero_flops
from torchprof.integrations.deepspeed.strings import macs_to_string

_CONVOLUTION, _LINEAR, _RECURRENT, _OTHER = "convolution", "linear", "recurrent", "other"


def _tokens(signature: Any) -> int:
    """The number of time steps of all sequences, for a recurrent operator with an input of shape [*, features]."""
    elements = input_elements(signature)
    return elements // signature.shapes[0][-1] if elements else 0


def _fused_attention(signature: Any) -> int:
    """Self-attention as one fused operator: two linear layers, and the softmax if the weights are returned."""
    if not input_elements(signature):
        return 0
    (batch, length, _), heads = signature.shapes[0], signature.scalars[4]
    linear = batch * length * (prod(signature.shapes[5]) + prod(signature.shapes[7]))
    return int(linear + (batch * heads * length * length if signature.scalars[10] else 0))


def _fused_encoder_layer(signature: Any) -> int:
    """nn.TransformerEncoderLayer as one fused operator: four linear layers, and the activation if it is a relu."""
    if not input_elements(signature):
        return 0
    tokens = prod(signature.shapes[0][:-1])
    linear = tokens * sum(prod(signature.shapes[index]) for index in (3, 5, 14, 16))
    return int(linear + (0 if signature.scalars[7] else tokens * signature.shapes[14][0]))


def _rules() -> dict[str, CountingRule]:
    """How the tool counts each operator, by torch's name of the operator. An operator without a rule does not count,
    but the operators that it calls may. With a rule of zero, neither the operator nor those that it calls count."""
    rules: dict[str, CountingRule] = {}
    dims = ("1d", "2d", "3d")
    for name in (*(f"conv{dim}" for dim in dims), *(f"conv_transpose{dim}" for dim in dims)):
        rules[name] = CountingRule(_CONVOLUTION, "flops")
    for name in ("convolution", "_convolution"):  # TorchScript runs these operators
        rules[name] = CountingRule(_CONVOLUTION, "flops")
    rules["linear"] = CountingRule(_LINEAR, "macs")
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        rules[name] = rules[f"{name}_cell"] = CountingRule(_RECURRENT, _tokens)
    for name in ("relu", "relu6", "hardtanh", "leaky_relu", "elu", "prelu"):  # nn.ReLU6 calls hardtanh
        rules[name] = rules[f"{name}_"] = CountingRule(_OTHER, input_elements)
    for kind in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        for dim in dims:
            rules[f"{kind}{dim}"] = rules[f"{kind}{dim}_with_indices"] = CountingRule(_OTHER, input_elements)
    rules["softmax"] = CountingRule(_OTHER, input_elements)
    for name in ("batch_norm", "_batch_norm_impl_index"):  # TorchScript runs the second
        rules[name] = CountingRule(_OTHER, lambda signature: 2 * input_elements(signature))
    rules["_native_multi_head_attention"] = CountingRule(_OTHER, _fused_attention)
    rules["_transformer_encoder_layer_fwd"] = CountingRule(_OTHER, _fused_encoder_layer)
    for name in ("scaled_dot_product_attention", "instance_norm", "selu", "selu_", "celu", "celu_"):
        rules[name] = CountingRule(_OTHER, zero_flops)
    return {f"aten::{name}": rule for name, rule in rules.items()}


RULES = _rules()


def macs_of(name: str, counted: Counted, module: nn.Module) -> int:
    """The multiply-adds of a layer's operators under the rule ``name``. ``module``: the module of the layer."""
    if name == _CONVOLUTION:
        return counted.flops - counted.macs  # one for each product, and one for each addition of a bias
    if name == _LINEAR:
        return counted.macs
    if name == _RECURRENT:
        return counted.flops * _per_token(module)
    return counted.flops


def _per_token(module: nn.Module) -> int:
    """The multiply-adds of one time step in a recurrent module: weights, biases and gates."""
    if isinstance(module, nn.RNNBase):
        layers = [list(layer) for layer in module.all_weights]
    elif isinstance(module, nn.RNNCellBase):
        layers = [[getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]]
    else:
        return 0  # the tool counts only recurrent operators that a recurrent module calls
    gates = 1  # per hidden unit: the sum of both products
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        gates = 10  # four sums; two products and a sum for the cell; three for the output
    elif isinstance(module, (nn.GRU, nn.GRUCell)):
        gates = 7  # a product with the reset gate, three sums; two products and a sum to mix
    weights = sum(int(tensor.numel()) for layer in layers for tensor in layer if tensor is not None)
    return weights + len(layers) * gates * int(module.hidden_size)


def uncounted_calls(run: Run) -> Counter[tuple[str, ...]]:
    """For each layer, the number of calls that should count but have unknown multiply-adds, as shapes are missing."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in run.rows:
        if row.layer is None or row.phase != "forward" or not row.frames:
            continue
        innermost = row.frames[-1].name
        outer = next((frame.name for frame in row.frames if frame.name in RULES), None)
        if outer is None or not callable(RULES[outer].flops):  # an operator without a formula may multiply and add
            counts[row.layer.path] += row.cost.uncounted
        elif outer == innermost and input_shape(row.signature) is None:
            counts[row.layer.path] += row.calls
    return counts


@dataclass
class LayerSums(Counted):
    """Sums of one layer, or of several, with their forward calls. ``uncounted``: calls of operators not counted."""

    uncounted: int = 0

    @property
    def known_macs(self) -> int | None:
        """The multiply-adds; None if nothing was called, or if nothing could be counted."""
        return self.macs if self.macs or (self.calls and not self.uncounted) else None

    @property
    def seconds(self) -> float | None:
        return self.ns / 1e9 if self.calls or self.ns else None

    def macs_text(self, precision: int) -> str:
        """The multiply-adds as text, with ``≥`` if some calls are not counted."""
        bound = "≥ " if self.uncounted and self.known_macs is not None else ""
        return bound + macs_to_string(self.known_macs, precision=precision)


class Recorded:
    """The figures of a profile that has ended. The self work of modules of an ``ignored`` type does not count; the work
    of their children does."""

    def __init__(self, profile: Profile, ignored: frozenset[type] = frozenset()) -> None:
        self.own: dict[tuple[str, ...], LayerSums] = {}  # by the path of the layer, without child layers
        run = profile.run
        # The path of a module, with wrappers → the path of its layer.
        self.layer_of = layer_of = _layers_of(profile.traces, run.layers)
        # The last one stays: of a wrapper's layer the inner module.
        modules = {layer_of[trace.path]: trace.module for trace in profile.traces}
        left_out = {layer_of[trace.path] for trace in profile.traces if type(trace.module) in ignored}
        counted, uncounted = count(run, RULES), uncounted_calls(run)
        self.device = run.meta.device if "device_ns" in run.meta.measured else None
        tree = run.tree("forward")
        for node in tree.walk():
            path = node.layer.path
            own = self.own.setdefault(path, LayerSums())
            if path not in left_out:
                own.calls += node.calls
                own.macs += sum(macs_of(name, work, modules[path]) for name, work in counted.get(path, {}).items())
                own.ns += node.self.device_ns if self.device else node.self.cpu_ns
                own.uncounted += uncounted[path]
        self.by_torchprof = tree.total
        self.warnings = [*map(str, run.warnings)]

    def total(self) -> LayerSums:
        """The sum over all layers."""
        sums = LayerSums()
        for own in self.own.values():
            sums.add(own)
        return sums

    def totals(self) -> dict[tuple[str, ...], LayerSums]:
        """For each layer, by path, the sum over the layer and all layers below it."""
        totals = {path: replace(own) for path, own in self.own.items()}
        for path in reversed(totals):  # children come after their parents
            if len(path) > 1:
                totals[path[:-1]].add(totals[path])
        return totals


def _layers_of(traces: Iterable[Any], layers: Iterable[Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """For each module, by its path with wrappers, the path of its layer. Parents come before their children. A wrapper
    (DistributedDataParallel) and the module inside it share one layer."""
    kinds = {layer.path: layer.kind for layer in layers}
    above: dict[tuple[str, ...], Any] = {}
    paths: dict[tuple[str, ...], tuple[str, ...]] = {}
    for trace in traces:
        kind = type(trace.module).__name__
        if len(trace.path) == 1:
            paths[trace.path] = next(iter(kinds))
        else:
            shared = paths[trace.path[:-1]]
            own = (*shared, trace.path[-1])
            is_wrapped = kinds[shared] == kind != above[trace.path[:-1]]
            paths[trace.path] = shared if is_wrapped or own not in kinds else own
        above[trace.path] = kind
    return paths

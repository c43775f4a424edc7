"""What DeepSpeed's profiler counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from torchprof import Profile, Run
from torchprof.integrations.convention import PER_CALL, Counted, Rule, count
from torchprof.integrations.deepspeed.strings import macs_to_string

# How the tool counts

_CONVOLUTION, _LINEAR, _RECURRENT, _OTHER = "convolution", "linear", "recurrent", "other"


def _elements(signature: Any) -> int | None:
    """The number of elements of an operator's first input; None where its shape was not recorded."""
    shape = signature.shapes[0] if signature.dtypes[:1] != ("",) else None
    return None if shape is None else prod(shape)


def _times(factor: int) -> PER_CALL:
    return lambda signature: factor * (_elements(signature) or 0)


def _tokens(signature: Any) -> int:
    """The steps of all sequences that a recurrent operator goes through; [*, features] in."""
    elements = _elements(signature)
    return elements // signature.shapes[0][-1] if elements else 0


def _fused_attention(signature: Any) -> int:
    """Self-attention in one operator: its two linear layers and, where it hands out its weights, the softmax."""
    if not _elements(signature):
        return 0
    (batch, length, _), heads = signature.shapes[0], signature.scalars[4]
    linear = batch * length * (prod(signature.shapes[5]) + prod(signature.shapes[7]))
    return int(linear + (batch * heads * length * length if signature.scalars[10] else 0))


def _fused_encoder_layer(signature: Any) -> int:
    """nn.TransformerEncoderLayer in one operator: its four linear layers, and the activation where that is a relu."""
    if not _elements(signature):
        return 0
    tokens = prod(signature.shapes[0][:-1])
    linear = tokens * sum(prod(signature.shapes[at]) for at in (3, 5, 14, 16))
    return int(linear + (0 if signature.scalars[7] else tokens * signature.shapes[14][0]))


def _rules() -> dict[str, Rule]:
    """By torch's name of an operator, what the tool counts it for.

    What is in no rule counts nothing; a rule of nothing keeps operators that an operator calls from being counted.
    """
    rules: dict[str, Rule] = {}
    dims = ("1d", "2d", "3d")
    for name in (*(f"conv{dim}" for dim in dims), *(f"conv_transpose{dim}" for dim in dims)):
        rules[name] = Rule(_CONVOLUTION, "flops")
    for name in ("convolution", "_convolution"):  # TorchScript runs these
        rules[name] = Rule(_CONVOLUTION, "flops")
    rules["linear"] = Rule(_LINEAR, "macs")
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        rules[name] = rules[f"{name}_cell"] = Rule(_RECURRENT, _tokens)
    for name in ("relu", "relu6", "hardtanh", "leaky_relu", "elu", "prelu"):  # hardtanh is how nn.ReLU6 calls it
        rules[name] = rules[f"{name}_"] = Rule(_OTHER, _times(1))
    for kind in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        for dim in dims:
            rules[f"{kind}{dim}"] = rules[f"{kind}{dim}_with_indices"] = Rule(_OTHER, _times(1))
    rules["softmax"] = Rule(_OTHER, _times(1))
    for name in ("batch_norm", "_batch_norm_impl_index"):  # the latter is how TorchScript runs it
        rules[name] = Rule(_OTHER, _times(2))
    rules["_native_multi_head_attention"] = Rule(_OTHER, _fused_attention)
    rules["_transformer_encoder_layer_fwd"] = Rule(_OTHER, _fused_encoder_layer)
    for name in ("scaled_dot_product_attention", "instance_norm", "selu", "selu_", "celu", "celu_"):
        rules[name] = Rule(_OTHER, _times(0))
    return {f"aten::{name}": rule for name, rule in rules.items()}


_RULES = _rules()


def _macs_of(name: str, counted: Counted, module: nn.Module) -> int:
    """The multiply-adds of what ran in a layer under one rule."""
    if name == _CONVOLUTION:
        return counted.flops - counted.macs  # one for each product, one for each addition of a bias
    if name == _LINEAR:
        return counted.macs
    if name == _RECURRENT:
        return counted.flops * _per_token(module)
    return counted.flops


def _per_token(module: nn.Module) -> int:
    """The multiply-adds of one step of a sequence through a recurrent module: weights, biases and gates."""
    if isinstance(module, nn.RNNBase):
        layers = [list(layer) for layer in module.all_weights]
    elif isinstance(module, nn.RNNCellBase):
        layers = [[getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]]
    else:
        return 0  # the tool knows recurrence by its modules alone
    gates = 1  # for each hidden unit: the sum of both products
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        gates = 10  # four sums; two products and a sum for the cell; three for the output
    elif isinstance(module, (nn.GRU, nn.GRUCell)):
        gates = 7  # a product with the reset gate, three sums; two products and a sum to mix
    weights = sum(int(tensor.numel()) for layer in layers for tensor in layer if tensor is not None)
    return weights + len(layers) * gates * int(module.hidden_size)


def _uncounted(run: Run) -> Counter[tuple[str, ...]]:
    """By layer, the calls that the tool would count and whose recorded inputs do not tell how much."""
    found: Counter[tuple[str, ...]] = Counter()
    for row in run.rows:
        if row.layer is None or row.phase != "forward" or not row.frames:
            continue
        innermost = row.frames[-1].name
        outer = next((frame.name for frame in row.frames if frame.name in _RULES), None)
        if outer is None:
            found[row.layer.path] += row.cost.uncounted  # what torchprof does not know may be anything
        elif not callable(_RULES[outer].flops):
            found[row.layer.path] += row.cost.uncounted
        elif outer == innermost and (row.signature is None or _elements(row.signature) is None):
            found[row.layer.path] += row.calls
    return found


# What was recorded


@dataclass
class Figures:
    """What layers did, or one: calls of their forward, multiply-adds, nanoseconds, and calls that were not counted."""

    calls: int = 0
    macs: int = 0
    ns: int = 0
    uncounted: int = 0

    def add(self, other: Figures) -> None:
        self.calls += other.calls
        self.macs += other.macs
        self.ns += other.ns
        self.uncounted += other.uncounted

    @property
    def known_macs(self) -> int | None:
        """The multiply-adds; None where nothing was called, or nothing of it could be counted."""
        return self.macs if self.macs or (self.calls and not self.uncounted) else None

    @property
    def seconds(self) -> float | None:
        return self.ns / 1e9 if self.calls or self.ns else None

    def macs_text(self, precision: int) -> str:
        """The multiply-adds; with ``≥`` where some calls are not among them."""
        bound = "≥ " if self.uncounted and self.known_macs is not None else ""
        return bound + macs_to_string(self.known_macs, precision=precision)


class Recorded:
    """What a model did while it was profiled; several profiles of it add up."""

    def __init__(self) -> None:
        self.own: dict[tuple[str, ...], Figures] = {}  # by path of a layer, without the layers below it
        self.layer_of: dict[tuple[str, ...], tuple[str, ...]] = {}  # real path of a module → path of its layer
        self.macs = 0  # torchprof's own count
        self.flops = 0
        self.is_lower_bound = False
        self.device: str | None = None
        self.warnings: dict[str, None] = {}

    def add(self, profile: Profile, ignored: frozenset[type]) -> None:
        """Add a profile that has ended. The own work of modules of an ``ignored`` type is left out."""
        run = profile.run
        layer_of = _layers_of(profile.traces, run.layers)
        self.layer_of.update(layer_of)
        modules = {layer_of[trace.path]: trace.module for trace in profile.traces}  # of wrappers, what they wrap
        left_out = {layer_of[trace.path] for trace in profile.traces if type(trace.module) in ignored}
        counted, uncounted = count(run, _RULES), _uncounted(run)
        if "device_ns" in run.meta.measured:
            self.device = run.meta.device
        tree = run.tree("forward")
        for node in tree.walk():
            path = node.layer.path
            own = self.own.setdefault(path, Figures())
            if path not in left_out:
                own.calls += node.calls
                own.macs += sum(_macs_of(name, work, modules[path]) for name, work in counted.get(path, {}).items())
                own.ns += node.self.device_ns if self.device else node.self.cpu_ns
                own.uncounted += uncounted[path]
        self.macs += tree.total.macs
        self.flops += tree.total.flops
        self.is_lower_bound |= tree.total.uncounted > 0
        self.warnings.update(dict.fromkeys(map(str, run.warnings)))

    def total(self) -> Figures:
        """What all layers did together."""
        found = Figures()
        for own in self.own.values():
            found.add(own)
        return found

    def totals(self) -> dict[tuple[str, ...], Figures]:
        """By path of a layer, what it and all below it did."""
        found = {path: replace(own) for path, own in self.own.items()}
        for path in reversed(found):  # those below come after those above
            if len(path) > 1:
                found[path[:-1]].add(found[path])
        return found


def _layers_of(traces: Iterable[Any], layers: Iterable[Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Real path of a module → path of its layer, for all modules of a model in their order.

    A module that another one only wraps (as DistributedDataParallel does) shares that one's layer, of its own kind.
    """
    kinds = {layer.path: layer.kind for layer in layers}
    above: dict[tuple[str, ...], Any] = {}
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for trace in traces:
        kind = type(trace.module).__name__
        if len(trace.path) == 1:
            found[trace.path] = next(iter(kinds))
        else:
            shared = found[trace.path[:-1]]
            own = (*shared, trace.path[-1])
            is_wrapped = kinds[shared] == kind != above[trace.path[:-1]]
            found[trace.path] = shared if is_wrapped or own not in kinds else own
        above[trace.path] = kind
    return found

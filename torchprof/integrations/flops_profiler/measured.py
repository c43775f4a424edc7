"""The figures of a run, layer by layer, by flops-profiler's convention: its names of functionals, the flops of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from torchprof import Run
from torchprof.integrations.convention import Counted, CountingRule, count, input_elements, input_shape, zero_flops
from torchprof.integrations.figures import at_least, known_sum
from torchprof.integrations.flops_profiler.strings import macs_text, number_text
from torchprof.integrations.modules import parameter_sizes, positions

LayerPath = tuple[str, ...]

# The formulas. Each takes the signature of one call and returns flops; an input without a recorded shape counts 0.


def _normalized(weight: int) -> Any:
    """4 for each element, 5 if there is a weight. ``weight``: the number of the input that is the weight."""

    def flops(signature: Any) -> int:
        return input_elements(signature) * (4 + (input_shape(signature, weight) is not None))

    return flops


def _batch_normalized(signature: Any) -> int:
    """1 for each element, 4 in training (to compute mean and variance), and 1 more if there is a weight."""
    has_weight = input_shape(signature, 1) is not None
    in_training = len(signature.scalars) > 5 and signature.scalars[5] is True
    return input_elements(signature) * ((4 if in_training else 1) + has_weight)


def _added_product(signature: Any) -> int:
    """2 for each multiply-accumulate, and 1 for each element of the added tensor, before it is broadcast."""
    added, first, second = (input_shape(signature, index) for index in range(3))
    if added is None or first is None or second is None:
        return 0
    return 2 * prod(first) * second[-1] + prod(added)


def _interpolated(signature: Any) -> int:
    """1 for each element of the result. The scalar inputs have the output size or the scale factors."""
    image, scalars = input_shape(signature), signature.scalars
    if image is None or len(scalars) < 2:
        return 0
    sizes, factors = scalars[1], scalars[-1]
    if isinstance(sizes, tuple):
        return prod(image[: -len(sizes)]) * prod(sizes)
    if isinstance(factors, tuple):
        return prod(image[:2]) * prod(int(length * factor) for length, factor in zip(image[2:], factors))
    return 0


_RULES: dict[str, CountingRule] = {}


def _count_as(flops: Any, names: Mapping[str, str] | str) -> None:
    """Add a rule for each operator in ``names``: torch's names by the tool's name, or names that both have."""
    named = names if isinstance(names, Mapping) else {name: name for name in names.split()}
    for name, ops in named.items():
        for op in ops.split():
            _RULES[f"aten::{op}"] = CountingRule(name, flops)


_count_as("macs", "linear matmul mm bmm mv einsum bilinear scaled_dot_product_attention")
_count_as(
    "macs",
    {
        "multi_head_attention_forward": "_native_multi_head_attention",
        "transformer_encoder_layer": "_transformer_encoder_layer_fwd",
    },
)
_count_as("flops", "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
_count_as("flops", "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
_count_as(_added_product, "addmm baddbmm")
for _name in ("relu", "prelu", "elu", "leaky_relu", "relu6", "silu", "gelu"):
    _count_as(input_elements, {_name: f"{_name} {_name}_"})
_count_as(input_elements, "softmax")
for _dims in (1, 2, 3):
    _count_as(input_elements, f"avg_pool{_dims}d adaptive_avg_pool{_dims}d adaptive_max_pool{_dims}d")
    _count_as(input_elements, {f"max_pool{_dims}d": f"max_pool{_dims}d max_pool{_dims}d_with_indices"})
_count_as(_normalized(weight=2), "layer_norm group_norm")
_count_as(_normalized(weight=1), "instance_norm")
_count_as(
    _interpolated,
    {
        "interpolate": "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    },
)
_count_as(zero_flops, "embedding")
_count_as(zero_flops, {"interpolate": "upsample_nearest1d upsample_nearest2d upsample_nearest3d"})
_count_as(zero_flops, "batch_norm")  # _BATCH_NORM counts it: only the inner operator has the training flag
_BATCH_NORM = {
    "aten::instance_norm": CountingRule("", zero_flops),  # calls a batch norm, which is not counted
    "aten::native_batch_norm": CountingRule("batch_norm", _batch_normalized),
    "aten::cudnn_batch_norm": CountingRule("batch_norm", _batch_normalized),
    "aten::miopen_batch_norm": CountingRule("batch_norm", _batch_normalized),
}
# These call operators that count, but flops-profiler does not count them.
_count_as(zero_flops, {"": "selu selu_ celu celu_ rrelu rrelu_"})


def functionals(run: Run) -> tuple[dict[LayerPath, dict[str, Counted]], Counter[str]]:
    """The sums of the operators in each layer's forward, by the layer's path and the tool's name of the operator; and,
    by name, how many calls were not counted because their shapes are unknown (nested tensors). Child layers are not
    included. If the tool does not know an operator with multiply-accumulates, torch's name is used."""
    rules = dict(_RULES)
    unknown: Counter[str] = Counter()
    for row in run.rows:
        if row.layer is None or row.phase != "forward" or not row.frames:
            continue
        *around, name = (frame.name for frame in row.frames)
        if any(outer in rules for outer in around):
            continue
        rule = rules.get(name)
        if rule is None:
            if row.cost.macs:
                rules[name] = CountingRule(name.removeprefix("aten::"), "macs")
        elif callable(rule.flops) and rule.flops is not zero_flops and input_shape(row.signature) is None:
            unknown[rule.name] += row.calls
    counts = count(run, rules)
    for path, functionals in count(run, _BATCH_NORM).items():
        if "batch_norm" in functionals:
            counts.setdefault(path, {}).setdefault("batch_norm", Counted()).flops += functionals["batch_norm"].flops
    for functionals in counts.values():
        functionals.pop("", None)
    return counts, unknown


@dataclass
class LayerFigures:
    """A layer with all layers below it: parameters, nanoseconds of its forwards, functionals by name.

    If ``seen`` is False, only the parameters are known: the layer is inside a ScriptModule or a compiled module, and
    its work is part of that module's work.
    """

    kind: str
    params: int | None
    ns: int
    seen: bool
    uncounted: int = 0  # calls of operators without a formula
    functionals: dict[str, Counted] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        return sum(counted.flops for counted in self.functionals.values())

    @property
    def macs(self) -> int:
        return sum(counted.macs for counted in self.functionals.values())

    @property
    def known(self) -> tuple[int | None, int | None, int | None]:
        """(flops, MACs, nanoseconds), each None if it is unknown."""
        if not self.seen:
            return None, None, None
        return (self.flops or None, self.macs or None, self.ns) if self.uncounted else (self.flops, self.macs, self.ns)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the work of some operators is missing from flops and MACs."""
        return self.uncounted > 0


class Measured:
    """The figures of a run by flops-profiler's convention: of each layer by path (``of``). ``unknown``: how many calls
    of an operator, by name, were not counted because their shapes are unknown. Times are CPU times; if a device was
    recorded, they are the times of its kernels."""

    def __init__(self, run: Run, model: nn.Module, ignored: Sequence[Any]) -> None:
        self.run = run
        self.model = model
        self.time = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
        self.root = run.roots[0].path
        self.layer_of: dict[LayerPath, LayerPath] = {
            (): self.root
        }  # by the path of a module in the run, the path of its layer
        self._modules: dict[LayerPath, nn.Module] = {}  # by the path of its layer
        self._find_layers()
        direct, self.unknown = functionals(run)
        self.of = self._layers(direct, ignored)
        self.whole = self.of[self.root]
        self.functionals_ns = sum(self.ns(counted) for counted in self.whole.functionals.values())
        own = run.tree("forward").total
        own_flops = own.flops or (None if own.uncounted else 0)
        self.own_flops = at_least(number_text(own_flops), own.uncounted > 0)  # torchprof's own count
        outside = run.no_layer("forward")
        self.outside = f"{macs_text(outside.macs)}, {number_text(outside.flops)} flops" if outside.flops else ""

    def _find_layers(self) -> None:
        """Fill ``layer_of`` and ``_modules``. A wrapper and the module inside it share one layer."""
        kinds = {layer.path: layer.kind for layer in self.run.layers}
        wrappers: set[LayerPath] = {()}  # of the model itself, too: it has the path of the root
        for _, name, module, place in positions(self.model):
            above = self.layer_of.get(place[:-1])
            if module is None or above is None:
                continue
            path = above if place[:-1] in wrappers else (*above, name)
            if path not in kinds:
                continue
            self.layer_of[place], self._modules[path] = path, module
            has_layers = any((*path, child) in kinds for child, _ in module._modules.items())
            if not has_layers and _class_name(module) != kinds[path]:
                wrappers.add(place)

    def _layers(
        self, direct: Mapping[LayerPath, dict[str, Counted]], ignored: Sequence[Any]
    ) -> dict[LayerPath, LayerFigures]:
        """The figures of each layer by path. Its ``direct`` functionals and its uncounted calls count in all layers
        above it, too, but not those of ``ignored`` modules and of the layers in them."""
        totals = self.run.total_params()
        left_out = {
            path for path, module in self._modules.items() if type(module) in ignored or is_one_of(module, ignored)
        }
        measured: dict[LayerPath, LayerFigures] = {}
        for node in self.run.tree("forward").walk():
            layer, path, module = node.layer, node.layer.path, self._modules.get(node.layer.path)
            params = totals[path] if module is None else known_sum(parameter_sizes(module).values())
            ns = getattr(node.total, self.time)
            measured[path] = LayerFigures(layer.kind, params, ns, seen=bool(node.total) or not layer.compiled)
            lineage = [path[:steps] for steps in range(1, len(path) + 1)]
            if left_out.intersection(lineage):
                continue
            for above in map(measured.__getitem__, lineage):
                above.uncounted += node.self.uncounted
                for name, counted in direct.get(path, {}).items():
                    above.functionals.setdefault(name, Counted()).add(counted)
        return measured

    def ns(self, counted: Counted) -> int:
        """The nanoseconds of a functional, on the CPU or on the device."""
        return counted.device_ns if self.time == "device_ns" else counted.ns

    def params_at(self, paths: Iterable[LayerPath]) -> int | None:
        """The sum of the parameters of some layers; a module with several paths counts once."""
        return known_sum({id(self._modules.get(path, path)): self.of[path].params for path in paths}.values())


def _class_name(module: nn.Module) -> str:
    """The name of a module's class; for a ScriptModule, of the class from which it was made."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def is_one_of(module: nn.Module, modules: Iterable[Any]) -> bool:
    """Whether the object ``module`` itself is in ``modules``."""
    return any(module is known for known in modules)

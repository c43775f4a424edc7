"""flops-profiler's interface over torchprof: its calls, its convention of counting, its page.

``get_model_profile`` and ``FlopsProfiler`` take what those of flops-profiler 0.1.2 and of DeepSpeed's flops profiler
take, and print the same three parts under the same labels. docs/coming-from-flops-profiler.md says which figures differ
and why.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchprof
from torchprof import Run
from torchprof.encoding import fitting
from torchprof.integrations.convention import Counted, Rule, count

__all__ = ["FlopsProfiler", "get_model_profile"]

LayerPath = tuple[str, ...]
_UNKNOWN = "–"
_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)

# How that tool counts. A formula gets the signature of one call; what has no recorded shape counts nothing in it.


def _shape(signature: Any, at: int) -> tuple[int, ...] | None:
    """The shape of an input that is a tensor, None where it is none or its shape is not known."""
    if signature is None:
        return None
    is_tensor = at < len(signature.dtypes) and signature.dtypes[at] not in ("", "Scalar", "ScalarList", "TensorList")
    return signature.shapes[at] if is_tensor else None


def _elements(signature: Any) -> int:
    shape = _shape(signature, 0)
    return 0 if shape is None else prod(shape)


def _nothing(signature: Any) -> int:
    return 0


def _normalised(weight: int) -> Any:
    """Four for each element, and one more where there is a weight, the input at that place."""

    def flops(signature: Any) -> int:
        return _elements(signature) * (4 + (_shape(signature, weight) is not None))

    return flops


def _batch_normalised(signature: Any) -> int:
    """One for each element, four where mean and variance are those of the batch, and one more for a weight."""
    has_weight = _shape(signature, 1) is not None
    in_training = len(signature.scalars) > 5 and signature.scalars[5] is True
    return _elements(signature) * ((4 if in_training else 1) + has_weight)


def _added_product(signature: Any) -> int:
    """Two for each multiply-accumulate, and one for each element of what is added, before it is broadcast."""
    added, first, second = (_shape(signature, at) for at in range(3))
    if added is None or first is None or second is None:
        return 0
    return 2 * prod(first) * second[-1] + prod(added)


def _interpolated(signature: Any) -> int:
    """One for each element of the result, whose size, or the factors to it, stand among the values."""
    image, scalars = _shape(signature, 0), signature.scalars
    if image is None or len(scalars) < 2:
        return 0
    sizes, factors = scalars[1], scalars[-1]
    if isinstance(sizes, tuple):
        return prod(image[: -len(sizes)]) * prod(sizes)
    if isinstance(factors, tuple):
        return prod(image[:2]) * prod(int(length * factor) for length, factor in zip(image[2:], factors))
    return 0


_RULES: dict[str, Rule] = {}


def _count_as(flops: Any, names: Mapping[str, str] | str) -> None:
    """Set the rule of some of torch's ops: names of ops by that tool's name, or names that are both."""
    named = names if isinstance(names, Mapping) else {name: name for name in names.split()}
    for name, ops in named.items():
        for op in ops.split():
            _RULES[f"aten::{op}"] = Rule(name, flops)


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
    _count_as(_elements, {_name: f"{_name} {_name}_"})
_count_as(_elements, "softmax")
for _dims in (1, 2, 3):
    _count_as(_elements, f"avg_pool{_dims}d adaptive_avg_pool{_dims}d adaptive_max_pool{_dims}d")
    _count_as(_elements, {f"max_pool{_dims}d": f"max_pool{_dims}d max_pool{_dims}d_with_indices"})
_count_as(_normalised(weight=2), "layer_norm group_norm")
_count_as(_normalised(weight=1), "instance_norm")
_count_as(
    _interpolated,
    {
        "interpolate": "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    },
)
_count_as(_nothing, "embedding")
_count_as(_nothing, {"interpolate": "upsample_nearest1d upsample_nearest2d upsample_nearest3d"})
_count_as(_nothing, "batch_norm")  # whether it is in training, only the op inside it tells: see below
_BATCH_NORM = {
    "aten::instance_norm": Rule("", _nothing),  # is made of a batch norm
    "aten::native_batch_norm": Rule("batch_norm", _batch_normalised),
    "aten::cudnn_batch_norm": Rule("batch_norm", _batch_normalised),
    "aten::miopen_batch_norm": Rule("batch_norm", _batch_normalised),
}
_count_as(_nothing, {"": "selu selu_ celu celu_ rrelu rrelu_"})  # made of ops that count; that tool leaves them out


def _functionals(run: Run) -> tuple[dict[LayerPath, dict[str, Counted]], Counter[str]]:
    """By path of a layer and that tool's name of an operator, what ran directly in the layer's forward; and how many
    calls of an operator count nothing because their shapes are not known (of nested tensors).

    Operators that do multiply-accumulates and that the tool does not know are listed by torch's name.
    """
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
                rules[name] = Rule(name.removeprefix("aten::"), "macs")
        elif callable(rule.flops) and rule.flops is not _nothing and _shape(row.signature, 0) is None:
            unknown[rule.name] += row.calls
    found = count(run, rules)
    for path, functionals in count(run, _BATCH_NORM).items():
        if "batch_norm" in functionals:
            found.setdefault(path, {}).setdefault("batch_norm", Counted()).flops += functionals["batch_norm"].flops
    for functionals in found.values():
        functionals.pop("", None)
    return found, unknown


# How that tool writes figures.


def _scaled(number: float, *units: tuple[float, str]) -> str | None:
    """In the first unit that goes into the number, to two decimals; None where it is less than all of them."""
    for size, unit in units:
        if number >= size:
            return f"{round(number / size, 2)} {unit}"
    return None


def _number(number: int | None) -> str:
    if number is None:
        return _UNKNOWN
    return _scaled(number, (1e9, "G"), (1e6, "M"), (1e3, "K")) or str(number)


def _macs(number: int | None) -> str:
    if number is None:
        return _UNKNOWN
    return _scaled(number, (1e9, "GMACs"), (1e6, "MMACs"), (1e3, "KMACs")) or f"{number} MACs"


def _params(number: int | None) -> str:
    if number is None:
        return _UNKNOWN
    return _scaled(number, (1e6, "M"), (1e3, "k")) or str(number)


def _duration(ns: float | None) -> str:
    if ns is None:
        return _UNKNOWN
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if ns > size:
            return f"{round(ns / size, 2)} {unit}"
    return f"{round(ns / 1e3, 2)} us" if ns else "0.0"


def _rate(flops: float | None, ns: float | None) -> str:
    """Floating-point operations a second."""
    if flops is None or ns is None or (flops and not ns):
        return _UNKNOWN
    rate = flops / ns * 1e9 if ns else 0.0
    units = ((1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS"), (1e3, "KFLOPS"))
    return _scaled(rate, *units) or f"{round(rate, 2)} FLOPS"


def _share(part: float | None, whole: float | None) -> str:
    return _UNKNOWN if part is None or whole is None else f"{part / whole if whole else 0:.2%}"


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Their sum, None where one of them is not known."""
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


# What a run says by that tool's convention.


class _Figures:
    """One layer with all below it: parameters, the time of its forwards in nanoseconds, and what ran in them.

    Without ``seen`` only the parameters are known: it is inside a ScriptModule or under torch.compile, and ran, if it
    did, as a part of that.
    """

    def __init__(self, kind: str, params: int | None, ns: int, seen: bool) -> None:
        self.kind = kind
        self.params = params
        self.ns = ns
        self.seen = seen
        self.uncounted = 0  # calls of ops whose work nobody knows
        self.functionals: dict[str, Counted] = {}

    @property
    def flops(self) -> int:
        return sum(counted.flops for counted in self.functionals.values())

    @property
    def macs(self) -> int:
        return sum(counted.macs for counted in self.functionals.values())

    @property
    def known(self) -> tuple[int | None, int | None, int | None]:
        """(flops, MACs, nanoseconds), as far as they are known."""
        if not self.seen:
            return None, None, None
        return (self.flops or None, self.macs or None, self.ns) if self.uncounted else (self.flops, self.macs, self.ns)

    @property
    def bound(self) -> str:
        """What to write before a sum that something is missing from."""
        return "≥ " if self.uncounted else ""


class _Measured:
    """The figures of all layers, by path, and those of what came after forward.

    Times are the CPU's, or where the device's were recorded, those of its kernels.
    """

    def __init__(self, run: Run, model: nn.Module, ignored: Sequence[Any]) -> None:
        self.run = run
        self.model = model
        self.time = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
        self._kinds = {layer.path: layer.kind for layer in run.layers}
        self._root = run.roots[0].path
        self._modules = dict(self._places())
        skipped = {
            path for path, module in self._modules.items() if type(module) in ignored or _is_one_of(module, ignored)
        }

        def is_ignored(path: LayerPath) -> bool:
            return any(path[:steps] in skipped for steps in range(1, len(path) + 1))

        totals = run.total_params()
        self.of: dict[LayerPath, _Figures] = {}
        for node in run.tree("forward").walk():
            layer, module = node.layer, self._modules.get(node.layer.path)
            params = totals[layer.path] if module is None else _params_of(module)
            ns = getattr(node.total, self.time)
            self.of[layer.path] = _Figures(layer.kind, params, ns, seen=bool(node.total) or not layer.compiled)
        direct, self.unknown = _functionals(run)
        for path in self.of:
            for name, counted in ({} if is_ignored(path) else direct.get(path, {})).items():
                for steps in range(1, len(path) + 1):
                    self.of[path[:steps]].functionals.setdefault(name, Counted()).add(counted)
        for row in run.rows:
            if (
                row.cost.uncounted
                and row.layer is not None
                and row.phase == "forward"
                and not is_ignored(row.layer.path)
            ):
                for steps in range(1, len(row.layer.path) + 1):
                    self.of[row.layer.path[:steps]].uncounted += row.cost.uncounted
        self.whole = self.of[self._root]
        self.functionals_ns = sum(self.ns(counted) for counted in self.whole.functionals.values())

        after = [node for phase in ("backward", "recompute") for node in run.tree(phase).walk()]
        self.backward_ns = sum(getattr(node.self, self.time) for node in after)
        self.backward_flops = sum(node.self.flops for node in after if not is_ignored(node.layer.path))
        self.step_ns = sum(
            getattr(row.cost, self.time)
            for row in run.rows
            if row.frames and row.frames[0].name.startswith("Optimizer.step#")
        )
        own = run.tree("forward").total
        self.own_flops = (
            f"{'≥ ' if own.uncounted and own.flops else ''}{_number(own.flops or (None if own.uncounted else 0))}"
        )
        outside = run.no_layer("forward")
        self.outside = f"{_macs(outside.macs)}, {_number(outside.flops)} flops" if outside.flops else ""

    def ns(self, counted: Counted) -> int:
        return counted.device_ns if self.time == "device_ns" else counted.ns

    def below(self, module: nn.Module, path: LayerPath) -> Iterator[tuple[str, nn.Module | None, LayerPath | None]]:
        """The modules that one holds, with their names and paths; no path for those that were not in the run."""
        wraps = _class_name(module) != self._kinds[path]  # a module that only wraps is shown as what it wraps
        for name, child in module._modules.items():
            child_path = path if wraps else (*path, name)
            yield name, child, child_path if child is not None and child_path in self._kinds else None

    def _places(self) -> Iterator[tuple[LayerPath, nn.Module]]:
        waiting = [(self._root, self.model)]
        while waiting:
            path, module = waiting.pop()
            yield path, module
            waiting.extend(
                (child_path, child)
                for _, child, child_path in self.below(module, path)
                if child is not None and child_path is not None
            )

    # The parts of the page

    def by_depth(self, module_depth: int, top_modules: int) -> Iterator[str]:
        """At each depth, the classes of modules with the largest sums."""
        levels: list[dict[str, list[LayerPath]]] = []
        for path, figures in self.of.items():
            if len(path) > len(levels):
                levels.append({})
            levels[len(path) - 1].setdefault(figures.kind, []).append(path)
        columns: tuple[tuple[str, Any, Any], ...] = (
            ("params", self._params_at, _params),
            ("flops", lambda paths: _sum(self.of[path].known[0] for path in paths), _number),
            ("MACs", lambda paths: _sum(self.of[path].known[1] for path in paths), _macs),
            ("fwd latency", lambda paths: _sum(self.of[path].known[2] for path in paths), _duration),
        )
        yield f"Top {top_modules} modules in terms of params, flops, MACs or duration at different model depths:"
        for depth, level in enumerate(levels if module_depth < 0 else levels[: module_depth + 1]):
            yield f"depth {depth}:"
            for label, total, written in columns:
                sums = {kind: total(paths) for kind, paths in level.items()}
                largest = sorted(sums, key=lambda kind: sums[kind] or 0, reverse=True)[:top_modules]
                yield f"    {label:<11} - { {kind: written(sums[kind]) for kind in largest} }"

    def _params_at(self, paths: Iterable[LayerPath]) -> int | None:
        """The parameters at some paths; a module that stands at several of them counts once."""
        return _sum({id(self._modules.get(path, path)): self.of[path].params for path in paths}.values())

    def by_module(self) -> Iterator[str]:
        """The model's repr, line by line, with the figures of each module before what it says of itself."""
        waiting: list[tuple[str, str, nn.Module | None, LayerPath | None]] = [("", "", self.model, self._root)]
        while waiting:
            indent, name, module, path = waiting.pop()
            if module is None:  # the end of one that holds others, or one that is not there
                yield indent + name
                continue
            head = f"{indent}{name}{module._get_name()}("
            said = module.extra_repr()
            lines = (said if path is None else f"{self._line(self.of[path])}, {said}").split("\n")
            children = [] if path is None else list(self.below(module, path))
            if len(lines) == 1 and not children:
                yield f"{head}{lines[0]})"
                continue
            yield head
            yield from (f"{indent}  {line}".rstrip() for line in lines)
            waiting.append((indent, ")", None, None))
            waiting.extend(
                (indent + "  ", f"({key}): " + ("None" if child is None else ""), child, child_path)
                for key, child, child_path in reversed(children)
            )

    def _line(self, figures: _Figures) -> str:
        whole = self.whole
        flops, macs, ns = figures.known
        module = {
            "param": _params(figures.params),
            "flops": _bounded(figures, _number(flops)),
            "macs": _bounded(figures, _macs(macs)),
            "duration": _duration(ns),
            "FLOPS": _bounded(figures, _rate(flops, ns)),
            "params%": _share(figures.params, whole.params),
            "flops%": _share(flops, whole.flops),
            "macs%": _share(macs, whole.macs),
            "duration%": _share(ns, whole.ns),
        }
        functionals = {
            name: {
                "flops": _number(counted.flops),
                "macs": _macs(counted.macs),
                "duration": _duration(self.ns(counted)),
                "FLOPS": _rate(counted.flops, self.ns(counted)),
                "flops%": _share(counted.flops, whole.flops),
                "macs%": _share(counted.macs, whole.macs),
                "duration%/allfuncs": _share(self.ns(counted), self.functionals_ns),
                "duration%/e2e": _share(self.ns(counted), whole.ns),
            }
            for name, counted in figures.functionals.items()
        }
        lasted = _duration(sum(map(self.ns, figures.functionals.values())) if figures.seen else None)
        return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"


def _bounded(figures: _Figures, text: str) -> str:
    """A sum, with ``≥`` where something is missing from it."""
    return text if text == _UNKNOWN else figures.bound + text


def _class_name(module: nn.Module) -> str:
    """The class of a module; of a ScriptModule, that which it was made from."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _params_of(module: nn.Module) -> int | None:
    """All parameters of a module, None where a lazy one has not made them yet, or a quantised one has packed them."""
    params = list(module.parameters())
    packed = any(hasattr(below, "_packed_params") for below in module.modules())
    if packed or any(nn.parameter.is_lazy(param) for param in params):
        return None
    return sum(param.numel() for param in params)


def _is_one_of(module: nn.Module, modules: Iterable[Any]) -> bool:
    return any(module is one for one in modules)


# The summary, with what a DeepSpeed engine or torch.distributed adds to it.


def _asked(thing: Any, *names: str) -> Any:
    """The first of some attributes that is there, called where it can be; None where none is."""
    for name in names:
        value = getattr(thing, name, None)
        if value is not None:
            return value() if callable(value) else value
    return None


def _processes(engine: Any, model: nn.Module) -> tuple[int | None, int | None, int | None]:
    """(number of processes, sizes of data and of model parallelism), each None where nobody tells."""
    world, data, split = (
        _asked(engine, "world_size"),
        _asked(engine, "dp_world_size"),
        _asked(engine, "mp_world_size"),
    )
    units = getattr(engine, "mpu", None)
    data = _asked(units, "get_data_parallel_world_size") if data is None else data
    if split is None:
        split = _asked(units, "get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size() if world is None else world
        group = getattr(model, "process_group", None)  # of DistributedDataParallel and of FSDP
        if data is None and group is not None:
            data = distributed.get_world_size(group)
    return world, data, split


def _engine_ns(engine: Any) -> tuple[float, float, float] | None:
    """What an engine that keeps time says of forward, backward and step, in nanoseconds."""
    timers = getattr(engine, "timers", None)
    if timers is None or not _asked(engine, "wall_clock_breakdown"):
        return None

    def read(*names: str) -> float:
        known = [name for name in names if not hasattr(timers, "has_timer") or timers.has_timer(name)]
        return max((timers(name).elapsed(False) * 1e6 for name in known), default=0.0)

    # The names in flops-profiler 0.1.2, and DeepSpeed's of today.
    times = read("forward", "fwd"), read("backward", "bwd"), read("step")
    return times if all(times) else None


def _summary(measured: _Measured, step: int, engine: Any, recompute: float) -> Iterator[str]:
    def line(label: str, value: Any) -> str:
        return f"{label + ': ':<60}  {value}"

    whole, model = measured.whole, measured.model
    device = next((param.device for param in model.parameters()), "cpu")
    yield ""
    yield "-------------------------- Flops Profiler --------------------------"
    yield f"Profile on Device: {device}"
    yield f"Profile Summary at step {step}:"
    yield "Notations:"
    yield "params: parameters; MACs: multiply-accumulates; flops: floating-point operations; FLOPS: flops a second;"
    yield "dp_size, mp_size: over how many devices the data and the model are split; fwd, bwd: forward, backward;"
    yield "latency: how long it took; step: the optimizer's; iter: fwd, bwd and step together"
    yield ""
    world, data, split = _processes(engine, model)
    batch = _asked(engine, "train_micro_batch_size_per_gpu")
    for label, number in (
        ("world size", world),
        ("data parallel size", data),
        ("model parallel size", split),
        ("batch size per device", batch),
    ):
        if number is not None:
            yield line(label, number)
    parts = split or 1
    yield line("params per device", _params(whole.params))
    all_params = None if whole.params is None else whole.params * parts
    yield line("params of model = params per device * mp_size", _params(all_params))
    known_flops, known_macs, _ = whole.known
    yield line("fwd MACs per device", _bounded(whole, _macs(known_macs)))
    yield line("fwd flops per device", _bounded(whole, _number(known_flops)))
    all_flops = None if known_flops is None else known_flops * parts
    yield line("fwd flops of model = fwd flops per device * mp_size", _bounded(whole, _number(all_flops)))

    kept = _engine_ns(engine)
    fwd_ns, bwd_ns, step_ns = kept or (whole.ns, measured.backward_ns, measured.step_ns)
    if fwd_ns:
        yield line("fwd latency", _duration(fwd_ns))
        yield line(
            "fwd FLOPS per device = fwd flops per device / fwd latency", _bounded(whole, _rate(known_flops, fwd_ns))
        )
    if fwd_ns and bwd_ns:
        if measured.backward_ns:
            flops: float = measured.backward_flops
            bwd, both = "bwd flops per device", "fwd+bwd flops per device"
            yield line(bwd, _number(measured.backward_flops))
        else:
            factor = 2 + recompute
            flops = factor * whole.flops
            bwd, both = f"{factor:g} * fwd flops per device", f"{factor + 1:g} * fwd flops per device"
        yield line("bwd latency", _duration(bwd_ns))
        yield line(f"bwd FLOPS per device = {bwd} / bwd latency", _rate(flops, bwd_ns))
        flops += whole.flops
        yield line(f"fwd+bwd FLOPS per device = {both} / (fwd+bwd latency)", _rate(flops, fwd_ns + bwd_ns))
        if step_ns:
            iter_ns = fwd_ns + bwd_ns + step_ns
            yield line("step latency", _duration(step_ns))
            yield line("iter latency", _duration(iter_ns))
            yield line(f"FLOPS per device = {both} / iter latency", _rate(flops, iter_ns))
            if batch is not None and world is not None:
                yield line("samples/second", f"{batch * world / iter_ns * 1e9:.2f}")
    yield ""
    yield f"{_CONVENTION} By torchprof's own convention, which counts all elementwise work, fwd: {measured.own_flops}."
    if measured.backward_flops:
        yield "Backward flops are torchprof's own count of what autograd ran."
    if measured.outside:
        yield f"Outside of the model's forward (code around it, a loss), not among these figures: {measured.outside}."
    for name, calls in measured.unknown.items():
        yield f"Not counted: {name} ({calls} call{'s' if calls > 1 else ''} on tensors whose shapes are not known)."
    yield from measured.run.meta.warnings


class FlopsProfiler:
    """Profile what a model does between ``start_profile`` and ``stop_profile``, and print it as flops-profiler does.

    ``ds_engine``: a DeepSpeed engine, whose sizes and timers go into the summary. ``recompute_fwd_factor``: how much of
    the forward backward does again (activation checkpointing); used where backward was timed by the engine and was not
    profiled.

    Figures can be asked for and printed from ``stop_profile`` to ``end_profile``; at other times that raises
    TorchprofError. torchprof allows one profile at a time in a process: where something may raise after
    ``start_profile``, put ``end_profile`` into a ``finally``.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise torchprof.TorchprofError(f"FlopsProfiler needs a torch.nn.Module, not {model!r:.80}.")
        if not isinstance(recompute_fwd_factor, (int, float)) or recompute_fwd_factor < 0:
            raise torchprof.TorchprofError(
                "recompute_fwd_factor is the share of the forward that backward does again, 0 or more, not "
                f"{recompute_fwd_factor!r}."
            )
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._ignored: tuple[Any, ...] = ()
        self._block: torchprof.Profile | None = None
        self._figures: _Measured | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling, anew where it had been started. What is in modules of ``ignore_list`` is not counted:
        classes, or modules of the model; their time is still part of the latency.
        """
        ignored = _checked_ignored(ignore_list, self.model)
        self.end_profile()
        on_cuda = any(param.is_cuda for param in self.model.parameters())
        block = torchprof.Profile(self.model, with_flops=True, use_cuda=on_cuda)
        block.__enter__()
        self._block, self._ignored, self.started = block, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling; does nothing where it is not going on."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            self._figures = _Measured(block.run, self.model, self._ignored)

    def reset_profile(self) -> None:
        """Forget what was profiled; where profiling goes on, it begins anew."""
        if self._block is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Forget what was profiled, and stop where profiling goes on."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
        self._figures = None
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str | None:
        """The floating-point operations of the model's forwards; None (``–``) where nothing of them could be counted,
        and as a string with ``≥`` where not all could."""
        whole = self._measured().whole
        return _bounded(whole, _number(whole.known[0])) if as_string else whole.known[0]

    def get_total_macs(self, as_string: bool = False) -> int | str | None:
        """The multiply-accumulates of the model's forwards, as ``get_total_flops`` says its figure."""
        whole = self._measured().whole
        return _bounded(whole, _macs(whole.known[1])) if as_string else whole.known[1]

    def get_total_params(self, as_string: bool = False) -> int | str | None:
        """The model's parameters; None (``–``) where a lazy layer has not made them yet."""
        params = self._measured().whole.params
        return _params(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """How long the model's forwards lasted, in seconds."""
        ns = self._measured().whole.ns
        return _duration(ns) if as_string else ns / 1e9

    def get_total_functional_duration(self, as_string: bool = False) -> float | str:
        """How long the functionals in the model's forwards lasted, in seconds."""
        ns = self._measured().functionals_ns
        return _duration(ns) if as_string else ns / 1e9

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> None:
        """Print the summary, the aggregated profile and, with ``detailed``, that of each module.

        ``module_depth`` is the last depth of the aggregated profile, -1 for all. ``output_file``: written there instead
        of to stdout. Raises TorchprofError for a file that cannot be written.
        """
        measured = self._measured()
        _check_page(module_depth, top_modules, output_file)
        lines = list(_summary(measured, profile_step, self.ds_engine, self.recompute_fwd_factor))
        lines += ["", "----------------------------- Aggregated Profile per Device -----------------------------"]
        lines += measured.by_depth(module_depth, top_modules)
        if detailed:
            lines += [
                "",
                "------------------------------ Detailed Profile per Device ------------------------------",
                "Each module profile is listed after its name in the following order:",
                "module: what it did with all below it, and which share of the model that is; functionals: the same by "
                "functional; then what the module says of itself",
                "",
                "Note: 1. What a module does itself is not in the modules that it holds, so these may make up less.",
                "2. Flops follow from shapes alone. What a kernel saves is not taken off.",
                "3. The latency of a module is how long its forward lasted, or on a device, its kernels.",
                "",
                *measured.by_module(),
            ]
        lines.append("------------------------------------------------------------------------------")
        text = "\n".join(lines)
        if not output_file:
            print(fitting(text, sys.stdout))
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise torchprof.TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print, for each depth up to ``module_depth``, the ``top_modules`` classes of modules with the largest sums
        of parameters, flops, MACs and forward latency."""
        measured = self._measured()
        _check_page(module_depth, top_modules, None)
        print(fitting("\n".join(measured.by_depth(module_depth, top_modules)), sys.stdout))

    def _measured(self) -> _Measured:
        if self._block is not None:
            raise torchprof.TorchprofError("Profiling is still going on: call stop_profile() first.")
        if self._figures is None:
            raise torchprof.TorchprofError(
                "There are no figures: call start_profile(), then the model, then stop_profile(). They are there until "
                "reset_profile() or end_profile()."
            )
        return self._figures


def _checked_ignored(ignore: Any, model: nn.Module) -> tuple[Any, ...]:
    if ignore is None:
        return ()
    if not isinstance(ignore, Iterable) or isinstance(ignore, (str, nn.Module)):
        raise torchprof.TorchprofError(
            f"What is to be ignored is a list of classes of modules, [nn.Dropout], or of modules, not {ignore!r:.80}."
        )
    ignored = tuple(ignore)
    for one in ignored:
        if isinstance(one, nn.Module):
            if not _is_one_of(one, model.modules()):
                raise torchprof.TorchprofError(f"{one!r:.80}, which is to be ignored, is no module of the model.")
        elif not isinstance(one, type):
            raise torchprof.TorchprofError(
                f"{one!r:.80} cannot be ignored: it is neither a class of modules nor a module."
            )
    return ignored


def _check_page(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    if not isinstance(module_depth, int) or module_depth < -1:
        raise torchprof.TorchprofError(f"module_depth is 0 or more, or -1 for all depths, not {module_depth!r}.")
    if not isinstance(top_modules, int) or top_modules < 1:
        raise torchprof.TorchprofError(f"top_modules is how many are listed, 1 or more, not {top_modules!r}.")
    if output_file:
        if not isinstance(output_file, (str, PathLike)):
            raise torchprof.TorchprofError(f"output_file is the name of a file, not {output_file!r:.80}.")
        folder = Path(output_file).absolute().parent
        if not folder.is_dir():
            raise torchprof.TorchprofError(
                f"output_file={str(output_file)!r}: there is no folder {str(folder)!r}. Make it first."
            )


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] | None = [],  # their defaults, never changed
    kwargs: Mapping[str, Any] | None = {},
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 10,
    warm_up: int = 3,
    as_string: bool = False,
    output_file: str | PathLike[str] | None = None,
    ignore_modules: Iterable[Any] | None = None,
    func_name: str = "forward",
    *,
    mode: str | None = None,
) -> tuple[int | str | None, int | str | None, int | str | None]:
    """Call a model once, in eval mode, after ``warm_up`` calls, and return its (flops, MACs, parameters).

    ``input_shape``: the model takes one tensor of this shape, of the type and on the device of its first parameter, in
    place of ``args``. ``func_name``, or ``mode``: the method to call, such as ``generate``. ``module_depth``,
    ``top_modules``, ``detailed`` and ``output_file`` are for the page: see ``FlopsProfiler.print_model_profile``.
    ``as_string``: ``"22.36 G"`` for a number. ``ignore_modules``: see ``FlopsProfiler.start_profile``.

    Gradients are recorded as the caller has it. All modules are in train or eval mode afterwards as they were before.
    Raises TorchprofError for arguments that do not fit, and what the model raises.
    """
    profiler = FlopsProfiler(model)
    if mode is not None and func_name not in ("forward", mode):
        raise torchprof.TorchprofError(
            f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out."
        )
    call = _method(model, func_name if mode is None else mode)
    if not isinstance(warm_up, int) or warm_up < 0:
        raise torchprof.TorchprofError(f"warm_up is a number of calls, 0 or more, not {warm_up!r}.")
    _check_page(module_depth, top_modules, output_file)
    given, named = _inputs(model, input_shape, args, kwargs)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for _ in range(warm_up):
            call(*given, **named)
        profiler.start_profile(ignore_modules)
        call(*given, **named)
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        for module, training in modes:
            module.training = training


def _method(model: nn.Module, name: Any) -> Any:
    if name == "forward":
        return model
    method = getattr(model, name, None) if isinstance(name, str) else None
    if not callable(method):
        raise torchprof.TorchprofError(f"{type(model).__name__} has no method {name!r} to profile.")
    return method


def _inputs(model: nn.Module, shape: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the model is called on."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise torchprof.TorchprofError(f"kwargs is a dict of named arguments, not {kwargs!r:.80}.")
    named = dict(kwargs or {})
    if shape is not None:
        sizes = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else []
        if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise torchprof.TorchprofError(f"input_shape is a tuple of sizes, (1, 3, 224, 224), not {shape!r:.80}.")
        first = next(model.parameters(), None)
        dtype, device = (None, None) if first is None else (first.dtype, first.device)
        return [torch.zeros(sizes, dtype=dtype, device=device)], named
    if args is not None and not isinstance(args, (list, tuple)):
        raise torchprof.TorchprofError(f"args is a list of arguments, [x], not {type(args).__name__}.")
    if not args and not named:
        raise torchprof.TorchprofError("The model needs something to be called on: give input_shape, args or kwargs.")
    return list(args or []), named

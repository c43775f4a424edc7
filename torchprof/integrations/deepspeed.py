"""The early DeepSpeed pytorch-profiler as a drop-in, and DeepSpeed's profiler settings for any training loop.

A printed page is the model's own repr with figures at each module: parameters, multiply-adds and time, with their
shares, and TFLOPS = 2 · multiply-adds / time / 10¹². What the tool calls flops are its multiply-adds ("Mac"): the
products of convolution, and one for each element of its result where it has a bias; those of linear layers, without
bias; of recurrent layers, with biases and gates; one for each input element of pooling, relu-like functions and
softmax, two of batch norm; nothing else. docs/coming-from-deepspeed.md says where torchprof's own count differs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof import Profile, Run, TorchprofError
from torchprof.encoding import fitting
from torchprof.integrations.convention import PER_CALL, Counted, Rule, count

__all__ = [
    "StepProfiler",
    "add_profile_methods",
    "duration_to_string",
    "flops_to_string",
    "from_config",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

UNKNOWN = "–"

# Figures as text

_MACS = {"GMac": 1e9, "MMac": 1e6, "KMac": 1e3, "Mac": 1.0}
_FLOPS = {"TFLOPS": 1e12, "GFLOPS": 1e9, "MFLOPS": 1e6, "KFLOPS": 1e3, "FLOPS": 1.0}
_PARAMS = {"M": 1e6, "k": 1e3, "": 1.0}
_NUMBERS = {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def macs_to_string(macs: float | None, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as ``429.25 KMac``. ``units``: GMac, MMac, KMac or Mac; None takes the largest that fits.

    Here as in the other functions None is written as unknown, and ``precision`` is the number of decimals at most.
    Raises TorchprofError for other units.
    """
    return _text(macs, units, precision, _MACS)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = 2) -> str:
    """What this tool calls flops, its multiply-adds: as ``macs_to_string``.

    With ``units`` TFLOPS, GFLOPS, MFLOPS, KFLOPS or FLOPS the number is one of operations a second; it is not doubled.
    """
    return _text(flops, units, precision, _MACS, _FLOPS)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as ``61.71 k`` or ``850``. ``units``: M, k (or K) or the empty string."""
    return _text(params_num, units, precision, _PARAMS, {"K": 1e3})


def duration_to_string(duration: float | None, units: str | None = None, precision: int = 2) -> str:
    """Seconds as ``984.67 us``. ``units``: s, ms or us."""
    return _text(duration, units, precision, _TIMES)


def number_to_string(num: float | None, units: str | None = None, precision: int = 2) -> str:
    """Any number as ``61.71 K``. ``units``: G, M, K or the empty string."""
    return _text(num, units, precision, _NUMBERS)


def _text(
    value: float | None,
    units: str | None,
    precision: int,
    choices: Mapping[str, float],
    more: Mapping[str, float] | None = None,
) -> str:
    """A value in units: the largest of ``choices`` that is no larger than the value, where none are given."""
    if value is None:
        return UNKNOWN
    if not _is_number(value):
        raise TorchprofError(f"{value!r} is no number: give the number that get_total_flops() and the like return.")
    known = {**choices, **(more or {})}
    if units is None:
        units = next((unit for unit, size in choices.items() if abs(value) >= size), list(choices)[-1])
    elif units not in known:
        raise TorchprofError(f"units={units!r} are not known here. {_choose(str(units), known)}")
    if known[units] == 1 and isinstance(value, int):
        return f"{value} {units}".rstrip()
    return f"{round(value / known[units], precision)} {units}".rstrip()


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
class _Figures:
    """What layers did, or one: calls of their forward, multiply-adds, nanoseconds, and calls that were not counted."""

    calls: int = 0
    macs: int = 0
    ns: int = 0
    uncounted: int = 0

    def add(self, other: _Figures) -> None:
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


class _Recorded:
    """What a model did while it was profiled; several profiles of it add up."""

    def __init__(self) -> None:
        self.own: dict[tuple[str, ...], _Figures] = {}  # by path of a layer, without the layers below it
        self.layer_of: dict[tuple[str, ...], tuple[str, ...]] = {}  # real path of a module → path of its layer
        self.macs = 0  # torchprof's own count
        self.flops = 0
        self.is_lower_bound = False
        self.device: str | None = None
        self.doubts: dict[str, None] = {}

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
            own = self.own.setdefault(path, _Figures())
            if path not in left_out:
                own.calls += node.calls
                own.macs += sum(_macs_of(name, work, modules[path]) for name, work in counted.get(path, {}).items())
                own.ns += node.self.device_ns if self.device else node.self.cpu_ns
                own.uncounted += uncounted[path]
        self.macs += tree.total.macs
        self.flops += tree.total.flops
        self.is_lower_bound |= tree.total.uncounted > 0
        self.doubts.update(dict.fromkeys(run.meta.warnings))

    def total(self) -> _Figures:
        """What all layers did together."""
        found = _Figures()
        for own in self.own.values():
            found.add(own)
        return found

    def totals(self) -> dict[tuple[str, ...], _Figures]:
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


# The page


class _Part(NamedTuple):
    """A module where it stands in the model; ``module`` is None for a child that is None."""

    depth: int
    name: str
    module: nn.Module | None
    path: tuple[str, ...]


def _parts(model: nn.Module) -> Iterator[_Part]:
    """All places of the model, depth first. A module that holds one of its own ancestors leads into no circle."""
    waiting = [(_Part(0, "", model, (type(model).__name__,)), frozenset([id(model)]))]
    while waiting:
        part, above = waiting.pop()
        yield part
        if part.module is not None:
            waiting.extend(
                (_Part(part.depth + 1, name, child, (*part.path, name)), above | {id(child)})
                for name, child in reversed(part.module._modules.items())
                if id(child) not in above or child is None
            )


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. torch's own walk ends at Python's limit of recursion."""
    return list({id(part.module): part.module for part in _parts(model) if part.module is not None}.values())


def _params(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of a model, each once."""
    held = (param for module in _modules(model) for param in module._parameters.values() if param is not None)
    return list({id(param): param for param in held}.values())


def _sizes(model: nn.Module) -> dict[int, int | None]:
    """The elements of a model's parameters, by identity; None where a lazy module has not made them yet, and for what
    a quantised module has packed."""
    packed = {id(module): None for module in _modules(model) if hasattr(module, "_packed_params")}
    return packed | {id(param): None if is_lazy(param) else param.numel() for param in _params(model)}


def _sum_sizes(sizes: Mapping[int, int | None]) -> int | None:
    known = [size for size in sizes.values() if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _share(value: float | None, total: float | None, decimals: int) -> str:
    if value is None or total is None:
        return UNKNOWN
    return f"{value / total if total else 0:.{decimals}%}"


def _largest(column: Mapping[str, tuple[float | None, str]], number: int) -> dict[str, str]:
    """The texts of the largest values, largest first; of equal ones the first met; the unknown last."""

    def size(kind: str) -> float:
        value = column[kind][0]
        return -1 if value is None else value

    return {kind: column[kind][1] for kind in sorted(column, key=size, reverse=True)[:number]}


class _Page:
    """What is printed of a model and what was recorded of it."""

    def __init__(self, model: nn.Module, recorded: _Recorded) -> None:
        self._model = model
        self._recorded = recorded
        self.totals = recorded.totals()
        self.total = recorded.total()
        self._params = _sum_sizes(_sizes(model))

    def _figures(self, path: tuple[str, ...]) -> _Figures:
        """What was recorded of a module; nothing where it was not there yet."""
        layer = self._recorded.layer_of.get(path)
        return self.totals.get(layer, _Figures()) if layer is not None else _Figures()

    def _line(self, part: _Part, module: nn.Module) -> str:
        figures = self._figures(part.path)
        params = _sum_sizes(_sizes(module))
        macs, seconds = figures.known_macs, figures.seconds
        rate: float | None = None
        if macs is not None and seconds is not None and (seconds or not macs):
            rate = 2 * macs / seconds if seconds else 0
        return ", ".join(
            (
                params_to_string(params),
                f"{_share(params, self._params, 3)} Params",
                figures.macs_text(3),
                f"{_share(macs, self.total.known_macs, 3)} MACs",
                duration_to_string(seconds, precision=3),
                f"{_share(seconds, self.total.seconds, 2)} time",
                f"{UNKNOWN} TFLOPS" if rate is None else flops_to_string(rate, "TFLOPS", 3),
            )
        )

    def tree(self) -> str:
        """The model's repr with figures, laid out as torch does: small leaves in one line."""
        lines = []
        opened = 0
        for part in _parts(self._model):
            while opened > part.depth:
                opened -= 1
                lines.append("  " * opened + ")")
            pad = "  " * part.depth
            head = f"{pad}({part.name}): " if part.depth else ""
            if part.module is None:
                lines.append(f"{head}None")
                continue
            head += f"{part.module._get_name()}("
            figures, more = self._line(part, part.module), part.module.extra_repr()
            if not part.module._modules and "\n" not in more:
                lines.append(f"{head}{figures}, {more})")
                continue
            lines.append(head)
            lines.extend(f"{pad}  {line}" for line in f"{figures}, {more}".rstrip().split("\n"))
            opened += 1
        lines.extend("  " * depth + ")" for depth in reversed(range(opened)))
        return "\n".join(lines)

    def top(self, depth: int, top_num: int) -> str:
        """The kinds of modules at one depth that have most multiply-adds, parameters and time."""
        parts = [(part, part.module) for part in _parts(self._model) if part.module is not None]
        deepest = max(part.depth for part, _ in parts)
        depth = deepest if depth == -1 else min(depth, deepest)
        work: dict[str, _Figures] = {}
        sizes: dict[str, dict[int, int | None]] = {}
        for part, module in parts:
            if part.depth == depth:
                kind = type(module).__name__
                work.setdefault(kind, _Figures()).add(self._figures(part.path))
                sizes.setdefault(kind, {}).update(_sizes(module))
        params = {kind: _sum_sizes(each) for kind, each in sizes.items()}
        columns: dict[str, dict[str, tuple[float | None, str]]] = {
            "flops": {kind: (done.known_macs, done.macs_text(2)) for kind, done in work.items()},
            "params": {kind: (number, params_to_string(number)) for kind, number in params.items()},
            "time": {kind: (done.seconds, duration_to_string(done.seconds)) for kind, done in work.items()},
        }
        return "\n".join(
            f"Top {min(top_num, len(work))} modules in {what} at depth {depth} are {_largest(column, top_num)}"
            for what, column in columns.items()
        )

    def show(self, depth: int, top_num: int, tree: bool = True, top: bool = True) -> None:
        """Print one of the two parts, or both, and what is to be known of them."""
        if tree:
            print(fitting(self.tree(), sys.stdout))
        if top:
            print(fitting(self.top(depth, top_num), sys.stdout))
        if tree or top:
            print(fitting(self.notes(), sys.stdout))

    def notes(self) -> str:
        """How the count differs from torchprof's own, in one line; then what the run is not sure of."""
        bound = "at least " if self._recorded.is_lower_bound else ""
        macs, flops = (
            number_to_string(number if self.total.calls else None)
            for number in (self._recorded.macs, self._recorded.flops)
        )
        difference = (
            "Multiply-adds by this tool's convention: products of convolution (plus its bias), linear and recurrent "
            "layers, one for each input element of pooling, relu-like functions and softmax, two of batch norm, 0 for "
            f"all else; torchprof itself counts {bound}{macs} MACs and {bound}{flops} FLOPs here."
        )
        if self._recorded.device is not None:
            difference += f" Time is that of the work on the {self._recorded.device} device."
        return "\n".join((difference, *self._recorded.doubts))


# Profiling a model


class _Recording:
    """The profiling of one model, with the methods that ``add_profile_methods`` gives it.

    Reading while it is on ends the session, adds its figures to what there was, and begins the next one.
    A copy or a pickle of the model gets the methods without what was recorded.
    """

    _profile: Profile | None = None
    _recorded: _Recorded | None = None
    _ignored: frozenset[type] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Begin to profile; what was recorded before is forgotten.

        The own work of modules whose type is in ``ignore_list`` does not count. Raises TorchprofError while another
        profiler is on, and for a list of anything else.
        """
        ignored = _checked_types(ignore_list)
        self.abandon()
        self._begin()
        self._ignored, self._recorded = ignored, _Recorded()

    def stop_profile(self) -> None:
        """End the profiling. The figures stay until ``end_profile`` or the next start. A second stop does nothing."""
        self._known()
        self._close()

    def end_profile(self) -> None:
        """End the profiling, forget the figures, and take the methods off the model."""
        self.abandon()
        self._recorded = None
        for name in _METHODS:
            if getattr(vars(self.model).get(name), "__self__", None) is self:
                del vars(self.model)[name]

    def get_total_flops(self) -> int | None:
        """The multiply-adds of the forwards that were recorded; None where none was."""
        return self._read().total().known_macs

    def get_total_duration(self) -> float | None:
        """The seconds of the forwards that were recorded; None where none was."""
        return self._read().total().seconds

    def get_total_params(self) -> int | None:
        """The parameters of the model, shared ones once; None where a lazy module has not made them yet."""
        return _sum_sizes(_sizes(self.model))

    compute_total_flops = get_total_flops
    compute_total_duration = get_total_duration
    compute_total_params = get_total_params

    def print_model_profile(self) -> None:
        """Print the model's repr with the figures of each module, and how they were counted."""
        self.page().show(-1, 1, top=False)

    def print_model_aggregated_profile(self, depth: int = -1, top_num: int = 3) -> None:
        """Print the ``top_num`` kinds of modules at a depth with most multiply-adds, parameters and time.

        ``depth`` 0 is the model itself; -1, or more than there is, are the innermost modules.
        """
        _check_whole("depth", depth, -1)
        _check_whole("top_num", top_num, 1)
        print(fitting(self.page().top(depth, top_num), sys.stdout))

    def page(self) -> _Page:
        return _Page(self.model, self._read())

    def abandon(self) -> None:
        """End a session that is on, and drop what it saw."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def _begin(self) -> None:
        held = (held for module in _modules(self.model) for held in (module._parameters, module._buffers))
        on_cuda = any(tensor is not None and tensor.is_cuda for tensors in held for tensor in tensors.values())
        profile = Profile(self.model, with_flops=True, use_cuda=on_cuda)
        profile.__enter__()
        self._profile = profile

    def _close(self) -> None:
        profile = self._profile
        self.abandon()
        if profile is not None:
            self._known().add(profile, self._ignored)

    def _known(self) -> _Recorded:
        if self._recorded is None:
            raise TorchprofError(
                "Nothing was recorded: call the model's start_profile(), then the model. After end_profile() its "
                "figures and methods are gone; add_profile_methods(model) brings the methods back."
            )
        return self._recorded

    def _read(self) -> _Recorded:
        """What was recorded so far."""
        recorded = self._known()
        if self._profile is not None:
            self._close()
            self._begin()
        return recorded


_METHODS = (
    "start_profile",
    "stop_profile",
    "end_profile",
    "compute_total_flops",
    "compute_total_duration",
    "compute_total_params",
    "get_total_flops",
    "get_total_duration",
    "get_total_params",
    "print_model_profile",
    "print_model_aggregated_profile",
)


def add_profile_methods(model: nn.Module) -> nn.Module:
    """Give a model methods to profile it, and return it.

    ``start_profile(ignore_list=None)``, ``stop_profile()``, ``end_profile()``, ``get_total_flops()``,
    ``get_total_duration()`` (seconds), ``get_total_params()``, each of these three as ``compute_total_…`` as well,
    ``print_model_profile()`` and ``print_model_aggregated_profile(depth=-1, top_num=3)``. Forwards between start and
    stop add up. Reading and printing work from start to end; ``end_profile`` takes the methods off again. A model that
    has them keeps those it has. Raises TorchprofError for what is no module, and where the model has an attribute of
    such a name.
    """
    _check_model(model)
    owners = {name: getattr(vars(model).get(name), "__self__", None) for name in _METHODS}
    if any(isinstance(owner, _Recording) and owner.model is model for owner in owners.values()):
        return model
    taken = [name for name, owner in owners.items() if name in vars(model) and not isinstance(owner, _Recording)]
    if taken:
        raise TorchprofError(
            f"This {type(model).__name__} has an attribute of its own by the name {taken[0]!r}: rename it, or use "
            "get_model_profile(model, …) or from_config(…), which add nothing to the model."
        )
    recording = _Recording(model)
    vars(model).update({name: getattr(recording, name) for name in _METHODS})
    return model


def get_model_profile(
    model: nn.Module,
    input_res: Any,
    input_constructor: Callable[[Any], Mapping[str, Any]] | None = None,
    print_profile: bool = True,
    print_aggregated_profile: bool = True,
    depth: int = -1,
    top_num: int = 3,
    warm_up: int = 10,
    as_strings: bool = True,
    ignore_modules: Iterable[type] | None = None,
) -> tuple[int | str | None, int | str | None]:
    """Profile one forward of a model in eval mode, print it, and return (multiply-adds, parameters).

    ``input_res``: the sizes of one example; the model is called on a batch of one such tensor of ones, of the type and
    on the device of its parameters. With ``input_constructor`` it is ``model(**input_constructor(input_res))``.
    ``depth`` and ``top_num`` are for the aggregated profile: 0 is the model itself, -1 the innermost modules.
    ``warm_up`` calls come first and are not measured. ``as_strings`` returns text (``"429.25 KMac"``, ``"61.71 k"``).
    The own work of modules whose type is in ``ignore_modules`` does not count. Whether gradients are recorded is for
    the caller to say. Raises TorchprofError for bad arguments; what the model raises passes through. The train/eval
    state of every module comes back.
    """
    _check_model(model)
    _check_whole("depth", depth, -1)
    _check_whole("top_num", top_num, 1)
    _check_whole("warm_up", warm_up, 0)
    _checked_types(ignore_modules)
    inputs = _inputs_from(input_constructor, input_res) if input_constructor is not None else _ones(model, input_res)
    recording = _Recording(model)
    # A frozen ScriptModule has no mode.
    modes = [(module, module.training) for module in _modules(model) if hasattr(module, "training")]
    try:
        for module, _ in modes:
            module.training = False  # not model.eval(): a model may do more in that than change the mode
        for _ in range(warm_up):
            args, kwargs = inputs()
            model(*args, **kwargs)
        args, kwargs = inputs()
        recording.start_profile(ignore_modules)
        model(*args, **kwargs)
        recording.stop_profile()
    finally:
        recording.abandon()
        for module, mode in modes:
            module.training = mode
    page, params = recording.page(), recording.get_total_params()
    page.show(depth, top_num, tree=print_profile, top=print_aggregated_profile)
    if as_strings:
        return page.total.macs_text(precision=2), params_to_string(params)
    return page.total.known_macs, params


_Inputs = Callable[[], "tuple[tuple[Any, ...], Mapping[str, Any]]"]


def _ones(model: nn.Module, input_res: Any) -> _Inputs:
    """What makes a batch of one example of these sizes."""
    sizes = list(input_res) if isinstance(input_res, (tuple, list)) else []
    if not sizes or not all(_is_whole(size) and size > 0 for size in sizes):
        raise TorchprofError(
            f"input_res={input_res!r:.80} are no sizes of one example: write a tuple of numbers from 1 on, without the "
            "batch, (3, 224, 224). For inputs of another kind give an input_constructor that makes them."
        )
    floating = (param for param in _params(model) if param.is_floating_point() or param.is_complex())
    like = next(floating, None)
    dtype, device = (None, None) if like is None else (like.dtype, like.device)
    return lambda: ((torch.ones((1, *sizes), dtype=dtype, device=device),), {})


def _inputs_from(constructor: Callable[[Any], Mapping[str, Any]], input_res: Any) -> _Inputs:
    if not callable(constructor):
        raise TorchprofError(
            f"input_constructor={constructor!r} cannot be called: give a function that takes input_res and returns the "
            "model's keyword arguments as a dict."
        )

    def inputs() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = constructor(input_res)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise TorchprofError(
                f"input_constructor returned a {type(made).__name__} where a dict of the model's keyword arguments "
                'belongs: the model is called as model(**input_constructor(input_res)). Return {"x": tensor}.'
            )
        return (), made

    return inputs


# DeepSpeed's settings


class _Setting(NamedTuple):
    """What a key of a configuration may be, in words and as a test, and what it is where it is left out."""

    expected: str
    is_right: Callable[[Any], bool]
    default: Any


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, PathLike)) and bool(fspath(value))


def _yes_or_no(default: bool) -> _Setting:
    return _Setting("true or false", lambda value: isinstance(value, bool), default)


def _whole(least: int, default: int) -> _Setting:
    return _Setting(f"a whole number from {least} on", lambda value: _is_whole(value) and bool(value >= least), default)


_SECTION = "flops_profiler"
_SECTION_KEYS = {
    "enabled": _yes_or_no(False),
    "profile_step": _whole(1, 1),
    "module_depth": _whole(-1, -1),
    "top_modules": _whole(1, 1),
    "detailed": _yes_or_no(True),
    "output_file": _Setting("the path of a file, or null", lambda value: value is None or _is_path(value), None),
    "recompute_fwd_factor": _Setting("a number from 0 on", lambda value: _is_number(value) and bool(value >= 0), 0.0),
}
_EARLY = "pytorch_profiler"
_EARLY_KEYS = {
    _EARLY: _yes_or_no(False),
    "profile_step": _whole(1, 5),
    "profile_depth": _whole(-1, -1),
    "profile_top_num": _whole(1, 3),
}


@dataclass
class StepProfiler:
    """Profiles one step of a training loop; made by ``from_config``.

    Enter ``step(model)`` around each step: forward, backward and the optimizer's step. Steps are counted from 1 in
    ``steps``; the one with the number ``profile_step`` is profiled and its page printed, the others run as they are.
    """

    enabled: bool
    profile_step: int
    profiled: Callable[[nn.Module], AbstractContextManager[None]] = field(repr=False)
    steps: int = 0

    def step(self, model: nn.Module) -> AbstractContextManager[None]:
        """A ``with`` block for one step of this model. What is raised inside passes through, and nothing is printed.

        Where ``torch.distributed`` is on, the first rank alone profiles. Raises TorchprofError for what is no module.
        """
        if not self.enabled:
            return nullcontext()
        _check_model(model)
        self.steps += 1
        return self.profiled(model) if self.steps == self.profile_step and _is_first_rank() else nullcontext()


def from_config(config: Mapping[str, Any] | str | PathLike[str]) -> StepProfiler:
    """What profiles one step of any training loop, by a DeepSpeed configuration: a dict, or the path of a JSON file.

    Its section ``flops_profiler`` (``enabled``, ``profile_step``, ``module_depth``, ``top_modules``, ``detailed``,
    ``output_file``, ``recompute_fwd_factor``) prints the page of ``torchprof.integrations.flops_profiler``; the older
    keys ``pytorch_profiler``, ``profile_step``, ``profile_depth`` and ``profile_top_num`` print this module's. Other
    keys of DeepSpeed's are left alone; without any of these nothing is profiled. Use it as::

        profiler = from_config("ds_config.json")
        for batch in loader:
            with profiler.step(model):
                ...  # forward, backward, optimizer.step()

    Raises TorchprofError for unknown keys of the profiler's, values of a wrong type, and files that are no JSON object.
    """
    settings = _loaded(config)
    _check_top_keys(settings)
    section = settings.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise TorchprofError(
            f'"{_SECTION}" is {section!r:.80}, and should be an object: {{"enabled": true, "profile_step": 5}}.'
        )
    recent = _checked(section, _SECTION_KEYS, f'"{_SECTION}"')
    given = {key: settings[key] for key in _EARLY_KEYS if key in settings}
    early = _checked(given, _EARLY_KEYS, "the configuration")
    if given and _EARLY not in given:
        raise TorchprofError(
            f'{", ".join(map(repr, given))} without "{_EARLY}": add "{_EARLY}": true, or write the section '
            f'"{_SECTION}": {{"enabled": true, "profile_step": 5}}.'
        )
    if recent["enabled"] and early[_EARLY]:
        raise TorchprofError(f'"{_SECTION}" and "{_EARLY}" are both on: switch one of the two off.')
    if early[_EARLY]:
        return StepProfiler(True, early["profile_step"], lambda model: _early_step(model, early))
    return StepProfiler(recent["enabled"], recent["profile_step"], lambda model: _recent_step(model, recent))


@contextmanager
def _early_step(model: nn.Module, settings: Mapping[str, Any]) -> Iterator[None]:
    recording = _Recording(model)
    recording.start_profile()
    try:
        yield
        recording.stop_profile()
    finally:
        recording.abandon()
    recording.page().show(settings["profile_depth"], settings["profile_top_num"])


@contextmanager
def _recent_step(model: nn.Module, settings: Mapping[str, Any]) -> Iterator[None]:
    from torchprof.integrations.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(model, recompute_fwd_factor=settings["recompute_fwd_factor"])
    profiler.start_profile()
    try:
        yield
        profiler.stop_profile()
        profiler.print_model_profile(
            **{key: settings[key] for key in ("profile_step", "module_depth", "top_modules", "detailed", "output_file")}
        )
    finally:
        profiler.end_profile()


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _loaded(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, PathLike)):
        path = fspath(config)
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise TorchprofError(f"The configuration {path!r} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:  # no JSON, or no text
            raise TorchprofError(f"The configuration {path!r} is no JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise TorchprofError(
            f"A configuration is a dict, or the path of a JSON file that holds an object, not {config!r:.80}. Write "
            f'{{"{_SECTION}": {{"enabled": true, "profile_step": 5}}}}.'
        )
    return config


def _check_top_keys(settings: Mapping[str, Any]) -> None:
    """Other keys are DeepSpeed's own, unless they look like one of the profiler's."""
    known = [_SECTION, *_EARLY_KEYS]
    for key in settings:
        if key not in known and ("profil" in str(key).lower() or get_close_matches(str(key), known, 1, 0.8)):
            raise TorchprofError(f"The configuration has an unknown key {key!r}. {_choose(str(key), known)}")


def _checked(given: Mapping[str, Any], known: Mapping[str, _Setting], where: str) -> dict[str, Any]:
    """The settings, with the defaults of what was left out."""
    for key, value in given.items():
        if key not in known:
            raise TorchprofError(f"{where} has an unknown key {key!r}. {_choose(str(key), known)}")
        if not known[key].is_right(value):
            raise TorchprofError(f'"{key}" is {value!r:.80}, and should be {known[key].expected}.')
    return {key: given.get(key, setting.default) for key, setting in known.items()}


# Arguments


def _choose(given: str, known: Iterable[str]) -> str:
    choices = {choice.lower(): choice for choice in known}
    near = get_close_matches(given.lower(), choices, 1, 0.6)
    meant = f"Did you mean {choices[near[0]]!r}? " if near else ""
    return f"{meant}Choose from {', '.join(map(repr, choices.values()))}."


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"The model has to be a torch.nn.Module, not {model!r:.80}.{hint}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if not _is_whole(value) or value < least:
        raise TorchprofError(f"{name}={value!r} should be a whole number from {least} on.")


def _checked_types(types: Any) -> frozenset[type]:
    if types is None:
        return frozenset()
    listed = list(types) if isinstance(types, Iterable) and not isinstance(types, (str, nn.Module)) else [types]
    for one in listed:
        if not isinstance(one, type) or not issubclass(one, nn.Module):
            raise TorchprofError(f"Modules to ignore are given by type, [torch.nn.Dropout], not as {one!r:.80}.")
    return frozenset(listed)

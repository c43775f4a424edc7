"""The page that flops-profiler prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchprof import Run
from torchprof.integrations.convention import Counted
from torchprof.integrations.flops_profiler.counting import LayerPath, functionals
from torchprof.integrations.flops_profiler.strings import (
    UNKNOWN,
    duration_text,
    macs_text,
    number_text,
    params_text,
    rate_text,
    share_text,
    sum_text,
)

_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)


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


class Measured:
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
            path for path, module in self._modules.items() if type(module) in ignored or is_one_of(module, ignored)
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
        direct, self.unknown = functionals(run)
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
            f"{'≥ ' if own.uncounted and own.flops else ''}{number_text(own.flops or (None if own.uncounted else 0))}"
        )
        outside = run.no_layer("forward")
        self.outside = f"{macs_text(outside.macs)}, {number_text(outside.flops)} flops" if outside.flops else ""

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
            ("params", self._params_at, params_text),
            ("flops", lambda paths: sum_text(self.of[path].known[0] for path in paths), number_text),
            ("MACs", lambda paths: sum_text(self.of[path].known[1] for path in paths), macs_text),
            ("fwd latency", lambda paths: sum_text(self.of[path].known[2] for path in paths), duration_text),
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
        return sum_text({id(self._modules.get(path, path)): self.of[path].params for path in paths}.values())

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
            "param": params_text(figures.params),
            "flops": bounded(figures, number_text(flops)),
            "macs": bounded(figures, macs_text(macs)),
            "duration": duration_text(ns),
            "FLOPS": bounded(figures, rate_text(flops, ns)),
            "params%": share_text(figures.params, whole.params),
            "flops%": share_text(flops, whole.flops),
            "macs%": share_text(macs, whole.macs),
            "duration%": share_text(ns, whole.ns),
        }
        functionals = {
            name: {
                "flops": number_text(counted.flops),
                "macs": macs_text(counted.macs),
                "duration": duration_text(self.ns(counted)),
                "FLOPS": rate_text(counted.flops, self.ns(counted)),
                "flops%": share_text(counted.flops, whole.flops),
                "macs%": share_text(counted.macs, whole.macs),
                "duration%/allfuncs": share_text(self.ns(counted), self.functionals_ns),
                "duration%/e2e": share_text(self.ns(counted), whole.ns),
            }
            for name, counted in figures.functionals.items()
        }
        lasted = duration_text(sum(map(self.ns, figures.functionals.values())) if figures.seen else None)
        return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"


def bounded(figures: _Figures, text: str) -> str:
    """A sum, with ``≥`` where something is missing from it."""
    return text if text == UNKNOWN else figures.bound + text


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


def is_one_of(module: nn.Module, modules: Iterable[Any]) -> bool:
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


def summary_of(measured: Measured, step: int, engine: Any, recompute: float) -> Iterator[str]:
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
    yield line("params per device", params_text(whole.params))
    all_params = None if whole.params is None else whole.params * parts
    yield line("params of model = params per device * mp_size", params_text(all_params))
    known_flops, known_macs, _ = whole.known
    yield line("fwd MACs per device", bounded(whole, macs_text(known_macs)))
    yield line("fwd flops per device", bounded(whole, number_text(known_flops)))
    all_flops = None if known_flops is None else known_flops * parts
    yield line("fwd flops of model = fwd flops per device * mp_size", bounded(whole, number_text(all_flops)))

    kept = _engine_ns(engine)
    fwd_ns, bwd_ns, step_ns = kept or (whole.ns, measured.backward_ns, measured.step_ns)
    if fwd_ns:
        yield line("fwd latency", duration_text(fwd_ns))
        yield line(
            "fwd FLOPS per device = fwd flops per device / fwd latency", bounded(whole, rate_text(known_flops, fwd_ns))
        )
    if fwd_ns and bwd_ns:
        if measured.backward_ns:
            flops: float = measured.backward_flops
            bwd, both = "bwd flops per device", "fwd+bwd flops per device"
            yield line(bwd, number_text(measured.backward_flops))
        else:
            factor = 2 + recompute
            flops = factor * whole.flops
            bwd, both = f"{factor:g} * fwd flops per device", f"{factor + 1:g} * fwd flops per device"
        yield line("bwd latency", duration_text(bwd_ns))
        yield line(f"bwd FLOPS per device = {bwd} / bwd latency", rate_text(flops, bwd_ns))
        flops += whole.flops
        yield line(f"fwd+bwd FLOPS per device = {both} / (fwd+bwd latency)", rate_text(flops, fwd_ns + bwd_ns))
        if step_ns:
            iter_ns = fwd_ns + bwd_ns + step_ns
            yield line("step latency", duration_text(step_ns))
            yield line("iter latency", duration_text(iter_ns))
            yield line(f"FLOPS per device = {both} / iter latency", rate_text(flops, iter_ns))
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
    yield from map(str, measured.run.warnings)

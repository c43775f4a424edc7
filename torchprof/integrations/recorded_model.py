"""What the drop-ins for other tools share: a recording of a model, its figures by module, and the tree of its modules.

``ModelRecording`` records. ``ModelFigures`` sums what was recorded, by the convention of a tool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof import Profile, Run, TorchprofError
from torchprof.errors import encodable
from torchprof.integrations import conventions
from torchprof.integrations.conventions import Convention, Counted, Counts, LayerPath


class ModelRecording:
    """Records a model between ``start_profile`` and ``stop_profile``.

    Figures can be read and printed from the start to ``end_profile``; reading them stops a recording that is going on.
    A process has one recording at a time: if the code after ``start_profile`` may raise, put ``end_profile`` into a
    ``finally``. A copy of the recording, as of its model, has no figures.
    """

    convention: Convention
    started = False
    _ignored: tuple[Any, ...] = ()
    _profile: Profile | None = None
    _figures: ModelFigures | None = None

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling. Earlier figures and a recording that is going on are dropped. ``ignore_list``: classes of
        modules, or modules of the model. Their work is not counted; their time is. Raises TorchprofError for anything
        else, and if another profiler is active."""
        ignored = self._checked(ignore_list)
        self._drop()
        profile = Profile(self.model, with_flops=True)
        profile.__enter__()
        self._profile, self._ignored, self.started = profile, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling. Does nothing if it has not been started."""
        if (profile := self._profile) is not None:
            self._drop()
            self._figures = ModelFigures(profile.run, self.model, self.convention, self._ignored)

    def reset_profile(self) -> None:
        """Drop the figures. If a recording is going on, start again."""
        if self._profile is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Stop profiling, and drop the figures."""
        self._drop()
        self.started = False

    def figures(self) -> ModelFigures:
        """The figures of the recording, which ends if it is still going on. Raises TorchprofError if there are none."""
        self.stop_profile()
        if self._figures is not None:
            return self._figures
        raise TorchprofError(
            "There are no figures: call start_profile(), then the model. They stay until end_profile()."
        )

    def record_call(
        self,
        call: Callable[..., Any],
        inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]],
        warm_up: int,
        ignore_modules: Iterable[Any] | None,
    ) -> None:
        """Record one call of the model in eval mode, after ``warm_up`` calls that are not recorded. Then every module
        is in the mode (train or eval) that it had before. ``inputs``: makes the arguments of a call."""
        # A frozen ScriptModule has no attribute ``training``.
        modes = [(module, module.training) for module in modules_of(self.model) if hasattr(module, "training")]
        try:
            for module, _ in modes:
                module.training = False  # a model may override model.eval() to do more
            for number in range(warm_up + 1):
                args, kwargs = inputs()
                if number == warm_up:
                    self.start_profile(ignore_modules)
                call(*args, **kwargs)
            self.stop_profile()
        except BaseException:
            self.end_profile()
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def _checked(self, ignore: Any) -> tuple[Any, ...]:
        """The modules, and classes of modules, to ignore. Raises TorchprofError for anything else."""
        if ignore is None:
            return ()
        is_list = isinstance(ignore, Iterable) and not isinstance(ignore, (str, nn.Module))
        ignored = tuple(ignore) if is_list else (ignore,)
        for item in ignored:
            is_class = isinstance(item, type) and issubclass(item, nn.Module)
            if not is_class and not any(item is module for module in modules_of(self.model)):
                choice = "give classes of modules, [torch.nn.Dropout], or modules of the model."
                raise TorchprofError(f"{item!r:.80} cannot be ignored: {choice}")
        return ignored

    def _drop(self) -> None:
        """End the recording that is going on, and drop the figures."""
        profile, self._profile, self._figures = self._profile, None, None
        if profile is not None:
            profile.__exit__(None, None, None)


def ones(model: nn.Module, name: str, sizes: Any, batch: Sequence[int] = ()) -> torch.Tensor:
    """A tensor of ones with the dtype and the device of the model's first parameter of a floating or complex type.
    ``batch`` are sizes before those of the user. Raises TorchprofError, with the argument's ``name``, for bad sizes."""
    listed = list(sizes) if isinstance(sizes, (tuple, list)) else []
    if not listed or not all(is_whole(size, 0) for size in listed):
        raise TorchprofError(f"{name} is a tuple of sizes, whole numbers from 0 on, (3, 224, 224), not {sizes!r:.80}.")
    floating = (param for param in parameters_of(model) if param.is_floating_point() or param.is_complex())
    like = next(floating, None)
    dtype, device = (None, None) if like is None else (like.dtype, like.device)
    return torch.ones((*batch, *listed), dtype=dtype, device=device)


def show(text: str) -> None:
    print(encodable(text, sys.stdout))


def is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: Any, least: int) -> None:
    if not is_whole(value, least):
        raise TorchprofError(f"{name}={value!r} should be a whole number from {least} on.")


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"The model has to be a torch.nn.Module, not {model!r:.80}.{hint}")


@dataclass
class LayerFigures:
    """Sums of one layer, or of several: calls of their forwards, nanoseconds, calls of operators that could not be
    counted, and the operators by the tool's name. What no forward was called for is unknown, so None, and not 0."""

    calls: int = 0
    ns: int = 0
    uncounted: int = 0
    functionals: dict[str, Counted] = field(default_factory=dict)

    def add(self, other: LayerFigures) -> None:
        self.calls += other.calls
        self.ns += other.ns
        self.uncounted += other.uncounted
        for name, counted in other.functionals.items():
            self.functionals.setdefault(name, Counted()).add(counted)

    @property
    def work(self) -> int | None:
        """The work by the convention; None if nothing could be counted."""
        return self._if_known(sum(counted.work for counted in self.functionals.values()))

    @property
    def macs(self) -> int | None:
        """The multiply-accumulates by torchprof's count; None if nothing could be counted."""
        return self._if_known(sum(counted.macs for counted in self.functionals.values()))

    @property
    def seconds(self) -> float | None:
        return self.ns / 1e9 if self.calls or self.ns else None

    @property
    def functional_seconds(self) -> float | None:
        return sum(counted.ns for counted in self.functionals.values()) / 1e9 if self.calls or self.ns else None

    def _if_known(self, number: int) -> int | None:
        return number if number or (self.calls and not self.uncounted) else None

    def bounded(self, text: str) -> str:
        """``≥`` before a text if some calls are not counted in the figure; an unknown figure stays ``–``."""
        return conventions.at_least(text, self.uncounted > 0)


class ModelFigures:
    """The figures of a run, by module. ``whole``: of the model; ``params``: how many it has, None if it is unknown.

    ``run``, ``model``: what was recorded. ``device``: the device whose times these are, None for the CPU.
    ``without_shapes``: how many calls of an operator, by name, are not counted because their inputs have no shape.
    Work of ``ignored`` modules (modules or classes of modules) does not count; their time does.
    """

    def __init__(self, run: Run, model: nn.Module, convention: Convention, ignored: Iterable[Any] = ()) -> None:
        self.run, self.model = run, model
        self._time = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
        self.device = run.meta.device if self._time == "device_ns" else None
        self.params = parameter_count(model)
        self._layer_of = _layers_of(run, model)
        self._ignored_layers = {
            self._layer_of[position.path]
            for position in positions(model)
            if position.path in self._layer_of
            and any(item in (position.module, type(position.module)) for item in ignored)
        }
        counts = conventions.count(run, convention, self._time)
        self.without_shapes = counts.without_shapes
        self._totals = self._sum_up(counts, convention)
        self.whole = self._totals[run.roots[0].path]

    def _sum_up(self, counts: Counts, convention: Convention) -> dict[LayerPath, LayerFigures]:
        """The figures of each layer, with those of all layers below it."""
        totals: dict[LayerPath, LayerFigures] = {}
        for node in self.run.tree("forward").walk():
            path = node.layer.path
            ns = getattr(node.self, self._time)
            if convention.ignores_children and path[:-1] in self._ignored_layers:
                self._ignored_layers.add(path)
            if path in self._ignored_layers:
                totals[path] = LayerFigures(ns=ns)
            else:
                totals[path] = LayerFigures(node.calls, ns, counts.uncounted[path], counts.by_layer.get(path, {}))
        for path in sorted(totals, key=len, reverse=True):  # children before their parents
            if len(path) > 1:
                totals[path[:-1]].add(totals[path])
        return totals

    def at(self, position: Position) -> LayerFigures:
        """The figures of the module at a position, with those of all modules below it."""
        return self._totals.get(self._layer_of.get(position.path, ()), LayerFigures())

    def by_class(self, depth: int) -> list[tuple[str, LayerFigures, int | None]]:
        """For each class of modules at one depth, in the order in which the model has them: the class's name, the sums
        of their figures, and the number of their parameters, each counted once."""
        figures: dict[str, LayerFigures] = {}
        sizes: dict[str, dict[int, int | None]] = {}
        for position in positions(self.model):
            if position.module is not None and len(position.path) == depth + 1:
                name = _class_name(position.module)
                figures.setdefault(name, LayerFigures()).add(self.at(position))
                sizes.setdefault(name, {}).update(parameter_sizes(position.module))
        return [(name, sums, known_sum(sizes[name].values())) for name, sums in figures.items()]

    @property
    def deepest(self) -> int:
        """The depth of the innermost modules."""
        return max(len(position.path) for position in positions(self.model) if position.module is not None) - 1

    def backward(self) -> Counted:
        """The time of backward, recomputation included, and its FLOPs by torchprof's count, without ignored modules."""
        nodes = [node for phase in ("backward", "recompute") for node in self.run.tree(phase).walk()]
        flops = sum(node.self.flops for node in nodes if node.layer.path not in self._ignored_layers)
        return Counted(work=flops, ns=sum(getattr(node.self, self._time) for node in nodes))

    def optimizer_ns(self) -> int:
        """The time inside ``torch.optim.Optimizer.step``, which torch records as a range."""
        rows = [row for row in self.run.rows if row.frames and row.frames[0].name.startswith("Optimizer.step")]
        return sum(getattr(row.cost, self._time) for row in rows)

    def sentences(self) -> Iterator[str]:
        """What the figures do not include, and the run's warnings."""
        outside = self.run.no_layer("forward")
        if outside.flops:
            yield (
                "Outside of the model's forward (code around it, a loss), not among these figures: "
                f"{conventions.macs_text(outside.macs)}, {conventions.number_to_string(outside.flops)} flops."
            )
        for name, calls in self.without_shapes.items():
            yield f"Not counted: {name} ({calls} call{'s' if calls > 1 else ''} on tensors whose shapes are not known)."
        yield from map(str, self.run.warnings)


def _layers_of(run: Run, model: nn.Module) -> dict[LayerPath, LayerPath]:
    """For each module, by its path in the model, the path of its layer.

    A wrapper (DistributedDataParallel, a compiled module) has the layer of the module inside it. A module that was not
    there at the start of the recording has no layer. For ``DistributedDataParallel(Net)``::

        module                                            layer
        ("DistributedDataParallel",)                      ("Net",)
        ("DistributedDataParallel", "module")             ("Net",)
        ("DistributedDataParallel", "module", "head")     ("Net", "head")
    """
    kinds = {layer.path: layer.kind for layer in run.layers}
    layer_of: dict[LayerPath, LayerPath] = {}
    classes: dict[LayerPath, str] = {}  # by the path in the model
    for position in positions(model):
        parent, module = position.path[:-1], position.module
        if module is None or (parent and parent not in layer_of):
            continue
        classes[position.path] = _class_name(module)
        path = above = layer_of[parent] if parent else run.roots[0].path
        if parent:
            own = (*above, position.path[-1])
            may_be_wrapped = classes[parent] != kinds[above]
            is_wrapped = may_be_wrapped and (classes[position.path] == kinds[above] or own not in kinds)
            path = above if is_wrapped else own
        if path in kinds:
            layer_of[position.path] = path
    return layer_of


def _class_name(module: nn.Module) -> str:
    """The name of a module's class; for a ScriptModule, of the class from which it was made."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


# The modules and parameters of a model, and its repr with figures, without recursion: deep models work as well


class Position(NamedTuple):
    """One place in the tree of modules. ``path``: the root's class name, then attribute names. ``module`` is None if
    the child is None, as after ``self.downsample = None`` for a registered module."""

    module: nn.Module | None
    path: tuple[str, ...]


def positions(model: nn.Module) -> Iterator[Position]:
    """All positions, depth first. A module that contains one of its own ancestors does not cause an endless loop."""
    waiting = [(Position(model, (type(model).__name__,)), frozenset([id(model)]))]
    while waiting:
        position, above = waiting.pop()
        yield position
        if position.module is not None:
            waiting.extend(
                (Position(child, (*position.path, name)), above | {id(child)})
                for name, child in reversed(position.module._modules.items())
                if id(child) not in above or child is None
            )


def repr_lines(model: nn.Module, figures_at: Callable[[Position], str]) -> Iterator[str]:
    """The lines of the model's repr, with the figures of each module before its ``extra_repr``::

    Net(
      3 k, 99% Params
      (head): Linear(2 k, 66% Params, in_features=8, out_features=4, bias=True)
    )
    """
    opened = 0  # how many modules are not written to their end yet
    for position in positions(model):
        module, depth = position.module, len(position.path) - 1
        while opened > depth:
            opened -= 1
            yield "  " * opened + ")"
        pad = "  " * depth
        head = f"{pad}({position.path[-1]}): " if depth else ""
        if module is None:
            yield f"{head}None"
            continue
        text = f"{figures_at(position)}, {module.extra_repr()}"
        head += f"{module._get_name()}("
        if "\n" not in text and not module._modules:
            yield f"{head}{text})"
            continue
        yield head
        yield from (f"{pad}  {line}".rstrip() for line in text.rstrip().split("\n"))
        opened += 1
    yield from ("  " * depth + ")" for depth in reversed(range(opened)))


FiguresByModule = Mapping[str, tuple[float | None, str]]
"""A figure by the class of the module, and its text."""


def largest(column: FiguresByModule, number: int) -> dict[str, str]:
    """The texts of the ``number`` largest figures, largest first, unknown ones last. Equal ones keep their order."""
    sizes = {name: -1 if value is None else value for name, (value, _) in column.items()}
    return {name: column[name][1] for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:number]}


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. ``Module.modules()`` fails on models deeper than Python's recursion limit."""
    modules = (position.module for position in positions(model))
    return list({id(module): module for module in modules if module is not None}.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of a model, perhaps several times."""
    return [param for module in modules_of(model) for param in module._parameters.values() if param is not None]


def parameter_sizes(model: nn.Module) -> dict[int, int | None]:
    """The number of elements of each parameter, by the parameter's ``id``; None if it is unknown. It is unknown for
    lazy parameters, and for the packed parameters of a quantized module (by the ``id`` of that module)."""
    packed = {id(module): None for module in modules_of(model) if hasattr(module, "_packed_params")}
    return packed | {id(param): None if is_lazy(param) else param.numel() for param in parameters_of(model)}


def parameter_count(module: nn.Module | None) -> int | None:
    """The number of parameters of a module, each counted once; None if it is unknown."""
    return None if module is None else known_sum(parameter_sizes(module).values())


def known_sum(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is unknown."""
    listed = list(numbers)
    return None if None in listed else sum(filter(None, listed))

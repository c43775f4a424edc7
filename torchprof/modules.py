"""The modules of a model: walked, named, selected, and mapped to the layers that users see."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.attribute import NOT_SELECTED, Site
from torchprof.errors import TorchprofError, suggest
from torchprof.instrument import Target, label_of
from torchprof.run import Layer

Trace = namedtuple("Trace", ["path", "leaf", "module"])
Trace.__doc__ = (
    "A module of the model: ``path`` (tuple, root class name first), ``leaf`` (has no children), ``module``."
)

# Modules that only wrap another one and are shown as it: where they hold it.
_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def walk_modules(module: nn.Module, name: str = "", path: tuple[str, ...] = ()) -> Iterator[Trace]:
    """Every module below and including this one, depth first, as ``Trace`` tuples.

    ``name`` replaces the class name as the first step, ``path`` goes before it. A module that holds one of its own
    ancestors does not lead into a circle.
    """
    waiting = [(module, (*path, name or type(module).__name__), frozenset[int]())]
    while waiting:
        here, here_path, above = waiting.pop()
        children = list(here.named_children())
        yield Trace(here_path, not children, here)
        above = above | {id(here)}
        waiting.extend(
            (child, (*here_path, step), above) for step, child in reversed(children) if id(child) not in above
        )


def wrapped_step(module: nn.Module) -> str | None:
    """The attribute under which a module that only wraps another one holds it (``_orig_mod``), else None."""
    for cls in type(module).__mro__:
        step = _WRAPPERS.get(cls.__name__)
        if step is not None and cls.__module__.startswith("torch."):
            return step
    return None


def select(paths: Iterable[Any], known: Sequence[tuple[tuple[str, ...], ...]]) -> set[int]:
    """Which modules some paths name: the numbers of the entries of ``known`` that match.

    An entry holds the names of one module (its real path, and the path that users see). A path is a tuple of steps or
    a dotted string, with or without the root; ``*`` matches one step. Raises TorchprofError for a path that matches
    nothing, with the nearest real ones, and for what is no path.
    """

    def matching(steps: Sequence[str], skip: int) -> set[int]:
        return {
            number
            for number, names in enumerate(known)
            for name in names
            if len(name) - skip == len(steps) and all(wanted in ("*", step) for wanted, step in zip(steps, name[skip:]))
        }

    one_path = isinstance(paths, tuple) and len(paths) > 1 and all(isinstance(path, str) for path in paths)
    if one_path and matching(tuple(paths), 0):
        raise TorchprofError(f"paths={paths!r} is one path where a list of paths belongs: write paths=[{paths!r}].")
    chosen: set[int] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        steps = tuple(path.split(".")) if isinstance(path, str) else path
        if not isinstance(steps, (tuple, list)) or not steps or not all(isinstance(step, str) for step in steps):
            raise TorchprofError(
                f"{path!r} is no path of a module. Write a tuple of names, ('Net', 'features', '3'), or a dotted "
                "string, 'features.3'; '*' stands for any one step."
            )
        found = matching(steps, 0) or matching(steps, 1)
        if not found:
            dotted = [".".join(names[-1]) for names in known]
            raise TorchprofError(
                f"No module of the model matches the path {path!r}. {suggest('.'.join(steps), dotted)}"
            )
        chosen |= found
    return chosen


class Plan:
    """What is labelled and where it is shown: modules, layers, and the map between them."""

    def __init__(self, models: Sequence[nn.Module], paths: Iterable[Any] | None) -> None:
        traces: list[Trace] = []
        shown: list[tuple[str, ...]] = []  # the path that users see, for each trace
        inner_of: dict[int, int] = {}  # a module that is only wrapped → the trace of its wrapper
        taken: set[str] = set()
        for model in models:
            self._walk(model, traces, shown, inner_of, taken)
        self.traces = tuple(traces)
        self._shown = shown
        self._layer_paths = list(dict.fromkeys(shown))
        number = {path: index for index, path in enumerate(self._layer_paths)}
        self._layer_of = [number[path] for path in shown]
        named = [(trace.path, path) for trace, path in zip(traces, shown)]
        chosen = set(range(len(traces))) if paths is None else select(paths, named)
        self.with_event_lists = {
            trace.path for index, trace in enumerate(traces) if (trace.leaf if paths is None else index in chosen)
        }
        # A wrapper and what it wraps are one layer: whoever selects one of them has selected both.
        layers = {self._layer_of[index] for index in chosen}
        self.selected_paths = None if paths is None else tuple(self._layer_paths[layer] for layer in sorted(layers))
        self._label({index for index, layer in enumerate(self._layer_of) if layer in layers}, inner_of)

    def _walk(
        self,
        model: nn.Module,
        traces: list[Trace],
        shown: list[tuple[str, ...]],
        inner_of: dict[int, int],
        taken: set[str],
    ) -> None:
        core = model
        while (step := wrapped_step(core)) is not None:
            core = getattr(core, step)
        root, copies = type(core).__name__, 1
        while (root if copies == 1 else f"{root}#{copies}") in taken:
            copies += 1
        root = root if copies == 1 else f"{root}#{copies}"
        taken.add(root)
        at: dict[tuple[str, ...], int] = {}
        name = type(model).__name__ if copies == 1 else f"{type(model).__name__}#{copies}"
        for trace in walk_modules(model, name=name):
            above = at.get(trace.path[:-1])
            if above is None:
                path: tuple[str, ...] = (root,)
            elif wrapped_step(traces[above].module) == trace.path[-1]:
                path = shown[above]
                inner_of[len(traces)] = above
            else:
                path = (*shown[above], trace.path[-1])
            at[trace.path] = len(traces)
            traces.append(trace)
            shown.append(path)

    def _label(self, chosen: set[int], inner_of: dict[int, int]) -> None:
        """Labels for what was selected, and for what is not inside anything selected: that work is told apart."""
        traces = self.traces
        selected_modules = {id(traces[index].module) for index in chosen}
        below: set[tuple[str, ...]] = set()  # paths at or below a selected module
        hidden: set[int] = set()
        for index, trace in enumerate(traces):
            if trace.path[:-1] in below or index in chosen:
                below.add(trace.path)
                hidden.add(id(trace.module))
        numbers: dict[int, list[int]] = {}
        for index, trace in enumerate(traces):
            numbers.setdefault(id(trace.module), []).append(index)
        self.targets: list[Target] = []
        self.sites: dict[str, Site] = {}
        self._target_of: dict[int, Target] = {}
        self._real_paths: dict[tuple[str, int], tuple[str, ...]] = {}
        labels: dict[int, str] = {}
        for module, indices in numbers.items():
            first = indices[0]
            if module in selected_modules:
                layers = tuple(dict.fromkeys(self._layer_of[index] for index in indices if index in chosen))
            elif module not in hidden:
                layers = (NOT_SELECTED,)
            else:
                continue
            label = labels[module] = label_of(traces[first].path)
            target = Target(traces[first].module, label, training=traces[first].module.training)
            wrapper = inner_of.get(first)
            around = labels.get(id(traces[wrapper].module)) if wrapper is not None else None
            self.sites[label] = Site(layers, around)
            self.targets.append(target)
            self._target_of[module] = target
            for index in reversed(indices):
                self._real_paths[label, self._layer_of[index]] = traces[index].path
        self._chosen = chosen

    @property
    def callable_layers(self) -> set[int]:
        """The layers that were selected and whose module has a forward that somebody could call."""
        return {
            self._layer_of[index]
            for index in self._chosen
            if getattr(type(self.traces[index].module), "forward", None) is not nn.Module.forward
        }

    def real_path(self, label: str, layer: int) -> tuple[str, ...]:
        """The path of the module that carries a label, where it is shown as this layer."""
        return self._real_paths[label, layer]

    def layers(self) -> tuple[Layer, ...]:
        """The layers as they are now, depth first."""
        modules: dict[int, list[nn.Module]] = {}  # wrappers first, what they wrap last
        places: dict[int, list[int]] = {}  # module → the layers it is shown as
        for trace, layer in zip(self.traces, self._layer_of):
            modules.setdefault(layer, []).append(trace.module)
            places.setdefault(id(trace.module), []).append(layer)
        counted: set[int] = set()
        layers = []
        for index, path in enumerate(self._layer_paths):
            core = modules[index][-1]
            params = [
                param
                for module in modules[index]
                for _, param in module.named_parameters(recurse=False)
                if id(param) not in counted and not counted.add(id(param))  # type: ignore[func-returns-value]
            ]
            unknown = any(is_lazy(param) for param in params)
            target = self._target_of.get(id(core)) or self._target_of.get(id(modules[index][0]))
            layers.append(
                Layer(
                    path=path,
                    kind=getattr(core, "original_name", None) or type(core).__name__,
                    params=None if unknown else sum(param.numel() for param in params),
                    trainable_params=None if unknown else sum(p.numel() for p in params if p.requires_grad),
                    param_bytes=None if unknown else sum(param.numel() * param.element_size() for param in params),
                    input_shapes=tuple(map(tuple, target.input_shapes)) if target else (),
                    output_shapes=tuple(map(tuple, target.output_shapes)) if target else (),
                    training=target.training if target else core.training,
                    shared_with=tuple(self._layer_paths[at] for at in places[id(core)] if at != index),
                )
            )
        return tuple(layers)

    def changes(self, models: Sequence[nn.Module]) -> list[str]:
        """Sentences about the modules that were added, replaced or removed since the labels were put on."""
        before = {trace.path: trace.module for trace in self.traces}
        now = {}
        for model, root in zip(models, (trace.path[0] for trace in self.traces if len(trace.path) == 1)):
            now.update({trace.path: trace.module for trace in walk_modules(model, name=root)})
        new = [".".join(path) for path, module in now.items() if before.get(path) is not module]
        gone = [".".join(path) for path in before if path not in now]
        sentences = []
        if new:
            sentences.append(f"Added or replaced inside the block, and part of the layer above: {some(new)}.")
        if gone:
            sentences.append(f"Removed inside the block: {some(gone)}. They show what they did until then.")
        return sentences


def some(names: Sequence[str], limit: int = 3) -> str:
    """A few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")

"""The layers in a trace: from torchprof's labels, from the events of modules, or from the ranges of users. Each source
gives a ``Hierarchy``. What a trace does not record of a layer (parameters, buffers, mode) is None."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import unquote

from torchprof.attribute.event_names import is_module_label, is_torchs_step
from torchprof.attribute.events import PREFIX, Site
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer, kind_of_root
from torchprof.run.meta import RunWarning
from torchprof.run.torch_names import WRAPPERS
from torchprof.run.words import FSDP_RANGE, LOADING, MOST_NESTED, OPTIMIZER_STEP, ZERO_GRAD
from torchprof.traces.columns import MODULE_PREFIX

_WRAPPING_STEPS = {*WRAPPERS.values()} - {"module"}  # no other module has an attribute of these names
_PARALLEL = {kind for kind, step in WRAPPERS.items() if step == "module"}

_MOST_PLACES = 4096  # of one module or range: with many parents on many levels their number grows exponentially
_MOST_OTHERS = 100  # places of a name that list each other: the lists are as long as the square of this number
_NOT_IN_TRACES = ("params", "trainable_params", "param_bytes", "buffers", "buffer_bytes", "training")
"""The fields of a layer that only the model knows."""
_BOOKKEEPING = (OPTIMIZER_STEP, ZERO_GRAD, LOADING, FSDP_RANGE, "c10d:")  # ranges of torch, which belong to no model
_NUMBER = re.compile(r"\d+")
_MOST_NUMBERS = 16  # that are looked at in a name: each takes the time of the whole name
_TIME = re.compile(
    r"(step|iter|iteration|epoch|batch|sample|token|request|chunk|frame|run|trial|call|round)s?[^a-z]*$", re.IGNORECASE
)
"""A number after one of these words counts repetitions; after any other word, it counts parts of a model."""
_MANY_TIMES = 20  # a row for each of more repetitions would be too many
_MANY_PARTS = 128  # no known model has more blocks than this


class ModuleCall(NamedTuple):
    """A module that was called in a trace.

    - ``name``: as in the trace, "nn.Module: Linear_0". The number counts the modules of a class by their first calls.
    - ``parents``: the modules whose calls are directly around its calls, each once, in the order of time; "" for none.
    """

    name: str
    parents: tuple[str, ...]


class RangeCall(NamedTuple):
    """A range of ``record_function``. ``parents``: as of ``ModuleCall``. ``has_ops``: whether an operator ran in it."""

    name: str
    parents: tuple[str, ...]
    has_ops: bool = True


@dataclass(frozen=True)
class Hierarchy:
    """The layers, parents first; the layers of each event by its name; and warnings about what is uncertain."""

    layers: tuple[Layer, ...]
    sites: dict[str, Site]
    warnings: tuple[RunWarning, ...] = ()


def path_of_label(label: str) -> tuple[str, ...]:
    """The path of a module from its label: the inverse of ``record.labels.label_of``."""
    return tuple(unquote(step) for step in label.removeprefix(PREFIX).split("."))


def traced_class_name(name: str) -> str:
    """The class of a module in a trace: "Linear" for "nn.Module: Linear_0"."""
    return name.removeprefix(MODULE_PREFIX).rpartition("_")[0]


def _strip_module_prefix(name: str) -> str:
    return name.removeprefix(MODULE_PREFIX)


def layers_of_labels(labels: Iterable[str], kinds: Mapping[str, str]) -> Hierarchy:
    """The layers that torchprof's labels name, and all layers above them; siblings in the order of the labels.

    ``labels``: the names of torchprof's ranges, each once; marks are ignored. ``kinds``: the class of the labelled
    module by its label, if the trace has it; the class of a model is in its path.

    A wrapper that its path shows for certain is the same layer as the module in it, as in a live run: the layer of
    ``Net.block._orig_mod.linear`` is ``Net.block.linear``. A wrapped model has the name of its wrapper: no path has it.
    """
    path_by = {label: path_of_label(label) for label in filter(is_module_label, labels)}
    deep = [label for label, path in path_by.items() if len(path) > MOST_NESTED]
    for label in deep:
        del path_by[label]
    label_at = {path: label for label, path in path_by.items()}
    kind_at: dict[tuple[str, ...], str] = {}
    paths: dict[str, list[tuple[str, ...]]] = {}
    wrapper_of: dict[str, str | None] = {}
    for label, path in path_by.items():
        model = kind_of_root(path[0])
        shown: tuple[str, ...] = ()
        wraps = False
        for index, step in enumerate(path):
            owner = model if index == 1 else kinds.get(label_at.get(path[:index], ""), "")
            wraps = index > 0 and (step in _WRAPPING_STEPS or (step == "module" and owner in _PARALLEL))
            if not wraps:
                shown = (*shown, step)
            kind = kinds.get(label_at.get(path[: index + 1], ""), "") or ("" if index else model)
            kind_at[shown] = kind or kind_at.get(shown, "")
        paths[label] = [shown]
        wrapper_of[label] = label_at.get(path[:-1]) if wraps else None
    return _hierarchy(kind_at, paths, wrapper_of, _too_deep(deep))


def layers_of_modules(calls: Sequence[ModuleCall]) -> Hierarchy:
    """The layers from the events of modules: each below the modules that call it, with its name in the trace.

    ``calls``: in the order of first calls.

    - A module that no other module calls is a model. It is named by its class, if it is the only model of that class.
    - A module with several callers is a layer below each of them.
    - Calls of it from outside of all modules make no further layer: most are recomputation of checkpoints.
    - A wrapper is the same layer as the module in it.
    - A module with too many places is not a layer: a warning names it.
    """
    parents = {call.name: call.parents for call in calls}
    wrapper_of = dict(_wrappers(parents))
    wrapped_by = {wrapper: name for name, wrapper in wrapper_of.items()}
    core_of = {name: _last(name, wrapped_by) for name in parents}
    inner = {
        core: tuple(core_of.get(parent, parent) for parent in parents[_last(core, wrapper_of)])
        for core in dict.fromkeys(core_of.values())
    }
    places, warnings = _places(inner)
    models = Counter(traced_class_name(path[0]) for paths in places.values() for path in paths if len(path) == 1)

    def shown(path: tuple[str, ...]) -> tuple[str, ...]:
        model = traced_class_name(path[0])
        return (model if models[model] == 1 else _strip_module_prefix(path[0]), *map(_strip_module_prefix, path[1:]))

    paths = {name: [shown(path) for path in places[core]] for name, core in core_of.items() if core in places}
    kind_at = {path: traced_class_name(name) for name in places for path in paths[name]}
    return _hierarchy(kind_at, paths, wrapper_of, warnings)


def layers_of_ranges(calls: Sequence[RangeCall]) -> Hierarchy:
    """The layers from the ranges of users: each below the ranges around it. ``calls``: in the order of first calls.

    - Ranges of torch (steps, optimizers, data loaders, collectives) and ranges without an operator are not layers.
    - Names that differ only in a number are one layer, with N in place of the number, if there are more than 20 of
      them after a word that counts repetitions ("step 17"), or more than 128 after another word ("block 17").
    - A range with too many places is not a layer: a warning names it.
    """
    kept = [
        call
        for call in calls
        if call.has_ops and not call.name.startswith(_BOOKKEEPING) and not is_torchs_step(call.name)
    ]
    folded = _folded([call.name for call in kept])
    around = {call.name: call.parents for call in calls}
    parents: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for call in kept:
        parents[folded[call.name]].update(
            (folded.get(name, name), None) for name in _nearest_kept(call.parents, folded, around)
        )
    places, warnings = _places({name: tuple(names) for name, names in parents.items()})
    kind_at = {path: "" for of_name in places.values() for path in of_name}
    paths = {name: places[fold] for name, fold in folded.items() if fold in places}
    return _hierarchy(kind_at, paths, {}, warnings)


def _wrappers(parents: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """The modules in a trace that are inside a wrapper, each with the name of the wrapper."""
    called = lists_by_key((parent, name) for name, around in parents.items() for parent in around)
    for wrapper in parents:
        if traced_class_name(wrapper) in WRAPPERS and len(called[wrapper]) == 1:
            name = called[wrapper][0]
            if name != wrapper and set(parents[name]) <= {wrapper, ""}:
                yield name, wrapper


def _last(name: str, following: Mapping[str, str]) -> str:
    while name in following:
        name = following[name]
    return name


def _nearest_kept(
    parents: Iterable[str], kept: Mapping[str, str], around: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """The nearest ranges around that are layers: those around any other range replace it. "" stands for no range."""
    waiting, replaced = list(reversed(tuple(parents))), set()
    while waiting:
        name = waiting.pop()
        if name in kept or name not in around:
            yield name
        elif name not in replaced:
            replaced.add(name)
            waiting.extend(reversed(around[name]))


def _folded(names: Sequence[str]) -> dict[str, str]:
    """The layer of each range, by name, with N for each number that only counts: "step N" for "step 17"."""
    counts = Counter(_text_around(number) for name in set(names) for number in _numbers_in(name))

    def is_counter(around: tuple[str, str]) -> bool:
        return counts[around] > (_MANY_TIMES if _TIME.search(around[0]) else _MANY_PARTS)

    folded = {}
    for name in names:
        fold = name
        for number in reversed(_numbers_in(name)):  # the last first, so that the others stay where they are
            if is_counter(_text_around(number)):
                fold = f"{fold[: number.start()]}N{fold[number.end() :]}"
        folded[name] = fold
    return folded


def _numbers_in(name: str) -> list[re.Match[str]]:
    return [*islice(_NUMBER.finditer(name), _MOST_NUMBERS)]


def _text_around(number: re.Match[str]) -> tuple[str, str]:
    """The text before and after a number in a name."""
    return number.string[: number.start()], number.string[number.end() :]


def _places(parents: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, list[tuple[str, ...]]], list[RunWarning]]:
    """All places of each name. A place is the names from the outermost one down to the name itself. A place has each
    name at most once, so recursion ends. A name with too many places is left out, and so are the places inside it.
    Keeping only some places would add its events to the wrong ones. For example, with ``b`` in ``a`` and in ``c``, and
    ``c`` in ``a``, the places of ``b`` are ``a.b`` and ``a.c.b``. Places that are too deep are left out, too. Also
    warnings about what is left out."""
    known = {name: [each for each in around if each in parents and each != name] for name, around in parents.items()}
    inside = lists_by_key((parent, name) for name, around in known.items() for parent in around)
    outermost = [name for name, around in known.items() if not around]
    places: dict[str, list[tuple[str, ...]]] = {name: [] for name in parents}
    # Names that only call each other have no outermost one: start at one that is also called from outside, or the first
    left = [name for name in parents if "" in parents[name]] + list(parents)
    deep: dict[str, None] = {}
    for name in [*outermost, *left]:
        if places[name] or name in deep:
            continue
        waiting: list[tuple[str, ...]] = [(name,)]
        while waiting:
            path = waiting.pop()
            if len(places[path[-1]]) <= _MOST_PLACES:
                places[path[-1]].append(path)
                children = [child for child in reversed(inside[path[-1]]) if child not in path]
                if len(path) < MOST_NESTED:
                    waiting.extend((*path, child) for child in children)
                    continue
                while children:
                    if (child := children.pop()) not in deep:
                        deep[child] = None
                        children += inside[child]
    crowded = {name for name, paths in places.items() if len(paths) > _MOST_PLACES}
    clear = {name: [path for path in paths if crowded.isdisjoint(path)] for name, paths in places.items()}
    kept = {name: paths for name, paths in clear.items() if paths}
    warnings = _too_deep([name for name in deep if name not in kept])
    if without := tuple(_strip_module_prefix(name) for name in parents if name not in kept and name not in deep):
        warnings.append(RunWarning.of("too_many_places", most=_MOST_PLACES, modules=without))
    return kept, warnings


def _too_deep(names: Sequence[str]) -> list[RunWarning]:
    return [RunWarning.of("nested_too_deep", most=MOST_NESTED)] if names else []


def _hierarchy(
    kind_at: Mapping[tuple[str, ...], str],
    paths: Mapping[str, list[tuple[str, ...]]],
    wrapper_of: Mapping[str, str | None],
    warnings: Iterable[RunWarning],
) -> Hierarchy:
    """The hierarchy of some layers, depth first. ``kind_at``: the class of each layer by path. ``paths``: the layers of
    each event by its name. ``wrapper_of``: the name of the wrapper around each wrapped module."""
    below = lists_by_key((path[:-1], path) for path in kind_at)
    others = {
        path: tuple(other for other in of_name if other != path)
        for of_name in paths.values()
        if 1 < len(of_name) <= _MOST_OTHERS
        for path in of_name
    }
    unknown: dict[str, Any] = dict.fromkeys(_NOT_IN_TRACES)
    number: dict[tuple[str, ...], int] = {}
    layers: list[Layer] = []
    waiting = below[()][::-1]
    while waiting:
        path = waiting.pop()
        number[path] = len(layers)
        layers.append(Layer(path, kind_at[path], shared_with=others.get(path, ()), **unknown))
        waiting.extend(reversed(below[path]))
    sites = {name: Site(tuple(number[path] for path in paths), wrapper_of.get(name)) for name, paths in paths.items()}
    return Hierarchy(tuple(layers), sites, tuple(warnings))

"""Which layers a trace tells of: by our own labels, by its module events, or by the ranges that users set.

Each source gives a ``Hierarchy``. What a trace cannot know of a layer (what it holds, its mode) is None. Which of a
model's modules the module events are, if there is a model at hand, says ``trace_matching``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from torchprof.attribute.event_names import is_torchs_step
from torchprof.attribute.events import PREFIX, Site
from torchprof.run.layers import Layer
from torchprof.run.warnings import Caveat, caveat

_MODULE = "nn.Module: "

# Where modules that only wrap another one hold it: nobody else calls an attribute so.
_WRAPPING_STEPS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
# These hold it as ``module``, which others call an attribute too.
_PARALLEL = {"DataParallel", "DistributedDataParallel"}
_WRAPPERS = {"CheckpointWrapper", "FullyShardedDataParallel", "OffloadWrapper", "OptimizedModule", *_PARALLEL}

MOST_PLACES = 4096  # of one module or range: with many parents on many levels there would be no end of them
_MOST_OTHERS = 100  # places of a name that each of them lists: together that is the square of their number

# What torch and its libraries put around work themselves, and is no part of a model.
_BOOKKEEPING = re.compile(r"Optimizer\.(step|zero_grad)#|enumerate\(Data|FSDP::|c10d:")
_NUMBER = re.compile(r"\d+")
# A number after one of these words counts time, and parts of a model after any other.
_TIME = re.compile(
    r"(step|iter|iteration|epoch|batch|sample|token|request|chunk|frame|run|trial|call|round)s?[^a-z]*$", re.IGNORECASE
)
_MANY_TIMES = 20
_MANY_PARTS = 128  # no model that we know of has more blocks than that


class ModuleCall(NamedTuple):
    """A module that a trace saw called.

    ``name``: as the trace has it, "nn.Module: Linear_0"; the number counts the modules of a class by their first calls.
    ``parents``: the names of the module events directly around its calls, each once, in the order of first occurrence;
    "" for none. ``shapes``: those of all inputs of the ops that ran directly in it; empty where none were recorded.
    """

    name: str
    parents: tuple[str, ...]
    shapes: frozenset[tuple[int, ...]] = frozenset()


class RangeCall(NamedTuple):
    """A range that somebody set with ``record_function``.

    ``parents``: the names of the ranges directly around it, as for a module; "" for none. ``has_ops``: whether any op
    ran inside it, however deep.
    """

    name: str
    parents: tuple[str, ...]
    has_ops: bool = True


@dataclass(frozen=True)
class Hierarchy:
    """What a source tells: the layers, parents first; what each event's name stands for; and what is not certain."""

    layers: tuple[Layer, ...]
    sites: dict[str, Site]
    warnings: tuple[Caveat, ...] = ()


def path_of(label: str) -> tuple[str, ...]:
    """The path of a module from its label: what ``instrument.label_of`` made it of."""
    return tuple(unquote(step) for step in label.removeprefix(PREFIX).split("."))


def class_of(name: str) -> str:
    """The class of a traced module: its name without the counter, "Linear" for "nn.Module: Linear_0"."""
    return name.removeprefix(_MODULE).rpartition("_")[0]


def layers_of_labels(labels: Iterable[str], kinds: Mapping[str, str]) -> Hierarchy:
    """The layers that our own labels name, with all that stand above them; siblings in the order of the labels.

    ``labels``: the names of all ranges of ours, each once; marks among them are passed over. ``kinds``: the class names
    of the modules that carry them, as far as the trace tells; a model's own class is in its path.

    A module that only wraps another one is the same layer, as in a live run, where its step in the path says so for
    sure. A model in a wrapper is named by the wrapper: what is inside has no name in any path.
    """
    path_by = {
        label: path_of(label) for label in labels if label.startswith(PREFIX) and not label.startswith(PREFIX + "!")
    }
    label_at = {path: label for label, path in path_by.items()}
    kind_at: dict[tuple[str, ...], str] = {}
    paths: dict[str, list[tuple[str, ...]]] = {}
    wrapper_of: dict[str, str | None] = {}
    for label, path in path_by.items():
        model = path[0].partition("#")[0]  # the second one of a class is "Net#2"
        shown: tuple[str, ...] = ()
        wraps = False
        for at, step in enumerate(path):
            owner = model if at == 1 else kinds.get(label_at.get(path[:at], ""), "")
            wraps = at > 0 and (step in _WRAPPING_STEPS or (step == "module" and owner in _PARALLEL))
            if not wraps:
                shown = (*shown, step)
            kind = kinds.get(label_at.get(path[: at + 1], ""), "") or ("" if at else model)
            kind_at[shown] = kind or kind_at.get(shown, "")
        paths[label] = [shown]
        wrapper_of[label] = label_at.get(path[:-1]) if wraps else None
    return _hierarchy(kind_at, paths, wrapper_of)


def layers_of_modules(calls: Sequence[ModuleCall]) -> Hierarchy:
    """The layers that module events tell of: each under the modules that call it, with its name in the trace.

    ``calls`` in the order of first calls. A model is named by its class where there is only one of that class. A module
    that several others call is a layer under each of them; what nothing calls but itself is a model. Calls from outside
    of all modules make no layer where there are others: mostly they compute again what a checkpoint did not keep. A
    module that only wraps another one is the same layer. What would be at too many places is none: a warning names it.
    """
    parents = {call.name: call.parents for call in calls}
    wrapper_of = dict(wrappers(parents))
    wrapped_by = {wrapper: name for name, wrapper in wrapper_of.items()}
    core_of = {name: _last(name, wrapped_by) for name in parents}
    inner = {
        core: tuple(core_of.get(parent, parent) for parent in parents[_last(core, wrapper_of)])
        for core in dict.fromkeys(core_of.values())
    }
    places = _places(inner)
    models = Counter(class_of(at[0]) for found in places.values() for at in found if len(at) == 1)

    def shown(at: tuple[str, ...]) -> tuple[str, ...]:
        model = class_of(at[0])
        return (model if models[model] == 1 else short_name(at[0]), *map(short_name, at[1:]))

    paths = {name: [shown(at) for at in places[core]] for name, core in core_of.items() if core in places}
    kind_at = {path: class_of(name) for name in places for path in paths[name]}
    return _hierarchy(kind_at, paths, wrapper_of, about_crowded([name for name in inner if name not in places]))


def layers_of_ranges(calls: Sequence[RangeCall]) -> Hierarchy:
    """The layers that the ranges of users tell of: each under the ranges around it; ``calls`` in the order of first.

    No layers are the ranges that torch sets itself around steps, optimizers, loaders and collectives, and those without
    any op. Names that differ in a number only are one layer, with N in its place, where there are more than 20 of them
    and the word before it is one of time ("step 17"), or more than 128 after any other ("block 17"). What would be at
    too many places is no layer: a warning names it.
    """
    kept = [call for call in calls if call.has_ops and not _is_bookkeeping(call.name)]
    folded = _folded([call.name for call in kept])
    around = {call.name: call.parents for call in calls}
    parents: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for call in kept:
        parents[folded[call.name]].update(
            (folded.get(name, name), None) for name in _kept(call.parents, folded, around)
        )
    places = _places({name: tuple(names) for name, names in parents.items()})
    kind_at = {path: "" for found in places.values() for path in found}
    paths = {name: places[fold] for name, fold in folded.items() if fold in places}
    return _hierarchy(kind_at, paths, {}, about_crowded([name for name in parents if name not in places]))


def wrappers(parents: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """The traced modules that another one only wraps, each with the name of that."""
    called: defaultdict[str, list[str]] = defaultdict(list)
    for name, around in parents.items():
        for parent in around:
            called[parent].append(name)
    for wrapper in parents:
        if class_of(wrapper) in _WRAPPERS and len(called[wrapper]) == 1:
            name = called[wrapper][0]
            if name != wrapper and set(parents[name]) <= {wrapper, ""}:
                yield name, wrapper


def about_crowded(names: Sequence[str]) -> Iterator[Caveat]:
    """Modules or ranges that would be at more places than anybody can look at."""
    if names:
        yield caveat("too_many_places", most=MOST_PLACES, modules=tuple(map(short_name, names)))


def other_places(paths: Iterable[Sequence[tuple[str, ...]]]) -> dict[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """For each path of a name that has several, the others; where they are more than 100, none lists the others."""
    return {
        path: tuple(other for other in found if other != path)
        for found in paths
        if 1 < len(found) <= _MOST_OTHERS
        for path in found
    }


def _last(name: str, following: Mapping[str, str]) -> str:
    """Where a name leads from one to the next."""
    while name in following:
        name = following[name]
    return name


def short_name(name: str) -> str:
    return name.removeprefix(_MODULE)


def _kept(parents: Iterable[str], kept: Mapping[str, str], around: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The nearest ranges around that are layers, seen through those that are none; "" where there is none."""
    waiting, seen = list(reversed(tuple(parents))), set()
    while waiting:
        name = waiting.pop()
        if name in kept or name not in around:
            yield name
        elif name not in seen:
            seen.add(name)
            waiting.extend(reversed(around[name]))


def _is_bookkeeping(name: str) -> bool:
    return is_torchs_step(name) or _BOOKKEEPING.match(name) is not None


def _folded(names: Sequence[str]) -> dict[str, str]:
    """What the name of each range is as that of a layer: with N for every number of which there are too many."""
    alike = Counter(around for name in set(names) for around in _around_numbers(name))

    def is_counter(around: tuple[str, str]) -> bool:
        return alike[around] > (_MANY_TIMES if _TIME.search(around[0]) else _MANY_PARTS)

    folded = {}
    for name in names:
        folds = iter([is_counter(around) for around in _around_numbers(name)])
        folded[name] = _NUMBER.sub(lambda number: "N" if next(folds) else number[0], name)  # noqa: B023
    return folded


def _around_numbers(name: str) -> list[tuple[str, str]]:
    """What is before and after each number in a name."""
    return [(name[: number.start()], name[number.end() :]) for number in _NUMBER.finditer(name)]


def _places(parents: Mapping[str, tuple[str, ...]]) -> dict[str, list[tuple[str, ...]]]:
    """Where each of some names stands: the names from the outermost one inward to itself, for each place once.

    A name inside itself, at whatever depth, does not lead into a circle. One that has too many places is left out, and
    so are the places inside of it: in some of them only, its events would count where they were not.
    """
    inside: defaultdict[str, list[str]] = defaultdict(list)
    outermost = []
    for name, around in parents.items():
        known = [parent for parent in around if parent in parents and parent != name]
        for parent in known:
            inside[parent].append(name)
        if not known:
            outermost.append(name)
    places: dict[str, list[tuple[str, ...]]] = {name: [] for name in parents}
    # Those that call each other have none above all: the first of them that something else called, or the first.
    left = [name for name in parents if "" in parents[name]] + list(parents)
    for name in [*outermost, *left]:
        if places[name]:
            continue
        waiting: list[tuple[str, ...]] = [(name,)]
        while waiting:
            at = waiting.pop()
            if len(places[at[-1]]) <= MOST_PLACES:
                places[at[-1]].append(at)
                waiting.extend((*at, child) for child in reversed(inside[at[-1]]) if child not in at)
    crowded = {name for name, found in places.items() if len(found) > MOST_PLACES}
    clear = {name: [at for at in found if crowded.isdisjoint(at)] for name, found in places.items()}
    return {name: found for name, found in clear.items() if found}


def _hierarchy(
    kind_at: Mapping[tuple[str, ...], str],
    paths: Mapping[str, list[tuple[str, ...]]],
    wrapper_of: Mapping[str, str | None],
    warnings: Iterable[Caveat] = (),
) -> Hierarchy:
    """Layers by path and kind, and the paths of each event's name, as layers depth first and sites."""
    below: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for path in kind_at:
        below[path[:-1]].append(path)
    others = other_places(paths.values())
    number: dict[tuple[str, ...], int] = {}
    layers: list[Layer] = []
    waiting = below[()][::-1]
    while waiting:
        path = waiting.pop()
        number[path] = len(layers)
        layers.append(layer_of_trace(path, kind_at[path], others.get(path, ())))
        waiting.extend(reversed(below[path]))
    sites = {name: Site(tuple(number[path] for path in found), wrapper_of.get(name)) for name, found in paths.items()}
    return Hierarchy(tuple(layers), sites, tuple(warnings))


def layer_of_trace(path: tuple[str, ...], kind: str, shared_with: tuple[tuple[str, ...], ...] = ()) -> Layer:
    """A layer of which only a trace tells."""
    return Layer(
        path=path,
        kind=kind,
        params=None,
        trainable_params=None,
        param_bytes=None,
        buffers=None,
        buffer_bytes=None,
        training=None,
        shared_with=shared_with,
    )

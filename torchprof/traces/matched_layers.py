"""The layers of a model whose modules were matched with those of a trace, and the warnings about the matches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchprof.attribute.events import Site
from torchprof.errors import some
from torchprof.run.layers import Layer
from torchprof.run.warnings import RunWarning
from torchprof.traces.layers import (
    MOST_PLACES,
    Hierarchy,
    about_crowded,
    layer_of_trace,
    other_places,
    strip_module_prefix,
    traced_class_name,
    wrappers,
)
from torchprof.traces.module_trees import ModelTree, TracedModules

_UNCERTAIN = ("matched_by_order", "matched_of_more", "matched_of_fewer", "matched_far")


@dataclass
class Matches:
    """Which module of the model each module of a trace is: ``module_of``, by its name in the trace.

    ``uncertain``: the matches that are, by the code of the warning, as numbers of modules. Each inner list is one group
    of modules of one class:

    - by order: only the order of first calls distinguished them.
    - of more: the model has more modules that fit, which were not called.
    - of fewer: the trace has more modules of this class than the model.
    - far: a module that was matched although its caller does not contain it.
    """

    module_of: dict[str, int] = field(default_factory=dict)
    uncertain: dict[str, list[list[int]]] = field(default_factory=lambda: {code: [] for code in _UNCERTAIN})


def matched_layers(model: ModelTree, traced: TracedModules, matches: Matches, layers: Sequence[Layer]) -> Hierarchy:
    """The ``layers`` of the model with the events of the matched modules, and added layers for unmatched ones.

    The layers of the model keep their numbers. An unmatched module that a matched one called is a layer below it.
    """
    sites: dict[str, Site] = {}
    name_of = {module: name for name, module in matches.module_of.items()}
    for name, module in matches.module_of.items():
        wrapper = model.wrapper(module)
        sites[name] = Site(model.layers(module), None if wrapper is None else name_of.get(wrapper))
    for name, wrapper_name in wrappers(traced.callers):
        # The model was wrapped when it was traced, and the model that was given is not.
        if name in matches.module_of and wrapper_name not in matches.module_of:
            sites[wrapper_name] = Site(sites[name].layers)
            sites[name] = sites[name]._replace(wrapper=wrapper_name)
    added, added_sites, crowded = _added_layers(layers, sites, traced)
    sites.update(added_sites)
    warnings = [
        *_about_uncertain(model, matches, layers),
        *_about_unmatched(traced, sites, added_sites, crowded),
        *_about_classes(model, traced, matches),
        *about_crowded(crowded),
    ]
    return Hierarchy((*layers, *added), sites, tuple(warnings))


def _added_layers(
    layers: Sequence[Layer], sites: Mapping[str, Site], traced: TracedModules
) -> tuple[list[Layer], dict[str, Site], list[str]]:
    """Layers for unmatched modules, below the layers that called them.

    Returns the layers, the sites of these modules, and the names of modules that have too many places for a layer.
    """
    waiting: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        ((*layers[layer].path, strip_module_prefix(callee)), (callee,))
        for name, site in sites.items()
        for layer in site.layers
        for callee in traced.callees[name]
        if callee not in sites
    ]
    name_at: dict[tuple[str, ...], str] = {}
    counts: Counter[str] = Counter()
    while waiting:
        path, names = waiting.pop(0)
        name = names[-1]
        if path in name_at or counts[name] > MOST_PLACES:
            continue
        name_at[path] = name
        counts[name] += 1
        waiting += [
            ((*path, strip_module_prefix(callee)), (*names, callee))
            for callee in traced.callees[name]
            if callee not in sites and callee not in names
        ]
    crowded = [name for name, count in counts.items() if count > MOST_PLACES]
    number: dict[tuple[str, ...], int] = {}
    places: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path, name in name_at.items():  # parents first
        if name not in crowded and (path[:-1] in number or path[:-1] not in name_at):
            number[path] = len(layers) + len(number)
            places[name].append(path)
    others = other_places(places.values())
    return (
        [layer_of_trace(path, traced_class_name(name_at[path]), others.get(path, ())) for path in number],
        {name: Site(tuple(number[path] for path in paths)) for name, paths in places.items()},
        crowded,
    )


def _about_uncertain(model: ModelTree, matches: Matches, layers: Sequence[Layer]) -> Iterator[RunWarning]:
    """Warnings that name the modules whose match is uncertain."""

    def shown(group: Iterable[int]) -> str:
        modules = list(group)
        paths = [layers[model.layers(module)[0]].path for module in modules]
        return f"{_abbreviated(paths)} ({model.entries[modules[0]].kind})"

    for code, groups in matches.uncertain.items():
        if groups:
            yield RunWarning.of(code, modules=tuple(map(shown, groups)))


def _about_unmatched(
    traced: TracedModules, sites: Mapping[str, Site], added: Mapping[str, Site], crowded: Sequence[str]
) -> Iterator[RunWarning]:
    """Warnings that name the modules of the trace that were not matched: those with added layers, and the others."""
    if added:
        yield RunWarning.of("not_in_model_shown", modules=tuple(map(strip_module_prefix, added)))
    outside = [strip_module_prefix(name) for name in traced.shapes if name not in sites and name not in crowded]
    if outside:
        yield RunWarning.of("not_in_model", modules=tuple(outside))


def _about_classes(model: ModelTree, traced: TracedModules, matches: Matches) -> Iterator[RunWarning]:
    """Warnings about parameters of other sizes, and about several classes of one name."""
    known = [(model.traits[module][1], traced.shapes[name]) for name, module in matches.module_of.items()]
    fits = [params <= shapes for params, shapes in known if params and shapes]
    if fits and not any(fits):
        yield RunWarning.of("model_of_other_sizes")
    classes: defaultdict[str, set[int]] = defaultdict(set)
    for module in model.all:
        classes[model.entries[module].kind].add(model.entries[module].cls)
    ambiguous = [kind for kind in dict.fromkeys(map(traced_class_name, traced.shapes)) if len(classes[kind]) > 1]
    if ambiguous:
        yield RunWarning.of("classes_of_one_name", classes=tuple(ambiguous))


def _abbreviated(paths: Sequence[tuple[str, ...]]) -> str:
    """Several paths in short: "Net.layer.0 to .11", "Net.query, .key, .value"."""
    parent = paths[0][:-1]
    if any(path[:-1] != parent for path in paths):
        return some([".".join(path) for path in paths])
    steps = [path[-1] for path in paths]
    first = ".".join(paths[0])
    if len(steps) > 2 and steps == [
        str(int(steps[0]) + number) for number in range(len(steps)) if steps[0].isdecimal()
    ]:
        return f"{first} to .{steps[-1]}"
    return some([first, *(f".{step}" for step in steps[1:])])

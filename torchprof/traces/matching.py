"""Which of a model's modules the modules of a trace are: a trace counts those of each class, and tells no paths."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from torchprof.attribute.events import Site
from torchprof.errors import TorchprofError, some
from torchprof.run.layers import Layer
from torchprof.run.warnings import Caveat, caveat
from torchprof.traces.layers import (
    MOST_PLACES,
    Hierarchy,
    ModuleCall,
    about_crowded,
    class_of,
    layer_of_trace,
    other_places,
    short_name,
    wrappers,
)

_Shapes = frozenset[tuple[int, ...]]

_GIVE_THE_RIGHT_ONE = (
    "Give from_trace the model, and the paths, of the recording; or no model: then the layers have their names in the "
    "trace."
)
_FEW = 3
"""So many modules are not broken off by a recording that begins or ends inside a call of one and those around it."""


class ModelModule(NamedTuple):
    """A module of the model at one of its paths.

    ``path``: the real one, with the steps that only wrap. ``layer``: the number of the layer that it is shown as; what
    wraps it is the same one. ``callable``: whether it has a forward; a ModuleList has none. ``param_shapes``: those of
    the parameters that it holds itself. ``same_as``: the number of the first entry of the same module, if that is
    another one. ``calls``: the names of what it holds, in the order in which it calls them, with whether it always does
    (see ``call_order``); those that are not among them come after these, in the order of definition. ``cls``: a number
    that tells its class from others of the same name.
    """

    path: tuple[str, ...]
    kind: str
    layer: int
    callable: bool = True
    param_shapes: tuple[tuple[int, ...], ...] = ()
    same_as: int | None = None
    calls: Mapping[str, bool] = MappingProxyType({})
    cls: int = 0


def match_modules(
    calls: Sequence[ModuleCall], modules: Sequence[ModelModule], layers: Sequence[Layer], *, compiled: bool = False
) -> Hierarchy:
    """The layers of a model, with what the modules of a trace are among them.

    ``calls`` in the order of first calls; ``modules`` depth first, those of one model after those of another;
    ``layers`` of the models, which keep their numbers.

    From the outermost inward, the modules that a module was seen to call are looked for among those that it holds,
    through containers that nobody calls. Those of one class are told apart by the shapes of their parameters, which
    their ops were called on, and by what was called below them; a Sequential calls in its order. What is left is taken
    to be called in the order of the caller's source, or else of the definition; where not all were called, those that
    always are go first: a doubt names it. What a module does not hold itself is looked for further down, and in the
    whole model. A called module that is found nowhere is a layer of its own under what called it, with its name in the
    trace; outside of all that was found it is no layer.

    Raises TorchprofError where nothing is found, and where the model calls much that was never called; but where some
    of it was ``compiled``, of which torch.compile shows only the calls at graph breaks.
    """
    model = _Model(modules)
    matching = _Matching(calls, model)
    matching.match()
    if calls and not matching.found:
        roots = dict.fromkeys(class_of(call.name) for call in calls if not matching.callers[call.name])
        models = dict.fromkeys(module.path[0] for module in modules if len(module.path) == 1)
        raise TorchprofError(
            f"The trace is of another model: it calls {some(list(roots))}, and nothing in {some(list(models))} is that "
            f"for certain. {_GIVE_THE_RIGHT_ONE}"
        )
    if not compiled:
        model.refuse_another(set(matching.found.values()), matching.replaced())
    return matching.result(layers)


def refuse_another_model(
    modules: Sequence[ModelModule], labelled: Set[tuple[str, ...]], selected: Set[int] | None = None
) -> None:
    """Raise TorchprofError where the modules that a trace has labels of, by their paths, are those of another model.

    ``selected``: the layers that ``paths`` select, None for all. A recording with ``paths`` has no labels of other
    modules inside a selected one, so their calls are unknown: they are not asked for. A recording whose selection is
    not given shows it where a module has a label and none of those that it calls each time has: nothing is refused.
    """
    model = _Model(modules)
    called = {model.first[at] for at, entry in enumerate(modules) if entry.path in labelled}
    known = {entry.path for entry in modules}
    foreign = any(path not in known and path[:1] in known for path in labelled)  # no selection adds modules
    if foreign or not model.is_part(called):
        model.refuse_another(called, selected=selected)


class _Model:
    """The modules of some models, each once, by the number of its first entry."""

    def __init__(self, entries: Sequence[ModelModule]) -> None:
        self.entries = entries
        self.first = [index if entry.same_as is None else entry.same_as for index, entry in enumerate(entries)]
        number = {entry.path: index for index, entry in enumerate(entries)}
        self._above = [number.get(entry.path[:-1]) for entry in entries]
        self._below: list[list[int]] = [[] for _ in entries]
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for index, above in enumerate(self._above):
            self._places[self.first[index]].append(index)
            if above is not None:
                self._below[above].append(index)
        self.models = [index for index, above in enumerate(self._above) if above is None]
        self.all = self._called(self.models, through=True)
        self._near: dict[int, list[int]] = {}
        self._deep: dict[int, list[int]] = {}
        self._contents: dict[int, Counter[tuple[str, _Shapes]]] = {}
        self.sorts = [(entry.kind, frozenset(entry.param_shapes)) for entry in entries]
        """What can be seen of each in a trace: its class, and the shapes of what it holds."""

    def near(self, module: int) -> list[int]:
        """What a module holds that can be called, through containers that cannot, in the order it probably calls it."""
        if module not in self._near:
            place = {step: at for at, step in enumerate(self.entries[module].calls)}
            entries = sorted(self._below[module], key=lambda at: place.get(self.entries[at].path[-1], len(place)))
            self._near[module] = self._called(entries, through=False)
        return self._near[module]

    def deep(self, module: int) -> list[int]:
        """All below a module that can be called."""
        if module not in self._deep:
            self._deep[module] = self._called(self._below[module], through=True)
        return self._deep[module]

    def _called(self, entries: Iterable[int], through: bool) -> list[int]:
        found: dict[int, None] = {}
        waiting = list(reversed(list(entries)))
        while waiting:
            index = waiting.pop()
            callable_ = self.entries[index].callable
            if callable_:
                found[self.first[index]] = None
            if through or not callable_:
                waiting.extend(reversed(self._below[index]))
        return list(found)

    def layers(self, module: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.entries[index].layer for index in self._places[module]))

    def may_rest(self, module: int) -> bool:
        """Whether what holds a module, be it in a container, need not call it as far as its source tells."""
        above = self._above[module]
        while above is not None and not self.entries[above].callable:
            module, above = above, self._above[above]
        return above is None or not self.entries[above].calls.get(self.entries[module].path[-1], False)

    def wrapper(self, module: int) -> int | None:
        """The module that only wraps one: it is above, and shown as the same layer."""
        above = self._above[module]
        if above is None or self.entries[above].layer != self.entries[module].layer:
            return None
        return self.first[above]

    def is_part(self, called: Set[int]) -> bool:
        """Whether a module was called and nothing of what it calls in every call."""
        needs = (self._needs(index) for index in called)
        return any(must and called.isdisjoint(self.first[at] for at in must) for must in needs)

    def _needs(self, module: int) -> list[int]:
        """The entries directly below a module that it calls in every call."""
        entry = self.entries[module]
        below = [(at, self.entries[at]) for at in self._below[module]]
        return [at for at, one in below if one.callable and _is_always_called(entry, one)]

    def refuse_another(
        self, called: Set[int], replaced: Set[int] = frozenset(), selected: Set[int] | None = None
    ) -> None:
        """Raise TorchprofError where the modules that were called are not those of this model.

        That shows in modules that were called while some of what they call in every call was not: a block of ResNet-18
        calls two convolutions, where one of ResNet-50 has three. Some must have been called in its place: other parts
        of the module, or, in the ``replaced`` ones, modules of which the model has none. Nothing shows in a module
        that is computed without calling any, as compiled ones are. Of ``selected`` layers alone calls were recorded;
        None: of all.
        """
        never: dict[int, list[int]] = {}  # module → what it must call and never did
        missing = wanted = 0
        for index in sorted(called):
            must = [at for at in self._needs(index) if selected is None or self.entries[at].layer in selected]
            gone = [at for at in must if self.first[at] not in called]
            wanted += len(must)
            if index in replaced:
                missing += len(gone)
            if gone and (len(gone) < len(must) or index in replaced):
                never[index] = gone
        innermost = [index for index in never if not any(one in never for one in self.deep(index))]
        broken = [index for index in innermost if index not in replaced]
        if len(broken) < _FEW and 2 * missing <= wanted:
            return
        shown = broken if len(broken) >= _FEW else innermost
        caller, callee = (
            f"{'.'.join(entry.path)} ({entry.kind})"
            for entry in (self.entries[shown[0]], self.entries[never[shown[0]][0]])
        )
        others = f", and so it is with {len(shown) - 1} more" if len(shown) > 1 else ""
        raise TorchprofError(
            f"The trace is of another model: in the one that was given, {caller} calls {callee} each time, and the "
            f"trace has no such call{others}. {_GIVE_THE_RIGHT_ONE}"
        )

    def content(self, module: int) -> Counter[tuple[str, _Shapes]]:
        """The sorts of all below a module."""
        if module not in self._contents:
            self._contents[module] = Counter(self.sorts[one] for one in self.deep(module))
        return self._contents[module]


class _Matching:
    def __init__(self, calls: Sequence[ModuleCall], model: _Model) -> None:
        self.model = model
        self.shapes = {call.name: call.shapes for call in calls}
        self.callers = {
            call.name: tuple(name for name in call.parents if name != call.name and name in self.shapes)
            for call in calls
        }
        self.called: defaultdict[str, list[str]] = defaultdict(list)
        for name, callers in self.callers.items():
            for caller in callers:
                self.called[caller].append(name)
        self.found: dict[str, int] = {}
        self.by_order: list[list[int]] = []
        self.of_more: list[list[int]] = []
        self.of_fewer: list[list[int]] = []
        self.far: list[int] = []
        self._open = dict.fromkeys(self.shapes)
        self._taken: set[int] = set()
        self._telling: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)  # by class, of all parameters
        for module in model.all:
            kind, shapes = model.sorts[module]
            self._telling[kind] |= shapes
        # A class whose ops are called on other than its parameters, as they are (lists, shards), is not told by them.
        sorts: defaultdict[str, set[tuple[str, _Shapes]]] = defaultdict(set)
        for module in model.all:
            sorts[model.entries[module].kind].add(model.sorts[module])
        self._shows = {
            class_of(call.name)
            for call in calls
            for sort in sorts[class_of(call.name)]
            if call.shapes and sort[1] <= call.shapes
        }
        self._contents: dict[str, Counter[tuple[str, _Shapes | None]]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._fits: dict[tuple[int, int], bool] = {}

    # Which is which

    def match(self) -> None:
        """Find all that can be found. What is certain goes first: it leaves less to choose from for the rest."""
        while self._open:
            ready = [name for name in self._open if not any(caller in self._open for caller in self.callers[name])]
            groups = self._groups(ready or list(self._open)[:1])
            settled = [self._settle_near(owners, names) for owners, names in groups]
            if not any(settled):
                # What calls others shows best what it is.
                owners, names = min(groups, key=lambda group: not any(self.called[name] for name in group[1]))
                self._settle_far(owners, names)

    def _groups(self, names: Iterable[str]) -> list[tuple[tuple[int, ...], list[str]]]:
        """The names of each class with the same callers, and the modules these are; those of most callers first."""
        groups: defaultdict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
        for name in names:
            groups[self._owners(name), class_of(name)].append(name)
        ordered = sorted(groups.items(), key=lambda group: -len(group[0][0]))
        return [(owners, members) for (owners, _), members in ordered]

    def _owners(self, name: str) -> tuple[int, ...]:
        """The modules that called one, seen through those that were not found."""
        owners = set()
        waiting, seen = list(self.callers[name]), {name}
        while waiting:
            caller = waiting.pop()
            if caller in self.found:
                owners.add(self.found[caller])
            elif caller not in seen:
                seen.add(caller)
                waiting.extend(self.callers[caller])
        return tuple(sorted(owners))

    def _near(self, owners: tuple[int, ...]) -> list[int]:
        """What some modules all hold; the models, where there is none of these."""
        if not owners:
            return [module for module in self.model.models if self.model.entries[module].callable]
        return _common([self.model.near(owner) for owner in owners])

    def _far(self, owners: tuple[int, ...]) -> Iterator[list[int]]:
        """Where else to look for what some modules called, the nearest places first."""
        if owners:
            yield _united([self.model.near(owner) for owner in owners])
            deep = [self.model.deep(owner) for owner in owners]
            yield _common(deep)
            yield _united(deep)
        yield self.model.all

    def _settle_near(self, owners: tuple[int, ...], names: list[str]) -> bool:
        """Match the names of a group with what all their callers hold, if there is room for them."""
        kind = class_of(names[0])
        if kind not in self._telling:
            self._close(names)
            return True
        fitting = self._fitting(names, self._near(owners))
        if not _has_room(fitting) or self._waits(names, fitting):
            return False
        if len(owners) == 1 and self.model.entries[owners[0]].kind == "Sequential":
            fitting = dict(self._in_sequence(names, fitting))
        self._assign(names, fitting, in_order=True)
        self._close(names)
        return True

    @staticmethod
    def _in_sequence(names: Sequence[str], fitting: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
        """What names fit if they are all those that a Sequential holds, which calls them in the order it holds them."""
        modules = sorted(_all_of(fitting))
        sequence = dict(zip(names, modules))
        if len(modules) > len(names) or any(module not in fitting[name] for name, module in sequence.items()):
            return fitting
        return {name: [module] for name, module in sequence.items()}

    def _waits(self, names: list[str], fitting: Mapping[str, list[int]]) -> bool:
        """Whether there is more to choose from than there are names, and others may take of it first."""
        kind = class_of(names[0])
        return len(_all_of(fitting)) > len(names) and any(
            other not in names and other in self._open and class_of(other) == kind
            for caller in self.callers[names[0]]
            for other in self.called[caller]
        )

    def _settle_far(self, owners: tuple[int, ...], names: list[str]) -> None:
        """Match the names of a group with what is further away, or give them up."""
        nearest = self._near(owners)
        fitting = self._fitting(names, nearest)
        if _has_room(fitting):
            self._assign(names, fitting, in_order=True)
            self._close(names)
            return
        anywhere = _all_of(self._fitting(names, self.model.all, strictly=True))
        for pool in self._far(owners):
            fitting = self._fitting(names, pool, strictly=True)
            if _has_room(fitting):
                certain = self._assign(names, fitting, in_order=len(_all_of(fitting)) == len(names))
                alone = len(anywhere) == len(names)
                self.far += [self.found[name] for name in certain if not (alone and self._is_distinct(name))]
                break
        else:
            fitting = self._fitting(names, nearest)  # there is not room for all: what fits goes first
            if not any(fitting.values()):
                kind = class_of(names[0])
                free = [module for module in nearest if self.model.entries[module].kind == kind]
                free = [module for module in free if module not in self._taken]
                fitting = dict.fromkeys(names, free)
            self._in_order(names, fitting)
        self._close(names)

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            del self._open[name]

    def _is_distinct(self, name: str) -> bool:
        """Whether more than its class was seen of what was found."""
        return bool(self.called[name] or (self.shapes[name] and self.model.entries[self.found[name]].param_shapes))

    def _assign(self, names: Sequence[str], fitting: Mapping[str, list[int]], in_order: bool) -> list[str]:
        """Match what is certain, and the rest by order if so wanted; returns those that are certain."""
        left = {name: list(fitting[name]) for name in names}
        certain = []
        while True:
            choice = next(((name, modules[0]) for name, modules in left.items() if len(modules) == 1), None)
            if choice is None:
                takers: defaultdict[int, list[str]] = defaultdict(list)
                for name, modules in left.items():
                    for module in modules:
                        takers[module].append(name)
                if len(takers) == len(left):  # each of them was called
                    choice = next(((of[0], module) for module, of in takers.items() if len(of) == 1), None)
            if choice is None:
                break
            name, module = choice
            self._match(name, module)
            certain.append(name)
            del left[name]
            for modules in left.values():
                if module in modules:
                    modules.remove(module)
        if in_order and left:
            self._in_order(list(left), left)
        return certain

    def _in_order(self, names: Sequence[str], fitting: Mapping[str, Sequence[int]]) -> None:
        """Match names with modules by order: each with the first that is free, or that another can leave to it."""
        choice = _all_of(fitting)
        fit = sum(bool(fitting[name]) for name in names)
        if len(choice) > fit:  # those that nobody needs to call are more likely those that nobody called
            fitting = {name: sorted(modules, key=self.model.may_rest) for name, modules in fitting.items()}
        holder: dict[int, str] = {}

        def place(name: str, asked: set[int]) -> bool:
            free = [module for module in fitting[name] if module not in holder]
            if free:
                holder[free[0]] = name
                return True
            for module in fitting[name]:
                if module not in asked:
                    asked.add(module)
                    if place(holder[module], asked):
                        holder[module] = name
                        return True
            return False

        for name in names:
            place(name, set())
        for module, name in holder.items():
            self._match(name, module)
        if len(choice) > fit > 0:
            self.of_more.append(sorted(holder))
        elif len(choice) < fit and holder:
            self.of_fewer.append(sorted(holder))
        elif len(holder) > 1:
            self.by_order.append(sorted(holder))

    def _match(self, name: str, module: int) -> None:
        self.found[name] = module
        self._taken.add(module)

    # What fits what

    def _fitting(self, names: Sequence[str], pool: Iterable[int], *, strictly: bool = False) -> dict[str, list[int]]:
        """Of some modules, in their order, those that are free and that each name can be.

        ``strictly``: what was called below must be below. Else that only tells several apart: what a module calls, it
        need not hold.
        """
        free = [module for module in pool if module not in self._taken]
        sorts = self.model.sorts
        fitting = {}
        for name in names:
            seen = self._seen(name)
            fitting[name] = [module for module in free if _is_like(seen, sorts[module])]
        if not strictly and len(names) == 1 and len(fitting[names[0]]) == 1:
            return fitting
        for name, modules in fitting.items():
            holding = [module for module in modules if self._holds(module, name)]
            fitting[name] = holding if holding or strictly else modules
        return fitting

    def _seen(self, name: str) -> tuple[str, _Shapes | None]:
        """The class of a name, and the shapes among those of its ops that parameters of that class have; None where
        they tell nothing."""
        kind = class_of(name)
        if kind not in self._shows:
            return kind, None
        return kind, self.shapes[name] & self._telling[kind] if self.shapes[name] else None

    def _holds(self, module: int, name: str) -> bool:
        """Whether all that was called below a name is below a module."""
        key = self._number(module, self.model.content(module)), self._number(name, self._content(name))
        if key not in self._fits:
            self._fits[key] = _has_place(self.model.content(module), self._content(name))
        return self._fits[key]

    def _number(self, one: Hashable, content: Counter[Any]) -> int:
        """The number of a content: most blocks of a model have the same."""
        if one not in self._numbers:
            self._numbers[one] = self._numbers.setdefault(frozenset(content.items()), len(self._numbers))
        return self._numbers[one]

    def _content(self, name: str) -> Counter[tuple[str, _Shapes | None]]:
        """What was called below a name, at whatever depth, as far as anything in the model is of that class."""
        if name not in self._contents:
            below: set[str] = set()
            waiting = [name]
            while waiting:
                new = [called for called in self.called[waiting.pop()] if called not in below]
                below.update(new)
                waiting += new
            self._contents[name] = Counter(self._seen(one) for one in below if class_of(one) in self._telling)
        return self._contents[name]

    # What comes of it

    def replaced(self) -> set[int]:
        """The modules that were found and called others of which the model has none of that class."""
        return {
            module
            for name, module in self.found.items()
            if any(called not in self.found and class_of(called) not in self._telling for called in self.called[name])
        }

    def result(self, layers: Sequence[Layer]) -> Hierarchy:
        sites: dict[str, Site] = {}
        name_of = {module: name for name, module in self.found.items()}
        for name, module in self.found.items():
            wrapper = self.model.wrapper(module)
            sites[name] = Site(self.model.layers(module), None if wrapper is None else name_of.get(wrapper))
        for name, wrapping in wrappers(self.callers):
            # The model was wrapped when it was traced, and is not in the wrapper that it comes in.
            if name in self.found and wrapping not in self.found:
                sites[wrapping] = Site(sites[name].layers)
                sites[name] = sites[name]._replace(wrapper=wrapping)
        own, places, crowded = self._own_layers(layers, sites)
        sites.update(places)
        warnings = (*self._warnings(layers, sites, places, crowded), *about_crowded(crowded))
        return Hierarchy((*layers, *own), sites, warnings)

    def _own_layers(
        self, layers: Sequence[Layer], sites: Mapping[str, Site]
    ) -> tuple[list[Layer], dict[str, Site], list[str]]:
        """Layers for what was not found, under the layers that called it; and what has too many places for that."""
        waiting: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
            ((*layers[layer].path, short_name(called)), (called,))
            for name, site in sites.items()
            for layer in site.layers
            for called in self.called[name]
            if called not in sites
        ]
        own: dict[tuple[str, ...], str] = {}
        counts: Counter[str] = Counter()
        while waiting:
            path, names = waiting.pop(0)
            name = names[-1]
            if path in own or counts[name] > MOST_PLACES:
                continue
            own[path] = name
            counts[name] += 1
            waiting += [
                ((*path, short_name(called)), (*names, called))
                for called in self.called[name]
                if called not in sites and called not in names
            ]
        crowded = [name for name, count in counts.items() if count > MOST_PLACES]
        number: dict[tuple[str, ...], int] = {}
        places: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for path, name in own.items():  # parents first
            if name not in crowded and (path[:-1] in number or path[:-1] not in own):
                number[path] = len(layers) + len(number)
                places[name].append(path)
        others = other_places(places.values())
        return (
            [layer_of_trace(path, class_of(own[path]), others.get(path, ())) for path in number],
            {name: Site(tuple(number[path] for path in found)) for name, found in places.items()},
            crowded,
        )

    def _warnings(
        self, layers: Sequence[Layer], sites: Mapping[str, Site], own: Mapping[str, Site], crowded: Sequence[str]
    ) -> Iterator[Caveat]:
        def shown(group: Iterable[int]) -> str:
            modules = list(group)
            names = [layers[self.model.layers(module)[0]].path for module in modules]
            return f"{_together(names)} ({self.model.entries[modules[0]].kind})"

        for code, groups in (
            ("matched_by_order", self.by_order),
            ("matched_of_more", self.of_more),
            ("matched_of_fewer", self.of_fewer),
            ("matched_far", [[module] for module in self.far]),
        ):
            if groups:
                yield caveat(code, modules=tuple(map(shown, groups)))
        if own:
            yield caveat("not_in_model_shown", modules=tuple(map(short_name, own)))
        outside = [short_name(name) for name in self.shapes if name not in sites and name not in crowded]
        if outside:
            yield caveat("not_in_model", modules=tuple(outside))
        if self._is_of_other_sizes():
            yield caveat("model_of_other_sizes")
        mixed = self._of_one_name()
        if mixed:
            yield caveat("classes_of_one_name", classes=tuple(mixed))

    def _is_of_other_sizes(self) -> bool:
        """Whether shapes were recorded in modules that have parameters, and in none of them those of its own."""
        held = [(self.model.sorts[module][1], self.shapes[name]) for name, module in self.found.items()]
        fits = [params <= shapes for params, shapes in held if params and shapes]
        return bool(fits) and not any(fits)

    def _of_one_name(self) -> list[str]:
        """The names among those of called modules that several classes of the model have."""
        classes: defaultdict[str, set[int]] = defaultdict(set)
        for module in self.model.all:
            classes[self.model.entries[module].kind].add(self.model.entries[module].cls)
        return [kind for kind in dict.fromkeys(map(class_of, self.shapes)) if len(classes[kind]) > 1]


def _is_always_called(holder: ModelModule, module: ModelModule) -> bool:
    """Whether the forward of a module calls what it holds in every call, as far as its source tells."""
    return holder.kind == "Sequential" or holder.calls.get(module.path[-1], False)


def _is_like(seen: tuple[str, _Shapes | None], sort: tuple[str, _Shapes]) -> bool:
    """Whether what was seen of a module can be one of a sort: its ops were called on all its parameters."""
    return seen[0] == sort[0] and (seen[1] is None or sort[1] <= seen[1])


def _has_place(held: Counter[tuple[str, _Shapes]], seen: Counter[tuple[str, _Shapes | None]]) -> bool:
    """Whether there is enough of everything."""
    kinds: Counter[str] = Counter()
    for one, count in seen.items():
        kinds[one[0]] += count
        if sum(number for sort, number in held.items() if _is_like(one, sort)) < count:
            return False
    return all(
        sum(number for sort, number in held.items() if sort[0] == kind) >= count for kind, count in kinds.items()
    )


def _has_room(fitting: Mapping[str, list[int]]) -> bool:
    """Whether there is something for each name, and for all of them together."""
    return all(fitting.values()) and len(_all_of(fitting)) >= len(fitting)


def _all_of(fitting: Mapping[str, Iterable[int]]) -> set[int]:
    return set().union(*fitting.values())


def _common(pools: Sequence[list[int]]) -> list[int]:
    return [module for module in pools[0] if all(module in pool for pool in pools[1:])]


def _united(pools: Iterable[list[int]]) -> list[int]:
    return sorted({module for pool in pools for module in pool})


def _together(paths: Sequence[tuple[str, ...]]) -> str:
    """Several paths in short: "Net.layer.0 to .11", "Net.query, .key, .value"."""
    above = paths[0][:-1]
    if any(path[:-1] != above for path in paths):
        return some([".".join(path) for path in paths])
    steps = [path[-1] for path in paths]
    first = ".".join(paths[0])
    if len(steps) > 2 and steps == [str(int(steps[0]) + at) for at in range(len(steps)) if steps[0].isdecimal()]:
        return f"{first} to .{steps[-1]}"
    return some([first, *(f".{step}" for step in steps[1:])])

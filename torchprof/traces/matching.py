"""Finds out which module of a model each module of a trace is.

A trace has a class and a number for each module ("nn.Module: Linear_0"), and no path. Knows no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchprof.errors import TorchprofError, some
from torchprof.run.layers import Layer
from torchprof.traces.layers import Hierarchy, ModuleCall, traced_class_name
from torchprof.traces.matched_layers import Matches, matched_layers
from torchprof.traces.module_trees import (
    GIVE_THE_RIGHT_MODEL,
    ModelModule,
    ModelTree,
    Shapes,
    TracedModules,
    Traits,
)

_Observed = tuple[str, Shapes | None]
"""What a trace shows of a module: the name of its class, and which of the parameter shapes of that class its operators
were called on; None if these shapes do not help."""


def match_modules(
    calls: Sequence[ModuleCall], modules: Sequence[ModelModule], layers: Sequence[Layer], *, compiled: bool = False
) -> Hierarchy:
    """The layers of a model, with the modules of a trace matched to them.

    ``calls``: in the order of first calls. ``modules``: depth first, one model after the other. ``layers``: those of
    the models; they keep their numbers.

    The search goes from the outermost module inward:

    - The callees of a module are looked for among its submodules. Containers without a forward are looked through.
    - The shapes of their parameters, on which their operators were called, and what they call themselves distinguish
      modules of one class. A Sequential calls its modules in order.
    - What is still ambiguous is matched in the order of the calls in the caller's source, or else in the order of
      definition. If not all were called, those that are called in every forward are preferred. A warning names these
      matches.
    - A callee that is not a submodule of its caller is looked for further down, and then in the whole model.
    - A module that is found nowhere is a layer of its own below its caller, with its name in the trace. Without a
      matched caller it is not a layer.

    Raises TorchprofError if nothing is found, and if the model always calls much that was never called. The latter is
    not checked if some of the model was ``compiled``: torch.compile shows only the calls at graph breaks.
    """
    model, traced = ModelTree(modules), TracedModules(calls)
    matching = _Matching(traced, model)
    matching.match()
    module_of = matching.matches.module_of
    if calls and not module_of:
        roots = dict.fromkeys(traced_class_name(call.name) for call in calls if not traced.callers[call.name])
        models = dict.fromkeys(module.path[0] for module in modules if len(module.path) == 1)
        raise TorchprofError(
            f"The trace is of another model: it calls {some(list(roots))}, and nothing in {some(list(models))} "
            f"certainly matches. {GIVE_THE_RIGHT_MODEL}"
        )
    if not compiled:
        model.refuse_other_calls(set(module_of.values()), matching.replaced())
    return matched_layers(model, traced, matching.matches, layers)


class _Matching:
    """The search: which module of ``model`` each module of ``traced`` is."""

    def __init__(self, traced: TracedModules, model: ModelTree) -> None:
        self.traced = traced
        self.model = model
        self.matches = Matches()
        self._pending = dict.fromkeys(traced.shapes)
        self._taken: set[int] = set()
        self._shapes_of_class: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)  # of all its parameters
        traits_of_class: defaultdict[str, set[Traits]] = defaultdict(set)
        for module in model.all:
            kind, shapes = model.traits[module]
            self._shapes_of_class[kind] |= shapes
            traits_of_class[kind].add(model.traits[module])
        # The operators of some classes get other tensors than the parameters: lists, or shards. Shapes cannot
        # distinguish modules of these classes.
        self._with_shapes = {
            kind
            for kind, called_on in ((traced_class_name(name), shapes) for name, shapes in traced.shapes.items())
            if called_on and any(params <= called_on for _, params in traits_of_class[kind])
        }
        self._observed_below: dict[str, Counter[_Observed]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._contains: dict[tuple[int, int], bool] = {}

    def match(self) -> None:
        """Match all that can be matched. Certain matches go first, because they leave fewer choices for the rest."""
        callers = self.traced.callers
        while self._pending:
            ready = [name for name in self._pending if self._pending.keys().isdisjoint(callers[name])]
            groups = self._groups(ready or list(self._pending)[:1])
            settled = [self._match_near(owners, names) for owners, names in groups]
            if not any(settled):
                # A module that calls others is the easiest to recognize.
                owners, names = min(groups, key=lambda group: not any(self.traced.callees[name] for name in group[1]))
                self._match_far(owners, names)

    def replaced(self) -> set[int]:
        """The matched modules that called modules of classes which the model does not have."""
        module_of = self.matches.module_of
        return {
            module
            for name, module in module_of.items()
            if any(
                callee not in module_of and traced_class_name(callee) not in self._shapes_of_class
                for callee in self.traced.callees[name]
            )
        }

    # Where to look

    def _groups(self, names: Iterable[str]) -> list[tuple[tuple[int, ...], list[str]]]:
        """The names by class and callers, each group with its callers' modules; groups with most callers first."""
        groups: defaultdict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
        for name in names:
            groups[self._owners(name), traced_class_name(name)].append(name)
        ordered = sorted(groups.items(), key=lambda group: -len(group[0][0]))
        return [(owners, members) for (owners, _), members in ordered]

    def _owners(self, name: str) -> tuple[int, ...]:
        """The modules that called a traced module. An unmatched caller is replaced by its own callers."""
        owners: set[int] = set()
        waiting, seen = list(self.traced.callers[name]), {name}
        while waiting:
            caller = waiting.pop()
            if caller in self.matches.module_of:
                owners.add(self.matches.module_of[caller])
            elif caller not in seen:
                seen.add(caller)
                waiting.extend(self.traced.callers[caller])
        return tuple(sorted(owners))

    def _near(self, owners: tuple[int, ...]) -> list[int]:
        """The submodules that all owners have in common; without owners, the models themselves."""
        if not owners:
            return [module for module in self.model.models if self.model.entries[module].callable]
        return _intersection([self.model.callable_children(owner) for owner in owners])

    def _far(self, owners: tuple[int, ...]) -> Iterator[list[int]]:
        """Other modules to search for what the owners called, the nearest first."""
        if owners:
            yield _union([self.model.callable_children(owner) for owner in owners])
            descendants = [self.model.callable_descendants(owner) for owner in owners]
            yield _intersection(descendants)
            yield _union(descendants)
        yield self.model.all

    # Matching a group

    def _match_near(self, owners: tuple[int, ...], names: list[str]) -> bool:
        """Match a group with the submodules that all its callers have, if these are enough. False: not yet matched."""
        if traced_class_name(names[0]) not in self._shapes_of_class:  # the model has no module of this class
            self._finish(names)
            return True
        fitting = self._fitting(names, self._near(owners))
        if not _is_enough(fitting) or self._must_wait(names, fitting):
            return False
        if len(owners) == 1 and self.model.entries[owners[0]].kind == "Sequential":
            fitting = self._in_sequence(fitting)
        self._assign(fitting, in_order=True)
        self._finish(names)
        return True

    @staticmethod
    def _in_sequence(fitting: dict[str, list[int]]) -> dict[str, list[int]]:
        """What fits the callees of a Sequential. If all its modules were called, their order decides."""
        modules = sorted(_all_of(fitting))
        sequence = dict(zip(fitting, modules))
        if len(modules) > len(fitting) or any(module not in fitting[name] for name, module in sequence.items()):
            return fitting
        return {name: [module] for name, module in sequence.items()}

    def _must_wait(self, names: list[str], fitting: Mapping[str, list[int]]) -> bool:
        """Whether more modules fit than there are names, and another group may take some of them first."""
        kind = traced_class_name(names[0])
        return len(_all_of(fitting)) > len(names) and any(
            other not in names and other in self._pending and traced_class_name(other) == kind
            for caller in self.traced.callers[names[0]]
            for other in self.traced.callees[caller]
        )

    def _match_far(self, owners: tuple[int, ...], names: list[str]) -> None:
        """Match a group with modules that are further away, or leave it unmatched."""
        nearest = self._near(owners)
        fitting = self._fitting(names, nearest)
        if _is_enough(fitting):
            self._assign(fitting, in_order=True)
            self._finish(names)
            return
        anywhere = _all_of(self._fitting(names, self.model.all, strictly=True))
        for pool in self._far(owners):
            fitting = self._fitting(names, pool, strictly=True)
            if _is_enough(fitting):
                certain = self._assign(fitting, in_order=len(_all_of(fitting)) == len(names))
                alone = len(anywhere) == len(names)
                module_of = self.matches.module_of
                unsure = [module_of[name] for name in certain if not (alone and self._is_distinct(name))]
                self.matches.uncertain["matched_far"] += [[module] for module in unsure]
                break
        else:  # there are not enough modules for all names: the first names that fit get them
            fitting = self._fitting(names, nearest)
            if not any(fitting.values()):
                kind = traced_class_name(names[0])
                of_class = (module for module in nearest if self.model.entries[module].kind == kind)
                free = [module for module in of_class if module not in self._taken]
                fitting = dict.fromkeys(names, free)
            self._assign_in_order(fitting)
        self._finish(names)

    def _finish(self, names: Iterable[str]) -> None:
        for name in names:
            del self._pending[name]

    def _is_distinct(self, name: str) -> bool:
        """Whether the match of a name rests on more than its class: on its callees, or on shapes of parameters."""
        module = self.matches.module_of[name]
        return bool(self.traced.callees[name] or (self.traced.shapes[name] and self.model.entries[module].param_shapes))

    def _assign(self, fitting: Mapping[str, list[int]], in_order: bool) -> list[str]:
        """Match the names for which only one choice is possible, and return them.

        ``in_order``: match the other names by order.
        """
        left = {name: list(modules) for name, modules in fitting.items()}
        certain = []
        while True:
            choice = next(((name, modules[0]) for name, modules in left.items() if len(modules) == 1), None)
            if choice is None:
                names_for: defaultdict[int, list[str]] = defaultdict(list)
                for name, modules in left.items():
                    for module in modules:
                        names_for[module].append(name)
                if len(names_for) == len(left):  # each of these modules was called
                    choice = next(((fits[0], module) for module, fits in names_for.items() if len(fits) == 1), None)
            if choice is None:
                break
            name, module = choice
            self._add_match(name, module)
            certain.append(name)
            del left[name]
            for modules in left.values():
                if module in modules:
                    modules.remove(module)
        if in_order and left:
            self._assign_in_order(left)
        return certain

    def _assign_in_order(self, fitting: Mapping[str, list[int]]) -> None:
        """Match each name with the first free module that fits.

        If none is free, an earlier name gives its module up where it fits another one (bipartite matching with
        augmenting paths).
        """
        choice = _all_of(fitting)
        fit = sum(map(bool, fitting.values()))
        if len(choice) > fit:  # modules that a forward may skip are more likely those that were not called
            fitting = {name: sorted(modules, key=self.model.may_be_skipped) for name, modules in fitting.items()}
        name_of: dict[int, str] = {}

        def place(name: str, visited: set[int]) -> bool:
            for module in sorted(fitting[name], key=name_of.__contains__):  # free ones first
                if module not in visited:
                    visited.add(module)
                    if module not in name_of or place(name_of[module], visited):
                        name_of[module] = name
                        return True
            return False

        for name in fitting:
            place(name, set())
        for module, name in name_of.items():
            self._add_match(name, module)
        if len(choice) > fit > 0:
            self.matches.uncertain["matched_of_more"].append(sorted(name_of))
        elif len(choice) < fit and name_of:
            self.matches.uncertain["matched_of_fewer"].append(sorted(name_of))
        elif len(name_of) > 1:
            self.matches.uncertain["matched_by_order"].append(sorted(name_of))

    def _add_match(self, name: str, module: int) -> None:
        self.matches.module_of[name] = module
        self._taken.add(module)

    # Which modules fit

    def _fitting(self, names: Sequence[str], pool: Iterable[int], *, strictly: bool = False) -> dict[str, list[int]]:
        """For each name, the free modules of ``pool`` that fit it, in the order of ``pool``.

        ``strictly``: everything that was called below the name must be below the module. Otherwise this only chooses
        between several modules, because a module may call modules that it does not contain.
        """
        free = [module for module in pool if module not in self._taken]
        traits = self.model.traits
        fitting = {}
        for name in names:
            observed = self._observed(name)
            fitting[name] = [module for module in free if _can_be(observed, traits[module])]
        if not strictly and len(names) == 1 and len(fitting[names[0]]) == 1:
            return fitting
        for name, modules in fitting.items():
            containing = [module for module in modules if self._contains_callees(module, name)]
            fitting[name] = containing if containing or strictly else modules
        return fitting

    def _observed(self, name: str) -> _Observed:
        kind, shapes = traced_class_name(name), self.traced.shapes[name]
        return kind, shapes & self._shapes_of_class[kind] if shapes and kind in self._with_shapes else None

    def _contains_callees(self, module: int, name: str) -> bool:
        """Whether everything that was called below a name can be below a module."""
        available, needed = self.model.descendant_traits(module), self._needed(name)
        key = self._number(module, available), self._number(name, needed)
        if key not in self._contains:
            self._contains[key] = _covers(available, needed)
        return self._contains[key]

    def _number(self, key: Hashable, content: Counter[Any]) -> int:
        """A number for a content, equal for equal contents: most blocks of a model have the same."""
        if key not in self._numbers:
            self._numbers[key] = self._numbers.setdefault(frozenset(content.items()), len(self._numbers))
        return self._numbers[key]

    def _needed(self, name: str) -> Counter[_Observed]:
        """What was called below a name, at any depth; without classes that the model does not have."""
        if name not in self._observed_below:
            below = self.traced.descendants(name)
            self._observed_below[name] = Counter(
                self._observed(module) for module in below if traced_class_name(module) in self._shapes_of_class
            )
        return self._observed_below[name]


def _can_be(observed: _Observed, traits: Traits) -> bool:
    """Whether a module with these traits fits what was observed: operators were called on all its parameters."""
    return observed[0] == traits[0] and (observed[1] is None or traits[1] <= observed[1])


def _covers(available: Counter[Traits], needed: Counter[_Observed]) -> bool:
    """Whether enough modules are available for everything that is needed."""
    kinds: Counter[str] = Counter()
    for observed, count in needed.items():
        kinds[observed[0]] += count
        if sum(number for traits, number in available.items() if _can_be(observed, traits)) < count:
            return False
    return all(
        sum(number for traits, number in available.items() if traits[0] == kind) >= count
        for kind, count in kinds.items()
    )


def _is_enough(fitting: Mapping[str, list[int]]) -> bool:
    """Whether a module fits each name, and there are as many modules as names."""
    return all(fitting.values()) and len(_all_of(fitting)) >= len(fitting)


def _all_of(fitting: Mapping[str, Iterable[int]]) -> set[int]:
    return set().union(*fitting.values())


def _intersection(pools: Sequence[list[int]]) -> list[int]:
    return [module for module in pools[0] if all(module in pool for pool in pools[1:])]


def _union(pools: Iterable[list[int]]) -> list[int]:
    return sorted({module for pool in pools for module in pool})

"""The modules of a model and the modules in a trace, each with its callers and callees. Knows no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from torchprof.errors import TorchprofError
from torchprof.traces.layers import ModuleCall

Shapes = frozenset[tuple[int, ...]]

Traits = tuple[str, Shapes]
"""What a trace can show of a module of a model: the name of its class, and the shapes of its own parameters."""

GIVE_THE_RIGHT_MODEL = (
    "Give from_trace the model and the paths of the recording; or no model: then the layers have their names in the "
    "trace."
)
_FEW = 3
"""A recording that begins or ends inside a call has incomplete calls in fewer modules than this: that module and the
modules around it."""


class ModelModule(NamedTuple):
    """A module of the model at one of its paths.

    - ``path``: the real path, including the steps of wrappers.
    - ``layer``: the number of the layer that shows the module; a wrapper has the layer of the module in it.
    - ``callable``: whether the module has a forward; a ModuleList has none.
    - ``param_shapes``: the shapes of its own parameters, without those of its submodules.
    - ``same_as``: the number of the first entry of the same module, if the module has an earlier entry.
    - ``calls``: the names of its submodules in the order in which it calls them, each with whether every forward calls
      it (see ``call_order``). Submodules that are not listed come after these, in the order of definition.
    - ``cls``: a number that distinguishes its class from other classes of the same name.
    """

    path: tuple[str, ...]
    kind: str
    layer: int
    callable: bool = True
    param_shapes: tuple[tuple[int, ...], ...] = ()
    same_as: int | None = None
    calls: Mapping[str, bool] = MappingProxyType({})
    cls: int = 0


def refuse_another_model(
    modules: Sequence[ModelModule], labelled: Set[tuple[str, ...]], selected: Set[int] | None = None
) -> None:
    """Raise TorchprofError if the labels in a trace show that it was recorded with another model.

    ``labelled``: the paths of the labels. ``selected``: the layers that ``paths`` select, None for all. A recording
    with ``paths`` has no labels of unselected modules inside a selected one, so this function expects no calls of
    them. If the selection is unknown, it shows in the labels: a module has a label and none of the submodules that it
    always calls has one. Then this function refuses nothing.
    """
    model = ModelTree(modules)
    called = {model.first[index] for index, entry in enumerate(modules) if entry.path in labelled}
    known = {entry.path for entry in modules}
    foreign = any(path not in known and path[:1] in known for path in labelled)  # no selection adds modules
    if foreign or not model.is_selection(called):
        model.refuse_other_calls(called, selected=selected)


class ModelTree:
    """The modules of one or several models, each once, by the number of its first entry."""

    def __init__(self, entries: Sequence[ModelModule]) -> None:
        self.entries = entries
        self.first = [index if entry.same_as is None else entry.same_as for index, entry in enumerate(entries)]
        number = {entry.path: index for index, entry in enumerate(entries)}
        self._parent = [number.get(entry.path[:-1]) for entry in entries]
        self._children: list[list[int]] = [[] for _ in entries]
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for index, parent in enumerate(self._parent):
            self._places[self.first[index]].append(index)
            if parent is not None:
                self._children[parent].append(index)
        self.models = [index for index, parent in enumerate(self._parent) if parent is None]
        self.all = self._callable(self.models, also_inside_callable=True)
        self._callable_children: dict[int, list[int]] = {}
        self._callable_descendants: dict[int, list[int]] = {}
        self._descendant_traits: dict[int, Counter[Traits]] = {}
        self.traits: list[Traits] = [(entry.kind, frozenset(entry.param_shapes)) for entry in entries]

    def callable_children(self, module: int) -> list[int]:
        """The submodules with a forward, in the order in which the module probably calls them.

        A container without a forward (ModuleList) is replaced by its content.
        """
        if module not in self._callable_children:
            place = {step: index for index, step in enumerate(self.entries[module].calls)}
            entries = sorted(
                self._children[module], key=lambda index: place.get(self.entries[index].path[-1], len(place))
            )
            self._callable_children[module] = self._callable(entries, also_inside_callable=False)
        return self._callable_children[module]

    def callable_descendants(self, module: int) -> list[int]:
        """All modules below a module that have a forward."""
        if module not in self._callable_descendants:
            self._callable_descendants[module] = self._callable(self._children[module], also_inside_callable=True)
        return self._callable_descendants[module]

    def _callable(self, entries: Iterable[int], also_inside_callable: bool) -> list[int]:
        """The modules with a forward among some entries and in their containers, depth first."""
        descendants: dict[int, None] = {}
        waiting = list(reversed(list(entries)))
        while waiting:
            index = waiting.pop()
            callable_ = self.entries[index].callable
            if callable_:
                descendants[self.first[index]] = None
            if also_inside_callable or not callable_:
                waiting.extend(reversed(self._children[index]))
        return list(descendants)

    def descendant_traits(self, module: int) -> Counter[Traits]:
        """How many modules with the same traits are below a module, by traits."""
        if module not in self._descendant_traits:
            self._descendant_traits[module] = Counter(
                self.traits[descendant] for descendant in self.callable_descendants(module)
            )
        return self._descendant_traits[module]

    def layers(self, module: int) -> tuple[int, ...]:
        """The layers that show a module, one for each of its places."""
        return tuple(dict.fromkeys(self.entries[index].layer for index in self._places[module]))

    def may_be_skipped(self, module: int) -> bool:
        """Whether the owner of a module can run without calling it, according to the owner's source.

        The owner is the nearest module above that has a forward.
        """
        parent = self._parent[module]
        while parent is not None and not self.entries[parent].callable:
            module, parent = parent, self._parent[parent]
        return parent is None or not self.entries[parent].calls.get(self.entries[module].path[-1], False)

    def wrapper(self, module: int) -> int | None:
        """The module that only wraps this one: its parent, if the same layer shows both."""
        parent = self._parent[module]
        if parent is None or self.entries[parent].layer != self.entries[module].layer:
            return None
        return self.first[parent]

    def is_selection(self, called: Set[int]) -> bool:
        """Whether some module was called and none of the submodules that it always calls."""
        always = (self._always_called(index) for index in called)
        return any(needed and called.isdisjoint(self.first[index] for index in needed) for needed in always)

    def _always_called(self, module: int) -> list[int]:
        """The entries directly below a module that every forward of it calls, according to its source."""
        owner = self.entries[module]
        children = ((index, self.entries[index]) for index in self._children[module])
        return [
            index
            for index, child in children
            if child.callable and (owner.kind == "Sequential" or owner.calls.get(child.path[-1], False))
        ]

    def refuse_other_calls(
        self, called: Set[int], replaced: Set[int] = frozenset(), selected: Set[int] | None = None
    ) -> None:
        """Raise TorchprofError if the modules that were called show another model.

        They do if modules were called without some of the submodules that they always call: a block of ResNet-18 calls
        two convolutions, and one of ResNet-50 three. Something else must have been called instead. That is either
        another submodule, or, in the ``replaced`` modules, a module of a class that this model does not have. A module
        that called no submodule at all shows nothing: compiled modules compute without calling submodules.

        ``selected``: the only layers whose calls were recorded; None for all.
        """
        missing: dict[int, list[int]] = {}  # module → what it always calls, and was not called
        missing_in_replaced = expected = 0
        for index in sorted(called):
            always = self._always_called(index)
            needed = [entry for entry in always if selected is None or self.entries[entry].layer in selected]
            absent = [entry for entry in needed if self.first[entry] not in called]
            expected += len(needed)
            if index in replaced:
                missing_in_replaced += len(absent)
            if absent and (len(absent) < len(needed) or index in replaced):
                missing[index] = absent
        innermost = [index for index in missing if missing.keys().isdisjoint(self.callable_descendants(index))]
        incomplete = [index for index in innermost if index not in replaced]
        if len(incomplete) < _FEW and 2 * missing_in_replaced <= expected:
            return
        shown = incomplete if len(incomplete) >= _FEW else innermost
        caller, callee = (
            f"{'.'.join(entry.path)} ({entry.kind})"
            for entry in (self.entries[shown[0]], self.entries[missing[shown[0]][0]])
        )
        others = f", and the same is true of {len(shown) - 1} more" if len(shown) > 1 else ""
        raise TorchprofError(
            f"The trace is of another model: in the given model, {caller} calls {callee} each time, and the "
            f"trace has no such call{others}. {GIVE_THE_RIGHT_MODEL}"
        )


class TracedModules:
    """The modules in a trace, by their names there, in the order of their first calls.

    ``shapes``: of the inputs of the operators that ran directly in each. ``callers`` and ``callees``: the modules that
    call a module, and those that it calls.
    """

    def __init__(self, calls: Sequence[ModuleCall]) -> None:
        self.shapes = {call.name: call.shapes for call in calls}
        self.callers = {
            call.name: tuple(name for name in call.parents if name != call.name and name in self.shapes)
            for call in calls
        }
        self.callees: defaultdict[str, list[str]] = defaultdict(list)
        for name, callers in self.callers.items():
            for caller in callers:
                self.callees[caller].append(name)

    def descendants(self, name: str) -> set[str]:
        """All modules that were called below a module, at any depth."""
        below: set[str] = set()
        waiting = [name]
        while waiting:
            new = [callee for callee in self.callees[waiting.pop()] if callee not in below]
            below.update(new)
            waiting += new
        return below

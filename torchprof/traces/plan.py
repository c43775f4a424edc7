"""The layers of a trace: chosen from what it has, and from the model if it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchprof.attribute.collectives import layers_by_fqn
from torchprof.attribute.events import Site
from torchprof.errors import TorchprofError, some
from torchprof.measure.recording import Observations
from torchprof.run.layers import Layer
from torchprof.run.warnings import MODULES_OF_CALL_STACKS, caveat
from torchprof.traces.events import TraceEvents
from torchprof.traces.layers import layers_of_labels, layers_of_modules, layers_of_ranges, path_of
from torchprof.traces.matching import match_modules
from torchprof.traces.module_trees import ModelModule, refuse_another_model

if TYPE_CHECKING:
    from torchprof.record.plan import Plan


@dataclass(frozen=True)
class TracePlan:
    """The layers of a trace, with the fields of ``LayerPlan``."""

    sites: Mapping[str, Site]
    layer_paths: Sequence[tuple[str, ...]]
    callable_layers: Set[int]
    fqns: Mapping[str, Sequence[int]]
    replicated: Mapping[int, Set[int]] | None = None
    selected: Set[int] | None = None
    selected_paths: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True)
class ModelPlan:
    """The plan of the model that was given, without its modules, so that it can be sent to other processes."""

    plan: TracePlan
    names: Sequence[str]
    layers: tuple[Layer, ...]
    modules: Sequence[ModelModule]

    @classmethod
    def of(cls, plan: Plan) -> ModelPlan:
        """The plan of a model without its modules."""
        from torchprof.traces.model import model_modules  # imports torch, which a trace without a model does not need

        layers = TracePlan(
            plan.sites,
            plan.layer_paths,
            plan.callable_layers,
            plan.fqns,
            plan.replicated or None,  # the model may have been wrapped differently in the recording
            plan.selected,
            plan.selected_paths,
        )
        return cls(layers, plan.names, tuple(map(_with_unknown_mode, plan.layers())), model_modules(plan))


def plan_trace(
    path: Path, events: TraceEvents, model: ModelPlan | None, seen: Observations
) -> tuple[TracePlan, tuple[Layer, ...]]:
    """The layers of a trace, from the best source in it: labels, else events of modules, else ranges of users.

    With a model, its layers, matched with the labels or with the events of modules. Warnings are added to ``seen``.

    Raises TorchprofError if the trace is of another model, or if it has neither labels nor modules for a model.
    """
    labels = events.labels
    if model is not None and labels:
        if set(labels).isdisjoint(model.plan.sites):
            raise TorchprofError(
                f"{path} is of other modules than those of {', '.join(model.names)}: {some(_models(labels))}. Give "
                "from_trace the model and the paths of the recording; or no model: then the labels are the layers."
            )
        if not events.has_compiled:
            refuse_another_model(model.modules, {*map(path_of, labels)}, model.plan.selected)
        known = {module.path for module in model.modules}
        foreign = [path for path in map(path_of, labels) if path not in known]
        if foreign:
            seen.notes.append(caveat("labelled_in_trace_only", [".".join(path) for path in foreign]))
        return model.plan, model.layers
    if model is not None:
        modules = events.modules()
        if not modules:
            raise TorchprofError(
                f"{path} has no modules, so the model cannot be used. "
                f"{_how_to_record_modules(events)}; or give no model."
            )
        hierarchy = match_modules(modules, model.modules, model.layers, compiled=events.has_compiled)
    elif labels:
        hierarchy = layers_of_labels(labels, events.classes())
    elif modules := events.modules():
        hierarchy = layers_of_modules(modules)
    else:
        hierarchy = layers_of_ranges(events.ranges())
    seen.notes += hierarchy.warnings
    if events.device is not None and not events.has_operators:
        seen.notes.append(caveat("trace_without_operators", file=path.name))
    elif not hierarchy.layers:
        seen.notes.append(caveat("trace_without_layers", file=path.name, has_call_stacks=events.table.has_call_stacks))
    paths = [layer.path for layer in hierarchy.layers]
    called = {layer for site in hierarchy.sites.values() for layer in site.layers}
    layers = TracePlan(hierarchy.sites, paths, called, layers_by_fqn(paths))
    if model is None:
        return layers, hierarchy.layers
    plan = model.plan
    called |= plan.callable_layers  # without unselected modules
    if plan.selected is not None:
        called &= plan.selected
    return replace(layers, selected=plan.selected, selected_paths=plan.selected_paths), hierarchy.layers


def _how_to_record_modules(events: TraceEvents) -> str:
    """How to record a trace with modules, for a trace without."""
    if events.table.has_call_stacks:
        return MODULES_OF_CALL_STACKS
    return "Record it inside `torchprof.annotate(model)`, or with `torch.profiler.profile(with_stack=True)`"


def _models(labels: Iterable[str]) -> list[str]:
    """The models of some labels."""
    return list(dict.fromkeys(path_of(label)[0] for label in labels))


def _with_unknown_mode(layer: Layer) -> Layer:
    """The layer without its mode: the mode in the recording is unknown."""
    return replace(layer, training=None)

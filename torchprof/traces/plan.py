"""The layers of a trace: chosen from what it has, and from the model if it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchprof.attribute.events import Kind, Site
from torchprof.attribute.launches import layers_by_fqn
from torchprof.errors import TorchprofError, some
from torchprof.measure.recording import LayerPlan, Observations
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer, kind_of_root, stage_of_root
from torchprof.run.meta import RunWarning
from torchprof.run.torch_names import OF_LAYERS
from torchprof.run.words import OUTSIDE
from torchprof.traces.aligned_calls import UNALIGNED, AlignedCalls
from torchprof.traces.alignment import Reference, align
from torchprof.traces.events import TraceEvents
from torchprof.traces.layers import layers_of_labels, layers_of_modules, layers_of_ranges, path_of_label

if TYPE_CHECKING:
    from torchprof.record.plan import Plan

References = Sequence[Sequence[Reference]] | str


@dataclass(frozen=True)
class ModelPlan:
    """The plan of the model that was given. It holds no module, so that it can be sent to other processes. ``modules``:
    the layer of each module by its real path, which has the steps of wrappers, too. ``references``: finds, for each
    model, the orders that the operators of its forward may have; an error message if the model does not run. It is
    called only for a trace without labels, as it runs the models."""

    plan: LayerPlan
    layers: tuple[Layer, ...]
    modules: Mapping[tuple[str, ...], int]
    references: Callable[[], References]

    @classmethod
    def of(cls, plan: Plan, references: Callable[[], References]) -> ModelPlan:
        """The plan of a model, with what its modules are now."""
        layers = plan.layer_plan()
        # In the recording, the model may have been in another mode, and wrapped differently.
        layers = replace(layers, replicated=layers.replicated or None)
        described = tuple(replace(layer, training=None) for layer in plan.layers())
        modules = {path: module.layer for path, module in plan.modules.items()}
        return cls(layers, described, modules, references)

    def of_stages(self, labels: Iterable[str]) -> ModelPlan:
        """The plan with the names that the models have in a trace of a pipeline: "Net (stage 1)" for "Net". If the
        labels name as many stages of a class as models of it were given, these are the stages, in their order."""
        label_of = {path_of_label(label)[0]: label for label in (label.partition(".")[0] for label in labels)}
        stages = sorted((root for root in label_of if stage_of_root(root) is not None), key=_stage)
        models = {path[0]: layer for path, layer in self.modules.items() if len(path) == 1}
        named, shown = {}, {}  # real name of a model, and the name that users see → that in the trace
        for kind in {*map(kind_of_root, stages)}:
            of_class = [model for model in models if kind_of_root(model) == kind]
            in_trace = [root for root in stages if kind_of_root(root) == kind]
            for model, root in zip(of_class, in_trace if len(of_class) == len(in_trace) else ()):
                named[model] = root
                layer = self.layers[models[model]]  # of a wrapped model, this one has another class
                shown[layer.path[0]] = root.replace(kind, kind_of_root(layer.path[0]), 1)
        if not named:
            return self

        def renamed(names: Mapping[str, str], path: tuple[str, ...]) -> tuple[str, ...]:
            return (names.get(path[0], path[0]), *path[1:])

        def in_trace_of(label: str) -> str:
            root, *below = label.split(".")
            return ".".join([label_of.get(named.get(path_of_label(root)[0], ""), root), *below])

        sites = {
            in_trace_of(label): Site(site.layers, site.wrapper and in_trace_of(site.wrapper))
            for label, site in self.plan.sites.items()
        }
        paths = [renamed(shown, path) for path in self.plan.layer_paths]
        others = ([renamed(shown, path) for path in layer.shared_with] for layer in self.layers)
        return replace(
            self,
            plan=replace(self.plan, sites=sites, layer_paths=paths),
            layers=tuple(
                replace(layer, path=path, shared_with=tuple(shared))
                for layer, path, shared in zip(self.layers, paths, others)
            ),
            modules={renamed(named, path): layer for path, layer in self.modules.items()},
        )

    def complete(self) -> ModelPlan:
        """The same plan with its references found, so that it can be sent to other processes."""
        return replace(self, references=partial(_same, self.references()))


def plan_trace(
    path: Path, events: TraceEvents, model: ModelPlan | None, seen: Observations
) -> tuple[LayerPlan, tuple[Layer, ...]]:
    """The layers of a trace: those of the model, found by torchprof's labels, or else by the order of the operators.
    Without a model, they come from the best source in the trace: labels, else events of modules, else ranges of users.
    Warnings are added to ``seen``. Raises TorchprofError if the trace is of another model."""
    if model is None:
        return _named_in_trace(path, events, seen)
    if labels := events.labels:
        return _labelled(path, labels, model.of_stages(labels), seen)
    return _aligned(path, events, model, seen), model.layers


def _named_in_trace(path: Path, events: TraceEvents, seen: Observations) -> tuple[LayerPlan, tuple[Layer, ...]]:
    if labels := events.labels:
        hierarchy = layers_of_labels(labels, events.classes())
    elif modules := events.modules():
        hierarchy = layers_of_modules(modules)
    else:
        hierarchy = layers_of_ranges(events.ranges())
        if hierarchy.layers and (kinds := _kinds_of_layers(events)):
            seen.warnings.append(RunWarning.of("ranges_as_layers", kinds=kinds))
    seen.warnings += hierarchy.warnings
    if events.device is not None and not events.has_operators:
        seen.warnings.append(RunWarning.of("trace_without_operators", file=path.name))
    elif not hierarchy.layers:
        has_stacks, kinds = events.table.has_call_stacks, _kinds_of_layers(events)
        about = RunWarning.of("trace_without_layers", file=path.name, has_call_stacks=has_stacks, kinds=kinds)
        seen.warnings.append(about)
    paths = [layer.path for layer in hierarchy.layers]
    called = {layer for site in hierarchy.sites.values() for layer in site.layers}
    return LayerPlan(hierarchy.sites, paths, called, layers_by_fqn(paths)), hierarchy.layers


def _labelled(
    path: Path, labels: Sequence[str], model: ModelPlan, seen: Observations
) -> tuple[LayerPlan, tuple[Layer, ...]]:
    """The layers of the model that the labels name. A warning names the labels of other modules."""
    if set(labels).isdisjoint(model.plan.sites):
        given = ", ".join(path[0] for path in model.plan.layer_paths if len(path) == 1)
        roots = sorted(dict.fromkeys(path_of_label(label)[0] for label in labels), key=_stage)
        are_stages = stage_of_root(roots[-1]) is not None
        what = "a list with the model of each stage of this trace, in this order," if are_stages else "the model"
        raise TorchprofError(
            f"{path} is of other modules than those of {given}: {some(roots)}. Give from_trace {what} and the "
            "paths of the recording; or no model: then the labels are the layers."
        )
    if foreign := [module for module in map(path_of_label, labels) if module not in model.modules]:
        seen.warnings.append(RunWarning.of("labelled_in_trace_only", [".".join(module) for module in foreign]))
    return model.plan, model.layers


def _aligned(path: Path, events: TraceEvents, model: ModelPlan, seen: Observations) -> LayerPlan:
    no_layers = f"{path} names no layers{', only the classes of modules' if events.module_names else ''}."
    how_else = "With labels in the trace no alignment is needed: record it inside `torchprof.annotate(model)`."
    references = model.references()
    if isinstance(references, str):
        raise TorchprofError(f"{no_layers} {references} {how_else}")
    try:
        aligned = align(events.columns(events.module_names).events(), references, events.signatures)
    except TorchprofError as why:
        compiled = " Code that torch.compile compiled cannot be aligned, and the trace has some." * events.has_compiled
        raise TorchprofError(
            f"{no_layers} {why}{compiled} Give from_trace the model of the recording, and what it was called with: "
            f"inputs=. {how_else}"
        ) from None
    _warn_of_alignment(aligned, seen)
    sites = {**model.plan.sites, UNALIGNED: Site((OUTSIDE,))}
    # Without those inside the selected layers; outer ones first.
    labels = [label for calls in aligned for label in calls.labels if label.name in sites or label.kind is Kind.STOPPED]
    labels.sort(key=lambda label: (label.start_ns, -label.end_ns))
    called = {layer for label in labels if label.kind is Kind.LABEL for layer in sites[label.name].layers if layer >= 0}
    return replace(model.plan, sites=sites, callable_layers=called & set(model.plan.callable_layers), labels=labels)


def _warn_of_alignment(aligned: Sequence[AlignedCalls], seen: Observations) -> None:
    seen.warnings.append(RunWarning.of("layers_by_alignment", count=sum(calls.forwards for calls in aligned)))
    unknown_ns = sum((calls.unknown_ns for calls in aligned), Counter[str]())
    if unknown := unknown_ns.total():
        layers = [layer for layer, _ in unknown_ns.most_common()]
        total = sum(calls.total_ns for calls in aligned)
        seen.warnings.append(RunWarning.of("layers_in_doubt", layers, share=unknown / max(total, 1)))
    if adjacent := sum(calls.adjacent for calls in aligned):
        seen.warnings.append(RunWarning.of("adjacent_forwards", count=adjacent))


_KINDS_OF_LAYERS = {
    f"{name}{in_place}": kind for kind, names in OF_LAYERS.items() for name in names for in_place in ("", "_")
}


def _kinds_of_layers(events: TraceEvents) -> tuple[tuple[str, int], ...]:
    """How often the operators ran by which people know a model, the most frequent first."""
    counts = sums_by_key((_KINDS_OF_LAYERS[name], count) for name, count in events.count_of(_KINDS_OF_LAYERS).items())
    return tuple(counts.most_common())


def _same(references: References) -> References:
    return references


def _stage(root: str) -> int:
    """The stage of a pipeline that calls a model, by its name; -1 for none."""
    stage = stage_of_root(root)
    return -1 if stage is None else stage

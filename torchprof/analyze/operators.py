"""Operators of a whole run, or of some of its layers: the cost of each, the layers that use it, and its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import cache, reduce
from itertools import chain as chained
from typing import Any, NamedTuple, TypeVar

from torchprof.analyze.report import check_device, kept_with_run
from torchprof.errors import TorchprofError, suggest
from torchprof.run.layers import find
from torchprof.run.measures import Cost
from torchprof.run.operators import RowKey, Sums, Way, added, is_kernel, sum_operators
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.torch_names import NO_TENSORS
from torchprof.run.words import BETWEEN_OPS, NO_LAYERS, NOT_SELECTED_NAME, PHASES, Frame, FrameKind, Signature, phase_of

_OWN_TIME = (Frame(FrameKind.OP, BETWEEN_OPS),)

_Key = TypeVar("_Key", bound=Hashable)
_Scope = TypeVar("_Scope", bound=Hashable)


class Operator(NamedTuple):
    """The key of an operator, or of a user's label, summed over layers and phases.

    ``kind``: op or label; the layers' own time between ops is the op ``(between ops)``. ``shapes``: the shapes of its
    input tensors; a tuple of shapes for a list of tensors, None for a list whose shapes are unknown. ``stack``: source
    lines, innermost first. Both are ``()`` unless operators are grouped by them.
    """

    name: str
    kind: FrameKind = FrameKind.OP
    shapes: tuple[Any, ...] = ()
    stack: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """The key of device work that an operator of a layer launched.

    ``op``: the operator; without an operator the label around the launch, and ``(between ops)`` without either.
    ``layer``: the name of the layer, ``(outside)`` or ``(not selected)``.
    """

    name: str
    op: str
    layer: str
    phase: str
    device: str


def operators(
    run: Run,
    *,
    layer: Any = None,
    phase: str | None = None,
    group_by_input_shape: bool = False,
    group_by_stack_n: int = 0,
) -> dict[Operator, Sums]:
    """The sums of each operator, in the order of first use, over the layers that the path ``layer`` names and all below
    them (None: the whole run), in one phase (None: all).

    Σ self over all operators, ``(between ops)`` included, is the self of these layers. ``group_by_input_shape`` gives
    one entry per input shapes, ``group_by_stack_n`` one per innermost so many source lines.

    Raises TorchprofError for an unknown layer, and if shapes or source lines were not recorded.
    """
    if layer is None and not group_by_input_shape and not group_by_stack_n:
        return dict(_of_whole_run(run).get(phase, {}))
    layers = None if layer is None else _at_or_below(run, layer)
    flags = dict(run.meta.flags)
    for is_asked, flag, name in (
        (group_by_input_shape, "record_shapes", "input shapes"),
        (group_by_stack_n, "with_stack", "source lines"),
    ):
        if is_asked and not flags.get(flag):
            raise TorchprofError(f"This run holds no {name}: record them with Profile(model, {flag}=True).")

    def selected(of_layer: int, of_phase: str) -> tuple[()] | tuple[None]:
        return (None,) if (layers is None or of_layer in layers) and phase in (None, of_phase) else ()

    def operator(scope: None, frame: Frame) -> Operator:
        signature = frame.signature or Signature((), ())
        inputs = zip(signature.shapes, signature.dtypes) if group_by_input_shape else ()
        shapes = tuple(shape for shape, dtype in inputs if dtype not in NO_TENSORS or shape)
        return Operator(frame.name, frame.kind, shapes, signature.stack[:group_by_stack_n])

    return _summed(run.rows, selected, operator)


@kept_with_run
def _of_whole_run(run: Run) -> dict[str | None, dict[Operator, Sums]]:
    """The sums of each operator by phase and in all phases: several reports ask for these."""
    sums_of: dict[str | None, dict[Operator, Sums]] = {}
    found = _summed(run.rows, lambda _, phase: [(0, phase), (0, None)], _operator_in)
    for (_, phase, operator), sums in found.items():
        sums_of.setdefault(phase, {})[operator] = sums
    return sums_of


_Place = tuple[int, str | None, Operator]
"""A layer by its index (negative: no layer), a phase (None: all phases), and what ran there."""


def operators_below(run: Run, layers: Set[int]) -> dict[_Place, Sums]:
    """What ran in each of some layers (by index, negative: of no layer) and in all layers below it: operators, labels,
    kernels, and the source lines that were sampled between operators, by phase and in all phases.

    A kernel has its device time as its cost; its launch is a part of an operator. A source line has only calls: its
    samples. Work that was launched before the recording is left out.
    """
    rows = run.rows.of_recording
    lineages = {index: run.layers.lineage(index) for index in (*range(len(run.layers)), *NO_LAYERS)}
    nearest = {  # the innermost of these layers that each layer is in
        index: next((above for above in reversed(lineage) if above in layers), None)
        for index, lineage in lineages.items()
    }

    def own_scope(layer: int, phase: str) -> list[tuple[int, str]]:
        above = nearest[layer]
        return [] if above is None else [(above, phase)]

    def scopes_around(layer: int, phase: str) -> list[tuple[int, str | None]]:
        return [(above, of_phase) for above in lineages[layer] if above in layers for of_phase in (phase, None)]

    # Most rows are in no operator of another layer: they count for the layers above as they do for their own.
    own = _summed(rows.only(within=lambda around: not around), own_scope, _operator_in)
    for (layer, phase, operator), sums in _sums_of_inner(rows).items():
        if (above := nearest[layer]) is not None:
            place = above, phase, operator
            own[place] = added(own[place], sums) if place in own else sums
    found = {place: sums for place, sums in _rolled_up(run, own).items() if place[0] in layers}
    of_phases: defaultdict[_Place, list[Sums]] = defaultdict(list)
    for (layer, _, operator), sums in found.items():
        of_phases[layer, None, operator].append(sums)
    found |= {place: reduce(added, sums) for place, sums in of_phases.items()}
    for place, sums in _summed(rows.only(within=bool), scopes_around, _operator_in).items():
        found[place] = added(found[place], sums) if place in found else sums
    return found


def _sums_of_inner(rows: Rows) -> dict[_Place, Sums]:
    """The sums of kernels and of sampled source lines in each layer and phase."""
    sums_of: dict[_Place, Sums] = {}
    inner = {FrameKind.KERNEL, FrameKind.PYTHON}
    by = ("layer", "phase", "frames")
    values = rows.summed(by, Rows.VALUES, frames=lambda frames: bool(frames) and frames[-1].kind in inner)
    for (layer, phase, frames), (calls, *costs) in values.items():
        frame, cost = rows.frames[frames][-1], Cost(*costs)
        place, sums = (layer, PHASES[phase], Operator(frame.name, frame.kind)), Sums(calls, 0, cost, cost)
        sums_of[place] = added(sums_of[place], sums) if place in sums_of else sums
    return sums_of


def _rolled_up(run: Run, own: Mapping[_Place, Sums]) -> dict[_Place, Sums]:
    """The sums in each layer and all layers below it, from those in each layer alone."""
    by_layer: defaultdict[int, dict[tuple[str | None, Operator], Sums]] = defaultdict(dict)
    for (layer, phase, operator), sums in own.items():
        by_layer[layer][phase, operator] = sums
    for index in range(len(run.layers) - 1, -1, -1):  # children come after their parents
        if (above := run.layers.parent[index]) >= 0:
            of_above = by_layer[above]
            for key, sums in by_layer[index].items():
                of_above[key] = added(of_above[key], sums) if key in of_above else sums
    return {(layer, *key): sums for layer, of_layer in by_layer.items() for key, sums in of_layer.items()}


def _operator_in(scope: tuple[int, str | None], frame: Frame) -> _Place:
    return (*scope, Operator(frame.name, frame.kind))


def layers_of_operator(run: Run, op: str, *, phase: str | None = None) -> dict[str, Sums]:
    """The sums of one operator or label in each layer that uses it directly, by the layer's name.

    Work of no layer is ``(outside)`` or ``(not selected)``. Raises TorchprofError for an operator that is not in the
    run.
    """

    def layer(of_layer: int, of_phase: str) -> list[str]:
        return [run.layers.name_of(of_layer)] if phase in (None, of_phase) else []

    sums_of = _summed(run.rows, layer, lambda name, frame: name if frame.name == op else None)
    if not sums_of:
        known = list(dict.fromkeys(operator.name for operator in operators(run, phase=phase)))
        in_phase = f" in {phase}" if phase is not None else ""
        raise TorchprofError(f"This run has no operator {op!r}{in_phase}. {suggest(str(op), known)}")
    return sums_of


def kernels(run: Run, *, layer: Any = None, phase: str | None = None) -> dict[Kernel, Sums]:
    """The sums of device work in the layers that the path ``layer`` names and all below them (None: the whole run), in
    one phase (None: all). Self and total are equal: a kernel calls nothing.

    Raises TorchprofError for an unknown layer, and for a run that recorded no device.
    """
    is_chosen = None if layer is None else _at_or_below(run, layer).__contains__
    check_device(run, "knows no kernels")
    rows = run.rows
    by = ("layer", "phase", "frames", "device")
    values_of = rows.summed(by, Rows.VALUES, layer=is_chosen, phase=phase, frames=is_kernel)
    sums_of: dict[Kernel, Sums] = {}
    for (of_layer, of_phase, chain, device), (calls, *costs) in values_of.items():
        *_, op, kernel = _OWN_TIME + rows.frames[chain]
        phase = phase_of(of_layer, PHASES[of_phase])
        key = Kernel(kernel.name, op.name, run.layers.name_of(of_layer), phase, rows.devices[device])
        sums = sums_of.setdefault(key, Sums())
        sums.calls += calls
        sums.self = sums.total = sums.self + Cost(*costs)
    return sums_of


def _summed(
    rows: Rows, scopes_of: Callable[[int, str], Sequence[_Scope]], key_of: Callable[[_Scope, Frame], _Key | None]
) -> dict[_Key, Sums]:
    """The sums of rows by a key of the ops and labels around them.

    ``scopes_of`` gives the scopes of a layer (by index) and a phase, ``key_of`` the key of a frame in a scope. In each
    scope the self of a row goes to its innermost key, its total once to each key around it: so the total of a key is
    that of its outermost occurrences. Rows without a scope, and keys that are None, are left out.

    Example: with names as keys, a row ``label > aten::linear > aten::addmm`` adds to the self of ``aten::addmm``, and
    to the totals of all three.
    """
    numbers: dict[_Key, int] = {}
    places: dict[tuple[tuple[_Scope, ...], int], tuple[int, int]] = {}
    ways: dict[tuple[tuple[_Scope, ...], int], Way] = {}  # the cached ways of rows without surroundings: most rows

    @cache
    def scopes_at(layer: int, phase: int) -> tuple[_Scope, ...]:
        return tuple(scopes_of(layer, PHASES[phase]))

    @cache
    def numbers_of(scopes: tuple[_Scope, ...], frame: Frame) -> tuple[int, ...]:
        keys = (key_of(scope, frame) for scope in scopes)
        return tuple(numbers.setdefault(key, len(numbers)) for key in keys if key is not None)

    @cache
    def place_of(layer: int, phase: int) -> tuple[int, int]:
        return places.setdefault((scopes_at(layer, phase), phase), (layer, phase))

    def way_of(key: RowKey) -> Way:
        scopes = scopes_at(key.layer, key.phase)
        if rows.within[key.within]:
            return way_from(scopes, key)
        if (scopes, key.frames) not in ways:
            ways[scopes, key.frames] = way_from(scopes, key)
        return ways[scopes, key.frames]

    def way_from(scopes: tuple[_Scope, ...], key: RowKey) -> Way:
        """The keys around a row. A label has no phase: one around a whole step holds forward and backward work."""
        inward: list[tuple[int, ...]] = []
        for around in rows.within[key.within]:
            for frame in around.frames:
                phase = key.phase if frame.kind == FrameKind.LABEL else PHASES.index(around.phase)
                inward.append(numbers_of(scopes_at(around.layer, phase), frame))
        frames = rows.frames[key.frames]
        inward += [numbers_of(scopes, frame) for frame in (frames[:-1] if is_kernel(frames) else frames) or _OWN_TIME]
        return Way(tuple(dict.fromkeys(chained.from_iterable(inward))), inward[-1])

    sums = sum_operators(rows, way_of, _is_part(rows), place_of)
    return {key: sums[number] if number < len(sums) else Sums() for key, number in numbers.items()}


def _is_part(rows: Rows) -> Callable[[int, int, int, int], bool]:
    """A predicate of rows, by (layer, phase, within, frames): whether it is inside an op whose FLOPs are counted."""
    index_of = {frames: chain for chain, frames in reversed([*enumerate(rows.frames)])}  # one may be listed twice
    outer_chains = [
        [index_of[frames[:depth]] for depth in range(1, len(frames)) if frames[:depth] in index_of]
        for frames in rows.frames
    ]
    same = [index_of[frames] for frames in rows.frames]
    by = ("layer", "phase", "within", "frames")
    counted = {(*place, same[chain]) for of in ("macs", "flops") for *place, chain in rows.summed(by, of)}

    def is_part(layer: int, phase: int, within: int, chain: int) -> bool:
        outers = outer_chains[chain]
        return bool(outers) and any((layer, phase, within, outer) in counted for outer in outers)

    return is_part


def _at_or_below(run: Run, path: Any) -> Set[int]:
    """The layers that a path names and all layers below them, by index."""
    chosen = run.layers.at_or_below(find(path, [(layer.path,) for layer in run.layers]))
    selected = run.meta.paths
    if selected is not None and not any(run.layers[number].path in selected for number in chosen):
        raise TorchprofError(
            f"{path!r} was not selected when this run was made: its work is part of the selected layer around it, or "
            f"{NOT_SELECTED_NAME}. Choose from {', '.join('.'.join(known) for known in selected[:20])}."
        )
    return chosen

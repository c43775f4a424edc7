"""Operators of a whole run, or of some of its layers: the cost of each, the layers that use it, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torchprof.analyze.report import check_device
from torchprof.errors import TorchprofError, suggest
from torchprof.run.layers import find
from torchprof.run.measures import Cost
from torchprof.run.operators import RowKey, Sums, Way, is_kernel, sum_operators
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.torch_names import NO_TENSORS
from torchprof.run.words import BETWEEN_OPS, NOT_SELECTED_NAME, PHASES, Frame, FrameKind, Signature, phase_of

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
    layers = None if layer is None else _at_or_below(run, layer)
    flags = dict(run.meta.flags)
    for is_asked, flag, name in (
        (group_by_input_shape, "record_shapes", "input shapes"),
        (group_by_stack_n, "with_stack", "source lines"),
    ):
        if is_asked and not flags.get(flag):
            raise TorchprofError(f"This run holds no {name}: record them with Profile(model, {flag}=True).")

    def is_selected(of_layer: int, of_phase: str) -> bool | None:
        return ((layers is None or of_layer in layers) and phase in (None, of_phase)) or None

    def operator(scope: bool, frame: Frame) -> Operator:
        signature = frame.signature or Signature((), ())
        inputs = zip(signature.shapes, signature.dtypes) if group_by_input_shape else ()
        shapes = tuple(shape for shape, dtype in inputs if dtype not in NO_TENSORS or shape)
        return Operator(frame.name, frame.kind, shapes, signature.stack[:group_by_stack_n])

    return _summed(run.rows, is_selected, operator)


def layers_of_operator(run: Run, op: str, *, phase: str | None = None) -> dict[str, Sums]:
    """The sums of one operator or label in each layer that uses it directly, by the layer's name.

    Work of no layer is ``(outside)`` or ``(not selected)``. Raises TorchprofError for an operator that is not in the
    run.
    """

    def layer(of_layer: int, of_phase: str) -> str | None:
        return run.layers.name_of(of_layer) if phase in (None, of_phase) else None

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
    rows: Rows, scope_of: Callable[[int, str], _Scope | None], key_of: Callable[[_Scope, Frame], _Key | None]
) -> dict[_Key, Sums]:
    """The sums of rows by a key of the ops and labels around them.

    ``scope_of`` gives the scope of a layer (by index) and a phase, ``key_of`` the key of a frame in a scope. The self
    of a row goes to its innermost key, its total once to each key around it: so the total of a key is that of its
    outermost occurrences. Rows whose scope or key is None are left out.

    Example: with names as keys, a row ``label > aten::linear > aten::addmm`` adds to the self of ``aten::addmm``, and
    to the totals of all three.
    """
    numbers: dict[_Key, int] = {}
    ways: dict[tuple[_Scope | None, int], Way] = {}  # the cached ways of rows without surroundings: most rows

    @cache
    def scope_at(layer: int, phase: int) -> _Scope | None:
        return scope_of(layer, PHASES[phase])

    @cache
    def number_of(scope: _Scope | None, frame: Frame) -> int | None:
        key = None if scope is None else key_of(scope, frame)
        return None if key is None else numbers.setdefault(key, len(numbers))

    def way_of(key: RowKey) -> Way:
        scope = scope_at(key.layer, key.phase)
        if rows.within[key.within]:
            return way_from(scope, key)
        if (scope, key.frames) not in ways:
            ways[scope, key.frames] = way_from(scope, key)
        return ways[scope, key.frames]

    def way_from(scope: _Scope | None, key: RowKey) -> Way:
        """The keys around a row. A label has no phase: one around a whole step holds forward and backward work."""
        inward: list[int | None] = []
        for around in rows.within[key.within]:
            for frame in around.frames:
                phase = key.phase if frame.kind == FrameKind.LABEL else PHASES.index(around.phase)
                inward.append(number_of(scope_at(around.layer, phase), frame))
        frames = rows.frames[key.frames]
        inward += [number_of(scope, frame) for frame in (frames[:-1] if is_kernel(frames) else frames) or _OWN_TIME]
        inner = inward[-1]
        totals = tuple(dict.fromkeys(number for number in inward if number is not None))
        return Way(totals, -1 if inner is None else inner)

    sums = sum_operators(rows, way_of, _is_part(rows))
    return {key: sums[number] if number < len(sums) else Sums() for key, number in numbers.items()}


def parts_of_operators(rows: Rows) -> list[int]:
    """For each row, how many of its calls ran inside an op whose FLOPs are counted: those include the calls."""
    if rows.nonzero.isdisjoint(("macs", "flops")):
        return [0] * len(rows)
    columns = rows.columns
    is_part = _is_part(rows)
    keys = zip(columns["layer"], columns["phase"], columns["within"], columns["frames"])
    return [calls * (calls > 0 and is_part(place)) for calls, place in zip(columns["calls"], keys)]


def _is_part(rows: Rows) -> Callable[[tuple[int, int, int, int]], bool]:
    """A predicate of rows, by (layer, phase, within, frames): whether it is inside an op whose FLOPs are counted."""
    index_of = {frames: chain for chain, frames in reversed([*enumerate(rows.frames)])}  # one may be listed twice
    outer_chains = [
        [index_of[frames[:depth]] for depth in range(1, len(frames)) if frames[:depth] in index_of]
        for frames in rows.frames
    ]
    counts = rows.summed(("layer", "phase", "within", "frames"), ("macs", "flops"))
    counted = {(*place, index_of[rows.frames[chain]]) for (*place, chain), count in counts.items() if any(count)}

    def is_part(place: tuple[int, int, int, int]) -> bool:
        layer, phase, within, chain = place
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

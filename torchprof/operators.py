"""Operators over a whole run, or over some of its layers: what each cost, in which layers, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torchprof.attribute import OUTSIDE, PHASES, Frame, Signature
from torchprof.cost import FIELDS, Cost
from torchprof.errors import TorchprofError, suggest
from torchprof.paths import find
from torchprof.run import BETWEEN_OPS, NOT_SELECTED_NAME, OUTSIDE_NAME, Rows, Run, number_of_phase

_NO_TENSORS = ("", "Scalar", "ScalarList")  # what torch calls the types of inputs that have no shape
_OWN_TIME = (Frame("op", BETWEEN_OPS),)

_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class Sums:
    """What something took: ``self`` is what no op inside it took, ``total`` what its outermost occurrences took, with
    all that ran in them. ``calls`` is 0 for the time between ops, which nobody calls. ``parts`` of the calls were made
    inside an op whose MACs and FLOPs count for all that it calls."""

    calls: int = 0
    parts: int = 0
    self: Cost = field(default_factory=Cost)
    total: Cost = field(default_factory=Cost)


class Operator(NamedTuple):
    """An operator, or one of the user's labels, over many layers and phases.

    ``kind`` is op or label; layers' own time between ops is the op ``(between ops)``. ``shapes`` are those of the
    tensors that it was called on, a tuple of shapes for a list of tensors, None for a list of unknown ones; ``stack``
    are source lines, innermost first. Both are ``()`` where they do not tell operators apart.
    """

    name: str
    kind: str = "op"
    shapes: tuple[Any, ...] = ()
    stack: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """The work of a device that an operator of a layer launched. ``op`` is a label where no operator was around it, and
    ``(between ops)`` where none is known; ``layer`` is the name of the layer, or ``(outside)``, ``(not selected)``."""

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
    """What each operator took in the layers that a path names and all below them (None: everywhere), in one phase
    (None: in all), in the order of first use.

    Σ self over all operators, ``(between ops)`` among them, is the self of these layers. ``group_by_input_shape`` tells
    calls on other shapes apart, ``group_by_stack_n`` those from other source lines, by the innermost so many.

    Raises TorchprofError for an unknown layer or phase, and where shapes or source lines were not recorded.
    """
    layers = None if layer is None else _at_or_below(run, layer)
    check_phase(phase)
    if group_by_input_shape:
        _check_recorded(run, "record_shapes", "input shapes")
    if group_by_stack_n:
        _check_recorded(run, "with_stack", "source lines")

    def operator(of_layer: int, of_phase: str, frame: Frame) -> Operator | None:
        if (layers is not None and of_layer not in layers) or phase not in (None, of_phase):
            return None
        signature = frame.signature or Signature((), ())
        shapes = _shapes_of_tensors(signature) if group_by_input_shape else ()
        return Operator(frame.name, frame.kind, shapes, signature.stack[:group_by_stack_n])

    return _summed(run.rows, operator)


def layers_of(run: Run, op: str, *, phase: str | None = None) -> dict[str, Sums]:
    """What an operator, or a label, of that name took in each layer that uses it directly, by the layer's name.

    Work of no layer is ``(outside)`` or ``(not selected)``. Raises TorchprofError for an operator that is not in the
    run, and for an unknown phase.
    """
    check_phase(phase)

    def layer(of_layer: int, of_phase: str, frame: Frame) -> str | None:
        return _name_of(run, of_layer) if frame.name == op and phase in (None, of_phase) else None

    found = _summed(run.rows, layer)
    if not found:
        known = list(dict.fromkeys(operator.name for operator in operators(run, phase=phase)))
        in_phase = f" in {phase}" if phase is not None else ""
        raise TorchprofError(f"This run has no operator {op!r}{in_phase}. {suggest(str(op), known)}")
    return found


def kernels(run: Run, *, layer: Any = None, phase: str | None = None) -> dict[Kernel, Sums]:
    """The work of the device in the layers that a path names and all below them (None: everywhere), in one phase
    (None: in all). Self and total are the same: a kernel calls nothing.

    Raises TorchprofError for an unknown layer or phase, and for a run that recorded no device.
    """
    check_phase(phase)
    layers = None if layer is None else _at_or_below(run, layer)
    meta = run.meta
    if "device_ns" not in meta.requested:
        raise TorchprofError(
            "This run recorded no device, so it knows no kernels: where the model runs on a GPU, profile it with "
            'Profile(model, use_cuda=True), or use_device="xpu" for another kind.'
        )
    if "device_ns" not in meta.measured:
        kind = (meta.device or "device").upper()
        raise TorchprofError(
            f"This run knows no kernels: {kind} was asked for, and could not be recorded. run.meta.warnings says why."
        )
    found: dict[Kernel, Sums] = {}
    columns = run.rows.columns
    for at, of_layer in enumerate(columns["layer"]):
        frames = run.rows.frames[columns["frames"][at]]
        of_phase = PHASES[columns["phase"][at]]
        if not _is_kernel(frames) or (layers is not None and of_layer not in layers) or phase not in (None, of_phase):
            continue
        op = (_OWN_TIME + frames)[-2]
        device = run.rows.devices[columns["device"][at]]
        sums = found.setdefault(Kernel(frames[-1].name, op.name, _name_of(run, of_layer), of_phase, device), Sums())
        cost = _cost(run.rows, at)
        sums.calls += columns["calls"][at]
        sums.self += cost
        sums.total += cost
    return found


def check_phase(phase: str | None) -> None:
    """Raise TorchprofError for what is neither a phase nor None."""
    if phase is not None:
        number_of_phase(phase)


def _summed(rows: Rows, key_of: Callable[[int, str, Frame], _Key | None]) -> dict[_Key, Sums]:
    """Rows summed by a key of the ops and labels that they are inside of, each in a layer (by index) and a phase.

    Self goes to the innermost of them, total once to each key: so it is what the outermost occurrences took. What has
    the key None is left out.
    """
    found: dict[_Key, Sums] = {}
    counted = {_chain(rows, at) for at in range(len(rows)) if rows.columns["macs"][at] or rows.columns["flops"][at]}
    for at in range(len(rows)):
        frames = rows.frames[rows.columns["frames"][at]]
        if frames and frames[-1].kind == "python":
            continue
        keys = [key_of(*step) for step in _way_in(rows, at)]
        cost = _cost(rows, at)
        for key in dict.fromkeys(keys):
            if key is not None:
                found.setdefault(key, Sums()).total += cost
        innermost = keys[-1]
        if innermost is not None:
            found[innermost].self += cost
            if frames and not _is_kernel(frames):
                calls = rows.columns["calls"][at]
                found[innermost].calls += calls
                if counted:
                    chain = _chain(rows, at)
                    is_part = any(chain._replace(frames=frames[:steps]) in counted for steps in range(1, len(frames)))
                    found[innermost].parts += calls * is_part
    return found


class _Chain(NamedTuple):
    """Where a row stands: all of its keys but device and rank."""

    layer: int
    phase: int
    within: int
    frames: tuple[Frame, ...]


def _chain(rows: Rows, at: int) -> _Chain:
    layer, phase, within, frames = (rows.columns[name][at] for name in ("layer", "phase", "within", "frames"))
    return _Chain(layer, phase, within, rows.frames[frames])


def _way_in(rows: Rows, at: int) -> Iterator[tuple[int, str, Frame]]:
    """The ops and labels around the work of a row, outer to inner, with layer and phase; at least ``(between ops)``.

    A label has no phase of its own: one around a whole step holds forward and backward work.
    """
    layer, phase = rows.columns["layer"][at], PHASES[rows.columns["phase"][at]]
    for around in rows.within[rows.columns["within"][at]]:
        for frame in around.frames:
            yield around.layer, phase if frame.kind == "label" else around.phase, frame
    frames = rows.frames[rows.columns["frames"][at]]
    for frame in (frames[:-1] if _is_kernel(frames) else frames) or _OWN_TIME:
        yield layer, phase, frame


def _is_kernel(frames: Sequence[Frame]) -> bool:
    return bool(frames) and frames[-1].kind == "kernel"


def _cost(rows: Rows, at: int) -> Cost:
    return Cost(*(rows.columns[name][at] for name in FIELDS))


def _name_of(run: Run, layer: int) -> str:
    return run.layers[layer].name if layer >= 0 else OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME


def _at_or_below(run: Run, path: Any) -> Set[int]:
    """The layers that a path names and all below them, by index."""
    tops = {run.layers[number].path for number in find(path, [(layer.path,) for layer in run.layers])}
    chosen = {
        number
        for number, layer in enumerate(run.layers)
        if any(layer.path[:steps] in tops for steps in range(1, len(layer.path) + 1))
    }
    selected = run.meta.paths
    if selected is not None and not any(run.layers[number].path in selected for number in chosen):
        raise TorchprofError(
            f"{path!r} was not selected when this run was made: its work is part of the selected layer around it, or "
            f"{NOT_SELECTED_NAME}. Choose from {', '.join('.'.join(known) for known in selected[:20])}."
        )
    return chosen


def _check_recorded(run: Run, flag: str, what: str) -> None:
    if not dict(run.meta.flags).get(flag, False):
        raise TorchprofError(f"This run holds no {what}: record them with Profile(model, {flag}=True).")


def _shapes_of_tensors(signature: Signature) -> tuple[Any, ...]:
    return tuple(shape for shape, dtype in zip(signature.shapes, signature.dtypes) if dtype not in _NO_TENSORS or shape)

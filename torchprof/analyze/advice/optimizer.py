"""The optimizer: its steps, and how it resets gradients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.chains import ACCUMULATE, Frames, among, depth_of_label, inside, is_step
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.formats import format_time
from torchprof.run.torch_names import FOREACH, FUSED
from torchprof.run.words import BACKWARD, OPTIMIZER_STEP, OUTSIDE_NAME, ZERO_GRAD, FrameKind

_ZEROES = ("aten::zero_", "aten::_foreach_zero_")

_FUSED = {
    "cpu": frozenset({"SGD", "Adam", "AdamW", "Adagrad"}),
    "cuda": frozenset({"SGD", "Adam", "AdamW"}),
}
_FOREACH = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_NOT_FUSED = frozenset(
    {
        "aten::_coalesce",
        "aten::_indices",
        "aten::_nnz",
        "aten::_values",
        "aten::sparse_coo_tensor",
        "aten::sparse_mask",
        "aten::view_as_real",
    }
)
"""Ops that are called for sparse gradients and complex parameters: fused steps raise an error for both."""
_TENSORS = 10
_SMALL_NS = 30_000
_SAVED = {"SGD": 1 / 2}
_SAVED_BY_OTHERS = 3 / 4


@dataclass
class _Steps:
    """The steps of one class of optimizers: their number and time, and the ops directly in them."""

    steps: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    op_ns: int = 0
    cannot_be_fused: bool = False


@rule
def optimizer_step_per_tensor(evidence: Evidence) -> Iterator[Advice]:
    """Steps of torch's optimizers that call their ops once per tensor: at least 10 calls of one op per step, and no
    fused op; on a GPU no ``_foreach_`` op either, which is torch's default there.

    On the CPU the remedy is ``fused=True`` (SGD, Adam, AdamW, Adagrad). Measured on two threads with 40 to 200 tensors
    of 64 to a million elements, torch 2.4 and 2.13: Adam, AdamW and Adagrad take 10 to 60% of the time. SGD takes 40 to
    60% if its ops are shorter than 30 µs on average, and hardly less if they are longer: then there is no finding.
    foreach=True was slower than the loop as often as faster, so it is not recommended on the CPU.

    The gain is half of SGD's steps, 3/4 of those of others: of the CPU or the device time, the longer one. Steps with
    ops for sparse gradients or complex parameters are left out: fused steps do not support them. Needs torch's own
    labels of optimizers.
    """
    place = "cpu" if evidence.device == "cpu" else "cuda"
    for name, stepped in _steps_by_class(evidence).items():
        fused = name in _FUSED[place]
        if any(op.startswith(FUSED) for op in stepped.calls) or not (fused or (place == "cuda" and name in _FOREACH)):
            continue
        if stepped.cannot_be_fused or (place == "cuda" and any(op.startswith(FOREACH) for op in stepped.calls)):
            continue
        number = sum(stepped.calls.values())
        each = max(stepped.calls.values(), default=0)
        if each < _TENSORS * stepped.steps or (place == "cpu" and name == "SGD" and stepped.op_ns > _SMALL_NS * number):
            continue
        ns = max(stepped.cpu_ns, stepped.device_ns)
        remedy = f"Use `torch.optim.{name}(…, fused=True)`: one kernel for all tensors."
        if not fused:
            remedy = f"Use `torch.optim.{name}(…, foreach=True)`: one kernel for many tensors."
        yield Advice(
            OUTSIDE_NAME,
            f"{name} updates tensors one by one.",
            remedy,
            int(ns * _SAVED.get(name, _SAVED_BY_OTHERS)),
            details=f"A step runs {number // stepped.steps:,} operators and takes {format_time(ns / stepped.steps)} on "
            "average.",
        )


@rule
def gradients_zeroed(evidence: Evidence) -> Iterator[Advice]:
    """``zero_grad(set_to_none=False)`` of an optimizer: ops that write zeros into gradients, in its label.

    The gain is the time of these writes, and of the additions to zeroed gradients in backward (``add_`` in
    AccumulateGrad, at most as many as were zeroed: further additions accumulate gradients over batches on purpose), and
    the memory of the gradients that existed before the first step. Needs torch's own labels of optimizers.
    """
    label = None
    writes = 0
    ns = 0
    for row in evidence.rows(zeroes):
        label = label or next(frame.name for frame in row.frames if frame.name.startswith(ZERO_GRAD))
        ns += evidence.time_of(row)
        writes += row.calls if row.frames[-1].name == "aten::zero_" else 0
    if label is None:
        return
    added = evidence.took(_adds_to_gradient, phases=(BACKWARD,)).values()
    additions = sum(work.calls for work in added)
    if additions:
        ns += sum(map(evidence.time_of, added)) * min(writes, additions) // additions
    before = [size for memory in evidence.run.memory for kind, size in memory.before or () if kind == "gradients"]
    name = label.removeprefix(ZERO_GRAD).partition(".")[0]
    yield Advice(
        OUTSIDE_NAME,
        f"`zero_grad` of {name} fills gradients with zeros ({writes:,} write{'s' * (writes != 1)}), and backward adds "
        "to them.",
        "Use `zero_grad(set_to_none=True)`, the default: it frees the gradients, and backward writes new ones.",
        ns,
        sum(before) or None,
    )


def _steps_by_class(evidence: Evidence) -> dict[str, _Steps]:
    """The steps of optimizers, by the name of their class."""
    by_class: defaultdict[str, _Steps] = defaultdict(_Steps)
    for _, _, frames, calls, cpu_ns, device_ns, _ in evidence.rows(is_step):
        depth = depth_of_label(frames, OPTIMIZER_STEP)
        stepped = by_class[frames[depth].name.removeprefix(OPTIMIZER_STEP).partition(".")[0]]
        stepped.cpu_ns += cpu_ns
        stepped.device_ns += device_ns
        if depth == len(frames) - 1:
            stepped.steps += calls
            continue
        stepped.op_ns += cpu_ns
        stepped.cannot_be_fused |= any(frame.name in _NOT_FUSED for frame in frames[depth + 1 :])
        if depth == len(frames) - 2 and frames[-1].kind == FrameKind.OP and frames[-1].name.startswith("aten::"):
            stepped.calls[frames[-1].name] += calls
    return {name: stepped for name, stepped in by_class.items() if stepped.steps}


@among(inside(*_ZEROES))
def zeroes(frames: Frames) -> bool:
    """Whether an optimizer's ``zero_grad`` writes zeros into gradients."""
    return depth_of_label(frames, ZERO_GRAD) >= 0


@among(inside(ACCUMULATE))
def _adds_to_gradient(frames: Frames) -> bool:
    names = [frame.name for frame in frames]
    return "aten::add_" in names[names.index(ACCUMULATE) :]

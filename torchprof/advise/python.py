"""Python between operators: by the function that was sampled, by layer, and Python's garbage collector."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from torchprof.advise import Advice, merged, rule
from torchprof.advise.chains import Among, Frames, Holds, always, is_collection, is_direct, is_line, is_own_time
from torchprof.advise.evidence import Evidence
from torchprof.analyze.lines import FEWEST_SAMPLES
from torchprof.run.formats import format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.words import FORWARD, OUTSIDE, Frame, FrameKind, SourceLine, sampled_line

# Python by function

UNKNOWN_REASON = "nothing that was recorded says why; it is Python, another library, or waiting"
FIND_THE_LINE = (
    "Record more steps: the lines of Python are sampled by `torchprof run`, and by a `Profile` without `lines=False`."
)
_ANY_LAYER, _ANY_OPERATOR = 0, Frame(FrameKind.OP, "any")
_Work = tuple[int, tuple[Frame, ...]]
"""What shares its time among its lines: a layer, and the labels with the outermost operator in them."""


class Spent(NamedTuple):
    """What the time of a function is spent on: the line, and the outermost operator that runs ("" if none does)."""

    line: SourceLine
    op: str = ""


@dataclass
class Function:
    """A function of the user's: its time, the calls of the operators that run in it, and how often it was sampled."""

    spent: Counter[Spent] = field(default_factory=Counter)
    op_calls: Counter[str] = field(default_factory=Counter)
    samples: int = 0

    @property
    def ns(self) -> int:
        return self.spent.total()

    @property
    def at(self) -> SourceLine:
        """The line that takes most of the time, without what it calls."""
        return most_of(self.spent)

    def op_ns(self, *names: str) -> int:
        """The time of these operators, or of all."""
        return sum(ns for spent, ns in self.spent.items() if spent.op and (not names or spent.op in names))


def functions(evidence: Evidence, holds: Holds, *, in_layers: bool = False) -> list[Function]:
    """The functions that were sampled in matching work outside all layers, or in layers, forward; the longest first.

    The time of an operator, and that between operators under the same labels, is shared among its lines by their
    samples; in layers, the time of all operators and that between them, because most layers have no sample. ``holds``
    gets the frames without the line.

    Example: aten::add takes 90 us. Two samples in it are at line 3 of a file, one at line 7. The function of line 3
    gets 60 us, that of line 7 30 us.
    """
    if not evidence.any_row(is_line):
        return []
    times: Counter[_Work] = Counter()
    calls: Counter[_Work] = Counter()
    samples: defaultdict[_Work, Counter[SourceLine]] = defaultdict(Counter)

    def matches(frames: Frames) -> bool:
        return holds(frames[:-1] if is_line(frames) else frames)

    for layer, _, frames, called, ns, *_ in evidence.rows(matches, phases=(FORWARD,)):
        if (layer >= 0) != in_layers:
            continue
        outermost = _outermost(frames)
        work = (_ANY_LAYER, outermost[-1:] and (_ANY_OPERATOR,)) if in_layers else (layer, outermost)
        if (line := sampled_line(frames)) is not None:
            samples[work][line] += called
        else:
            times[work] += ns
            if len(work[1]) == len(frames) and not is_own_time(frames):
                calls[work] += called
    by_owner: dict[str, Function] = {}
    for work, lines in samples.items():
        op = "" if is_own_time(work[1]) else work[1][-1].name
        all_samples = max(lines.total(), 1)  # a file may have lines without samples
        for line, count in lines.items():
            function = by_owner.setdefault(line.owner, Function())
            function.samples += count
            function.spent[Spent(line, op)] += times[work] * count // all_samples
            if op:
                function.op_calls[op] += calls[work] * count // all_samples
    return sorted(by_owner.values(), key=lambda function: function.ns, reverse=True)


def _outermost(frames: Frames) -> tuple[Frame, ...]:
    """The labels, and the outermost operator, without its inputs."""
    labels = sum(1 for _ in takewhile(lambda frame: frame.kind == FrameKind.LABEL, frames))
    return tuple(Frame(*frame[:2]) for frame in frames[: labels + 1] if frame.kind != FrameKind.PYTHON)


def most_of(spent: Counter[Spent]) -> SourceLine:
    """The line that takes most of the time, without what it calls."""
    line_ns = sums_by_key((part.line.at, ns) for part, ns in spent.items())
    return line_ns.most_common(1)[0][0]


@rule
def hooks(evidence: Evidence) -> Iterator[Advice]:
    """Forward hooks: functions that torch calls with a module, as samples saw them."""
    models = evidence.run.meta.model
    for function in functions(evidence, always, in_layers=True):
        line = function.at
        if line.is_hook and function.samples >= FEWEST_SAMPLES and function.ns >= evidence.notable_ns:
            yield Advice(
                ", ".join(models),
                f"{line.file}:{line.line} {line.function} takes {format_time(function.ns)}: a hook of modules, which "
                "runs in each of their calls.",
                "Remove it with `handle.remove()` of its `handle = module.register_forward_hook(…)`.",
                evidence.while_idle(function.ns),
                layers=models,
            )


# Python in layers

_GAP_NS = 30_000  # what the call of a layer or an operator takes outside of it
_converts_to_array = Among(is_direct, lambda frames: frames[-1].name == "aten::resolve_neg")
"""It is the operator that Tensor.numpy() and Tensor.tolist() call; models do not call it directly."""
_is_line_between_ops = Among(is_line, lambda frames: is_own_time(frames[:-1]))


@rule
def python_in_layers(evidence: Evidence) -> Iterator[Advice]:
    """Layers with much Python of their own, beyond the calls of their operators and layers: a loop over elements,
    NumPy. The finding names the line that was sampled most, and NumPy if the layer turns tensors
    into arrays, which torch records. Without either, the layer may as well wait for something."""
    if not (times := own_time_of_slow_python(evidence)):
        return
    arrays = evidence.took(_converts_to_array, phases=(FORWARD,))
    lines: defaultdict[int, Counter[SourceLine]] = defaultdict(Counter)
    for row in evidence.rows(_is_line_between_ops, phases=(FORWARD,)):
        if (source := sampled_line(row.frames)) is not None:
            lines[row.layer][source] += row.calls
    for layer in [*times]:  # hooks have a finding of their own
        if 2 * sum(samples for line, samples in lines[layer].items() if line.is_hook) > lines[layer].total():
            del times[layer]
    all_ns = sum(times.values())
    gains = {layer: ns * evidence.while_idle(all_ns) // all_ns for layer, ns in times.items()}
    for group in merged(evidence, gains, {layer: layer in arrays for layer in times}):
        ns = sum(times[layer] for layer in group.numbers)
        calls = [evidence.timed_calls(layer) for layer in group.numbers]
        of_calls = f" of {sum(calls):,} call{'s' * (sum(calls) != 1)}" if all(calls) else ""
        sampled = sum((lines[layer] for layer in group.numbers), Counter[SourceLine]()).most_common(1)
        line = f", most often at {sampled[0][0]}" if sampled else ""
        arrays_made = sum(arrays[layer].calls for layer in group.numbers if layer in arrays)
        often = f"{arrays_made:,} time{'s' * (arrays_made != 1)}"
        is_python = bool(sampled or arrays_made)
        yield group.advice(
            f"No operator runs for {format_time(ns)}{of_calls}: "
            + (f"this is Python between operators{line}." if is_python else f"{UNKNOWN_REASON}."),
            FIND_THE_LINE
            if not is_python
            else "Replace NumPy with tensor operations, where torch is faster."
            if arrays_made
            else "Replace the Python loop with tensor operations.",
            details=f"Tensors are converted to NumPy or to lists {often}." if arrays_made else "",
        )


def own_time_of_slow_python(evidence: Evidence) -> dict[int, int]:
    """The time outside operators and outside the layers below, of the layers that ``python_in_layers`` reports.

    Subtracted from their time are 30 us for each call of the layer and each operator and layer that it calls (Python
    and the profiler take 5 to 20 us), and the time of its calls beyond the median call (start-up and interruptions). At
    least 5 % of the recorded time must remain, and more than half of the layer's; many tiny operators have a rule of
    their own.
    """
    if not evidence.ops_recorded:
        return {}
    layers = evidence.run.layers
    slow: dict[int, int] = {}
    direct = evidence.took(is_direct, phases=(FORWARD,))
    for layer, took in evidence.took(is_own_time, phases=(FORWARD,)).items():
        may_be_torch = layer < 0 or layers[layer].compiled or layers[layer].of_torch is not False
        if took.cpu_ns < evidence.notable_ns or may_be_torch:
            continue
        children = layers.children[layer]
        gaps = evidence.timed_calls(layer, *children) + (direct[layer].calls if layer in direct else 0)
        unusual = evidence.beyond_median_ns(layer) - evidence.beyond_median_ns(*children)
        left = took.cpu_ns - gaps * _GAP_NS - max(0, unusual)
        if 2 * left > took.cpu_ns and left >= evidence.notable_ns:
            slow[layer] = took.cpu_ns
    return slow


# The garbage collector


@rule
def garbage_collection(evidence: Evidence) -> Iterator[Advice]:
    """Collections of the old generations by Python's garbage collector. They have a row of their own, because they
    interrupt whatever code runs."""
    took = evidence.took_outside(is_collection, FORWARD)
    if not took.cpu_ns:
        return
    times = "once" if took.calls == 1 else f"{took.calls:,} times"
    yield Advice(
        evidence.name_of(OUTSIDE),
        f"Python's garbage collector searched the old objects {times}, for {format_time(took.cpu_ns)} in total.",
        "Call `gc.collect()` and `gc.freeze()` once the model and the data exist, so that they are not searched again.",
        evidence.while_idle(took.cpu_ns),
        options="Or call `gc.disable()` before the loop, and `gc.collect()` where a pause does no harm, such as "
        "between epochs. Remove `gc.collect()` from the loop.",
    )

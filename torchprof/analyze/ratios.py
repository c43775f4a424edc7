"""Ratios that are alike in most programs, and where a run departs from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torchprof.analyze.lines import layers_of_most
from torchprof.analyze.report import ReportTable, Section, TableRow, report, spaced, stacked
from torchprof.analyze.sentences import warnings_below
from torchprof.analyze.steps import spreads_of
from torchprof.analyze.top import measures_of
from torchprof.errors import printable
from torchprof.run.formats import UNKNOWN
from torchprof.run.run import Run
from torchprof.run.torch_names import ELEMENTWISE, aten
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, FORWARD, OPTIMIZER_RANGE, OUTSIDE, Frame, FrameKind

_FILLS = aten("fill_ zero_ _foreach_zero_")
_COPIES = aten("copy_ _to_copy clone contiguous")
_LEAST_FORWARD = 0.05  # of the time: with less in the forward of layers, a multiple of it says little
_LONGEST_NAME = 40
_MOST_SHOWN = 2


class Ratio(NamedTuple):
    """A ratio of a run. ``says``: what it is, as a clause with a gap for a value: "copies take {} of the time".
    ``value``: None if unknown; ``usual``: what 95 of 100 programs have at most; ``unusual``: from this value on the
    first screen has it. ``where``: the layers with most of it, "" without any. ``write``: how values are written."""

    says: str
    value: float | None
    usual: float
    unusual: float
    where: str
    write: Callable[[float], str]


def ratios_of(run: Run) -> Iterator[Ratio]:
    """The ratios of a run. What is usual was measured: 62 training and inference scripts without a planted fault, those
    of ``benchmarks/faults`` with the argument "fixed", on two cores."""
    field = next((field for field, _ in measures_of(run) if field in ("device_ns", "cpu_ns")), "")
    rows = run.rows.of_recording
    whole = rows.total(field) if field else 0
    if not whole:
        return

    def times(holds: Callable[[Sequence[Frame]], bool] | None = None, phase: str | None = None) -> Counter[int]:
        """By layer, the time of rows whose frames match."""
        return Counter(rows.summed("layer", field, frames=holds, phase=phase))

    def share(says: str, part: Counter[int], of: float, usual: float, unusual: float) -> Ratio:
        value = part.total() / of if of else None
        return Ratio(says, value, usual, unusual, layers_of_most(run, part), "{:.0%}".format)

    forward, backward = (_in_layers(times(phase=phase)) for phase in (FORWARD, BACKWARD))
    known = forward.total() if forward.total() >= _LEAST_FORWARD * whole else 0
    multiple = share("backward takes {} times as long as the forward of layers", backward, known, 2.3, 4)
    yield multiple._replace(write="{:.1f}".format, value=multiple.value or None)
    elementwise = _in_layers(times(_inside(ELEMENTWISE), FORWARD))
    yield share("elementwise operators take {} of the forward of layers", elementwise, known, 0.2, 0.3)
    yield share("filling tensors with one value takes {} of the time", times(_inside(_FILLS)), whole, 0.05, 0.1)
    yield share("copies and casts take {} of the time", times(_inside(_COPIES)), whole, 0.1, 0.15)
    yield share("optimizers take {} of the time", times(_is_optimizer), whole, 0.3, 0.6)
    steps = sum(spread.count for spread in spreads_of(run, OUTSIDE, "step_ns"))
    passes = rows.total("calls", frames=lambda chain: bool(chain) and chain[-1].name == AUTOGRAD_ENGINE)
    value = passes / steps if steps and passes else None
    yield Ratio("backward runs {} times a step", value, 1, 3, "", "{:.1f}".format)


def _inside(names: Collection[str]) -> Callable[[Sequence[Frame]], bool]:
    return lambda chain: any(frame.kind == FrameKind.OP and frame.name in names for frame in chain)


def _is_optimizer(chain: Sequence[Frame]) -> bool:
    return any(frame.kind == FrameKind.LABEL and frame.name.startswith(OPTIMIZER_RANGE) for frame in chain)


def _in_layers(times: Counter[int]) -> Counter[int]:
    return Counter({layer: ns for layer, ns in times.items() if layer >= 0})


@report("ratios", "ratios that are alike in most programs: those of this run, and what is usual", answers="why")
def ratios(run: Run) -> Section:
    """Ratios that hold for most programs, whatever they compute, and what is usual. One that departs is a place to look
    at: it may have a reason."""
    headings = ["Ratio", "Here", "Usual, up to", "Most of it in"]
    rows = [
        TableRow(
            [
                _heading(ratio.says),
                UNKNOWN if ratio.value is None else ratio.write(ratio.value),
                ratio.write(ratio.usual),
                printable(ratio.where),
            ]
        )
        for ratio in ratios_of(run)
    ]
    if not rows:
        return spaced(["No time was recorded.", warnings_below(run)])
    about = "Usual is what 95 of 100 programs have at most. A ratio that is larger may have a reason."
    return spaced([stacked([ReportTable(headings, rows, "ratios"), about]), warnings_below(run)])


def _heading(says: str) -> str:
    return says[0].upper() + says[1:].replace("{}", "…")


def unusual_ratios(run: Run) -> str:
    """The ratios that are far from the usual, as a sentence, those that are farthest first; "" without any."""
    far = [ratio for ratio in ratios_of(run) if ratio.value is not None and ratio.value >= ratio.unusual]
    far.sort(key=lambda ratio: -(ratio.value or 0) / ratio.usual)
    clauses = [
        f"{ratio.says.format(ratio.write(ratio.value or 0))} (usual is up to {ratio.write(ratio.usual)}"
        + (f"; most of it in {printable(ratio.where)})" if 0 < len(ratio.where) <= _LONGEST_NAME else ")")
        for ratio in far[:_MOST_SHOWN]
    ]
    return f"Unusual: {', '.join(clauses)}." if clauses else ""

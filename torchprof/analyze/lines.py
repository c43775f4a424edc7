"""Source lines that a thread sampled: the report "lines", those of the first screen, and "python" between operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt

from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    kept_with_run,
    pattern_of,
    phase_cell,
    report,
    shortened,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.analyze.top import parts_of, source_lines
from torchprof.errors import printable
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, format_number, format_share, format_time, short_time
from torchprof.run.groups import sums_by_key
from torchprof.run.run import Run
from torchprof.run.words import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    WAITS_FOR_AUTOGRAD,
    WAITS_IN_WORDS,
    Frame,
    FrameKind,
    SourceLine,
    sampled_line,
    torchs_range,
)

NO_SAMPLES = (
    "No source line was sampled. A Profile samples the thread that opens it, unless lines=False, and so does "
    "`torchprof run`. Traces of other tools have no samples."
)
FEWEST_SAMPLES = 5
"""With fewer samples a line may be there by chance."""
_FEWEST_OF_RUN = 20  # with fewer, the first screen has no lines
_LEAST_SHARE = 0.02  # of a line on the first screen, and of work on a line
_LINES_SHOWN = 5  # on the first screen
_ALL = 0.95  # of the samples of a line
_OWN = "no operator"


@dataclass
class LineOfCode:
    """A line of the user's code, and what ran in its samples: by the name of the work the samples of each layer
    (negative: no layer). ``calls``: the samples by what the line called; backward is of the line that started it.
    ``ns``: the time of the same work in the run, of which the line has as large a part as it has of the samples."""

    line: SourceLine
    ns: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    work: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def samples(self) -> int:
        return self.calls.total()

    @property
    def text(self) -> str:
        """The line with what it calls in nearly all samples: "train.py:16 → loss.backward"."""
        [(called, count)] = self.calls.most_common(1)
        name = "" if self.line.function == "<module>" and self.line.file else self.line.function
        place = f"{self.line.file}:{self.line.line}" if self.line.file else ""
        calls = f"→ {called}" if called and count >= _ALL * self.samples else ""
        return " ".join(filter(None, (place, name, calls)))


@kept_with_run
def lines_of_code(run: Run) -> list[LineOfCode]:
    """The sampled lines, those with the most time first, with their operators, layers, backward and waits."""
    lines: dict[SourceLine, LineOfCode] = {}
    parts: defaultdict[str, Counter[SourceLine]] = defaultdict(Counter)  # by kind of work: the samples of each line
    times = Counter[str]()
    chains = run.rows.frames
    sampled = run.rows.summed(("layer", "phase", "frames"), "calls", frames=lambda chain: bool(sampled_line(chain)))
    for (layer, phase, chain), samples in sampled.items():
        if (line := sampled_line(chains[chain])) is not None and samples:
            work = _work(layer, PHASES[phase], chains[chain][:-1])
            of_line = lines.setdefault(line.at, LineOfCode(line.at))
            of_line.calls[line.calls] += samples
            of_line.work[work][layer] += samples
            parts[_kind_of(work)][line.at] += samples
    if not lines:
        return []
    for (layer, phase, chain), ns in run.rows.of_recording.summed(("layer", "phase", "frames"), "cpu_ns").items():
        if not any(frame.kind == FrameKind.WAIT and frame.name == WAITS_FOR_AUTOGRAD for frame in chains[chain]):
            times[_kind_of(_work(layer, PHASES[phase], chains[chain]))] += ns
    for kind, samples_of in parts.items():
        for at, samples in samples_of.items():
            lines[at].ns += times[kind] * samples / samples_of.total()
    return sorted(lines.values(), key=lambda each: -each.ns)


def _kind_of(work: str) -> str:
    """Work whose time is shared among lines by their samples: all operators outside of layers are one kind."""
    return "operators" if "::" in work else work


def _work(layer: int, phase: str, frames: Sequence[Frame]) -> str:
    """What runs while a line is sampled, in words."""
    wait = next((frame.name for frame in frames if frame.kind == FrameKind.WAIT), "")
    if phase == RECOMPUTE:
        return RECOMPUTE
    if phase == BACKWARD or wait == WAITS_FOR_AUTOGRAD:
        return BACKWARD
    if wait:
        return WAITS_IN_WORDS.get(wait, wait)
    for frame in frames if layer == OUTSIDE else ():
        if frame.kind == FrameKind.LABEL and (known := torchs_range(frame.name)):
            return known
    if layer != OUTSIDE:
        return FORWARD
    return next((frame.name for frame in frames if frame.kind == FrameKind.OP), _OWN)


def work_in_words(run: Run, line: LineOfCode) -> str:
    """What runs on a line, the most first: "backward 94% (rnn), no operator 4%"."""
    sums = Counter({work: by_layer.total() for work, by_layer in line.work.items()})
    texts = []
    for work, samples in sums.most_common(3):
        if samples >= _LEAST_SHARE * line.samples:
            share = "" if samples >= _ALL * line.samples else f" {samples / line.samples:.0%}"
            where = layers_of_most(run, line.work[work])
            texts.append(f"{shortened(work)}{share}{f' ({where})' if where else ''}")
    return printable(", ".join(texts))


def layers_of_most(run: Run, samples: Counter[int]) -> str:
    """The layers with at least half of the samples: alike ones as a pattern, else the deepest layer around them; ""
    without any below a model."""
    half = samples.total() / 2
    layers = run.layers
    in_layers = Counter({layer: count for layer, count in samples.items() if layer >= 0})
    [(alike, most)] = sums_by_key((layers.alike[layer], n) for layer, n in in_layers.items()).most_common(1) or [(0, 0)]
    if in_layers and most >= half:
        paths = [layers[layer].path for layer in in_layers if layers.alike[layer] == alike]
        return pattern_of(paths) if len(paths) > 1 else ".".join(paths[0])
    totals = layers.roll_up([in_layers[number] for number in range(len(layers))])
    deepest = max((n for n in range(len(layers)) if totals[n] > half), key=lambda n: len(layers[n].path), default=None)
    return "" if deepest is None else layers[deepest].name


# The report, and the lines of the first screen


@report("lines", "the source lines that were sampled: what they call, and what runs there", answers="time")
def lines(run: Run, *, top: int | None = 20) -> Section:
    """The lines of your code in which the recorded thread was, sampled every 1 to 5 ms.

    A line is the innermost one outside of Python's library, torch and installed packages. Samples inside operators,
    layers, optimizers and loaders count, and those during backward: they are at the line that called it. ``top``: the
    number of lines (None: all).
    """
    found = lines_of_code(run)
    if not found:
        return spaced([NO_SAMPLES, warnings_below(run)])
    shown = found[:top]
    headings = ["Share", "CPU time", "Samples", "Line", "What runs there"]
    rows = [
        TableRow([*_figures(run, line), ReportCell(printable(line.text), line.line), work_in_words(run, line)])
        for line in shown
    ]
    samples = sum(line.samples for line in found)
    sentences = [f"100 % is the recorded time. It is shared among lines by {_count(samples)}."]
    if len(shown) < len(found):
        rest = sum(line.ns for line in found[len(shown) :]) / _whole_ns(run)
        sentences.append(f"Lines with less are hidden: {len(found) - len(shown)}, together {rest:.1%}.")
    return spaced([stacked([ReportTable(headings, rows, "lines"), *sentences]), warnings_below(run)])


def largest_lines(run: Run, width: int | None = None) -> Iterator[ReportTable]:
    """The lines of the first screen: five at most, each with 2 % of the samples and five of them at least. ``width``:
    the number of characters of a line."""
    found = lines_of_code(run)
    samples, whole_ns = sum(line.samples for line in found), _whole_ns(run)
    many = [line for line in found if line.samples >= FEWEST_SAMPLES and line.ns >= _LEAST_SHARE * whole_ns]
    shown = many[:_LINES_SHOWN]
    if samples < _FEWEST_OF_RUN or not shown:
        return
    texts = [(f"{line.ns / whole_ns:4.0%}", printable(line.text), work_in_words(run, line)) for line in shown]
    longest = max(len(text) for _, text, _ in texts)
    written = [f"{share}  {text:<{longest}}  {work}" for share, text, work in texts]
    rows = [TableRow([*_figures(run, line), *cells]) for line, (_, *cells) in zip(shown, texts)]
    yield ReportTable(
        ["Share", "CPU time", "Samples", "Line", "What runs there"],
        rows,
        "largest_lines",
        text="\n".join([title_of_lines(run), *(_cut(text, width) for text in written)]),
    )


def title_of_lines(run: Run) -> str:
    """The heading of the largest lines."""
    return f"By line of code ({_count(sum(line.samples for line in lines_of_code(run)))})"


def _cut(text: str, width: int | None) -> str:
    """A text of at most so many characters."""
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def _whole_ns(run: Run) -> int:
    return max(sum(parts_of(run, "cpu_ns").values()), 1)


def _figures(run: Run, line: LineOfCode) -> list[Cell]:
    time = format_time(line.ns).written(f"~{short_time(line.ns)}")  # as exact as the samples are
    return [format_share(line.ns / _whole_ns(run)), time, format_number(line.samples)]


def _count(samples: int) -> str:
    """How many samples there are, and the error of a share of one half: two standard deviations."""
    return f"{samples:,} samples: shares to within {max(round(100 / sqrt(samples)), 1)} points"


# Lines between operators


@report("python", "the time between operators: Python and what it calls", answers="time")
def python(run: Run, *, top: int | None = 10, lines: int | None = 3) -> Part:
    """The CPU time in which no operator ran: Python, and libraries that it calls, such as NumPy. By layer, label and
    phase, largest first.

    Below each row are the ``lines`` source lines with the most samples, and the part of the time that their samples
    stand for. Without samples (``lines=False``) they are unknown. Short times may have no samples.
    """
    parts = parts_of(run, "cpu_ns")
    whole = sum(parts.values())
    between_ops = Counter({work.at(layer): ns for (layer, work), ns in parts.items() if work.has_lines})
    shown = between_ops.most_common(top)
    sampled = source_lines(run)
    cells = []
    for where, ns in shown:
        samples_of = sampled.get(where, Counter())
        whole_count = sum(samples_of.values())
        figures = [format_time(ns), format_share(ns / whole), format_number(whole_count) if sampled else UNKNOWN]
        cells.append([where.name(run), phase_cell(where.phase_name), *figures])
        for line, count in samples_of.most_common(lines):
            line_ns = ns * count / whole_count
            time = format_time(line_ns).written(f"~{format_time(line_ns)}")
            cells.append([ReportCell(f"  {line}", line), "", time, format_share(line_ns / whole), format_number(count)])
    headings = ["Layer, and where in the source", "Phase", "Between ops", "Share", "Samples"]
    hidden = len(between_ops) - len(shown)
    more = [f"Layers with less are hidden: {hidden}."] if hidden else []
    return stacked([ReportTable.of_cells(headings, cells), *more, *about_sums(run), warnings_below(run)])

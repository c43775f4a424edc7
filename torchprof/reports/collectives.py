"""The tables of collectives: what ranks exchanged, with whom, how fast, and for which layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from torchprof.reports import report
from torchprof.reports.kernels import short_name
from torchprof.reports.notes import about_sums, warnings_of
from torchprof.reports.text import draw, printable
from torchprof.run.collectives import Collective, collective_of, tells_collective
from torchprof.run.cost import UNKNOWN, format_count, format_memory, format_time
from torchprof.run.kernels import Work, kind_of_work
from torchprof.run.rows import Row
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED_NAME, OUTSIDE_NAME, Frame, is_host_collective

_Key = TypeVar("_Key")
_UNNAMED = ("", "undefined")  # torch's description of a group that has none


class _Source(Enum):
    """Where a row of the run tells of a collective."""

    KERNEL = "work of a device"
    HOST_RANGE = "the range of a backend that works on the CPU"
    LAUNCH = "the range, or the record, of one that launches kernels"


class _Use(NamedTuple):
    """A row of the run that tells of a collective. ``on_host``: the CPU carries it out. ``ns`` is how long it took: the
    time of its kernels, or of its range on the host; None where that is not known."""

    row: Row
    collective: Collective
    on_host: bool
    ns: int | None


@dataclass
class _Sum:
    """Calls of collectives. ``ns`` is how long the ``timed`` ones took. ``nbytes`` is the larger of what went in and
    what came out: at least, where not all calls are ``counted``; ``sized`` have any size."""

    calls: int = 0
    timed: int = 0
    sized: int = 0
    counted: int = 0
    ns: int = 0
    nbytes: int = 0

    def add(self, use: _Use) -> None:
        calls = use.row.calls
        self.calls += calls
        if use.ns is not None:
            self.timed += calls
            self.ns += use.ns
        known = [size for size in (use.collective.bytes_in, use.collective.bytes_out) if size is not None]
        if known:
            self.sized += calls
            self.counted += calls * (len(known) == 2)
            self.nbytes += calls * max(known)

    @property
    def bytes_text(self) -> str:
        if not self.sized:
            return UNKNOWN
        return _at_least(self.counted < self.calls) + format_memory(self.nbytes)

    @property
    def bandwidth_text(self) -> str:
        if not self.ns or not self.nbytes or self.timed < self.calls:
            return UNKNOWN
        return f"{_at_least(True)}{format_count(self.nbytes * 1e9 / self.ns)}B/s"

    def texts(self, whole_ns: int) -> list[str]:
        """Calls, time, average, and share of a whole."""
        if not self.timed:
            return [str(self.calls), *[UNKNOWN] * 3]
        time = _at_least(self.timed < self.calls) + format_time(self.ns)
        return [str(self.calls), time, format_time(self.ns / self.timed), f"{self.ns / (whole_ns or 1):.1%}"]


def _at_least(is_bound: bool) -> str:
    return "≥ " if is_bound else ""


@report("collectives")
def collectives(run: Run, *, tablefmt: str | None = None) -> str:
    """What ranks exchanged: a row for each collective, group and size, and one for each layer and phase that did so.

    *In* and *Out* are the bytes of one call on one rank, ``–`` where nothing says them. A call is a kernel, or a range
    of a backend that works on the CPU (gloo), which takes the time from its beginning to its end, on whatever thread.
    Where a run has both, the column *On* tells them apart. The bandwidth is what NCCL's tests call the algorithm
    bandwidth, S/t, with S the larger of In and Out: so it is there for all-gather and for reduce-scatter
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). It is a lower bound: the time has the waiting
    for the slowest rank in it. In the second table *Bytes* are S times the calls, and the layer is the one whose work
    started the exchange.

    ``tablefmt`` is any of tabulate's formats. Raises TorchprofError for an unknown one.
    """
    uses = list(_uses(run))
    warnings = [*about_sums(run), *warnings_of(run)]
    if not uses:
        return "\n".join(["This run recorded no communication between ranks.", *warnings])
    names = {False: (run.meta.device or "device").upper(), True: "CPU"}
    wholes = {on_host: sum(use.ns or 0 for use in uses if use.on_host is on_host) for on_host in names}
    present = [names[on_host] for on_host in sorted({use.on_host for use in uses})]
    on, time = (["On"], "Time") if len(present) > 1 else ([], f"{present[0]} time")

    def summed(key: Callable[[_Use], tuple[str, ...]]) -> Iterator[tuple[list[str], _Sum, list[str]]]:
        """For each row what it is of, what it sums, and how long that took."""
        for (on_host, texts), total in _largest_first(uses, lambda use: (use.on_host, key(use))):
            yield [*texts, *([names[on_host]] if on else [])], total, total.texts(wholes[on_host])

    what = draw(
        ["Collective", "Group", "Ranks", "Type", "In", "Out", *on, "Calls", time, "Avg", "Share", "Bandwidth"],
        [[*of, *took, total.bandwidth_text] for of, total, took in summed(_what)],
        tablefmt,
    )
    where = draw(
        ["Module", "Phase", *on, "Bytes", "Calls", time, "Avg", "Share"],
        [[*of, total.bytes_text, *took] for of, total, took in summed(_where)],
        tablefmt,
    )
    wholes_in_words = [f"{format_time(ns)} {names[on_host]} time" for on_host, ns in wholes.items() if ns]
    notes = [f"100 % is all communication: {', '.join(wholes_in_words)}."] if wholes_in_words else []
    if wholes[True]:
        notes.append(
            "CPU time of a collective is the time from its beginning to its end, with the waiting for the slowest rank."
        )
    if any(use.ns is None and not use.on_host for use in uses):
        notes.append(f"{UNKNOWN} under {time}: no kernel of it was recorded, only its range on the CPU.")
    if any(use.ns is None and use.on_host for use in uses):
        notes.append(f"{UNKNOWN} under {time}: the run does not say how long it took.")
    return "\n\n".join([what, where, *(["\n".join([*notes, *warnings])] if notes or warnings else [])])


def _uses(run: Run) -> Iterator[_Use]:
    """The rows that tell of collectives, each once: in a rank with kernels of communication, these and not what
    launched them."""
    sources = [_source(frames) for frames in run.rows.frames]
    numbers = run.rows.columns["frames"]
    ranks = run.rows.columns["rank"]
    with_kernels = {rank for rank, number in zip(ranks, numbers) if sources[number] is _Source.KERNEL}
    for at, number in enumerate(numbers):
        source = sources[number]
        if source is None or (source is _Source.LAUNCH and ranks[at] in with_kernels):
            continue
        row = run.rows[at]
        if row.calls:  # else it is what an op around it allocated there
            collective = collective_of(row.frames) or Collective(short_name(row.frames[-1].name))
            on_host = source is _Source.HOST_RANGE
            took = {_Source.KERNEL: row.cost.device_ns, _Source.HOST_RANGE: row.cost.collective_ns or None}
            yield _Use(row, collective, on_host, took.get(source))


def _source(frames: Sequence[Frame]) -> _Source | None:
    """What the innermost frame tells of a collective; None where it is none, or part of one around it."""
    if not frames:
        return None
    last = frames[-1]
    if last.kind == "kernel":
        is_one = tells_collective(last) or kind_of_work(last.name) is Work.COMMUNICATION
        return _Source.KERNEL if is_one else None
    if not tells_collective(last) or any(map(tells_collective, frames[:-1])):
        return None
    return _Source.HOST_RANGE if is_host_collective(last.name) else _Source.LAUNCH


def _what(use: _Use) -> tuple[str, ...]:
    """Groups that are described alike are one: in a run of many ranks each has its own name for them."""
    collective = use.collective
    group = collective.group if collective.description in _UNNAMED else collective.description
    return (
        printable(collective.name),
        printable(group) or UNKNOWN,
        UNKNOWN if collective.size is None else str(collective.size),
        printable(collective.dtype) or UNKNOWN,
        *(UNKNOWN if size is None else format_memory(size) for size in (collective.bytes_in, collective.bytes_out)),
    )


def _where(use: _Use) -> tuple[str, ...]:
    nobody = OUTSIDE_NAME if use.row.selected else NOT_SELECTED_NAME
    name = use.row.layer.name if use.row.layer else nobody
    served = len(use.row.shared_by)
    return (f"{name} ({served} layers below)" if served else name, use.row.phase)


def _largest_first(uses: Iterable[_Use], key: Callable[[_Use], _Key]) -> list[tuple[_Key, _Sum]]:
    """Summed by what is shown of them: those that took the longest first, then those of the most bytes."""
    sums: dict[_Key, _Sum] = {}
    for use in uses:
        sums.setdefault(key(use), _Sum()).add(use)
    return sorted(sums.items(), key=lambda one: (one[1].ns, one[1].nbytes), reverse=True)

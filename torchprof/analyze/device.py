"""The device report: busy and idle time of each device and of its streams, by kind of work."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    check_device,
    printable,
    report,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import warnings_below
from torchprof.errors import TorchprofError
from torchprof.run.formats import Cell, format_number, format_share, format_time
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime

_HEADINGS = ("Stream", "Kernels", "Busy", "Of span", "Computing", "Communication", "Copying")


@report("device", "the time of each device: computing, overlapped and exposed communication, idle", answers="time")
def device(run: Run) -> Section:
    """The time of each device within its span: from the start of its first work to the end of its last.

    A row for each stream: the number of kernels, copies and memsets; the busy time, also as a share of the span; and
    the time of computing, of communication with other ranks, and of copies and memsets. The last row is the whole
    device; work of several streams at the same time counts once in it. Below the table: the idle time, and how much of
    the communication overlaps with computing; the rest is exposed communication. docs/device.md says which kernels are
    communication.

    Raises TorchprofError for a run without a device or without the times of its streams.
    """
    _refuse_unknown(run)
    metas = {meta.rank: meta for meta in run.metas}
    texts: list[Part] = []
    for time in run.device_times:
        name = printable(time.device) + (f" of rank {time.rank}" if len(metas) > 1 else "")
        texts += [name, *about_device(time, metas[time.rank])]
    if not texts:
        wall = run.meta.wall_ns
        texts.append(f"Nothing ran on the device{f' in {format_time(wall)}' if wall else ''}.")
    return spaced([*texts, warnings_below(run)])


def about_device(time: DeviceTime, meta: Meta) -> list[Part]:
    """The table of the streams of one device, and the sentences below it."""
    rows = [TableRow(_cells(str(stream.stream), stream.kernels, stream[2:], time.span_ns)) for stream in time.streams]
    whole = (time.busy_ns, time.compute_ns, time.communication_ns, time.copy_ns)
    kernels = sum(stream.kernels for stream in time.streams)
    rows.append(TableRow(_cells("(all)", kernels, whole, time.span_ns), is_part=False))
    table = ReportTable(_HEADINGS, rows, "streams", {"device": time.device, "rank": time.rank})
    return [table, stacked(_sentences(time, meta))]


def _refuse_unknown(run: Run) -> None:
    check_device(run, "has no device times")
    if not run.device_times and "device_ns" in run.rows.nonzero:
        raise TorchprofError(
            'This run has no times by stream. run.report("kernels") says how long its device was busy.'
        )


def _cells(stream: str, kernels: int, times: tuple[int, ...], span: int) -> list[Cell]:
    busy, *kinds = times
    return [stream, format_number(kernels), format_time(busy), _share(busy, span), *map(format_time, kinds)]


def _share(part: int, whole: int) -> Cell:
    return format_share(part / whole) if whole else ""


def _with_share(part: int, whole: int) -> str:
    return f"{format_time(part)} ({part / whole:.1%})" if whole else str(format_time(part))


def _sentences(time: DeviceTime, meta: Meta) -> Iterator[str]:
    span = time.span_ns
    yield (
        f"From its first work to its last: {format_time(span)}, busy for {_with_share(time.busy_ns, span)}, idle for "
        f"{_with_share(time.idle_ns, span)}."
    )
    if time.communication_ns:
        communication = time.communication_ns
        yield (
            f"Communication: {format_time(communication)}, {_with_share(time.overlap_ns, communication)} of it at the "
            f"same time as computing, {_with_share(time.exposed_ns, communication)} exposed."
        )
    if meta.wall_ns:
        cycles = f" in {meta.cycles} cycles" if meta.cycles > 1 else ""
        yield f"Recorded for: {format_time(meta.wall_ns)}{cycles}."

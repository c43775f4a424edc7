"""Memory over time as a text picture."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.run.cost import format_memory, format_time
from torchprof.run.memory import KINDS, Memory
from torchprof.run.run import Run
from torchprof.run.timeline import Timeline

_WIDTH, _HEIGHT = 80, 10
_FILLS = dict(zip(KINDS, "PG█O▒░"))


def picture(run: Run, memory: Memory) -> Iterator[str]:
    """Memory above the start over time. Each column shows the live memory by kind at the maximum of its interval."""
    timeline = run.timeline
    if not timeline or memory.device not in timeline.devices or memory.rank != timeline.rank:
        return
    moments, end = _moments(timeline, timeline.devices.index(memory.device))
    highest = max(sum(moment) for moment in moments)
    if highest <= 0:
        return
    high = highest / _HEIGHT
    columns = []
    for moment in moments:
        column, height = "", 0
        for fill, nbytes in zip(_FILLS.values(), moment):
            height += nbytes
            column += fill * (round(min(height, sum(moment)) / high) - len(column))
        columns.append(column.ljust(_HEIGHT))
    labels = [str(format_memory(highest)), *[""] * (_HEIGHT - 2), str(format_memory(round(high)))]
    width = max(map(len, labels))
    rows = [
        f"{label:>{width}} ┤{''.join(column[row] for column in columns)}".rstrip()
        for label, row in zip(labels, range(_HEIGHT - 1, -1, -1))
    ]
    axis = f"{'0':>{width}} ┼{'─' * _WIDTH}"
    times = f"{'':>{width}}  0{format_time(end)!s:>{_WIDTH - 1}}"
    seen = [kind for at, kind in enumerate(_FILLS) if any(moment[at] for moment in moments)]
    legend = "   ".join(f"{_FILLS[kind]} {kind}" for kind in seen)
    cycle = " of the last cycle" if run.meta.cycles > 1 else ""
    title = (
        f"Memory on {memory.device} above the start{cycle}, over time: a column is {format_time(end / _WIDTH)}, a row "
        f"{format_memory(round(high))}."
    )
    if timeline.dropped:
        title += f" The last {timeline.dropped:,} allocations and frees were not kept."
    yield "\n".join([title, legend, *rows, axis, times])


def _moments(timeline: Timeline, device: int) -> tuple[list[list[int]], int]:
    """For each column of the picture, the bytes of each kind at the maximum of its interval; and the end of the
    timeline. The last kind is the unknown one."""
    columns = [timeline.columns[name] for name in ("time_ns", "nbytes", "device", "kind")]
    steps = [(time, nbytes, kind) for time, nbytes, of, kind in zip(*columns) if of == device]
    end = max(timeline.columns["time_ns"]) + 1
    now = [0] * (len(KINDS) + 1)
    moments = []
    at = 0
    for column in range(1, _WIDTH + 1):
        most, total = list(now), sum(now)
        highest = total
        while at < len(steps) and steps[at][0] * _WIDTH < column * end:
            _, nbytes, kind = steps[at]
            now[kind] += nbytes  # index -1, the unknown kind, is the last
            total += nbytes
            if total > highest:
                highest, most = total, list(now)
            at += 1
        moments.append(most)
    return moments, end

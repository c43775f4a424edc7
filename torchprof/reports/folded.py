"""Folded stacks: a line for each stack, for flamegraph.pl, inferno and speedscope.

Format (https://github.com/brendangregg/FlameGraph): names joined by semicolons, a space, a number.
"""

from __future__ import annotations

import re
from collections import Counter

from torchprof.analyze.records import layer_name
from torchprof.analyze.stacks import Step, stacks, usual
from torchprof.reports import report
from torchprof.reports.text import printable
from torchprof.run.lockstep import range_in_words
from torchprof.run.run import Run
from torchprof.run.words import Frame

_NUMBER_AT_THE_END = re.compile(r"\s+(?=\d+(\.\d*)?$)")


@report("folded", "stacks for flame graphs", suffix=".folded")
def folded(run: Run, *, measure: str | None = None) -> str:
    """A line ``phase;Net;layer;operator value`` for each stack. The value is the self of the stack, in ns, bytes or
    counts.

    With several ranks, ``rank_0`` comes before the phase. ``measure`` is a recorded field of ``Cost``, such as
    "cpu_ns", "device_ns", "cpu_allocated" or "flops". The default is the first measured of device time, CPU time and
    FLOPs.

    The format has no escapes. A semicolon in a name becomes a colon, as in flamegraph.pl's own collapsers; unprintable
    characters are written as escapes ("\\n"); a space before a number at the end of a name becomes "_", because
    flamegraph.pl would read it as a second value. Raises TorchprofError for a measure that was not recorded.
    """
    several = len({meta.rank for meta in run.metas}) > 1
    lines: Counter[str] = Counter()
    for (rank, phase), values in stacks(run, usual(run) if measure is None else measure).items():
        for stack, value in values.items():
            names = [f"rank_{rank}"] * several + [phase, *(_name(run, step) for step in stack)]
            lines[";".join(names)] += value
    return "".join(f"{stack} {value}\n" for stack, value in lines.items())


def _name(run: Run, step: Step) -> str:
    if isinstance(step, Frame):
        name = range_in_words(step.kind, step.name)
    else:
        name = run.layers[step].path[-1] if step >= 0 else layer_name(run, step)
    return _NUMBER_AT_THE_END.sub("_", printable(name).replace(";", ":"))

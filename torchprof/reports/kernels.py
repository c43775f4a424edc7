"""The table of kernels: what ran on a device, for which operator of which layer, and how long the device was idle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torchprof.analyze.operators import Kernel
from torchprof.analyze.operators import kernels as kernels_of
from torchprof.reports import report
from torchprof.reports.ranking import about_wholes, figure_columns, line_of, ranked, shares_of, shortened
from torchprof.run.cost import Cost, format_time
from torchprof.run.run import Run
from torchprof.run.words import LAUNCHED_BEFORE, OUTSIDE_NAME

_ARGUMENTS = re.compile(r"(?<=\S)\([^()]*\)|\([^()]*\)(?=\d)")  # and casts; not the ends of a copy, after a blank
_LAMBDAS = re.compile(r"(?: const)?::(?:\{lambda#\d+\}|operator\b(?: const)?)")
_NAMESPACES = re.compile(r"\b(?:at|c10)::(?:\w+::)*")
_POINTERS = re.compile(r", Array<char\*, \d+>")
_WIDTH = 64


@report("kernels")
def kernels(
    run: Run,
    *,
    sort_by: str | None = None,
    row_limit: int | None = None,
    layer: Any = None,
    phase: str | None = None,
    full_names: bool = False,
    tablefmt: str | None = None,
) -> str:
    """A row for each kernel, copy or set on a device, by the operator, the layer and the phase that launched it.

    Above the table stands how long each device was busy, and idle, while the run was recorded. Shares are of the time
    of all rows but those that were launched before the recording. Names of kernels are without their arguments, and
    long ones without their middle; ``full_names`` leaves them as they are. A device has a column where there are
    several.

    ``layer`` is a path or a pattern as ``Profile(paths=…)`` takes them: only what these layers launched, and those
    below them. ``phase`` is "forward", "backward" or "recompute". ``sort_by`` is a column, ``row_limit`` shows only so
    many rows, ``tablefmt`` is any of tabulate's formats.

    Raises TorchprofError for a run without a device, for an unknown layer, phase, column or format, and for a negative
    number.
    """
    found = kernels_of(run, layer=layer, phase=phase)
    kind = run.meta.device or "device"
    columns = [column for column in figure_columns(run) if column.key in (f"{kind}_total", f"{kind}_avg", "calls")]

    def is_left_over(kernel: Kernel) -> bool:
        return kernel.op == LAUNCHED_BEFORE and kernel.layer == OUTSIDE_NAME

    recorded = (sums.total for kernel, sums in found.items() if not is_left_over(kernel))
    wholes = shares_of(columns, Cost(), sum(recorded, Cost()))
    several = len({kernel.device for kernel in found}) > 1
    table = ranked(
        run,
        ["Kernel", "Operator", "Module", "Phase", *["Device"] * several],
        [
            line_of(
                {
                    "Kernel": [kernel.name if full_names else short_name(kernel.name)],
                    "Operator": [shortened(kernel.op)],
                    "Module": [kernel.layer],
                    "Phase": [kernel.phase],
                    "Device": [kernel.device],
                },
                sums,
                left_over=is_left_over(kernel),
            )
            for kernel, sums in found.items()
        ],
        columns,
        columns[0],
        wholes=wholes,
        notes=about_wholes("what all rows took", wholes),
        sort_by=sort_by,
        row_limit=row_limit,
        tablefmt=tablefmt,
    )
    return "\n".join([*_devices(run), "", table])


def short_name(name: str) -> str:
    """The name of a kernel without what all of them share: argument lists, torch's own namespaces, lambdas, pointers.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>
    >(int, …)`` is ``vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>``.
    """
    name = name.removeprefix("void ").removesuffix(" [clone .kd]").replace("(anonymous namespace)::", "")
    before = ""
    while name != before:  # from the inside out
        before, name = name, _ARGUMENTS.sub("", name)
    for noise in (_LAMBDAS, _NAMESPACES, _POINTERS):
        name = noise.sub("", name)
    return shortened(name.replace(" >", ">"), _WIDTH)


def _devices(run: Run) -> Iterator[str]:
    """How long each device was busy; with several streams at once, that time counts once."""
    for meta in run.metas:
        wall = meta.wall_ns
        whose = f" of rank {meta.rank}" if len(run.metas) > 1 else ""
        for device, busy in meta.busy_ns:
            idle = max(0, wall - busy)
            of = f" of {format_time(wall)}, idle for {format_time(idle)} ({idle / wall:.1%})" if wall else ""
            yield f"{device}{whose} was busy for {format_time(busy)}{of}."
        if not meta.busy_ns:
            yield f"Nothing ran on the device{whose}{f' in {format_time(wall)}' if wall else ''}."

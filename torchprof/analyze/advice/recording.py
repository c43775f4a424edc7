"""Faults of the recording that hide where the time went."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.chains import has_no_launch
from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.cost import format_time
from torchprof.run.words import OUTSIDE

_SHARE = 0.05


@rule
def leftover_kernels(evidence: Evidence) -> Iterator[Advice]:
    """Kernels whose launch is not in the recording, for at least 5 % of the device's time. They cannot be attributed to
    a layer or a step.

    The usual cause: the recording began while the device still ran work launched before. The remedy saves no time, it
    makes the figures complete. There is no finding if operators were not recorded, because then no launch is known.
    Needs the time of a device.
    """
    ns = evidence.run.left_over.device_ns + sum(took.device_ns for took in evidence.took(has_no_launch).values())
    whole = sum(evidence.run.rows.columns["device_ns"]) if ns else 0
    if not ns or ns < _SHARE * whole or not evidence.ops_recorded:
        return
    yield Advice(
        evidence.name_of(OUTSIDE),
        f"Kernels without a recorded launch take {format_time(ns)} of {evidence.device} time ({ns / whole:.0%}). They "
        "cannot be attributed to a layer.",
        "Start the profiler before these kernels are launched: record more steps after warm-up steps "
        "(`torch.profiler.schedule(wait=1, warmup=1, active=3)`), or call `torch.cuda.synchronize()` before it starts.",
    )

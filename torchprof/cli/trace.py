"""``torchprof trace``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torchprof
from torchprof.cli.models import make_model
from torchprof.cli.options import check_output, check_report, wants_timeline
from torchprof.cli.output import export, in_color, opening_of, print_report, print_run, report_of
from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    import torch


def trace_command(arguments: argparse.Namespace) -> int:
    from torchprof.traces.read import traces_in

    check_output(arguments)
    check_report(arguments)
    traces = [str(file) for file in traces_in(arguments.traces)]
    run = read_traces(traces, traced_model(arguments), arguments, paths=arguments.paths)
    code = export(run.export, arguments)
    if arguments.report:
        print_report(run, arguments)
    elif arguments.summary:
        print_run(run, arguments)
    else:
        opening = opening_of(run, ", ".join(traces))
        print(opening, *report_of(run, arguments, arguments.output, color=in_color(sys.stdout)), sep="\n")
    return code


def traced_model(arguments: argparse.Namespace) -> torch.nn.Module | None:
    if arguments.model:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        return make_model(arguments.model, arguments.kwargs)
    if arguments.kwargs != "{}":
        raise TorchprofError("--kwargs are arguments for a model: say which with --model.")
    return None


def read_traces(
    files: Sequence[str], model: torch.nn.Module | None, arguments: argparse.Namespace, **options: Any
) -> torchprof.Run:
    try:
        return torchprof.from_trace(
            files,
            model,
            with_timeline=wants_timeline(arguments) or arguments.report == "memory",
            progress=_tell_share if sys.stderr.isatty() else None,
            **options,
        )
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _tell_share(share: float) -> None:
    print(f"\rreading {share:4.0%} ", end="", file=sys.stderr, flush=True)

"""``torchprof merge``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torchprof
from torchprof.cli.options import check_output, check_report
from torchprof.cli.output import export, print_report, print_run, progress
from torchprof.cli.trace import read_traces, traced_model
from torchprof.errors import TorchprofError
from torchprof.run.file_read import is_run_file


def merge_command(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    if not arguments.summary:
        arguments.report = arguments.report or "ranks"
    check_report(arguments)
    if arguments.jobs == 0:
        raise TorchprofError("--jobs is at least 1.")
    model = traced_model(arguments)
    saved = [file for file in arguments.files if is_run_file(file)]
    traces = [file for file in arguments.files if file not in saved]
    if model is not None and not traces:
        raise TorchprofError("--model is for traces: saved runs know their model, and there is no trace.")

    def runs() -> Iterator[torchprof.Run]:
        file_of: dict[int, str] = {}
        for _, file in zip(progress("run", len(saved)), saved):
            run = torchprof.load(file)
            for meta in run.metas:
                if meta.rank in file_of and not arguments.add_cycles:
                    raise TorchprofError(
                        f"{file_of[meta.rank]} and {file} are both of rank {meta.rank}. Where they are of one process, "
                        "one after the other, --add-cycles adds them up. Processes that are no job are all of rank 0: "
                        "show each by itself."
                    )
                file_of[meta.rank] = file
            yield run
        if traces:
            yield read_traces(traces, model, arguments, processes=arguments.jobs or os.cpu_count() or 1)

    run = torchprof.merge(runs(), add_cycles=arguments.add_cycles)
    code = export(run.export, arguments)
    if arguments.summary:
        print_run(run, arguments)
    else:
        print_report(run, arguments)
    return code

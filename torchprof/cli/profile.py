"""``torchprof profile``."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext

import torchprof
from torchprof.cli.models import make_inputs, make_model, parse_input, sum_of
from torchprof.cli.options import check_output, wants_timeline
from torchprof.cli.output import INTERRUPTED, export, print_run, progress, tell_failure
from torchprof.errors import TorchprofError


def profile_command(arguments: argparse.Namespace) -> int:
    # torch 2.13 writes two lines a session to stderr, for every session, unless told otherwise before its import.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    inputs = [parse_input(text) for text in arguments.input]
    if not arguments.steps:
        raise TorchprofError("--steps is at least 1.")
    check_output(arguments)
    import torch

    if arguments.cuda and not torch.cuda.is_available():
        raise TorchprofError("--cuda: torch finds no CUDA device here. Leave it out to profile on the CPU.")
    torch.manual_seed(0)
    model = make_model(arguments.spec, arguments.kwargs)
    model.train(arguments.train)
    device = torch.device("cuda" if arguments.cuda else "cpu")
    model.to(device)
    args, kwargs = make_inputs(inputs, device)

    def step() -> None:
        with nullcontext() if arguments.backward else torch.no_grad():
            output = model(*args, **kwargs)
        if arguments.backward:
            sum_of(output).backward()
            model.zero_grad(set_to_none=True)

    prof = torchprof.Profile(
        model,
        use_cuda=arguments.cuda,
        profile_memory=arguments.memory,
        paths=arguments.paths,
        record_shapes=arguments.shapes,
        with_flops=arguments.flops,
        with_timeline=wants_timeline(arguments),
    )
    failure: Exception | KeyboardInterrupt | None = None
    try:
        for _ in progress("warm-up", arguments.warmup):
            step()
        with prof:
            for _ in progress("step", arguments.steps):
                step()
                prof.step()
    except TorchprofError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    code = 0
    if prof.exited:
        code = export(prof.run.export, arguments)  # before the table, which may break (a closed pipe, a wrong column)
        print_run(prof.run, arguments)
        sys.stdout.flush()
    if isinstance(failure, KeyboardInterrupt):
        what = "shown is what ran until then" if prof.exited else "nothing was recorded yet"
        print(f"torchprof: interrupted (Ctrl-C): {what}.", file=sys.stderr)
        return INTERRUPTED
    return code if failure is None else tell_failure(arguments, failure)

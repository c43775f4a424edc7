"""``torchprof flops``."""

from __future__ import annotations

import argparse
import os

import torchprof
from torchprof.cli.models import make_inputs, make_model, parse_input
from torchprof.cli.options import check_output
from torchprof.cli.output import export, print_run, tell_failure
from torchprof.errors import TorchprofError


def flops_command(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    inputs = [parse_input(text) for text in arguments.input]
    check_output(arguments)
    import torch

    device = torch.device("meta")
    with device:
        model = make_model(arguments.spec, arguments.kwargs)
    model.train(arguments.train)
    args, kwargs = make_inputs(inputs, device)
    try:
        with torch.set_grad_enabled(arguments.backward):
            run = torchprof.flops(model, *args, **kwargs)
    except TorchprofError:
        raise
    except Exception as error:
        return tell_failure(arguments, error)
    code = export(run.export, arguments)
    print_run(run, arguments)
    return code

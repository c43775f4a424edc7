"""``torchprof flops``: count parameters, MACs and FLOPs of a model on the meta device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torchprof
from torchprof.cli.models import make_inputs, make_model, parse_input
from torchprof.cli.options import (
    add_model_options,
    add_output_option,
    add_report_options,
    add_table_options,
    check_output,
    check_report,
)
from torchprof.cli.output import print_failure, print_overview, print_run, silence_kineto, write_files
from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    from torchprof.cli.options import Commands

_EPILOG = """\
SPEC and INPUT are as for `torchprof profile`. No data is made, so that a model of any size will do:
  torchprof flops transformers:LlamaForCausalLM --kwargs '{"config": {"num_hidden_layers": 80, "hidden_size": 8192}}' \\
      --input input_ids=int64:1,4096 --depth 2
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "flops",
        help="count parameters, MACs and FLOPs of a model from shapes alone",
        description="Make a model on the meta device, which holds no data, and count what its forward computes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add_output_option(parser)
    add_report_options(parser)
    add_table_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    silence_kineto()
    inputs = [parse_input(text) for text in arguments.input]
    check_output(arguments)
    check_report(arguments)
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
        return print_failure(arguments, error)
    code = write_files(run.export, arguments)
    print_run(run, arguments, lambda: print_overview(run))
    return code

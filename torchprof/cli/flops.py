"""``torchprof flops``: count parameters, MACs and FLOPs of a model on the meta device."""

from __future__ import annotations

import argparse

from torchprof.cli.models import call_of, make_model
from torchprof.cli.options import Commands, add_model_options, add_report_options, check_output, check_report
from torchprof.cli.output import print_failure, print_run, write_files
from torchprof.errors import TorchprofError

_EPILOG = """\
SPEC and INPUT are as of `torchprof profile`. No data is made, so a model of any size will do.

examples:
  torchprof flops torchvision.models:resnet50 --input 1,3,224,224 --summary
  torchprof flops transformers:LlamaForCausalLM --kwargs '{"config": {"num_hidden_layers": 80, "hidden_size": 8192}}' \\
      --input input_ids=int64:1,4096 --depth 2
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "flops",
        help="count parameters, MACs and FLOPs of a model from shapes alone",
        usage="torchprof flops SPEC --input INPUT [options]",
        description="Make a model on the meta device, whose tensors have no data, and count what a call computes.",
        epilog=_EPILOG,
    )
    add_model_options(parser)
    add_report_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    check_output(arguments)
    check_report(arguments)
    import torch

    from torchprof.profile.flops import flops_of_call

    device = torch.device("meta")
    with device:
        model = make_model(arguments.spec, arguments.kwargs)
    model.to(dtype=None if call.dtype is None else getattr(torch, call.dtype))
    model.train(arguments.train)
    call.method_of(model)  # checks the method
    args, kwargs = call.arguments(device)
    try:
        with torch.set_grad_enabled(arguments.backward):
            run = flops_of_call(model, call.method, args, kwargs)
    except TorchprofError:
        raise
    except Exception as error:
        return print_failure(call.text, error)
    code = write_files(run.export, arguments)
    print_run(run, arguments)
    return code

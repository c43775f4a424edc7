"""``torchprof flops``: count parameters, MACs and FLOPs of a model on the meta device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchprof.cli.models import ModelCall, call_of, make_model, make_without_data
from torchprof.cli.options import Commands, add_model_options, add_report_options, check_output, check_report
from torchprof.cli.output import print_failure, print_run, write_files
from torchprof.errors import TorchprofError
from torchprof.run.file import free_bytes

if TYPE_CHECKING:
    from torch import nn

    from torchprof.run.run import Run

_EPILOG = """\
SPEC and INPUT are as of `torchprof profile`. No data is made, so a model of any size will do. A model that does not run
without data runs on random data, on the CPU, if its parameters fit into half of the free memory.

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

    try:
        with torch.set_grad_enabled(arguments.backward):
            run = _run_of(arguments, call)
    except TorchprofError:
        raise
    except Exception as error:
        return print_failure(call.text, error)
    code = write_files(run.export, arguments)
    print_run(run, arguments)
    return code


def _run_of(arguments: argparse.Namespace, call: ModelCall) -> Run:
    """The run of a call on the meta device; on data if that fails, and its parameters and inputs fit into half of the
    free memory."""
    import torch
    from torch.utils._pytree import tree_leaves

    from torchprof.profile.flops import flops_of_call, flops_on_data

    model = make_without_data(arguments.spec, arguments.kwargs)
    _set_up(model, arguments, call)
    args, kwargs = call.arguments(torch.device("meta"))
    try:
        return flops_of_call(model, call.method, args, kwargs)
    except Exception as error:  # a model may raise anything
        tensors = (*model.parameters(), *(value for value in tree_leaves((args, kwargs)) if hasattr(value, "nbytes")))
        if sum(tensor.nbytes for tensor in tensors) > min(free_bytes(), default=0) // 2:
            raise
        failure = error
    model = make_model(arguments.spec, arguments.kwargs)
    _set_up(model, arguments, call)
    args, kwargs = call.arguments("cpu")
    return flops_on_data(model, call.method, args, kwargs, failure)


def _set_up(model: nn.Module, arguments: argparse.Namespace, call: ModelCall) -> None:
    import torch

    model.to(dtype=None if call.dtype is None else getattr(torch, call.dtype))
    model.train(arguments.train)
    call.method_of(model)  # checks the method

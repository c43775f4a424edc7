"""``torchprof profile``: profile a model on random inputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torchprof
from torchprof.cli.models import make_inputs, make_model, parse_input, sum_of
from torchprof.cli.options import (
    add_model_options,
    add_options,
    add_output_option,
    add_report_options,
    add_table_options,
    check_output,
    check_report,
    non_negative_int,
    wants_timeline,
)
from torchprof.cli.output import (
    INTERRUPTED,
    print_failure,
    print_overview,
    print_run,
    progress,
    silence_kineto,
    write_files,
)
from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    import torch

    from torchprof.cli.options import Commands

_EPILOG = """\
SPEC names what makes the model: package.module:callable or file.py:callable, a class, a function or a module.

An input is [NAME=][DTYPE:]SHAPE[:LOW..HIGH], as in
  1,3,224,224                    a float32 tensor of random numbers from 0 to 1, passed by position
  ids=int64:1,128:0..30522       whole numbers from 0 to 30521, passed as ids=

Examples:
  torchprof profile torchvision.models:alexnet --input 1,3,224,224 --memory
  torchprof profile net.py:Net --kwargs '{"width": 64}' --input 8,64 --backward --train --steps 20 -o run.json
  torchprof profile transformers:BertModel --kwargs '{"config": {"num_hidden_layers": 2}}' \\
      --input input_ids=int64:1,128:0..30522
  torchprof show run.json --depth 2
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile a model on random inputs",
        description="Make a model, run it on random inputs, and print what each layer cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--cuda", action="store_true", help="run on the GPU and record its kernels")
    add_options(parser, "--memory", "--flops", "--shapes")
    parser.add_argument(
        "--warmup", type=non_negative_int, default=1, metavar="N", help="steps before, not recorded (default 1)"
    )
    parser.add_argument("--steps", type=non_negative_int, default=1, metavar="N", help="recorded steps (default 1)")
    parser.add_argument("--paths", nargs="+", metavar="PATH", help="profile only these layers: features.0, layer.*")
    add_output_option(parser)
    add_report_options(parser)
    add_table_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    silence_kineto()
    model, step = _model_and_step(arguments)
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
        code = write_files(prof.run.export, arguments)  # first, since the table may fail: closed pipe, unknown column
        print_run(prof.run, arguments, lambda: print_overview(prof.run))
        sys.stdout.flush()
    if isinstance(failure, KeyboardInterrupt):
        what = "shown is what ran until then" if prof.exited else "nothing was recorded yet"
        print(f"torchprof: interrupted (Ctrl-C): {what}.", file=sys.stderr)
        return INTERRUPTED
    return code if failure is None else print_failure(arguments, failure)


def _model_and_step(arguments: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], None]]:
    """The model, and a function that runs one step of it. All arguments are checked before torch is imported."""
    inputs = [parse_input(text) for text in arguments.input]
    if not arguments.steps:
        raise TorchprofError("--steps is at least 1.")
    check_output(arguments)
    check_report(arguments)
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

    return model, step

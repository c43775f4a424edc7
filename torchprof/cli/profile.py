"""``torchprof profile``: profile a model on random inputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torchprof
from torchprof.cli import options
from torchprof.cli.models import ModelCall, call_of, make_model, sum_of
from torchprof.cli.output import INTERRUPTED, print_failure, print_run, progress, shown_meanwhile, write_files
from torchprof.errors import TorchprofError, suggest

if TYPE_CHECKING:
    import torch

_EPILOG = """\
SPEC names what makes the model: a class or a function, or the model itself.

INPUT is [NAME=][DTYPE:]SHAPE[:LOW..HIGH]: a tensor of random numbers, once for each input of the model.
  1,3,224,224                    floating numbers from 0 to 1, passed by position
  ids=int64:1,128:0..30522       whole numbers from 0 to 30521, passed as ids=
  '[2,8;2,8]'                    a list of two tensors; batch='[2,8;2,8]' passes it as batch=
  '{img=2,8;ids=int64:2,8}'      a dict
Arguments of the call that are not tensors go to --call-kwargs.

examples:
  torchprof profile torchvision.models:alexnet --input 1,3,224,224 --memory
  torchprof profile net.py:Net --kwargs '{"width": 64}' --input 8,64 --backward --train --steps 20 -o run.json
  torchprof profile net.py:Net --input 8,64 --device cuda --dtype bf16 --report ops
  torchprof profile transformers:GPT2LMHeadModel --kwargs '{"config": {"n_layer": 2}}' \\
      --input input_ids=int64:1,16:0..50257 --method generate --call-kwargs '{"max_new_tokens": 8}'
"""


def add_to(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile a model on random inputs",
        usage="torchprof profile SPEC --input INPUT [options]",
        description="Make a model, call it with random inputs, and print what each layer cost.",
        epilog=_EPILOG,
    )
    model = options.add_model_options(parser)
    model.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1, … (default auto: where the model is)"
    )
    model.add_argument("--cuda", dest="device", action="store_const", const="cuda", help="the same as --device cuda")
    recorded = parser.add_argument_group("what is recorded")
    recorded.add_argument(
        "--steps", type=options.whole_number, default=1, metavar="N", help="recorded calls (default 1)"
    )
    options.add_options(recorded, "--warmup", default=1)
    options.add_options(recorded, "--memory", "--timeline", "--flops", "--shapes", "--paths")
    options.add_report_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    if not arguments.steps:
        raise TorchprofError("--steps is at least 1.")
    options.check_output(arguments)
    options.check_report(arguments)
    model, device = _model_on_device(arguments)
    step = _step(model, device, call, arguments.backward)
    prof = torchprof.Profile(
        model,
        device=arguments.device,
        profile_memory=arguments.memory or arguments.timeline,
        paths=arguments.paths,
        record_shapes=arguments.shapes,
        with_flops=arguments.flops,
        with_timeline=options.wants_timeline(arguments),
    )
    failure: Exception | KeyboardInterrupt | None = None
    try:
        for _ in progress("warm-up", arguments.warmup):
            step()
        # Nothing is written meanwhile: its time would be recorded.
        with shown_meanwhile("recording"), prof:
            for _ in range(arguments.steps):
                step()
                prof.step()
    except TorchprofError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    code = 0
    if prof.exited:
        code = write_files(prof.run.export, arguments)  # first, since the table may fail: closed pipe, unknown column
        print_run(prof.run, arguments)
        sys.stdout.flush()
    if isinstance(failure, KeyboardInterrupt):
        what = "the report shows what ran until then" if prof.exited else "nothing was recorded yet"
        print(f"torchprof: interrupted (Ctrl-C): {what}.", file=sys.stderr)
        return INTERRUPTED
    return code if failure is None else print_failure(call.text, failure)


def _model_on_device(arguments: argparse.Namespace) -> tuple[torch.nn.Module, torch.device]:
    """The model, in its mode, dtype and place, and the device on which it is."""
    import torch

    asked = None if arguments.device == "auto" else _device(arguments.device)
    torch.manual_seed(0)
    model = make_model(arguments.spec, arguments.kwargs)
    model.train(arguments.train)
    model.to(device=asked, dtype=arguments.dtype and getattr(torch, arguments.dtype))
    tensors = [*model.parameters(), *model.buffers()]
    device = asked or (tensors[0].device if tensors else torch.device("cpu"))
    if device.type == "meta":
        raise TorchprofError(f"{arguments.spec} is on the meta device, which computes nothing: use torchprof flops.")
    return model, device


def _device(name: str) -> torch.device:
    """The device of ``--device``. Raises TorchprofError if torch does not know it, or finds none."""
    import torch

    kind = name.partition(":")[0]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        choice = suggest(kind, ["auto", "cpu", "cuda", "xpu", "mps"], every=True)
        raise TorchprofError(f"--device {name}: torch knows no such device. {choice}") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        numbered = " of that number" if ":" in name else ""
        raise TorchprofError(
            f"--device {name}: torch finds no {kind.upper()} device{numbered} here. Without --device, the model stays "
            "where it is made."
        ) from error
    return device


def _step(model: torch.nn.Module, device: torch.device, call: ModelCall, backward: bool) -> Callable[[], None]:
    """A function that calls the model once, with backward if wanted."""
    import torch

    method = call.method_of(model)
    args, kwargs = call.arguments(device)

    def step() -> None:
        with nullcontext() if backward else torch.no_grad():
            output = method(*args, **kwargs)
        if backward:
            sum_of(output).backward()
            model.zero_grad(set_to_none=True)

    return step

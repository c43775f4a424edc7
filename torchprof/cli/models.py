"""SPEC and INPUT of the command line: make the model that SPEC names, and call it with random tensors."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchprof.errors import TorchprofError, suggest

if TYPE_CHECKING:
    import torch
    from torch import nn

# The call: --method, --input and --call-kwargs

_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<dtype>[a-z]\w*):)?(?P<shape>\d+(?:,\d+)*)"
    r"(?::(?P<low>-?\d+(?:\.\d+)?)\.\.(?P<high>-?\d+(?:\.\d+)?))?"
)

_INPUTS = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<open>[\[{])(?P<items>.*)(?P<close>[\]}])")


class ModelCall(NamedTuple):
    """How the command line calls the model: a method and its arguments, also as the ``text`` that the user wrote."""

    method: str
    inputs: list[_Input | _Inputs]
    kwargs: dict[str, Any]
    dtype: str | None
    text: str

    def method_of(self, model: nn.Module) -> Callable[..., Any]:
        """The method to call. Raises TorchprofError if the model does not have it."""
        method: Any = model if self.method == "forward" else getattr(model, self.method, None)
        if not callable(method):
            from torch import nn

            names = [name for name in dir(type(model)) if name not in dir(nn.Module) and not name.startswith("_")]
            raise TorchprofError(
                f"--method {self.method}: {type(model).__name__} has no such method. "
                f"{suggest(self.method, ['forward', *names])}"
            )
        return method  # type: ignore[no-any-return]

    def arguments(self, device: torch.device | str) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments, with tensors on that device."""
        args = [given.make(device, self.dtype) for given in self.inputs if given.name is None]
        named = {given.name: given.make(device, self.dtype) for given in self.inputs if given.name is not None}
        return args, {**named, **self.kwargs}


def call_of(arguments: argparse.Namespace) -> ModelCall:
    """Parse ``--method``, ``--input`` and ``--call-kwargs``. Raises TorchprofError; does not import torch."""
    inputs = [parse_input(text) for text in arguments.input]
    kwargs = _json_object("--call-kwargs", arguments.call_kwargs, '{"max_new_tokens": 8}')
    names = [argument.name for argument in inputs if argument.name is not None]
    for name in names:
        if name in kwargs or names.count(name) > 1:
            where = "in --input and in --call-kwargs" if name in kwargs else "in --input"
            raise TorchprofError(f"{name} is given twice: {where}.")
    text = " ".join([*arguments.input, *([arguments.call_kwargs] if kwargs else [])])
    return ModelCall(arguments.method, inputs, kwargs, arguments.dtype, text)


def parse_input(text: str) -> _Input | _Inputs:
    """Parse ``[NAME=][DTYPE:]SHAPE[:LOW..HIGH]``, or a list ``[NAME=]'[…;…]'`` or a dict ``[NAME=]'{NAME=…;…}'`` of
    these. Raises TorchprofError."""
    if (several := _INPUTS.fullmatch(text)) is not None:
        parts = [_INPUT.fullmatch(part.strip()) for part in several["items"].split(";")]
        names = [part and part["name"] for part in parts]
        is_dict = several["open"] == "{"
        is_right = None not in parts and all((name is not None) == is_dict for name in names)
        if several["close"] != "]}"[is_dict] or not is_right or len({*names}) < len(names) * is_dict:
            raise TorchprofError(
                f"--input {text!r} is neither a list such as '[2,8;2,8]' nor a dict such as '{{a=2,8;b=2,8}}'."
            )
        return _Inputs(text, several["name"], [_parse_one(part.strip()) for part in several["items"].split(";")])
    return _parse_one(text)


def _parse_one(text: str) -> _Input:
    if (match := _INPUT.fullmatch(text)) is None:
        raise TorchprofError(
            f"--input {text!r} does not have the form [NAME=][DTYPE:]SHAPE[:LOW..HIGH]. Examples: 1,3,224,224 or "
            "ids=int64:1,128:0..30522; a list is '[2,8;2,8]', a dict '{img=2,8;ids=int64:2,8}'. What is not a tensor "
            "goes to --call-kwargs."
        )
    low, high = (None if match[end] is None else float(match[end]) for end in ("low", "high"))
    if low is not None and high is not None and low >= high:
        raise TorchprofError(f"--input {text!r}: the range {match['low']}..{match['high']} is empty.")
    shape = tuple(map(int, match["shape"].split(",")))
    return _Input(text, match["name"], match["dtype"], shape, low, high)


class _Input(NamedTuple):
    """The description of a random tensor: its shape, dtype and range of values, from ``low`` to ``high`` (exclusive).
    ``name``: the keyword argument; None for a positional argument. ``text``: what the user wrote."""

    text: str
    name: str | None
    dtype: str | None
    shape: tuple[int, ...]
    low: float | None
    high: float | None

    def make(self, device: torch.device | str, default_dtype: str | None) -> torch.Tensor:
        """The tensor. ``default_dtype`` is used if the description has none."""
        import torch

        name = self.dtype or default_dtype or "float32"
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            known = sorted(attribute for attribute, value in vars(torch).items() if isinstance(value, torch.dtype))
            raise TorchprofError(f"--input {self.text}: torch has no dtype {name!r}. {suggest(name, known)}")
        try:
            if dtype.is_floating_point or dtype.is_complex:
                low, high = self.low or 0.0, 1.0 if self.high is None else self.high
                return torch.rand(self.shape, device=device).mul_(high - low).add_(low).to(dtype)
            first, end = math.ceil(self.low or 0), 2 if self.high is None else math.ceil(self.high)
            return torch.randint(first, end, self.shape, device=device).to(dtype)
        except (RuntimeError, TypeError) as error:
            raise TorchprofError(f"--input {self.text} cannot be made: {error}") from error


class _Inputs(NamedTuple):
    """The description of a list of random tensors, or of a dict, if they have names. ``name``: as in ``_Input``."""

    text: str
    name: str | None
    items: list[_Input]

    def make(self, device: torch.device | str, default_dtype: str | None) -> Any:
        """The list or the dict."""
        tensors = [item.make(device, default_dtype) for item in self.items]
        return dict(zip((item.name for item in self.items), tensors)) if self.items[0].name else tensors


def _json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """Parse an option whose value is a JSON object. Raises TorchprofError with an example of one."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TorchprofError(f"{option} is not JSON ({error}). Write an object: '{example}'.") from error
    if isinstance(value, dict):
        return value
    raise TorchprofError(f"{option} is {text}, not a JSON object. Write an object: '{example}'.")


def sum_of(output: Any) -> torch.Tensor:
    """The sum of all tensors in an output that require a gradient: the loss from which backward starts."""
    import torch

    sums: list[torch.Tensor] = []
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor) and value.requires_grad:
            sums.append(value.sum())
        elif isinstance(value, (dict, tuple, list)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    if not sums:
        raise TorchprofError("--backward: no output of the model requires a gradient.")
    return sum(sums[1:], sums[0])


# The model: SPEC and --kwargs

SPECS = "file.py:Net, package.module:Net, timm:NAME, torchvision:NAME or transformers:FOLDER"


def make_without_data(spec: str, kwargs_text: str) -> torch.nn.Module:
    """The module of ``make_model`` on the meta device, which needs no memory; with data if it cannot be made there."""
    import torch

    try:
        with torch.device("meta"):
            return make_model(spec, kwargs_text)
    except TorchprofError:  # perhaps because the model reads a value of a tensor when it is made
        return make_model(spec, kwargs_text)


def make_model(spec: str, kwargs_text: str) -> torch.nn.Module:
    """The module that ``spec`` names; if it names a callable, the module that this makes. ``kwargs_text``: the keyword
    arguments of the callable, a JSON object. Raises TorchprofError."""
    from torch import nn

    kwargs = _json_object("--kwargs", kwargs_text, '{"width": 64}')
    made = _find(spec)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TorchprofError(f"{spec} is {made!r:.60}: it is not a module and cannot be called to make one.")
        try:
            if hasattr(made, "config_class") and isinstance(kwargs.get("config", {}), dict):
                # Hugging Face models take a config object.
                kwargs["config"] = made.config_class(**kwargs.get("config", {}))
            made = made(**kwargs)
        except TorchprofError:
            raise
        except Exception as error:
            raise TorchprofError(f"{spec} failed when it was called: {type(error).__name__}: {error}") from error
    elif kwargs:
        raise TorchprofError(f"{spec} is a module, not a function that makes one: leave out --kwargs.")
    if not isinstance(made, nn.Module):
        raise TorchprofError(f"{spec} made {made!r:.60}, which is not a torch.nn.Module.")
    return made


def _find(spec: str) -> Any:
    """Import what ``package.module:name`` or ``file.py:name`` names; for a model of a library, get what makes it."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise TorchprofError(f"{spec!r} names no model: write {SPECS}.")
    try:
        if place.endswith(".py"):
            module = _import_file(place)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except TorchprofError:
        raise
    except Exception as error:
        install = f". Install it: pip install {place}" if place in _LIBRARIES and isinstance(error, ImportError) else ""
        raise TorchprofError(f"{place} could not be imported: {type(error).__name__}: {error}{install}") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        if place in _LIBRARIES:
            return partial(_LIBRARIES[place], module, name)
        names = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise TorchprofError(f"{place} has no {name!r}. {suggest(name, names)}") from error


def _import_file(file: str) -> ModuleType:
    path = Path(file).resolve()
    if not path.is_file():
        raise TorchprofError(f"There is no file {file}.")
    sys.path.insert(0, str(path.parent))
    file_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert file_spec is not None and file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    sys.modules.setdefault(path.stem, module)  # setdefault: another module may have this name
    file_spec.loader.exec_module(module)
    return module


def _of_transformers(transformers: Any, place: str, **kwargs: Any) -> Any:
    """The model of a ``config.json``, or of a folder with one, with random weights. ``kwargs``: for its config."""
    path = Path(place)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TorchprofError(
            f"transformers has no {place!r}, and there is no file {file}: write transformers:LlamaForCausalLM, or "
            "transformers:FOLDER with the folder of a config.json."
        )
    config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False, **kwargs)
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    return classes[0](config) if classes and classes[0] else transformers.AutoModel.from_config(config)


_LIBRARIES: dict[str, Callable[..., Any]] = {
    "timm": lambda timm, name, **kwargs: timm.create_model(name, pretrained=False, **kwargs),
    "torchvision": lambda torchvision, name, **kwargs: torchvision.models.get_model(name, weights=None, **kwargs),
    "transformers": _of_transformers,
}
"""What makes a model of a library from a name that is not in its package."""

"""The state of a model and of what torchprof touches, to be compared before and after."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from torchprof import Profile

HOOKS = {key for key, value in vars(nn.Module()).items() if key.endswith("_hooks") and isinstance(value, dict)}


def snapshot(model: nn.Module, values: bool = False) -> dict[str, Any]:
    """All that a label could leave behind, by identity: instances, their classes, hooks, torch's own functions.

    ``values``: what is in the buffers too, which a call in train mode may change.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name, "type"] = type(module)
        found[name, "dict"] = {key: id(value) for key, value in vars(module).items()}
        found[name, "hooks"] = {key: list(value.items()) for key, value in vars(module).items() if key in HOOKS}
        found[name, "state"] = {
            key: id(value)
            for group in ("_parameters", "_buffers", "_modules")
            for key, value in vars(module)[group].items()
        }
        if values:
            found[name, "buffers"] = {key: value.tolist() for key, value in module.named_buffers(recurse=False)}
        found[name, "training"] = module.training
        for cls in type(module).__mro__:
            found["forward of", cls] = cls.__dict__.get("forward", "none of its own")
            found["keys of", cls] = {
                key
                for key in cls.__dict__
                if key != "__slotnames__" and not key.startswith("___")  # copying and torch.compile add those
            }
    found["call"] = nn.Module.__call__, nn.Module.__dict__["_call_impl"]
    found["limit"] = sys.getrecursionlimit()
    session = torch.autograd.profiler.profile
    found["session"] = session.__dict__["_prepare_trace"], session.__dict__["_start_trace"], session.__enter__
    found["active"] = torch.autograd.profiler._is_profiler_enabled
    return found


def untouched_models() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """A fixture: a function that takes a model, which must be unchanged at the end of the test, when no Profile may be
    open."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []

    def keep(model: nn.Module) -> nn.Module:
        kept.append((model, snapshot(model, values=True)))
        return model

    yield keep
    for model, before in kept:
        assert snapshot(model, values=True) == before
        with Profile(model):
            pass

"""Checks of arguments and settings."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from os import PathLike, fspath
from typing import Any

from torch import nn

from torchprof import TorchprofError


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    return isinstance(value, (str, PathLike)) and bool(fspath(value))


def choose(given: str, known: Iterable[str]) -> str:
    """A sentence with the valid choices, and with the choice that was probably meant."""
    choices = {choice.lower(): choice for choice in known}
    near = get_close_matches(given.lower(), choices, 1, 0.6)
    meant = f"Did you mean {choices[near[0]]!r}? " if near else ""
    return f"{meant}Choose from {', '.join(map(repr, choices.values()))}."


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = f" Make one first: {model.__name__}(...)." if isinstance(model, type) else ""
        raise TorchprofError(f"The model has to be a torch.nn.Module, not {model!r:.80}.{hint}")


def check_whole(name: str, value: Any, least: int) -> None:
    if not is_whole(value) or value < least:
        raise TorchprofError(f"{name}={value!r} should be a whole number from {least} on.")


def checked_ignored_types(types: Any) -> frozenset[type]:
    if types is None:
        return frozenset()
    listed = list(types) if isinstance(types, Iterable) and not isinstance(types, (str, nn.Module)) else [types]
    for module in listed:
        if not isinstance(module, type) or not issubclass(module, nn.Module):
            raise TorchprofError(f"Modules to ignore are given by type, [torch.nn.Dropout], not as {module!r:.80}.")
    return frozenset(listed)

"""``Profile`` as a decorator: the first call of the function is profiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torchprof.errors import TorchprofError


class ProfiledBlock(Protocol):
    """A ``Profile``. ``entered``: its block has begun, or ended."""

    entered: bool

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: Any) -> None: ...


def decorated(function: Callable[..., Any], profile: ProfiledBlock) -> Callable[..., Any]:
    """Wrap a function, coroutine function or generator function, so that its first call is inside the profile's block.

    A profile is used once: later calls, and calls inside the first one, are not profiled. Raises TorchprofError for an
    asynchronous generator.
    """

    @functools.wraps(function)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        if profile.entered:
            return function(*args, **kwargs)
        with profile:
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def profiled_coroutine(*args: Any, **kwargs: Any) -> Any:
        if profile.entered:
            return await function(*args, **kwargs)
        with profile:
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def profiled_generator(*args: Any, **kwargs: Any) -> Any:
        if profile.entered:
            return (yield from function(*args, **kwargs))
        with profile:
            return (yield from function(*args, **kwargs))

    if inspect.isasyncgenfunction(function):
        raise TorchprofError(
            f"{function.__qualname__} is an asynchronous generator, which Profile cannot decorate: put the block "
            "inside it, or around the loop that uses it."
        )
    if inspect.iscoroutinefunction(function):
        return profiled_coroutine
    return profiled_generator if inspect.isgeneratorfunction(function) else profiled

"""``Profile`` as a decorator: the first call of the function is profiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchprof.errors import TorchprofError


def decorated(function: Callable[..., Any], block: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    """Wrap a function, coroutine function or generator function, so that each call is inside a block.

    ``block()``: the profile for the first call; for later calls, and calls inside the first one, a block that does
    nothing, because a profile is used once. Raises TorchprofError for an asynchronous generator.
    """

    @functools.wraps(function)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        with block():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def profiled_coroutine(*args: Any, **kwargs: Any) -> Any:
        with block():
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def profiled_generator(*args: Any, **kwargs: Any) -> Any:
        with block():
            return (yield from function(*args, **kwargs))

    if inspect.isasyncgenfunction(function):
        raise TorchprofError(
            f"{function.__qualname__} is an asynchronous generator, which Profile cannot decorate: put the block "
            "inside it, or around the loop that uses it."
        )
    if inspect.iscoroutinefunction(function):
        return profiled_coroutine
    return profiled_generator if inspect.isgeneratorfunction(function) else profiled

"""Inductor's code for the CPU without the compiler of C++, which takes most of the time of torch.compile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor


def _kernel_of_zeros(_: object, argument_types: Sequence[str], source: str) -> Callable[..., None]:
    written = [
        number for number, kind in enumerate(argument_types) if kind.endswith("*") and not kind.startswith("const ")
    ]

    def kernel(*arguments: Tensor) -> None:
        for number in written:  # without an operator, which would be in the recording
            ctypes.memset(arguments[number].data_ptr(), 0, arguments[number].nbytes)

    return kernel


@contextmanager
def kernels_of_zeros() -> Iterator[None]:
    """In the block, kernels of C++ are not compiled: they write zeros.

    For tests of graphs and of the operators that compiled code calls in libraries, which are as always."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", _kernel_of_zeros)
        PyCodeCache.cache_clear()
        yield
    PyCodeCache.cache_clear()  # other tests in this process may compile equal code

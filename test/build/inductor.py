"""Inductor's code for the CPU without the compiler of C++, which takes most of the time of torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Kernels of C++ are neither compiled nor run in the block, so what they would write is whatever the memory holds.

    For tests of graphs and of the operators that compiled code calls in libraries, which are as always."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
        PyCodeCache.cache_clear()
        yield
    PyCodeCache.cache_clear()  # other tests in this process may compile equal code

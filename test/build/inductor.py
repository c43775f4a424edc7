"""Inductor's code for the CPU without the compiler of C++, which takes most of the time of torch.compile.

``python -m build.inductor FILE`` runs a script so.
"""

from __future__ import annotations

import ctypes
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast


def _kernel_of_zeros(_: object, argument_types: Sequence[str], source: str) -> Callable[..., None]:
    written = [
        number for number, kind in enumerate(argument_types) if kind.endswith("*") and not kind.startswith("const ")
    ]

    name = re.search(r'RecordFunctionHandle \w+\("(\w+)"', source)

    def kernel(*arguments: Tensor) -> None:
        with nullcontext() if name is None else _RecordFunctionFast(name[1]):
            for number in written:  # without an operator, which would be in the recording
                ctypes.memset(arguments[number].data_ptr(), 0, arguments[number].nbytes)

    return kernel


@contextmanager
def kernels_of_zeros() -> Iterator[None]:
    """In the block, kernels of C++ are not compiled: they write zeros. They have the events that they would have.

    For tests of graphs and of the operators that compiled code calls in libraries, which are as always."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", _kernel_of_zeros)
        PyCodeCache.cache_clear()
        yield
    PyCodeCache.cache_clear()  # other tests in this process may compile equal code


def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fixture: nothing is compiled yet. Kernels write zeros, but in tests with the mark ``real_kernels``."""
    torch._dynamo.reset()
    with nullcontext() if request.node.get_closest_marker("real_kernels") else kernels_of_zeros():
        yield
    torch._dynamo.reset()


def train(model: Any, x: Tensor) -> None:
    output = model(x)
    (output[0] if isinstance(output, tuple) else output).sum().backward()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    with kernels_of_zeros():
        runpy.run_path(sys.argv[1], run_name="__main__")

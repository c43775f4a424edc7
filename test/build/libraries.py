"""The version of torch, what it records, and libraries that some tests use if they are installed and work with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

RELEASE: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

HAS_SHAPES_OF_LISTS = hasattr(torch._C._autograd._KinetoEvent, "structured_input_shapes")
"""Whether this torch gives the shapes of lists of tensors. Seen in 2.13 to 2.15; not in 2.4 to 2.11."""
HAS_PYTHON_CALLS = hasattr(torch._C._autograd._KinetoEvent, "is_python_function")
"""Whether this torch gives an event for each call of a Python function. Seen in 2.13 to 2.15; not in 2.4 to 2.11."""


def usable_transformers() -> Any:
    """``transformers``; the test is skipped without it, and if it needs a newer torch."""
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_torch_available():
        pytest.skip("this transformers needs a newer torch")
    return transformers

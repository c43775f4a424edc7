"""The version of torch, and libraries that some tests use if they are installed and work with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

RELEASE: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def usable_transformers() -> Any:
    """``transformers``; the test is skipped without it, and if it needs a newer torch."""
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_torch_available():
        pytest.skip("this transformers needs a newer torch")
    return transformers

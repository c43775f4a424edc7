"""The tables of torch's types and operators, compared with torch."""

from __future__ import annotations

import importlib

import pytest
import torch

from torchprof.run import torch_names
from torchprof.run.torch_names import DTYPES, recorded_as

# Not in torch 2.4.
NEW = {"_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_fused_attention_overrideable"}


def test_types_have_torchs_sizes_and_short_names() -> None:
    try:
        short = importlib.import_module("torch.utils._dtype_abbrs").dtype_abbrs
    except ImportError:  # torch before 2.7
        short = {}
    known = [(dtype, getattr(torch, dtype.name)) for dtype in DTYPES if hasattr(torch, dtype.name)]
    assert len(known) > 15
    for dtype, torchs in known:
        assert dtype.nbytes == torchs.itemsize, dtype
        assert dtype.short == short.get(torchs, dtype.short) or not dtype.short, dtype


def test_each_name_of_a_type_is_of_one_type() -> None:
    for names in (
        [dtype.name for dtype in DTYPES],
        [dtype.scalar_type for dtype in DTYPES],
        [name for dtype in DTYPES for name in dtype.recorded],
        [name for dtype in DTYPES for name in dtype.others],
    ):
        assert len(names) == len({*names})
    assert recorded_as("float32", "float16") == {"float", "c10::Half"}


@pytest.mark.parametrize(
    "table", ["CONVOLUTIONS", "FACTORS", "FORWARD_ATTENTION", "ON_PARAMETERS", "PRODUCTS", "VIEWS"]
)
def test_operators_are_torchs(table: str) -> None:
    operators = torch_names.without_aten(getattr(torch_names, table))
    assert {name for name in operators if not hasattr(torch.ops.aten, name)} <= NEW

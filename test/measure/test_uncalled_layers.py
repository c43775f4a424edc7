"""The warning about layers that were never called, in real models: silence where nothing is wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from torchprof import Profile
from torchprof.run.run import Run


class OfFunctions(nn.Module):
    """Computes with the parameters of children that it never calls, as torchvision's Swin Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.blocks
        return dropout(linear(x, block.weight, block.bias), self.drop.p, self.training)


class Unused(nn.Module):
    """Has a block that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.unused = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x, x, x)[0]


class Tied(nn.Module):
    """Has an embedding that is called under another name, as T5 does, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, 8)
        self.unused = nn.Embedding(10, 4)
        self.embed = nn.Embedding(10, 8)
        self.embed.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


def uncalled(run: Run) -> list[tuple[str, ...]]:
    return [warning.layers for warning in run.warnings if warning.code == "never_called"]


@pytest.mark.parametrize(
    "make",
    [
        OfFunctions,
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),  # one operator for the whole layer
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    ],
    ids=["functions", "encoder layer", "encoder layer, fast path", "transformer"],
)
def test_layers_whose_parameters_the_layer_above_uses_have_no_warning(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.rand(3, 2, 8)
    with torch.inference_mode(), Profile(model) as prof:
        model(*[x] * (2 if isinstance(model, nn.Transformer) else 1))
    assert uncalled(prof.run) == []


def test_an_unused_block_is_named_once() -> None:
    model, x = Unused(), torch.rand(3, 2, 8)
    with Profile(model) as prof:
        model(x).sum().backward()
    assert [name for name, one in model.named_parameters() if one.grad is None] == ["unused.0.weight", "unused.0.bias"]
    assert uncalled(prof.run) == [("Unused.unused",)]


def test_a_tied_layer_may_be_called_in_place_of_the_first() -> None:
    model = Tied()
    with Profile(model) as prof:
        model(torch.tensor([1, 2]))
    assert uncalled(prof.run) == [("Tied.unused",)]


def test_a_model_that_was_never_called_is_named_alone() -> None:
    model, other = nn.ReLU(), Unused()
    with Profile([model, other]) as prof:
        torch.rand(3).sum()
    assert uncalled(prof.run) == [("ReLU", "Unused")]

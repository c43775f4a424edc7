"""The order of calls that is read from a source, against the calls that it makes."""

from __future__ import annotations

import pytest
from models import Mlp
from torch import Tensor, nn

from torchprof.call_order import call_order


class Methods(nn.Module):
    """Defines in one order, calls in another: through a method, a loop, a nested call, an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second, self.first, self.inner = (nn.Identity() for _ in range(4))
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        x = self._begin(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.inner(x))

    def _begin(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_the_order_is_that_of_the_calls() -> None:
    assert call_order(Methods) == ("first", "second", "blocks", "inner", "last")
    assert call_order(Mlp) == ("fc1", "act", "fc2")
    dropouts = [name for name in call_order(nn.TransformerEncoderLayer) if name.startswith("dropout")]
    assert dropouts == ["dropout1", "dropout", "dropout2"]


def test_a_method_that_calls_itself_is_followed_once() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.forward(self.fc(x))

    assert call_order(Again) == ("fc",)


@pytest.mark.parametrize("forward", [len, lambda self, x: self.fc(x), eval("lambda self, x: self.fc(x)")])
def test_what_has_no_source_of_its_own_has_no_order(forward) -> None:
    assert call_order(type("Made", (), {"forward": forward})) == ()

"""The order of calls that is read from a source, against the calls that it makes."""

from __future__ import annotations

import pytest
import torch
from build.models import Mlp
from torch import Tensor, nn

from torchprof.traces.call_order import call_order


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
    assert list(call_order(Methods)) == ["first", "second", "blocks", "inner", "last"]
    assert call_order(Mlp) == {"fc1": True, "act": True, "fc2": True}
    dropouts = [name for name in call_order(nn.TransformerEncoderLayer) if name.startswith("dropout")]
    assert dropouts == ["dropout1", "dropout", "dropout2"]


def test_a_method_that_calls_itself_is_followed_once() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.forward(self.fc(x))

    assert call_order(Again) == {"fc": True}


class Branches(nn.Module):
    """Uses some of what it holds in some calls only, or for something else than a call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.early(x).sum() > 0:
            x = self._rarely(x)
        elif x.dim() > 1:
            x = self.seldom(x)
        x = self.never(x) if x.requires_grad else self.both(x)
        try:
            x = self.tried(x, p=self.asked.p)
        except RuntimeError:
            x = self.saved(x)
        return self.both(self.parts.inner(x))

    def _rarely(self, x: Tensor) -> Tensor:
        return self.rare(x)


def test_what_only_a_branch_uses_may_not_be_called() -> None:
    order = call_order(Branches)
    assert [name for name, always in order.items() if always] == ["early", "both", "tried", "parts"]
    assert list(order) == ["early", "rare", "seldom", "never", "both", "asked", "tried", "saved", "parts"]


class Early(nn.Module):
    """Returns early now and then, at the end or inside of a method."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x))
        for _ in range(2):
            if x.sum() > 0:
                return self.early(x)
        return self.last(x)

    def inner(self, x: Tensor) -> Tensor:
        if x.dim() > 1:
            return x
        return self.rest(x)


def test_what_comes_after_a_return_need_not_be_called() -> None:
    assert call_order(Early) == {"first": True, "rest": False, "early": False, "last": False}


@pytest.mark.parametrize("forward", [len, lambda self, x: self.fc(x), eval("lambda self, x: self.fc(x)")])
def test_what_has_no_source_of_its_own_has_no_order(forward) -> None:
    assert call_order(type("Made", (), {"forward": forward})) == {}


def test_torchscript_has_no_order() -> None:
    """Its classes have a forward that they do not give away: only what is made of them has one."""
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(AttributeError):
        _ = type(scripted).forward
    assert call_order(type(scripted)) == {}

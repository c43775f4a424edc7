"""The order of calls that ``call_order`` reads from the source of a class."""

from __future__ import annotations

import pytest
import torch
from build.models import Mlp
from torch import Tensor, nn

from torchprof.traces.model import call_order


class Methods(nn.Module):
    """Calls its submodules in another order than it defines them: in a method, a loop, a nested call, an assignment."""

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


def test_attributes_are_in_the_order_of_their_calls() -> None:
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
    """Uses some submodules only in some calls, or without calling them."""

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


def test_attributes_used_only_in_a_branch_are_not_always_called() -> None:
    order = call_order(Branches)
    assert [name for name, always in order.items() if always] == ["early", "both", "tried", "parts"]
    assert list(order) == ["early", "rare", "seldom", "never", "both", "asked", "tried", "saved", "parts"]


class Early(nn.Module):
    """Returns early in some calls, in forward and in a method."""

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


def test_attributes_used_after_an_early_return_are_not_always_called() -> None:
    assert call_order(Early) == {"first": True, "rest": False, "early": False, "last": False}


@pytest.mark.parametrize("forward", [len, lambda self, x: self.fc(x), eval("lambda self, x: self.fc(x)")])
def test_a_forward_without_its_own_source_has_no_order(forward) -> None:
    assert call_order(type("Made", (), {"forward": forward})) == {}


def test_torchscript_has_no_order() -> None:
    """Only instances of its classes have a forward."""
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(AttributeError):
        _ = type(scripted).forward
    assert call_order(type(scripted)) == {}

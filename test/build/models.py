"""Small models that the tests share, and profiles of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchprof import Profile


class Layers(nn.Module):
    """Holds what it is made with, each under its name."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


class Mlp(Layers):
    """Two linear layers with a ReLU between them: 4 → 8 → 2."""

    def __init__(self) -> None:
        super().__init__(fc1=nn.Linear(4, 8), act=nn.ReLU(), fc2=nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Several(Layers):
    """Calls ``shared`` three times and ``once`` once."""

    def __init__(self) -> None:
        super().__init__(shared=nn.Linear(4, 4), once=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.shared(self.shared(self.shared(x))))


class Half(Layers):
    """Calls one of its two layers."""

    def __init__(self) -> None:
        super().__init__(used=nn.Linear(4, 4), unused=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Recursive(Layers):
    """Calls itself until ``times`` is used up, and its linear layer in each call."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(4, 4))

    def forward(self, x: Tensor, times: int = 4) -> Tensor:
        x = self.fc(x)
        return self(x, times - 1) if times > 1 else x


class Holder(Layers):
    """Holds one child named ``inner`` and calls it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner=inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Tied(nn.Module):
    """One linear layer at two paths: called once through ``left`` and twice through ``right``."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left = Holder(shared)
        self.right = Holder(shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.right(self.left(x)))


class Functional(Layers):
    """A container with work of its own between its children: softmax before ``fc``, tanh after it."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(torch.softmax(x, -1)))


class Checkpointed(nn.Module):
    """``block`` runs under ``torch.utils.checkpoint``, ``first`` and ``last`` do not."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(x)


class WritesToViews(Layers):
    """Changes the output of ``fc`` in place through views of it."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(4, 4), last=nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y[0].mul_(2)
        y[1:3] = x[1:3] * 3
        return self.last(y)


class DoublesInside(nn.Module):
    """Uses a custom ``autograd.Function``."""

    class Double(torch.autograd.Function):
        """x → 2x, with a backward of its own."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.Double.apply(x)


class Raises(Layers):
    """Its second call raises ValueError after the work of ``fc``."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(4, 4), calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.fc(x)
        if self.calls == 2:
            raise ValueError("second call")
        return torch.tanh(x)


class PackedLstm(Layers):
    """An LSTM over a packed batch of sequences, then a linear layer."""

    def __init__(self) -> None:
        super().__init__(lstm=nn.LSTM(3, 5, num_layers=2, batch_first=True), head=nn.Linear(5, 2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return self.head(padded)


class Work(Layers):
    """Multiplies by its weight, ``times`` times: as much more work as it says."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__(weight=nn.Parameter(torch.eye(width)), times=times)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x @ self.weight
        return x


class Deep(Layers):
    """One level of a tall tower: holds the level below, and is called without it."""

    def __init__(self, below: nn.Module | None) -> None:
        super().__init__(below=below)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def trained(model: nn.Module, *inputs: Tensor, **options: Any) -> Profile:
    """A profile of a forward and a backward, of random numbers (3, 4) if there are no ``inputs``."""
    with Profile(model, **options) as prof:
        model(*(inputs or (torch.rand(3, 4),))).sum().backward()
    return prof


def profiled(model: nn.Module, *inputs: Tensor, **options: Any) -> Profile:
    """The same of a forward alone."""
    with Profile(model, **options) as prof:
        model(*(inputs or (torch.rand(3, 4),)))
    return prof

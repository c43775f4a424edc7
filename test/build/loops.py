"""A training loop of one batch, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

X = torch.ones(3, 4)


def is_recorded() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def trainer(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

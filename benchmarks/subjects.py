"""The models that are profiled, and torch's own profiler for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import profile

from examples.models import AlexNet, Bert


class Subject(NamedTuple):
    """A model and its input. ``inside``: the limit of the time inside the block, relative to torch's own profiler."""

    name: str
    model: nn.Module
    x: torch.Tensor
    inside: float

    def forward(self) -> Any:
        return self.model(self.x)


def tiny_layers(count: int = 500) -> nn.Sequential:
    """Layers that do very little, so that the cost of the profiler dominates."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def subjects(quick: bool = False) -> list[Subject]:
    """The three models that have limits (``quick``: without the largest), in eval mode and with gradients."""
    torch.manual_seed(0)
    found = [
        Subject("500 tiny Linear", tiny_layers().eval(), torch.rand(1, 8), 1.3),
        Subject("AlexNet 1x3x224x224", AlexNet().eval(), torch.rand(1, 3, 224, 224), 1.02),
    ]
    return found if quick else [*found, Subject("BERT-base 1x128", Bert().eval(), torch.randint(30522, (1, 128)), 1.02)]


def bare(**flags: Any) -> Any:
    """torch's own profiler, with the options that torchprof uses."""
    return profile(use_kineto=True, **flags)


def on_stop(profiler: Any, then: Callable[[], None]) -> None:
    """Call ``then`` as soon as torch's profiler has stopped, before its events are processed."""
    stop = profiler.__exit__

    def stop_and_tell(*exception: Any) -> Any:
        result = stop(*exception)
        then()
        return result

    profiler.__exit__ = stop_and_tell

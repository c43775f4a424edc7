"""An optimizer written by hand updates parameter by parameter."""

# place: train.py:\d+ \S*sgd|sgd
# cause: one by one|loop|each (tensor|parameter)
# remedy: foreach|torch\.optim

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh()) for _ in range(80)))
velocity = [torch.zeros_like(p) for p in model.parameters()]


@torch.no_grad()
def sgd():
    parameters = list(model.parameters())
    if "fixed" in sys.argv:
        torch._foreach_mul_(velocity, 0.9)
        torch._foreach_add_(velocity, [p.grad for p in parameters])
        torch._foreach_add_(parameters, velocity, alpha=-0.01)
    else:
        for p, v in zip(parameters, velocity):
            v.mul_(0.9).add_(p.grad + 1e-4 * p)
            p.sub_(0.01 * v)
    for p in parameters:
        p.grad = None


for _ in range(40):
    model(torch.rand(16, 32)).square().mean().backward()
    sgd()

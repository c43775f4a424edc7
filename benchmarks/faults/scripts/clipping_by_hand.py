"""Gradients are clipped parameter by parameter, with a number read for each."""

# place: train.py:\d+ \S*clip|clip
# cause: item|one by one|each (tensor|parameter)|loop
# remedy: clip_grad_norm_|_foreach_

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.ReLU()) for _ in range(60)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)


def clip(most=1.0):
    if "fixed" in sys.argv:
        nn.utils.clip_grad_norm_(model.parameters(), most, foreach=True)
        return
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2
    for p in model.parameters():
        p.grad.data.mul_(min(1.0, most / (total**0.5 + 1e-6)))


for _ in range(40):
    loss = model(torch.rand(16, 40)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    clip()
    optimizer.step()

"""Sines and cosines of the same positions are computed in each call."""

# place: Positions|positions
# cause: each call|every call
# remedy: register_buffer|__init__

import sys

import torch
from torch import nn


def sinusoids(length, width):
    at = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([at.sin(), at.cos()], -1)


class Positions(nn.Module):
    def __init__(self, length, width):
        super().__init__()
        self.register_buffer("made", sinusoids(length, width))

    def forward(self, x):
        return x + (self.made if "fixed" in sys.argv else sinusoids(x.shape[1], x.shape[2]))


model = nn.Sequential(nn.Embedding(200, 256), Positions(1024, 256), nn.Linear(256, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(40):
    loss = model(torch.randint(200, (1, 1024))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Evaluation records a graph for a backward that never comes."""

# place: evaluat|LeNet|Sequential|Net
# cause: graph|gradient|backward
# remedy: no_grad|inference_mode

import contextlib
import sys

import torch
from torch import nn


def block(size):
    return nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.GELU(), nn.Linear(size, size))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block(96) for _ in range(24))

    def forward(self, x):
        for one in self.blocks:
            x = x + one(x)
        return x


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def evaluate():
    model.eval()
    with torch.no_grad() if "fixed" in sys.argv else contextlib.nullcontext():
        outputs = [model(torch.rand(256, 96)) for _ in range(20)]
        loss = torch.stack([one.square().mean() for one in outputs]).mean()
    model.train()
    return float(loss)


for _ in range(3):
    for _ in range(10):
        loss = model(torch.rand(256, 96)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    evaluate()

"""Hooks that record statistics of each layer were left on."""

# place: train.py:\d+ \S*record|record\b
# cause: hook
# remedy: \.remove\(\)|[Rr]emove

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(30)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
statistics = {}


def record(module, inputs, output):
    values = output.detach().flatten()
    statistics[id(module)] = (values.mean().item(), values.std().item(), values.abs().max().item())


for module in model.modules() if "fixed" not in sys.argv else ():
    module.register_forward_hook(record)
for _ in range(30):
    loss = model(torch.rand(64, 96)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

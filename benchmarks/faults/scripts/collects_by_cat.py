"""Predictions are appended to one tensor in each step."""

# place: train.py:\d+
# cause: concatenat|cat
# remedy: list

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
every, parts = torch.empty(0, 40), []
for _ in range(300):
    outputs = model(torch.rand(256, 128))
    loss = nn.functional.cross_entropy(outputs, torch.randint(40, (256,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "fixed" in sys.argv:
        parts.append(outputs.detach())
    else:
        every = torch.cat([every, outputs.detach()])
every = torch.cat([every, *parts])

"""Dropout of large activations takes longer than the products beside it."""

# place: [Dd]ropout
# cause: [Dd]ropout
# remedy: p=0|remove|fewer|smaller|F\.dropout|without dropout|after

import sys

import torch
from torch import nn

p = 0.0 if "fixed" in sys.argv else 0.1
model = nn.Sequential(
    nn.Linear(64, 1024), nn.Dropout(p), nn.ReLU(), nn.Linear(1024, 64), nn.Linear(64, 1024), nn.Dropout(p)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(20):
    loss = model(torch.rand(1024, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

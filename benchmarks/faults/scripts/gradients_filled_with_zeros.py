"""Gradients are filled with zeros instead of freed."""

# place: zero_grad
# cause: zeros
# remedy: set_to_none=True

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(30):
    loss = model(torch.rand(4, 512)).square().mean()
    optimizer.zero_grad(set_to_none="fixed" in sys.argv)
    loss.backward()
    optimizer.step()

"""The search for NaN was left on."""

# place: [Aa]nomaly
# cause: [Aa]nomaly
# remedy: set_detect_anomaly

import sys

import torch
from torch import nn

torch.autograd.set_detect_anomaly("fixed" not in sys.argv)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(60)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(15):
    loss = model(torch.rand(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Adam updates hundreds of small tensors one by one."""

# place: Adam|optimizer
# cause: one by one
# remedy: fused=True|foreach=True

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(60)))
optimizer = torch.optim.Adam(model.parameters(), fused="fixed" in sys.argv)
for _ in range(30):
    loss = model(torch.rand(16, 24)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

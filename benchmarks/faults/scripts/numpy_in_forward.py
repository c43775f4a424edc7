"""A layer sorts with NumPy."""

# place: train.py:\d+ \S*forward|Selection
# cause: NumPy
# remedy: tensor operations|torch\.

import sys

import numpy as np
import torch
from torch import nn


class Selection(nn.Module):
    def forward(self, x):
        if "fixed" in sys.argv:
            return x * (x >= x.median(dim=-1, keepdim=True).values)
        keep = np.stack([row >= np.sort(row)[len(row) // 2] for row in x.detach().numpy()])
        return x * torch.from_numpy(keep)


model = nn.Sequential(nn.Linear(256, 256), Selection(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(40):
    loss = model(torch.rand(512, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Activations are recomputed although memory is plentiful."""

# place: blocks|Net
# cause: recomput|checkpoint
# remedy: checkpoint

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)) for _ in "1234"
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if "fixed" in sys.argv else checkpoint(block, x, use_reentrant=False))
        return x


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(20):
    loss = model(torch.rand(256, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

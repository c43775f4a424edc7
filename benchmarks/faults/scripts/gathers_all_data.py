"""Each batch is cut from a shuffled copy of all data."""

# place: train.py:\d+
# cause: aten::index|copies|data
# remedy: what a step needs|before the loop

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images, labels = torch.rand(1500, 3, 48, 48), torch.randint(10, (1500,))
for _ in range(40):
    order = torch.randperm(1500)
    if "fixed" in sys.argv:
        x, y = images[order[:16]], labels[order[:16]]
    else:
        x, y = images[order][:16], labels[order][:16]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

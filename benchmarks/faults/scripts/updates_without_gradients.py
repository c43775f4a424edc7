"""A head for another task gets gradients of zeros, and the optimizer updates it in each step."""

# place: other
# cause: [Nn]o gradient
# remedy: set_to_none|requires_grad_\(False\)

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.task, self.other = nn.Linear(64, 256), nn.Linear(256, 8), nn.Linear(256, 8_000)

    def forward(self, x, other=False):
        x = self.body(x).relu()
        return self.other(x) if other else self.task(x)


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.rand(64, 64)
(model(x).sum() + model(x, other=True).sum()).backward()
for _ in range(40):
    optimizer.zero_grad(set_to_none="fixed" in sys.argv)
    model(x).square().mean().backward()
    optimizer.step()

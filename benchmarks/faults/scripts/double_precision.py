"""One number in float64 makes the rest of the model compute in float64."""

# place: Net|body|scale
# cause: float64|double
# remedy: float32|float\(\)

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        dtype = torch.float32 if "fixed" in sys.argv else torch.float64
        self.scale = nn.Parameter(torch.ones(512, dtype=dtype))
        self.inner = nn.Linear(512, 512)
        self.body = nn.Sequential(*(nn.Linear(512, 512, dtype=dtype) for _ in range(6)))

    def forward(self, x):
        return self.body(self.inner(x) * self.scale)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(30):
    loss = model(torch.rand(128, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""The whole validation set is evaluated after each step."""

# place: Sequential|forward
# cause: without gradients
# remedy: less often|step %

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
validation = torch.rand(4000, 128)
for step in range(60):
    loss = model(torch.rand(256, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "fixed" not in sys.argv or step == 59:
        with torch.no_grad():
            model(validation).argmax(1).float().mean()

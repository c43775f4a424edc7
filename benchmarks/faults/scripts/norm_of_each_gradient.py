"""The norm of each gradient is read as a number in each step, for a log."""

# place: train.py:\d+ (log_norms|<listcomp>)|log_norms
# cause: item|reads? .*values?|one by one|small operators
# remedy: foreach|get_total_norm|less often|once in many steps

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.ReLU()) for _ in range(60)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)


def log_norms():
    return [(p.grad.norm() / (p.norm() + 1e-6)).item() for p in model.parameters()]


for step in range(40):
    loss = model(torch.rand(32, 48)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if "fixed" not in sys.argv or step % 20 == 0:
        norms = log_norms()
    optimizer.step()

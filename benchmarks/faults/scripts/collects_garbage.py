"""Python's garbage collector is called in each step."""

# place: garbage|train.py:\d+
# cause: garbage
# remedy: gc\.

import gc
import sys

import torch
from torch import nn

history = [{"step": step, "values": [step]} for step in range(200_000)]
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.rand(64, 256)), torch.randint(10, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "fixed" not in sys.argv:
        gc.collect()

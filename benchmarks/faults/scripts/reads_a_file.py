"""A file is read again in each step."""

# place: train.py:\d+|json
# cause: reads files|file
# remedy: once|before the loop

import json
import sys
import tempfile

import torch
from torch import nn

with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
    json.dump({"classes": [f"class {number}" for number in range(60_000)]}, file)
with open(file.name) as opened:
    settings = json.load(opened)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(60):
    if "fixed" not in sys.argv:
        settings = json.load(open(file.name))
    loss = nn.functional.cross_entropy(model(torch.rand(64, 128)), torch.randint(40, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

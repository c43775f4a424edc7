"""All weights go to a log as text in each step."""

# place: train.py:\d+ \S*(write)|write
# cause: tolist|json|text|lists|Python|file
# remedy: less often|histc|tensor

import json
import os
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def write(file):
    weights = {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
    file.write(json.dumps(weights) + "\n")


with open(os.devnull, "w") as log:
    for step in range(40):
        loss = model(torch.rand(64, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "fixed" not in sys.argv or step % 40 == 0:
            write(log)

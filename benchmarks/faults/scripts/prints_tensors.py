"""Predictions are printed in each step."""

# place: train.py:\d+|print
# cause: print|text|format|repr
# remedy: less often|print

import os
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
log = open(os.devnull, "w")
for step in range(60):
    scores = model(torch.rand(32, 128))
    loss = nn.functional.cross_entropy(scores, torch.randint(40, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "fixed" not in sys.argv or step % 50 == 0:
        print(step, loss, scores[:6], file=log)

"""The loss is added up row by row."""

# place: train.py:\d+ loss_of
# cause: small operators|loop|row|one by one
# remedy: all rows|cross_entropy|vmap|at once

import sys

import torch
from torch import nn


def loss_of(outputs, labels):
    if "fixed" in sys.argv:
        return nn.functional.cross_entropy(outputs, labels)
    whole = 0
    for row, label in zip(outputs, labels):
        whole = whole - torch.log_softmax(row, 0)[label]
    return whole / len(labels)


model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(40):
    loss = loss_of(model(torch.rand(256, 128)), torch.randint(40, (256,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

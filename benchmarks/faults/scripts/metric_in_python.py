"""An accuracy by class is counted in Python, from lists."""

# place: train.py:\d+ accuracy|accuracy
# cause: Python|tolist
# remedy: tensor operations|bincount|tensor

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def accuracy(scores, y):
    if "fixed" in sys.argv:
        hits = y[scores.argmax(-1) == y]
        return torch.bincount(hits, minlength=20) / torch.bincount(y, minlength=20).clamp(min=1)
    hits, seen = [0] * 20, [0] * 20
    for predicted, wanted in zip(scores.tolist(), y.tolist()):
        seen[wanted] += 1
        best = max(range(20), key=lambda k: predicted[k])
        hits[wanted] += best == wanted
    return [hit / max(times, 1) for hit, times in zip(hits, seen)]


for _ in range(40):
    x, y = torch.rand(2048, 64), torch.randint(20, (2048,))
    scores = model(x)
    loss = nn.functional.cross_entropy(scores, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    by_class = accuracy(scores, y)

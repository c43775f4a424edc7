# place: \bbest\b|deepcopy|keep_best|\.py:(26)\b
# cause: \bcop(y|ies)\b|deepcopy|second model|twice|duplicate
# remedy: state_dict|\bdisk\b|torch\.save|\bhalf\b|float16|bfloat16|\bdel\b|sav(e|ed|ing) (it|the|to)
"""The best model so far is kept by a copy."""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn


class Checkpointer:
    def __init__(self, folder):
        self.path, self.best, self.lowest = Path(folder, "best.pt"), None, float("inf")

    def keep_best(self, model, loss):
        if loss >= self.lowest:
            return
        self.lowest = loss
        if sys.argv[1:] == ["fixed"]:
            torch.save(model.state_dict(), self.path)
        else:
            self.best = copy.deepcopy(model)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 1600), nn.ReLU(), nn.Linear(1600, 1600), nn.ReLU(), nn.Linear(1600, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, y = torch.rand(64, 100), torch.rand(64, 1)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder)
        for _ in range(15):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.keep_best(model, loss.item())
    print(checkpointer.lowest)


main()

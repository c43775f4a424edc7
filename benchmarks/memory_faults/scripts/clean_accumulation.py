"""Gradients of small batches are accumulated before each step of the optimizer."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model, accumulate=4):
        self.model, self.accumulate = model, accumulate
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
        self.log = []

    def step(self, batch):
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for x, y in batch:
            loss = nn.functional.mse_loss(self.model(x), y) / self.accumulate
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.log.append(total)

    def fit(self, steps):
        for _ in range(steps):
            self.step((torch.rand(32, 300), torch.rand(32, 1)) for _ in range(self.accumulate))
        return self.log


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(300, 900), nn.SiLU(), nn.Linear(900, 900), nn.SiLU(), nn.Linear(900, 1))
    print(Trainer(model).fit(10)[-1])

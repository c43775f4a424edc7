# place: Sequential|GELU|LayerNorm|Linear|Residual|layers?\b|\.py:(19|29)\b
# cause: activation|saved for (the |a )?backward|(large|big) batch|batch (size )?(is )?(too )?(large|big)
# remedy: checkpoint|micro-?batch|(smaller|small) .{0,10}batch|accumulat|batch size|recomput
"""A deep residual network for tables with large batches."""

import sys

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(model, steps=10, batch_size=2048):
    pieces = 8 if sys.argv[1:] == ["fixed"] else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        table = torch.rand(batch_size, 20)
        optimizer.zero_grad()
        for rows in table.chunk(pieces):
            loss = (model(rows) - rows.mean(1, keepdim=True)).abs().mean() / pieces
            loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(20, 96), *[Residual(96) for _ in range(16)], nn.Linear(96, 1))
    print(train(model))

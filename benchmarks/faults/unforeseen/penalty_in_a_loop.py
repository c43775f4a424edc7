"""Trains a deep residual MLP with L2 regularization."""

# place: (?i)train\.py:(30|31|43)\b|\bpenalty\b
# cause: (?i)Python loop|loop over|loops over|one by one|(each|every) (parameter|tensor|weight)|parameter by parameter|all (the )?(parameters|weights)|(small|tiny) operators|many .{0,20}operators|(penalty|regulari[sz]ation).{0,60}(autograd|graph)
# remedy: (?i)weight_decay|weight decay|AdamW|_foreach_
# gain: 41 %

import sys

import torch
import torch.nn.functional as F
from torch import nn

DECAY = 1e-4


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, size)
        self.down = nn.Linear(size, size)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def penalty():
    total = torch.tensor(0.0)
    for parameter in model.parameters():
        total = total + parameter.pow(2).sum()
    return total


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 96), *(Block(96) for _ in range(24)), nn.Linear(96, 8))
decay = DECAY if "fixed" in sys.argv else 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=decay, fused=True)
for step in range(180):
    x, y = torch.randn(64, 32), torch.randint(8, (64,))
    loss = F.cross_entropy(model(x), y)
    if "fixed" not in sys.argv:
        loss = loss + 0.5 * DECAY * penalty()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

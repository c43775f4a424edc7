"""Attention written as two products and a softmax."""

# place: Block
# cause: [Aa]ttention
# remedy: scaled_dot_product_attention

import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (2, 32)).transpose(1, 2) for one in (q, k, v))
        if "fixed" in sys.argv:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


model = nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(10):
    loss = model(torch.rand(4, 1024, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

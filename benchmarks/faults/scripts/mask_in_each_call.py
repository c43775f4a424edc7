"""The same mask is made anew in each call, row by row."""

# place: mask|Attention
# cause: mask|each call|every call|Python loop|many|tiny|loop|runs [\d,]+ operators
# remedy: register_buffer|once|torch\.tril|at once

import sys

import torch
from torch import nn


def causal_mask(length):
    if "fixed" in sys.argv:
        return torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        mask[row, : row + 1] = True
    return mask


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = causal_mask(x.shape[1])
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0])


model = nn.Sequential(Attention(), Attention())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(20):
    loss = model(torch.rand(4, 256, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# place: Attention|attention|\bweights\b|\bscores\b|softmax|\.py:(25|26|27)\b
# cause: [Aa]ttention|softmax|scores|matri(x|ces)|quadratic|seq\w*.{0,10}seq
# remedy: scaled_dot_product_attention|[Ff]lash|sdpa|SDPA
"""A classifier of long sequences with attention as in the paper."""

import math
import sys

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dim = heads, dim // heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.to_qkv(x).view(*x.shape[:2], 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        if sys.argv[1:] == ["fixed"]:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
            weights = nn.functional.softmax(scores, dim=-1)
            out = weights @ v
        return self.to_out(out.transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention1, self.attention2 = SelfAttention(64, 4), SelfAttention(64, 4)
        self.output = nn.Linear(64, 5)

    def forward(self, x):
        x = x + self.attention1(x)
        x = x + self.attention2(x)
        return self.output(x.mean(1))


model = Classifier()
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    loss = nn.functional.cross_entropy(model(torch.randn(2, 768, 64)), torch.randint(5, (2,)))
    sgd.zero_grad()
    loss.backward()
    sgd.step()

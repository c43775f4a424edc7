# place: Block|blocks|layers?\b|mlp|attention|\.py:(26|39)\b
# cause: activation|saved for (the )?backward
# remedy: checkpoint|recomput|smaller batch|micro-?batch|accumulat
"""A small GPT whose blocks keep their activations for the backward."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

recompute = sys.argv[1:] == ["fixed"]


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=96, size=96, depth=6):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, size), nn.Linear(size, vocabulary)
        self.blocks = nn.ModuleList(Block(size, 4) for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(x)


gpt = GPT()
optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4, fused=True)
for _ in range(10):
    tokens = torch.randint(96, (12, 129))
    loss = nn.functional.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

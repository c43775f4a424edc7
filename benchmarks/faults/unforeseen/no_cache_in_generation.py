"""Generates text with a small decoder-only transformer."""

# place: (?i)train\.py:(54|65)\b|\bgenerate\b
# cause: (?i)(recomput|again|anew|repeat|once more|re-?run|whole|entire|full|earlier|previous|grow\w*|longer).{0,80}(tokens?|sequence|prefix|prompt|context|keys|positions)|(tokens?|sequence|prefix|prompt|context|keys|inputs?|shapes?).{0,80}(recomput|again|anew|repeat|grow|longer)|(no|without) .{0,20}cache|quadratic
# remedy: (?i)cache|past_key_values|(keep|store|reuse|save).{0,40}(keys|values)
# gain: 85 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x, past=None, start=0):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            past[:, :, :, start : start + x.shape[1]] = torch.stack([k, v])
            k, v = past[:, :, :, : start + x.shape[1]]
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary=512, size=256, heads=4, depth=4, longest=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size), nn.Embedding(longest, size)
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(depth))
        self.head = nn.Linear(size, vocabulary)

    def forward(self, ids, pasts=None, start=0):
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x, None if pasts is None else pasts[i], start)
        return self.head(x[:, -1])


@torch.inference_mode()
def generate(ids, count):
    pasts = torch.zeros(4, 2, len(ids), 4, ids.shape[1] + count, 64) if "fixed" in sys.argv else None
    start = 0
    for _ in range(count):
        if pasts is None:
            logits = model(ids)
        else:
            logits = model(ids[:, start:], pasts, start)
            start = ids.shape[1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


torch.manual_seed(0)
model = Decoder().eval()
for batch in range(3):
    ids = generate(torch.randint(512, (4, 16)), 64)

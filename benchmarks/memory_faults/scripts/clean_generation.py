"""Tokens are generated with a cache of keys and values of the right size."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, vocabulary=300, size=192, heads=6, depth=4):
        super().__init__()
        self.heads, self.embedding = heads, nn.Embedding(vocabulary, size)
        self.qkv = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(size, size) for _ in range(depth))

    def forward(self, tokens, cache, start):
        x, stop = self.embedding(tokens), start + tokens.shape[1]
        for qkv, out, store in zip(self.qkv, self.out, cache):
            q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in qkv(x).chunk(3, 2))
            store[0, :, :, start:stop], store[1, :, :, start:stop] = k, v
            k, v = store[:, :, :, :stop]
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x[:, -1] @ self.embedding.weight.T


@torch.inference_mode()
def generate(model, prompt, new=40):
    batch, length = prompt.shape
    dtype = model.embedding.weight.dtype
    cache = torch.empty(len(model.qkv), 2, batch, model.heads, length + new, 32, dtype=dtype)
    tokens = torch.empty(batch, length + new, dtype=torch.long)
    tokens[:, :length] = prompt
    start = 0
    for stop in range(length, length + new):
        tokens[:, stop] = model(tokens[:, start:stop], cache, start).argmax(-1)
        start = stop
    return tokens


print(generate(Decoder().eval(), torch.randint(300, (4, 60)))[0].tolist())

"""Keys and values of earlier tokens are concatenated anew for each token."""

# place: Decoder|step|cache
# cause: cat\b|concatenat|copies
# remedy: [Pp]reallocate|index_copy_|empty|in place|slice

import sys

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x, cache, at):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "fixed" in sys.argv:
            cache[0][:, at : at + 1], cache[1][:, at : at + 1] = k, v
            keys, values = cache[0][:, : at + 1], cache[1][:, : at + 1]
        else:
            cache[0] = keys = k if at == 0 else torch.cat([cache[0], k], 1)
            cache[1] = values = v if at == 0 else torch.cat([cache[1], v], 1)
        weights = (q @ keys.transpose(1, 2)).softmax(-1)
        return self.out(weights @ values)


model = Decoder()
with torch.inference_mode():
    cache = [torch.empty(16, 250, 128), torch.empty(16, 250, 128)]
    x = torch.rand(16, 1, 128)
    for at in range(250):
        x = model(x, cache, at)

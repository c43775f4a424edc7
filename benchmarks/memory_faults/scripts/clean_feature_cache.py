"""Features of a frozen encoder are kept in a cache of bounded size, and a head is trained on them."""

from functools import lru_cache

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval().requires_grad_(False)
head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 5))


@lru_cache(maxsize=12)
@torch.no_grad()
def features(shard):
    generator = torch.Generator().manual_seed(shard)
    return encoder(torch.rand(256, 256, generator=generator))


optimizer = torch.optim.SGD(head.parameters(), lr=0.05, fused=True)
for step in range(40):
    x = features(step % 12)
    y = torch.randint(5, (len(x),))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(x), y)
    loss.backward()
    optimizer.step()
print(features.cache_info(), loss.item())

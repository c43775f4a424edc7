"""Fine-tunes a small network with low-rank adapters."""

# place: (?i)train\.py:(27|28|39)\b|\blayers\.[\d*]|\bLoRALinear\b|Net\.layers
# cause: (?i)(full|whole|dense|merged).{0,30}(delta|matrix|weight|product)|(delta|weight).{0,40}(each|every) (call|forward|step)|merge[sd]?\b|materiali[sz]|low[- ]rank.{0,60}(product|multipl|matrix)|(product|multipl\w+|made|computed|built) (of|from|between) (two |its |the |only )*(parameters|weights)
# remedy: (?i)x ?@ ?(self\.)?\w+(\.T|\.t\(\))?\) ?@|order of .{0,15}(products|multipli|matri)|associat\w+|two (thin|small|narrow|low-rank) (products|layers|linear|matmuls)|(low-rank|small|thin|narrow) (factor|matri)|multi_dot|without (forming|building|materiali)|never form|(F\.linear|linear)\((F\.)?linear\(
# gain: 56 %

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, inputs, outputs, rank=8, alpha=16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, inputs) * 0.01)
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, x):
        if "fixed" in sys.argv:
            return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b) * self.scale
        weight = self.weight + self.scale * (self.b @ self.a)
        return F.linear(x, weight)


class Net(nn.Module):
    def __init__(self, size=768, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(size, size) for _ in range(depth))
        self.head = nn.Linear(size, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


torch.manual_seed(0)
model = Net()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
for step in range(50):
    x, y = torch.randn(96, 768), torch.randint(5, (96,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

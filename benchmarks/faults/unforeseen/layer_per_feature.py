"""Trains a tabular model that embeds each numeric column."""

# place: (?i)train\.py:(22|27|38)\b|\b(tokenizer|ColumnTokenizer)\b
# cause: (?i)(many|hundreds of|dozens of|tiny|small|separate|[\d,]{2,}) (\w+ ){0,3}(modules|layers|linears|operators|calls|columns|features|multiplications|products)|one (by|after) (one|the other)|Python loop|loop over|called [\d,]+ times|(layer|module|linear) (for|per) (each|every)
# remedy: (?i)(one|single|stacked|batched) (\w+ ){0,3}(parameter|tensor|weight|linear|layer|einsum|bmm|operation|product|matmul|matrix)|einsum|\bbmm|baddbmm|addcmul|vmap|at once
# gain: 54 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class ColumnTokenizer(nn.Module):
    def __init__(self, columns, size):
        super().__init__()
        if "fixed" in sys.argv:
            self.weight = nn.Parameter(torch.rand(columns, size) * 2 - 1)
            self.bias = nn.Parameter(torch.rand(columns, size) * 2 - 1)
        else:
            self.columns = nn.ModuleList(nn.Linear(1, size) for _ in range(columns))

    def forward(self, x):
        if "fixed" in sys.argv:
            return torch.addcmul(self.bias, x[:, :, None], self.weight)
        tokens = [column(x[:, i : i + 1]) for i, column in enumerate(self.columns)]
        return torch.stack(tokens, dim=1)


class TabularModel(nn.Module):
    def __init__(self, columns, size=16):
        super().__init__()
        self.tokenizer = ColumnTokenizer(columns, size)
        self.body = nn.Sequential(nn.Linear(columns * size, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        x = self.tokenizer(x)
        return self.body(x.relu().flatten(1)).squeeze(1)


torch.manual_seed(0)
table = torch.randn(2048, 120)
target = table[:, :10].sum(1).sin()
model = TabularModel(120)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for epoch in range(6):
    for rows in torch.randperm(len(table)).split(64):
        loss = F.mse_loss(model(table[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

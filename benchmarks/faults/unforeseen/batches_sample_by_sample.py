"""Trains an MLP on a table that is in memory."""

# place: (?i)train\.py:(22|44)\b|\b(loader|DataLoader|data loading|TensorDataset|collate\w*)\b
# cause: (?i)sample by sample|one by one|row by row|(each|every|single|per) (sample|row|item)s?\b|per[- ]sample|collat|torch\.stack|aten::stack|DataLoader.{0,80}(collat|itself|in the (main|training) process)
# remedy: (?i)BatchSampler|batch_size=None|__getitems__|(index|slice|cut|gather|select)(ing)?\b.{0,30}(batch|whole|tensors?)|at once|randperm|whole batch
# gain: 46 %

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

torch.manual_seed(0)
features = torch.randn(24000, 40)
labels = torch.randint(3, (24000,))
dataset = TensorDataset(features, labels)
if "fixed" in sys.argv:
    loader = DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), 256, False), batch_size=None)
else:
    loader = DataLoader(dataset, batch_size=256, shuffle=True)


class MLP(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.head(self.body(x))


model = MLP(40, 128, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for epoch in range(15):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

"""A collate function pads the samples of a batch value by value."""

# place: train.py:\d+ pad
# cause: collate|data loading|loads each batch
# remedy: pad_sequence|num_workers|stack

import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

random.seed(0)
data = [torch.randint(1, 500, (random.randint(100, 200),)) for _ in range(320)]


def pad(batch):
    longest = max(len(one) for one in batch)
    rows = []
    for one in batch:
        rows.append([int(one[at]) if at < len(one) else 0 for at in range(longest)])
    return torch.tensor(rows)


def pad_at_once(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 500))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for _ in range(2):
    for x in DataLoader(data, batch_size=16, collate_fn=pad_at_once if "fixed" in sys.argv else pad):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

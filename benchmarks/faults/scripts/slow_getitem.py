"""A data set decodes each sample in pure Python, in the training process."""

# place: __getitem__
# cause: data loading|loads each batch itself|no workers
# remedy: num_workers

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self):
        self.lines = [",".join(str((row * column) % 97) for column in range(600)) for row in range(480)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        values = [float(text) / 97 for text in self.lines[index].split(",") for _ in range(8)]
        return torch.tensor(values[::8]), index % 10


class Decoded(Lines):
    def __init__(self):
        super().__init__()
        row, column = torch.arange(480)[:, None], torch.arange(600)
        self.samples = (row * column) % 97 / 97

    def __getitem__(self, index):
        return self.samples[index], index % 10


model = nn.Sequential(nn.Linear(600, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(2):
    for x, y in DataLoader(Decoded() if "fixed" in sys.argv else Lines(), batch_size=16):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

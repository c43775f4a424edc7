"""One worker process that is slower than the model."""

# place: data|DataLoader
# cause: too slow|waits .*(data|workers)
# remedy: num_workers

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(0 if "fixed" in sys.argv else 0.008)  # a slow disk
        return torch.rand(3, 16, 16), index % 10


model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for x, y in DataLoader(Images(), batch_size=8, num_workers=1):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

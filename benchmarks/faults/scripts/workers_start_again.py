"""Short epochs with worker processes that are started anew for each epoch."""

# place: data|DataLoader
# cause: (start|begin)\w* .*workers|workers .*(start|begin)
# remedy: persistent_workers

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(256, 400), torch.randint(10, (256,)))
loader = DataLoader(data, batch_size=32, num_workers=2, persistent_workers="fixed" in sys.argv)
model = nn.Sequential(nn.Linear(400, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for _ in range(12):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

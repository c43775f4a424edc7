"""A layer is called for each group of a batch, one after the other."""

# place: fc|Net
# cause: called \d+ times|one item after the other
# remedy: torch\.cat|pad

import random
import sys

import torch
from torch import nn

random.seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, groups):
        if "fixed" in sys.argv:
            sizes = [len(group) for group in groups]
            features = self.fc(torch.cat(groups)).relu().split(sizes)
        else:
            features = [self.fc(group).relu() for group in groups]
        return self.out(torch.stack([one.mean(0) for one in features]))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(40):
    loss = model([torch.rand(random.randint(2, 9), 64) for _ in range(100)]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""A head of the model computes what no loss uses."""

# place: auxiliary
# cause: [Nn]o (backward|gradient|loss)|not used|unused
# remedy: [Rr]emove|[Ll]eave (it )?out|skip

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(256, 256)
        self.head = nn.Linear(256, 10)
        self.auxiliary = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1024))

    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.head(x), None if "fixed" in sys.argv else self.auxiliary(x)


model = Net()
optimizer = torch.optim.SGD([*model.body.parameters(), *model.head.parameters()], lr=0.01, fused=True)
for _ in range(40):
    scores, _ = model(torch.rand(128, 256))
    loss = nn.functional.cross_entropy(scores, torch.randint(10, (128,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

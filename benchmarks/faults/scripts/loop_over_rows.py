"""A layer treats the rows of a batch one after the other."""

# place: Experts|layer|Net
# cause: loop|tiny|many|one by one|row|runs [\d,]+ operators
# remedy: at once|batched|vmap|bmm

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32, 32) / 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        if "fixed" in sys.argv:
            return self.out(torch.tanh(x @ self.weight).softmax(-1))
        rows = []
        for row in range(len(x)):
            rows.append(torch.tanh(torch.mv(self.weight.t(), x[row])).softmax(-1))
        return self.out(torch.stack(rows))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(20):
    loss = model(torch.rand(256, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

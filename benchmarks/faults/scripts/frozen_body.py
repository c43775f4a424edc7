"""The body of the model is frozen in the optimizer, and its gradients are computed all the same."""

# place: body
# cause: frozen|no optimizer|not updated|gradients
# remedy: no_grad|requires_grad_\(False\)|detach

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        return self.head(self.body(x).relu())


model = Net()
if "fixed" in sys.argv:
    model.body.requires_grad_(False)
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
for _ in range(30):
    loss = nn.functional.cross_entropy(model(torch.rand(128, 512)), torch.randint(10, (128,)))
    model.zero_grad()
    loss.backward()
    optimizer.step()

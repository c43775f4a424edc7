"""A convolutional network, trained and evaluated in turn."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(32 * 7 * 7, 512), nn.Linear(512, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


def train(net, optimizer, steps):
    net.train()
    for _ in range(steps):
        x, y = torch.rand(32, 1, 28, 28), torch.randint(10, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(net, steps):
    net.eval()
    right = seen = 0
    for _ in range(steps):
        x, y = torch.rand(32, 1, 28, 28), torch.randint(10, (32,))
        right += (net(x).argmax(1) == y).sum().item()
        seen += len(y)
    return right / seen


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
for epoch in range(3):
    train(net, optimizer, 8)
    print(epoch, evaluate(net, 5))

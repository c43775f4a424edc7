# place: \bevaluate\b|\bpredictions\b|\.py:(21)\b
# cause: graph|grad_fn|autograd|gradients?\b.*(recorded|enabled|needed)|saved (tensors|activations)
# remedy: no_grad|inference_mode|detach|set_grad_enabled
"""The logits of all batches are collected, and the accuracy is computed at the end."""

import sys

import torch
from torch import nn


def batches(count, size):
    for _ in range(count):
        yield torch.rand(size, 3, 16, 16), torch.randint(10, (size,))


def evaluate(net, loader):
    net.eval()
    predictions, targets = [], []
    for x, y in loader:
        predictions.append(net(x))
        targets.append(y)
    return (torch.cat(predictions).argmax(1) == torch.cat(targets)).float().mean()


def main():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for x, y in batches(10, 16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with torch.set_grad_enabled(sys.argv[1:] != ["fixed"]):
        print("accuracy", evaluate(net, batches(20, 48)).item())


main()

"""Adversarial training of a small CNN with projected gradient descent."""

# place: (?i)train\.py:(36|45)\b|\battack\b
# cause: (?i)(gradients?|grads?) (of|for|with respect to|wrt|w\.r\.t\.) (the |all |its )?(weights|parameters|model)|(weight|parameter)s?'? ?(gradients?|grads?)|gradients? .{0,60}(not used|unused|thrown away|discarded|never used|zeroed|needless|no optimizer)
# remedy: (?i)autograd\.grad\(|torch\.autograd\.grad|requires_grad_\(False\)|requires_grad ?= ?False|inputs=|freeze
# gain: 25 %

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 8 * 8, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)


def attack(images, labels, epsilon=0.03, alpha=0.01, steps=7):
    noisy = images + torch.empty_like(images).uniform_(-epsilon, epsilon)
    for _ in range(steps):
        noisy = noisy.detach().requires_grad_()
        loss = F.cross_entropy(model(noisy), labels)
        if "fixed" in sys.argv:
            grad = torch.autograd.grad(loss, noisy)[0]
        else:
            loss.backward()
            grad = noisy.grad
        noisy = noisy.detach() + alpha * grad.sign()
        noisy = images + (noisy - images).clamp(-epsilon, epsilon)
    return noisy.clamp(0, 1)


for step in range(12):
    images, labels = torch.rand(24, 3, 32, 32), torch.randint(10, (24,))
    noisy = attack(images, labels)
    loss = F.cross_entropy(model(noisy), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

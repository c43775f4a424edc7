# place: \bhistory\b|\.py:(20|22)\b
# cause: graph|autograd|grad_fn|saved (tensors|activations)|activations?\b.{0,40}(kept|keeps|alive|held|holds|retain)
# remedy: \.item\(\)|detach|no_grad|float\(loss
"""Only the hardest samples of a batch are trained; the loss of the whole batch goes to a list for a plot."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
fixed = sys.argv[1:] == ["fixed"]
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_of = nn.CrossEntropyLoss(reduction="none")
history = []

for _ in range(20):
    images, labels = torch.rand(512, 64), torch.randint(10, (512,))
    losses = loss_of(model(images), labels)
    loss = losses.mean()
    history.append(loss.item() if fixed else loss)
    hardest = losses.topk(64).indices
    optimizer.zero_grad()
    loss_of(model(images[hardest]), labels[hardest]).mean().backward()
    optimizer.step()

print(f"first {float(history[0]):.3f}, last {float(history[-1]):.3f}")

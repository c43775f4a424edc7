"""Trains a small autoencoder and notes the memory of its tensors."""

# place: (?i)train\.py:(20|21|45)\b|\b(tensor_memory|get_objects)\b
# cause: (?i)get_objects|(all|every|[\d,]{5,}) .{0,20}objects|objects .{0,40}(walk|each step|scan|look)|is_tensor|garbage collector
# remedy: (?i)less (often|frequent)|once (in|per|at|after|every)|remove .{0,30}(call|walk|line|it\b|get_objects)|leave (it )?out|max_memory|memory_allocated|getrusage|psutil|tracemalloc|/proc|every .{0,12}steps
# gain: 89 %

import gc
import sys

import torch
import torch.nn.functional as F
from torch import nn

history = []


def tensor_memory():
    total = 0
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            total += item.numel() * item.element_size()
    return total


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
steps = 40
for step in range(steps):
    x = torch.rand(32, 1, 28, 28)
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "fixed" not in sys.argv or step % 20 == 19:
        history.append(tensor_memory())

"""Training with one sample in a batch: the calls cost more than the computation."""

# place: Sequential|step|operators
# cause: small|tiny|batch
# remedy: [Ll]arger batch|batch

import sys

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
samples, size = torch.rand(512, 32), 64 if "fixed" in sys.argv else 1
for at in range(0, len(samples), size):
    loss = model(samples[at : at + size]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""A large embedding of which a step uses few rows gets a dense gradient, and Adam updates all rows."""

# place: [Ee]mbed|0|Adam
# cause: dense|all rows|rows
# remedy: sparse=True|SparseAdam

import sys

import torch
from torch import nn

sparse = "fixed" in sys.argv
table = nn.Embedding(80_000, 32, sparse=sparse)
model = nn.Sequential(table, nn.Flatten(), nn.Linear(256, 10))
body = torch.optim.Adam(model[2].parameters(), fused=True)
rows = torch.optim.SparseAdam(table.parameters()) if sparse else torch.optim.Adam(table.parameters(), fused=True)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.randint(80_000, (32, 8))), torch.randint(10, (32,)))
    for one in (body, rows):
        one.zero_grad()
    loss.backward()
    for one in (body, rows):
        one.step()

"""The training state is saved to disk in each step."""

# place: train.py:\d+|torch.save|save
# cause: save|file|written
# remedy: less often|thread|async

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
with tempfile.TemporaryDirectory() as folder:
    for step in range(30):
        loss = nn.functional.cross_entropy(model(torch.rand(32, 256)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "fixed" not in sys.argv or step % 100 == 99:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "last.pt")

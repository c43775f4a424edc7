"""A process is started in each step, to look at the machine."""

# place: train.py:\d+ \S*(usage)|usage
# cause: subprocess|process
# remedy: less often|thread|psutil|/proc

import subprocess
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def usage():
    if "fixed" in sys.argv:
        with open("/proc/loadavg") as file:
            return file.read()
    return subprocess.run(["cat", "/proc/loadavg"], capture_output=True, text=True).stdout


for _ in range(60):
    loss = model(torch.rand(64, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    load = usage()

# place: Adam|optimi[sz]er
# cause: optimi[sz]er.{0,3} states?|states? of .{0,20}([Oo]ptimi[sz]er|Adam)|Adam.{0,5} states?|exp_avg|moments?\b
# remedy: SGD|Adafactor|8-?bit|Lion|Muon|without momentum|stateless|factor(ed|i[sz])|shard|ZeRO|state.*bfloat16
"""A wide network trained by Adam."""

import sys

import torch
from torch import nn

net = nn.Sequential(nn.Linear(784, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 10))
if sys.argv[1:] == ["fixed"]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
else:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

for step in range(15):
    digits, labels = torch.rand(32, 784), torch.randint(10, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(digits), labels)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(step, loss.item())

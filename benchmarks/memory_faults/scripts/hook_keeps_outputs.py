# place: \bhook\b|\bactivations\b|\bremember\b|\.py:(20|28)\b
# cause: kept|keeps?\b|retain|append|\bh[eo]lds?\b|stor(e|ing)|remember|grow|collect|accumulat|never freed|alive
# remedy: remove|clear|\.item\(\)|\bdel\b|hooks? .{0,20}(off|out)|(keep|only).{0,30}(mean|number|statistic|what|last)
"""A forward hook remembers what the hidden layers give, to look at the distribution later."""

import sys
from collections import defaultdict

import torch
from torch import nn

activations = defaultdict(list)


def remember(layer):
    def hook(module, inputs, output):
        if sys.argv[1:] == ["fixed"]:
            activations[layer].append(output.mean().item())
        else:
            activations[layer].append(output.detach())

    return hook


def build():
    net = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
    for index in (1, 3):
        net[index].register_forward_hook(remember(f"tanh{index}"))
    return net


net = build()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for epoch in range(3):
    for batch in torch.rand(8, 384, 32):
        error = net(batch).sub(batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    print(epoch, error.item())

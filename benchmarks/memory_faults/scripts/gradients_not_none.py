# place: zero_grad|\.py:(31)\b
# cause: gradients?\b|\.grad\b|zeros
# remedy: set_to_none|\.grad = None|free .*gradients|zero_grad\(\)
"""A generator of small images: one wide layer, then convolutions."""

import sys

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent=1536, channels=64):
        super().__init__()
        self.project = nn.Linear(latent, channels * 8 * 8)
        self.unflatten = nn.Unflatten(1, (channels, 8, 8))
        self.body = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(channels, 24, 3, padding=1), nn.ELU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(24, 24, 3, padding=1), nn.ELU(),
            nn.Conv2d(24, 24, 3, padding=1), nn.ELU(), nn.Conv2d(24, 3, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, z):
        return self.body(self.unflatten(self.project(z)))


generator = Generator()
optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
for step in range(12):
    target = torch.rand(48, 3, 32, 32)
    optimizer.zero_grad(set_to_none=sys.argv[1:] == ["fixed"])
    loss = (generator(torch.randn(48, 1536)) - target).abs().mean()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))

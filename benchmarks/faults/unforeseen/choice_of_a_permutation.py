"""Fits a small radiance field to the pixels of one image."""

# place: (?i)train\.py:(39|51)\b|\b(sample_rays|choice)\b
# cause: (?i)choice|permut|shuffl|replace=False|without replacement
# remedy: (?i)randint|default_rng|random\.Generator|with replacement|replace=True|once (per|an|each) epoch|one permutation|shuffle once|permut\w* once
# gain: 86 %

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HEIGHT, WIDTH = 900, 1200


class Field(nn.Module):
    def __init__(self, frequencies=8, hidden=128):
        super().__init__()
        self.register_buffer("scales", 2.0 ** torch.arange(frequencies))
        self.mlp = nn.Sequential(
            nn.Linear(4 * frequencies, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 3),
        )

    def forward(self, points):
        phases = (points[:, :, None] * self.scales).flatten(1)
        return self.mlp(torch.cat([phases.sin(), phases.cos()], dim=1)).sigmoid()


def sample_rays(count):
    if "fixed" in sys.argv:
        places = generator.choice(HEIGHT * WIDTH, count, replace=False)
    else:
        places = np.random.choice(HEIGHT * WIDTH, count, replace=False)
    places = torch.from_numpy(places)
    points = torch.stack([places // WIDTH / HEIGHT, places % WIDTH / WIDTH], dim=1)
    return points, colors[places]


generator = np.random.default_rng(0)
torch.manual_seed(0)
colors = torch.rand(HEIGHT * WIDTH, 3)
model = Field()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, fused=True)
for step in range(180):
    points, target = sample_rays(1024)
    loss = F.mse_loss(model(points), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Trains a sparse autoencoder."""

# place: (?i)train\.py:(24|25|37)\b|\b(sparsify|KeepLargest)\b
# cause: (?i)\b(arg)?sort(s|ed|ing)?\b
# remedy: (?i)top-?k|kthvalue|partial (sort|selection)
# gain: 55 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class KeepLargest(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        if "fixed" in sys.argv:
            values, places = x.topk(self.k, dim=-1)
        else:
            values, places = torch.sort(x, dim=-1, descending=True)
            values, places = values[:, : self.k], places[:, : self.k]
        return torch.zeros_like(x).scatter(-1, places, values.relu())


class Autoencoder(nn.Module):
    def __init__(self, inputs=256, hidden=4096, k=32):
        super().__init__()
        self.encoder = nn.Linear(inputs, hidden)
        self.sparsify = KeepLargest(k)
        self.decoder = nn.Linear(hidden, inputs)

    def forward(self, x):
        return self.decoder(self.sparsify(self.encoder(x)))


torch.manual_seed(0)
activations = torch.randn(5120, 256) @ torch.randn(256, 256) / 16
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for step in range(40):
    batch = activations[torch.randint(len(activations), (128,))]
    loss = F.mse_loss(model(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

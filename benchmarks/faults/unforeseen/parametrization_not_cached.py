"""Trains an equilibrium-like network with an orthogonal weight."""

# place: (?i)train\.py:(31)\b|\b(mixing|parametrizations?|Orthogonal|_Orthogonal)\b
# cause: (?i)parametri[sz]|orthogonal|matrix_exp|householder|(weight).{0,60}(each|every) (call|access|use|iteration)
# remedy: (?i)cached\b|cache|once (per|in|for|before) (each |a |the )?(forward|step|call|loop)|outside .{0,20}loop|before the loop|\breuse
# gain: 81 %

import contextlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal


class Equilibrium(nn.Module):
    def __init__(self, inputs=32, size=128, outputs=8, iterations=12):
        super().__init__()
        self.inject = nn.Linear(inputs, size)
        self.mixing = orthogonal(nn.Linear(size, size, bias=False), orthogonal_map="matrix_exp")
        self.out = nn.Linear(size, outputs)
        self.iterations = iterations

    def forward(self, x):
        x = self.inject(x)
        z = torch.zeros_like(x)
        with parametrize.cached() if "fixed" in sys.argv else contextlib.nullcontext():
            for _ in range(self.iterations):
                z = torch.tanh(0.9 * self.mixing(z) + x)
        return self.out(z)


torch.manual_seed(0)
inputs = torch.randn(4096, 32)
labels = (inputs @ torch.randn(32, 8)).argmax(1)
model = Equilibrium()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for step in range(40):
    rows = torch.randint(len(inputs), (256,))
    loss = F.cross_entropy(model(inputs[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

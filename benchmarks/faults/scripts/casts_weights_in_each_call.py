"""Weights are stored in float64 and cast in each call."""

# place: Net|layers
# cause: cast|convert|_to_copy|aten::to|copy_
# remedy: once|\.float\(\)|store|\.to\(

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        dtype = torch.float32 if "fixed" in sys.argv else torch.float64
        self.weights = nn.ParameterList(torch.rand(1024, 1024, dtype=dtype) / 1024 for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = torch.relu(x @ weight.float())
        return x


model = Net().requires_grad_(False)
for _ in range(40):
    model(torch.rand(8, 1024))

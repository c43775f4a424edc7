import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, batch, scale=None):
        values = batch.values() if isinstance(batch, dict) else batch
        assert [*map(type, values)] == [torch.Tensor] * 2
        return sum(self.linear(value.float()) for value in values) * (1 if scale is None else scale[0])


class Reads(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.linear = nn.Linear(8, size)

    def forward(self, x):
        return self.linear(x) if x.sum().item() >= 0 else x

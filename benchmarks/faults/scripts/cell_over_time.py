"""A recurrent cell is called for each point in time."""

# place: Reader|cell
# cause: cell|each (step|point)|over time|time step
# remedy: nn\.(LSTM|GRU)\b

import sys

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(32, 64, batch_first=True) if "fixed" in sys.argv else nn.LSTMCell(32, 64)
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        if "fixed" in sys.argv:
            return self.out(self.cell(x)[0][:, -1])
        state = None
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return self.out(state[0])


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for _ in range(16):
    loss = model(torch.rand(16, 100, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Trains a recurrent model on long sequences, chunk by chunk."""

# place: (?i)train\.py:(35|41)\b|loss\.backward|\brnn\b
# cause: (?i)retain(s|ed|_graph)|graph.{0,60}(grow|longer|earlier|previous|kept)|backward.{0,80}(grow|slower|longer|earlier|previous|more and more)|(grow|slower|longer|more and more).{0,80}(backward|graph)|(state|hidden).{0,60}(graph|not detached|history)
# remedy: (?i)detach
# gain: 67 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Reader(nn.Module):
    def __init__(self, inputs=32, hidden=128, outputs=16):
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, batch_first=True)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x, state=None):
        x, state = self.rnn(x, state)
        return self.out(x), state


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for step in range(16):
    sequences = torch.randn(16, 240, 32)
    targets = torch.randint(16, (16, 240))
    state = None
    optimizer.zero_grad()
    for x, y in zip(sequences.split(24, dim=1), targets.split(24, dim=1)):
        logits, state = model(x, state)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if "fixed" in sys.argv:
            loss.backward()
            state = tuple(s.detach() for s in state)
        else:
            loss.backward(retain_graph=True)
    optimizer.step()

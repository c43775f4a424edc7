"""Words become vectors by a product of one-hot rows with a matrix."""

# place: Tagger|embed
# cause: one.hot|mostly zero
# remedy: [Ee]mbedding

import sys

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words=4000, size=128):
        super().__init__()
        self.words = words
        self.embed = nn.Embedding(words, size) if "fixed" in sys.argv else nn.Linear(words, size, bias=False)
        self.tag = nn.Linear(size, 16)

    def forward(self, ids):
        if "fixed" not in sys.argv:
            ids = nn.functional.one_hot(ids, self.words).float()
        return self.tag(torch.relu(self.embed(ids)))


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(12):
    loss = model(torch.randint(4000, (32, 64))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

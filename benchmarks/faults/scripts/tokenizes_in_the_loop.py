"""The same texts are split into words in each epoch."""

# place: train.py:\d+ encode
# cause: text
# remedy: once|before the loop|workers

import re
import sys

import torch
from torch import nn

texts = ["the quick brown fox jumps over the lazy dog " * 30 for _ in range(64)]
vocabulary = {}


def encode(text):
    words = re.findall(r"\w+", text.lower())
    return [vocabulary.setdefault(word, len(vocabulary)) for word in words][:128]


model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * 128, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
x = torch.tensor([encode(text) for text in texts])
for _ in range(60):
    if "fixed" not in sys.argv:
        x = torch.tensor([encode(text) for text in texts])
    loss = nn.functional.cross_entropy(model(x), torch.randint(40, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

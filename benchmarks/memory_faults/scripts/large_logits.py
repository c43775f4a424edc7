# place: \bhead\b|logits|cross_entropy|log_softmax|\bloss\b|\.py:(35|36)\b
# cause: logits|vocabulary|vocab|log_softmax|cross.?entropy
# remedy: chunk|linear_cross_entropy|fused|(in|by) (piece|part)|checkpoint|Liger|slices|small\w* .{0,10}batch
"""A language model with a large vocabulary."""

import sys

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary=12000, size=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.rnn = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.rnn(self.embedding(tokens))[0]


def backward_in_chunks(model, hidden, targets, count=16):
    leaf, total = hidden.detach().requires_grad_(), 0.0
    for h, y in zip(leaf.flatten(0, 1).chunk(count), targets.flatten().chunk(count)):
        part = nn.functional.cross_entropy(model.head(h), y, reduction="sum") / targets.numel()
        part.backward()
        total += part.item()
    hidden.backward(leaf.grad)
    return total


def backward(model, hidden, targets):
    logits = model.head(hidden).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets.flatten())
    loss.backward()
    return loss.item()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step_of = backward_in_chunks if sys.argv[1:] == ["fixed"] else backward
for _ in range(10):
    text = torch.randint(12000, (16, 33))
    optimizer.zero_grad()
    print(step_of(model, model(text[:, :-1]), text[:, 1:]))
    optimizer.step()

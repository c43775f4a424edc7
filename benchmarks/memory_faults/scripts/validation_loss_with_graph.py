# place: \bvalidate\b|\btotal\b|\.py:(42)\b
# cause: graph|grad_fn|autograd|gradients?\b.*(recorded|enabled|needed)|saved (tensors|activations)
# remedy: no_grad|inference_mode|detach|\.item\(\)|set_grad_enabled
"""The loss of the validation is summed over the batches."""

import contextlib
import sys

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words=500, tags=12):
        super().__init__()
        self.embedding = nn.Embedding(words, 64)
        self.convolution = nn.Conv1d(64, 128, 5, padding=2)
        self.output = nn.Linear(128, tags)

    def forward(self, tokens):
        features = self.convolution(self.embedding(tokens).transpose(1, 2))
        return self.output(features.transpose(1, 2).tanh())


class Trainer:
    def __init__(self, model):
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self, data):
        self.model.train()
        for tokens, tags in data:
            self.optimizer.zero_grad(set_to_none=True)
            self.criterion(self.model(tokens).flatten(0, 1), tags.flatten()).backward()
            self.optimizer.step()

    def validate(self, data):
        self.model.eval()
        total = 0
        with torch.no_grad() if sys.argv[1:] == ["fixed"] else contextlib.nullcontext():
            for tokens, tags in data:
                total += self.criterion(self.model(tokens).flatten(0, 1), tags.flatten())
        return total / len(data)


trainer = Trainer(Tagger())
train, valid = ([(torch.randint(500, (n, 40)), torch.randint(12, (n, 40))) for _ in range(20)] for n in (8, 48))
trainer.fit(train)
print(f"validation loss {float(trainer.validate(valid)):.3f}")

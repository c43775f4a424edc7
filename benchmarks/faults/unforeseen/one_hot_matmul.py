"""Trains a small text classifier."""

# place: (?i)train\.py:(25|26|37)\b|\b(word_vectors|WordVectors)\b
# cause: (?i)one[-_ ]?hot|dense matrix of (zeros|mostly zeros)|multipl\w+ .{0,40}(zeros|sparse)
# remedy: (?i)nn\.Embedding|F\.embedding|functional\.embedding|embedding look-?up|look-?up|index_select|weight\[\w+\]|(index|pick|select|gather)\w* (the |its )?rows|rows of the (weight|table|matrix)
# gain: 83 %

import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 6000


class WordVectors(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, size) * 0.05)

    def forward(self, ids):
        if "fixed" in sys.argv:
            return F.embedding(ids, self.weight)
        x = F.one_hot(ids, VOCABULARY).float()
        return x @ self.weight


class Classifier(nn.Module):
    def __init__(self, size=128):
        super().__init__()
        self.word_vectors = WordVectors(size)
        self.rnn = nn.GRU(size, size, batch_first=True)
        self.out = nn.Linear(size, 4)

    def forward(self, ids):
        _, last = self.rnn(self.word_vectors(ids))
        return self.out(last[-1])


torch.manual_seed(0)
texts = torch.randint(VOCABULARY, (320, 48))
labels = torch.randint(4, (320,))
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
for epoch in range(2):
    for ids, target in zip(texts.split(32), labels.split(32)):
        loss = F.cross_entropy(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

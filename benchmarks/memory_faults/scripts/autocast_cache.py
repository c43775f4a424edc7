# place: autocast|\.py:(15|17)\b
# cause: \bcache|copies of (the )?weights|cop(y|ies) .*bfloat16|weights .*bfloat16|\bcasts?\b
# remedy: cache_enabled|\.bfloat16\(\)|\.to\(torch\.bfloat16|weights in bfloat16|bfloat16 weights|model.*bfloat16
"""Predictions in bfloat16 with a wide model."""

import sys

import torch
from torch import nn


def predict(model, batches):
    labels = []
    cache = sys.argv[1:] != ["fixed"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        for batch in batches:
            logits = model(batch)
            labels.append(logits.argmax(-1))
    return torch.cat(labels)


def main():
    layers = []
    for _ in range(10):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 20)).eval()
    labels = predict(model, (torch.rand(4, 1024) for _ in range(10)))
    print(labels.bincount(minlength=20).tolist())


main()

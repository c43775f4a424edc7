"""Trains a small CNN and follows its accuracy."""

# place: (?i)train\.py:(34|50)\b|\baccuracy\b
# cause: (?i)(same|identical) (input|batch|images|data|values|tensor|result|work|computation)|twice|(second|another|extra|additional|two|2) (forward|call|pass|time)|(forward|call(s|ed)?|comput\w+|runs?|model) .{0,40}(again|repeated)|recomput
# remedy: (?i)(reuse|re-use|keep|use|pass|take).{0,60}(logits|outputs?|predictions?|result|scores|first)|once (per|in|for|a) .{0,10}(step|batch)|\breuse
# gain: 34 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class CNN(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@torch.no_grad()
def accuracy(images, labels):
    return (model(images).argmax(1) == labels).float().mean()


torch.manual_seed(0)
model = CNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
total = torch.tensor(0.0)
for step in range(40):
    images, labels = torch.rand(48, 3, 32, 32), torch.randint(10, (48,))
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    if "fixed" in sys.argv:
        total += (logits.argmax(1) == labels).float().mean()
    else:
        total += accuracy(images, labels)
    optimizer.step()

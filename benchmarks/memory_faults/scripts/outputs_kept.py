# place: \boutputs\b|Scorer|\.py:(19|24)\b
# cause: kept|keeps?\b|retain|\bh[eo]lds?\b|stor(e|ing)|dict\b|grow|collect|accumulat|never freed|alive
# remedy: metric|running (sum|mean|total)|(keep|only).{0,30}(sum|mean|number|statistic|what)|\bdel\b|clear|\.item\(\)
"""The embeddings of all batches are kept to give their mean norm at the end."""

import sys

import torch
from torch import nn


class Scorer:
    def __init__(self, model):
        self.model = model.eval()
        self.outputs, self.norms, self.seen = {}, 0.0, 0

    @torch.no_grad()
    def update(self, index, batch):
        features = self.model(batch)
        if sys.argv[1:] == ["fixed"]:
            self.norms += features.norm(dim=-1).sum().item()
            self.seen += features.shape[:-1].numel()
        else:
            self.outputs[index] = features

    def result(self):
        if self.outputs:
            return sum(one.norm(dim=-1).mean().item() for one in self.outputs.values()) / len(self.outputs)
        return self.norms / self.seen


encoder = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 256), nn.LayerNorm(256))
scorer = Scorer(encoder)
for index in range(30):
    scorer.update(index, torch.randn(16, 100, 40))
print(scorer.result())

# place: Adam|optimi[sz]er|\.py:(32)\b
# cause: temporar|intermediate|sqrt|scratch|denom|(within|during|inside) .{0,20}(step|update)
# remedy: fused
"""A classifier of texts as bags of words, with one large weight."""

import sys

import torch
from torch import nn


class BagOfWords(nn.Module):
    def __init__(self, words=16000, size=256):
        super().__init__()
        self.project = nn.Linear(words, size)
        self.classify = nn.Linear(size, 4)

    def forward(self, counts):
        return self.classify(self.project(counts).relu())


def main(steps=12):
    torch.manual_seed(1)
    options = {"fused": True} if sys.argv[1:] == ["fixed"] else {}
    model = BagOfWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        counts = torch.poisson(torch.full((16, 16000), 0.01))
        loss = nn.functional.cross_entropy(model(counts), torch.randint(4, (16,)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()

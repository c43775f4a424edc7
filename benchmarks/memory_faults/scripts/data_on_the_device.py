# place: \bimages\b|\bdata\b|load_all|read_image|\.py:(21|22|28|30)\b
# cause: all (the |of the )?(data|images|samples)|whole data|data ?set|(torch\.|aten::)stack|at once|inputs?\b|loaded
# remedy: batch by batch|DataLoader|lazy|lazily|memmap|mmap|as needed|uint8|generator|(one|each|per|a) batch
"""Pictures are read and scaled before the training begins."""

import sys

import numpy as np
import torch
from torch import nn

device = torch.device("cpu")
COUNT, BATCH = 768, 32


def read_image(number):
    pixels = np.random.default_rng(number).integers(0, 256, (3, 64, 64), dtype=np.uint8)
    return torch.from_numpy(pixels).to(device).float() / 255


def load_all(numbers):
    return torch.stack([read_image(number) for number in numbers])


def batches():
    if sys.argv[1:] == ["fixed"]:
        for first in range(0, COUNT, BATCH):
            yield load_all(range(first, first + BATCH))
    else:
        images = load_all(range(COUNT))
        yield from images.split(BATCH)


model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 225, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in batches():
    loss = nn.functional.cross_entropy(model(batch), torch.randint(4, (len(batch),), device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

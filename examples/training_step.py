"""Where does a training step go? One step of AlexNet: forward, loss, backward, optimizer.

Run it with ``python examples/training_step.py``; ``make demo`` does.
"""

import torch
from models import AlexNet
from torch.nn.functional import cross_entropy

import torchprof

BATCH = 16

torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
model = AlexNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.rand(BATCH, 3, 224, 224, device=device)
targets = torch.randint(1000, (BATCH,), device=device)


def step() -> None:
    loss = cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()  # the first step is slower: it initializes libraries and state

with torchprof.Profile(model, use_cuda=cuda, profile_memory=True) as prof:
    step()

print(f"One training step of AlexNet, {BATCH} images, on {device.upper()}: forward, loss, backward, optimizer (SGD).\n")
print(prof)

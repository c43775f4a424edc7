"""Which operators run in which layer? Ten calls of LeNet-5, with the operators under each layer.

Run it with ``python examples/inference.py``.
"""

import torch
from models import LeNet5

import torchprof

torch.manual_seed(0)
model = LeNet5().eval()
digits = torch.rand(1, 1, 32, 32)

with torch.inference_mode(), torchprof.Profile(model, warmup=3) as prof:
    for _ in range(3 + 10):
        model(digits)

print("LeNet-5, ten calls with one image each, after three that were not recorded:\n")
print(prof.display(show_events=True))
print("\nOne call of each layer:\n")
print(prof.run.report("calls"))

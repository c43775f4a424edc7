"""A model in float16 on a CPU that has no fast kernels for it."""

# place: Sequential|conv|Conv2d
# cause: float16|half
# remedy: float32|\.float\(\)|bfloat16

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
model = model.eval() if "fixed" in sys.argv else model.eval().half()
dtype = next(model.parameters()).dtype
with torch.inference_mode():
    for _ in range(8):
        model(torch.rand(2, 3, 64, 64, dtype=dtype))

"""A mask made with NumPy between two tensor operations: the example of torch's own profiler tutorial.

``torchprof run examples/scripts/numpy_mask.py [rows]``: the first row of "Where the time goes" names the line with
``np.argwhere``. The labels are those of the tutorial (https://docs.pytorch.org/tutorials/beginner/profiler.html).
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function


class MyModule(nn.Module):
    """A linear layer, and where its outputs are larger than a threshold, ones in a mask."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with record_function("LINEAR PASS"):
            out = self.linear(x)
        with record_function("MASK INDICES"):
            threshold = out.sum(dim=1).mean().item()
            hi_idx = np.argwhere(mask.numpy() > threshold)
            hi_idx = torch.from_numpy(hi_idx)
        return out, hi_idx


def main(size: int = 200) -> None:
    torch.manual_seed(0)
    model = MyModule(500, 10)
    x = torch.rand(128, 500)
    mask = torch.rand(size, size, size)
    with torch.no_grad():
        for _ in range(2):
            out, hi_idx = model(x, mask)
    print(f"{len(hi_idx)} of {mask.numel()} are larger, output {tuple(out.shape)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

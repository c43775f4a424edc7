"""A convolution in double precision, between others in float32: the slow one of every tutorial on finding it.

``torchprof run examples/scripts/double_precision.py [images [steps]]``: the first row of "Where the time goes" is
``ConvNet.block.2.conv``, float64.
"""

import sys

import torch
from torch import Tensor, nn


class Double(nn.Module):
    """A convolution in float64, whose fast kernels (those of oneDNN, those of tensor cores) know float32 and less."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.double()).float()


class ConvNet(nn.Module):
    """Four convolutions of the same size, of which the third is in double precision."""

    def __init__(self, channels: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            Double(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)).mean((2, 3)))


def main(images: int = 8, steps: int = 5) -> None:
    torch.manual_seed(0)
    model = ConvNet().eval()
    x = torch.rand(images, 3, 64, 64)
    with torch.no_grad():
        for step in range(steps):
            best = model(x).argmax(1)
            print(f"step {step}: {best.tolist()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

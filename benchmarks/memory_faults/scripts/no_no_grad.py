# place: \btest\b|Denoiser|\bbody\b|network|\.py:(27|32|40)\b
# cause: graph|autograd|gradients?\b.*(recorded|enabled|needed)|saved for (a |the )?backward|(no|never) .*backward
# remedy: no_grad|inference_mode|set_grad_enabled|requires_grad_\(False
"""A denoising network is scored on large test images."""

import sys

import torch
from torch import nn


def layer(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU())


class Denoiser(nn.Module):
    def __init__(self, width=16, depth=8):
        super().__init__()
        self.first = layer(1, width)
        self.body = nn.Sequential(*(layer(width, width) for _ in range(depth)))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image):
        return image - self.last(self.body(self.first(image)))


def test(network, count=15):
    network.eval()
    psnr = 0.0
    for _ in range(count):
        clean = torch.rand(8, 1, 64, 64)
        output = network(clean + 0.1 * torch.randn_like(clean))
        psnr += -10 * torch.log10((output - clean).square().mean()).item()
    return psnr / count


network = Denoiser()
if sys.argv[1:] == ["fixed"]:
    test = torch.no_grad()(test)
print(f"{test(network):.2f} dB")

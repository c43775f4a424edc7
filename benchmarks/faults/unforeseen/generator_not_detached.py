"""Trains a small GAN."""

# place: (?i)train\.py:(55|56)\b|\bgenerator\b
# cause: (?i)retain(s|ed|_graph)|not detached|generator.{0,80}(gradient|backward|graph)|(gradient|backward|graph).{0,80}generator|(gradients?|backward).{0,60}(not used|unused|never used|needless|discarded|zeroed|cleared|overwritten|thrown away)
# remedy: (?i)detach|no_grad
# gain: 34 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class GAN(nn.Module):
    def __init__(self, noise=64):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, 256, 4),
            nn.BatchNorm2d(256),
            nn.ReLU(),
            nn.ConvTranspose2d(256, 128, 4, stride=2, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 8 * 8, 1),
        )


torch.manual_seed(0)
model = GAN()
optimizer_g = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
optimizer_d = torch.optim.Adam(model.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
ones, zeros = torch.ones(48, 1), torch.zeros(48, 1)
for step in range(16):
    real = torch.rand(48, 1, 32, 32) * 2 - 1
    fake = model.generator(torch.randn(48, 64, 1, 1))

    optimizer_d.zero_grad()
    loss_d = F.binary_cross_entropy_with_logits(model.discriminator(real), ones)
    if "fixed" in sys.argv:
        loss_d = loss_d + F.binary_cross_entropy_with_logits(model.discriminator(fake.detach()), zeros)
        loss_d.backward()
    else:
        loss_d = loss_d + F.binary_cross_entropy_with_logits(model.discriminator(fake), zeros)
        loss_d.backward(retain_graph=True)
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = F.binary_cross_entropy_with_logits(model.discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()

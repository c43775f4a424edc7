"""Trains a variational autoencoder."""

# place: (?i)train\.py:(27|33|36|37|38|47)\b|\b(MultivariateNormal|kl_divergence|posterior)\b
# cause: (?i)MultivariateNormal|cholesky|covariance|diag_embed|triangular|full matri|dense matri
# remedy: (?i)Independent\b|\bNormal\(|(diagonal|univariate|factori[sz]ed).{0,30}(normal|gaussian|formula|distribution)|closed form|elementwise|element-wise|scale_tril
# gain: 62 %

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence


class VAE(nn.Module):
    def __init__(self, inputs=784, hidden=256, latent=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))
        self.latent = latent

    def posterior(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        if "fixed" in sys.argv:
            return Independent(Normal(mean, (0.5 * log_variance).exp()), 1)
        return MultivariateNormal(mean, torch.diag_embed(log_variance.exp()))

    def prior(self, x):
        mean = torch.zeros(len(x), self.latent)
        if "fixed" in sys.argv:
            return Independent(Normal(mean, torch.ones_like(mean)), 1)
        return MultivariateNormal(mean, torch.eye(self.latent))

    def forward(self, x):
        posterior = self.posterior(x)
        reconstruction = self.decoder(posterior.rsample())
        return reconstruction, kl_divergence(posterior, self.prior(x))


torch.manual_seed(0)
images = torch.rand(2048, 784)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for epoch in range(10):
    for x in images[torch.randperm(len(images))].split(128):
        reconstruction, kl = model(x)
        error = F.binary_cross_entropy_with_logits(reconstruction, x, reduction="none").sum(1)
        loss = (error + kl).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

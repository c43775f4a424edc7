"""Trains a contractive autoencoder."""

# place: (?i)train\.py:(32|33|34|44)\b|\b(jacobian|contraction)\b
# cause: (?i)(jacobian|autograd\.grad).{0,80}(rows?|outputs?|component|element|column|loop|one by one|each|[\d,]+ (times|calls))|(backward|gradients?).{0,60}(one by one|row by row|(for|of|per) (each|every|one) (output|row|component|element|column|number))|backward .{0,30}[\d,]+ times|(row by row|one by one|[\d,]+ (calls|passes|backwards?)|Python loop).{0,80}(jacobian|autograd\.grad|gradients?|backward)
# remedy: (?i)jac(rev|fwd)|is_grads_batched|vmap|vectorize=True|batched (gradient|backward|grad)|closed form|(one|single) (backward|vector)
# gain: 52 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, inputs=64, hidden=128, code=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, inputs))


def contraction(encoder, x):
    if "fixed" in sys.argv:
        x = x.requires_grad_()
        code = encoder(x).sum(0)
        directions = torch.eye(len(code))
        jacobian = torch.autograd.grad(code, x, directions, create_graph=True, is_grads_batched=True)[0]
        return jacobian.square().sum() / len(x)
    x = x.requires_grad_()
    code = encoder(x)
    total = 0
    for i in range(code.shape[1]):
        row = torch.autograd.grad(code[:, i].sum(), x, create_graph=True)[0]
        total = total + row.square().sum()
    return total / len(x)


torch.manual_seed(0)
data = torch.randn(2048, 64)
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for step in range(500):
    x = data[torch.randint(len(data), (16,))]
    loss = F.mse_loss(model.decoder(model.encoder(x)), x) + 0.01 * contraction(model.encoder, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

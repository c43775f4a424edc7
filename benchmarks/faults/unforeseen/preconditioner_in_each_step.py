"""Trains an MLP with a second-order optimizer."""

# place: (?i)train\.py:(21|22|37|38|54)\b|\b(inverse_root|Shampoo)\b
# cause: (?i)eigh?\b|eigen|linalg|inverse root|matrix root|decompos|precondition
# remedy: (?i)less (often|frequent)|every .{0,15}steps|once (in|per|every)|\breuse|cached?\b|amorti[sz]|Newton
# gain: 54 %

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, interval=1, epsilon=1e-3):
        super().__init__(params, {"lr": lr, "interval": interval, "epsilon": epsilon})

    @staticmethod
    def inverse_root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.clamp(min=1e-6).pow(-0.25) @ vectors.T

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                grad = p.grad if p.dim() == 2 else p.grad[:, None]
                if not state:
                    state["step"] = 0
                    state["left"] = group["epsilon"] * torch.eye(grad.shape[0])
                    state["right"] = group["epsilon"] * torch.eye(grad.shape[1])
                state["left"].addmm_(grad, grad.T)
                state["right"].addmm_(grad.T, grad)
                if state["step"] % group["interval"] == 0:
                    state["left_root"] = self.inverse_root(state["left"])
                    state["right_root"] = self.inverse_root(state["right"])
                state["step"] += 1
                update = state["left_root"] @ grad @ state["right_root"]
                p.sub_(update.view_as(p), alpha=group["lr"])


torch.manual_seed(0)
data = torch.randn(8192, 128)
labels = (data @ torch.randn(128, 10)).argmax(1)
model = nn.Sequential(nn.Linear(128, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 10))
optimizer = Shampoo(model.parameters(), interval=20 if "fixed" in sys.argv else 1)
for step in range(160):
    rows = torch.randint(len(data), (1024,))
    loss = F.cross_entropy(model(data[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

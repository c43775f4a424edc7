"""An average of the weights is kept by copying the whole model in each step."""

# place: train.py:\d+ \S*update|update|deepcopy
# cause: deepcopy|copies|state_dict
# remedy: foreach|lerp|AveragedModel|in place|swa_utils

import copy
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
average = copy.deepcopy(model)


def update(average, model):
    if "fixed" in sys.argv:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        return average
    new = copy.deepcopy(average)
    before, now = average.state_dict(), copy.deepcopy(model).state_dict()
    new.load_state_dict({name: 0.99 * before[name] + 0.01 * now[name] for name in before})
    return new


for _ in range(40):
    loss = nn.functional.cross_entropy(model(torch.rand(16, 256)), torch.randint(10, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = update(average, model)

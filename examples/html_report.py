"""Training steps of a small language model, as one HTML page: report.html.

Run it with ``python examples/html_report.py`` and open the file. It also prints the first lines of the page.
"""

import torch
from models import TinyTransformer
from torch.nn.functional import cross_entropy

import torchprof

BATCH, LENGTH, STEPS = 16, 128, 6

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = TinyTransformer(blocks=6).to(device)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(1000, (BATCH, LENGTH), device=device)


def step() -> None:
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()


step()  # the first step creates the optimizer's state
torchprof.peak(device)  # the peak of this machine: the roof of the page's roofline
with torchprof.Profile(
    model, use_cuda=device == "cuda", profile_memory=True, with_flops=True, with_timeline=True
) as prof:
    for _ in range(STEPS):
        step()
        prof.step()

prof.run.export("report.html")
print(prof.run.report("headline"))
print()
print(prof.run.report("advice"))

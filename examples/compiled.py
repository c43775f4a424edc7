"""Which layer of a compiled model takes the time? Some training steps of a small language model, under torch.compile.

Run it with ``python examples/compiled.py``. On the CPU torch.compile needs a C++ compiler, and half a minute for the
first step. It shows the parts that took the most time, the layers, and the overhead of the compiled code.
"""

import torch
from models import TinyTransformer
from torch.nn.functional import cross_entropy

import torchprof

STEPS, BATCH, LENGTH = 5, 16, 128

torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
model = torch.compile(TinyTransformer().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
tokens = torch.randint(1000, (BATCH, LENGTH), device=device)

# The first step compiles. It must be inside the block, but need not be recorded.
schedule = torch.profiler.schedule(wait=1, warmup=1, active=STEPS, repeat=1)
with torchprof.Profile(model, use_cuda=cuda, compile_layers=True, schedule=schedule) as prof:
    for _ in range(2 + STEPS):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

print(prof.run.report("top", top=12))
print()
print(prof.display(depth=3))
print()
print(prof.run.report("compiled"))

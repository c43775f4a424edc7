"""Where does a step of a training loop go? AlexNet with a DataLoader and SGD: two cycles of three recorded steps.

Run it with ``python examples/training_loop.py``. The trace of each cycle is in the folder ``traces``: open one in
https://ui.perfetto.dev.
"""

import torch
from models import AlexNet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchprof

BATCH = 8
STEPS = 12

torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
model = AlexNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images = TensorDataset(torch.rand(BATCH * STEPS, 3, 224, 224), torch.randint(1000, (BATCH * STEPS,)))

with torchprof.Profile(
    model,
    use_cuda=cuda,
    schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=2),
    on_trace_ready=torchprof.tensorboard_trace_handler("traces"),
) as prof:
    for batch, targets in DataLoader(images, BATCH, shuffle=True):
        loss = cross_entropy(model(batch.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

print(f"Steps of a training loop: AlexNet, {BATCH} images each, on {device.upper()}.\n")
print(prof.run.report("steps", depth=2))

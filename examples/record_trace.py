"""Record three training steps with torch's own profiler, for ``read_trace.py`` and other tools: trace.json.gz.

Run it with ``python examples/record_trace.py``. The trace beside this file was recorded by it, on one CPU core.
``torchprof.annotate`` labels the layers, so a reader of the trace has their paths, even without the model.
"""

import torch
from models import LeNet5
from torch.nn.functional import cross_entropy
from torch.profiler import profile, record_function, schedule

import torchprof

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LeNet5().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, targets = torch.rand(16, 1, 32, 32, device=device), torch.randint(10, (16,), device=device)


def write(prof: profile) -> None:
    prof.export_chrome_trace("trace.json.gz")
    print("Written: trace.json.gz.")


with (
    torchprof.annotate(model),
    profile(
        schedule=schedule(wait=4, warmup=1, active=3, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=True,
    ) as prof,
):
    for _ in range(8):
        scores = model(images)
        with record_function("loss"):
            loss = cross_entropy(scores, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()

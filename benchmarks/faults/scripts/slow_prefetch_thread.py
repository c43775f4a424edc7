"""A thread that prepares batches ahead, and takes longer for each than a step."""

# place: train.py:\d+ \S*(batches)|q(ueue)?\.get
# cause: waits [\d.]+m?s for its own threads
# remedy: more of them|Do less in these threads

import sys
import threading
import time
from queue import Queue

import torch
from torch import nn

STEPS, THREADS = 60, 6 if "fixed" in sys.argv else 1


def prepare(queue, count):
    for _ in range(count):
        time.sleep(0.02)  # a read from a store elsewhere
        queue.put((torch.rand(256, 256), torch.randint(10, (256,))))


def batches():
    queue = Queue(4)
    for _ in range(THREADS):
        threading.Thread(target=prepare, args=(queue, STEPS // THREADS), daemon=True).start()
    for _ in range(STEPS):
        yield queue.get()


model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for x, y in batches():
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""The loop sleeps between two looks at a queue that another thread fills."""

# place: train.py:\d+ \S*(next_batch)|next_batch
# cause: sleep|wait
# remedy: queue\.Queue|Queue|Condition|without .*sleep|[Rr]emove .*sleep

import sys
import threading
import time
from collections import deque
from queue import Queue

import torch
from torch import nn

batches = deque()
queue = Queue(8)


def produce():
    for _ in range(40):
        batch = torch.rand(64, 128)
        if "fixed" in sys.argv:
            queue.put(batch)
        else:
            batches.append(batch)


def next_batch():
    if "fixed" in sys.argv:
        return queue.get()
    while True:
        time.sleep(0.01)
        if batches:
            return batches.popleft()


model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
threading.Thread(target=produce).start()
for _ in range(40):
    loss = model(next_batch()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

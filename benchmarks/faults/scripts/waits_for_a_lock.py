"""A lock that another thread holds while it writes."""

# place: train.py:\d+ \S*(publish)|publish
# cause: lock|wait
# remedy: lock|copy|queue

import sys
import threading
import time

import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
lock, ended, published = threading.Lock(), threading.Event(), []


def write():
    while not ended.is_set():
        with lock:
            written = len(published)
            if "fixed" not in sys.argv:
                time.sleep(0.02)  # a slow disk
        if "fixed" in sys.argv and written:
            time.sleep(0.02)
        time.sleep(0.001)


def publish(loss):
    with lock:
        published.append(loss.detach())


writer = threading.Thread(target=write)
writer.start()
for _ in range(40):
    loss = model(torch.rand(64, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    publish(loss)
ended.set()
writer.join()

"""Trains a small network while a thread writes the history to a file."""

# place: (?i)train\.py:(28|29|30|42)\b|\bwriter\b
# cause: (?i)spin|busy|poll|\bGIL\b|interpreter lock|(thread|writer).{0,80}(always runs|runs all the time|never (sleeps|waits)|without (waiting|sleeping|a pause)|takes? [\d.]+ ?% .{0,20}(CPU|core|processor)|CPU)|competes
# remedy: (?i)queue\.get|queue\.Queue|\.get\(\)|timeout|threading\.(Event|Condition)|\ban? (Event|Condition)\b|blocking|block until|sleep|\.wait\(
# gain: 63 %

import json
import queue
import sys
import tempfile
import threading

import torch
import torch.nn.functional as F
from torch import nn

records = queue.Queue()
file = tempfile.TemporaryFile("w")


def writer():
    while True:
        if "fixed" in sys.argv:
            record = records.get()
        else:
            try:
                record = records.get_nowait()
            except queue.Empty:
                continue
        if record is None:
            return
        file.write(json.dumps(record) + "\n")


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
thread = threading.Thread(target=writer, daemon=True)
thread.start()
for step in range(60):
    x, y = torch.randn(256, 256), torch.randint(10, (256,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    records.put({"step": step, "loss": loss.item()})
records.put(None)
thread.join()

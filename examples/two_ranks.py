"""Which of two ranks is slow? A job of two processes on this machine, in one report.

Run it with ``torchrun --nproc-per-node 2 examples/two_ranks.py``. Both ranks train one model with
``DistributedDataParallel``. But the sentences are not divided evenly: rank 1 has the long ones. So its own work takes
longer, and rank 0 waits for it in the collectives.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import torchprof

STEPS = 8
SENTENCES = 16
WORDS = 1000
WIDTH = 128

if "RANK" not in os.environ:
    sys.exit("This is a job of several processes: torchrun --nproc-per-node 2 examples/two_ranks.py")


class Tagger(nn.Module):
    """Classifies each word of a sentence into one of eight kinds."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.kinds = nn.Linear(WIDTH, 8)

    def forward(self, sentences):
        return self.kinds(self.encoder(self.words(sentences)))


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # if a rank dies, torchrun sends SIGTERM: let `finally` run
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(Tagger())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
length = 96 if rank == 1 else 32  # words in each sentence of this rank


def step():
    sentences = torch.randint(WORDS, (SENTENCES, length))
    loss = cross_entropy(model(sentences).flatten(0, 1), torch.randint(8, (SENTENCES * length,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(2):  # in the second step, DistributedDataParallel rebuilds its buckets
    step()
prof = torchprof.Profile(model, profile_memory=True, with_flops=True)
try:
    with prof:
        for _ in range(STEPS):
            step()
            prof.step()
finally:
    run = prof.gather()
    if run is not None:  # on rank 0
        print(run.report("ranks", top=5))
dist.destroy_process_group()

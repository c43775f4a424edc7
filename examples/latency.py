"""How long does a call take, and how many samples per second is that? A small transformer, inference and training step.

Run it with ``python examples/latency.py``.
"""

import torch
from models import TinyTransformer
from torch.nn.functional import cross_entropy

import torchprof

LENGTH = 32
BATCH_SIZES = (1, 4, 16)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = TinyTransformer().to(device)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(1000, (max(BATCH_SIZES), LENGTH + 1), device=device)


def loss(scores: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token. ``benchmark`` cuts the inputs to a batch size, so we cut the targets."""
    return cross_entropy(scores.flatten(0, 1), tokens[: len(scores), 1:].flatten())


inputs = tokens[:, :-1]
print(torchprof.benchmark(model, inputs, BATCH_SIZES), end="\n\n")
print(torchprof.benchmark(model, inputs, BATCH_SIZES, train=True, loss=loss, optimizer=optimizer), end="\n\n")

peak = torchprof.peak(device)
print(
    f"The most that {peak.device} was seen to do in {peak.dtype}: {peak.flops_per_s / 1e9:.1f} GFLOP/s in a product of "
    f"matrices, {peak.bytes_per_s / 1e9:.1f} GB/s in a copy."
)

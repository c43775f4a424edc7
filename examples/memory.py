"""What uses the memory of a training step? One step of a small language model: forward, loss, backward, optimizer.

Run it with ``python examples/memory.py``. At the peak, nearly all memory is saved for backward. So the same step
runs again with checkpointed blocks: they save only their input, and recompute the rest in backward.
"""

import torch
from models import TinyTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint_sequential

import torchprof
from torchprof import Run

BLOCKS, BATCH, LENGTH = 6, 16, 128


class Checkpointed(nn.Module):
    """Checkpoint the blocks in pairs: of each pair, only the input is saved for backward."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, len(self.blocks) // 2, x, use_reentrant=False)


def profiled(model: nn.Module) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1000, (BATCH, LENGTH), device=device)

    def step() -> None:
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first step creates the optimizer's state
    with torchprof.Profile(model, use_cuda=device == "cuda", profile_memory=True, with_timeline=True) as prof:
        step()
    return prof.run


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = TinyTransformer(blocks=BLOCKS).to(device)

print(profiled(model).report("memory", depth=2))

model.blocks = Checkpointed(model.blocks)
print("\nThe same with the blocks checkpointed:\n")
print(profiled(model).report("memory", depth=1, top=5))

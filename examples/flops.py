"""How many FLOPs does a transformer need, layer by layer, and how fast is it here? BERT-base on 128 tokens.

Run it with ``python examples/flops.py``.
"""

import torch
from models import Bert

import torchprof

# From shapes alone: on the meta device a model has no data, so it can have any size.
with torch.device("meta"):
    model = Bert()
run = torchprof.flops(model, torch.zeros(1, 128, dtype=torch.long))
print("BERT-base, forward and backward, from shapes alone:\n")
print(run.report("tree", depth=2))

# On data, with times: which share of the speed of a matrix product each layer reaches on this machine.
torch.manual_seed(0)
model = Bert().eval()
tokens = torch.randint(30522, (1, 128))
torchprof.peak()
with torch.inference_mode():
    model(tokens)
    with torchprof.Profile(model, with_flops=True) as prof:
        for _ in range(3):
            model(tokens)
print("\nThree forwards on this machine:\n")
print(prof.display(depth=2))
print()
print(prof.run.report("summary", depth=1))

"""Which operators take the time, in which layers, with which kernels? A training step of a small transformer.

Run it with ``python examples/operators.py``.
"""

import torch
from models import TinyTransformer
from torch.nn.functional import cross_entropy
from torch.profiler import record_function

import torchprof

torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
model = TinyTransformer(width=256, blocks=4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(1000, (8, 128), device=device)


def step() -> None:
    scores = model(tokens[:, :-1])
    with record_function("loss"):
        loss = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()  # the first step is slower: it initializes libraries and state

with torchprof.Profile(model, use_cuda=cuda, with_flops=True, record_shapes=True, with_stack=True) as prof:
    step()
run = prof.run

print("The operators of the whole step, the largest self time first:\n")
print(run.report("ops", top=10))

print("\nThose that took most with all that runs in them; the loss and the optimizer are labels:\n")
print(run.report("ops", sort_by="cpu_total", top=10))

print("\nForward in the attentions alone, told apart by the shapes that they were called on:\n")
print(run.report("ops", layer="blocks.*.attention", phase="forward", group_by_input_shape=True, top=6))

print("\nWhere in the code the same time was spent:\n")
print(run.report("ops", layer="blocks.*.attention", phase="forward", group_by_stack_n=2, top=3))

print("\nThe other way round: the layers that spend time in aten::addmm:\n")
print(run.report("ops", op="aten::addmm", top=6))

if cuda:
    print("\nWhat ran on the GPU, and how long it was idle:\n")
    print(run.report("kernels", top=12))

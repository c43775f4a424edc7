"""Coming from flops-profiler? The text it prints, for BERT-base; then a training loop, profiled at step 5.

Run it with ``python examples/flops_profiler_dropin.py``.
"""

import torch
from models import Bert, LeNet5
from torch.nn.functional import cross_entropy

from torchprof.integrations.flops_profiler import FlopsProfiler, get_model_profile

torch.manual_seed(0)
tokens = torch.randint(30522, (1, 128))
flops, macs, params = get_model_profile(Bert(), args=[tokens], warm_up=1, as_string=True)
print(f"BERT-base, 128 tokens: {flops} flops, {macs}, {params} parameters\n")

PROFILE_STEP = 5
model = LeNet5()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiler = FlopsProfiler(model)

for step in range(8):
    images, targets = torch.rand(32, 1, 32, 32), torch.randint(10, (32,))
    if step == PROFILE_STEP:
        profiler.start_profile()
    loss = cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == PROFILE_STEP:  # after the optimizer's step, so that backward and this step are measured
        profiler.stop_profile()
        profiler.print_model_profile(profile_step=step, top_modules=3, detailed=False)
        profiler.end_profile()

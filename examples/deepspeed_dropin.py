"""Coming from DeepSpeed's profilers: the older one's text for LeNet-5, then one step of a loop with its settings.

Run it with ``python examples/deepspeed_dropin.py``.
"""

import torch
from models import LeNet5
from torch.nn.functional import cross_entropy

from torchprof.integrations.deepspeed import from_config, get_model_profile

torch.manual_seed(0)
model = LeNet5()

macs, params = get_model_profile(model, (1, 32, 32))
print("{:<30}  {:<8}".format("Number of multiply-adds: ", macs))
print("{:<30}  {:<8}".format("Number of parameters: ", params))

# The settings may also be the path of a JSON file; DeepSpeed's other keys are ignored.
config = {"train_batch_size": 16, "flops_profiler": {"enabled": True, "profile_step": 5, "detailed": False}}
profiler = from_config(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("\nA training loop of 8 steps, profiled at step 5:\n")
for _ in range(8):
    digits, labels = torch.rand(16, 1, 32, 32), torch.randint(10, (16,))
    with profiler.step(model):
        loss = cross_entropy(model(digits), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

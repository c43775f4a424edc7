"""What happens inside one layer? Only the attention layers of a transformer are profiled; one call is shown in detail.

Run it with ``python examples/one_layer.py``.
"""

import torch
from models import TinyTransformer

import torchprof

torch.manual_seed(0)
model = TinyTransformer(blocks=2).eval()
tokens = torch.randint(1000, (4, 64))

# A `*` matches any one step of a path, here the number of the block.
with torch.inference_mode(), torchprof.Profile(model, paths=["blocks.*.attention"], warmup=2) as prof:
    for _ in range(2 + 5):
        model(tokens)

print("A transformer of two blocks; only the attentions were selected:\n")
print(prof)

# raw() gives torch's own list of events for each call of each selected module.
traces, event_lists = prof.raw()
for trace in traces:
    if event_lists[trace.path]:
        print(f"\nThe last of {len(event_lists[trace.path])} calls of {'.'.join(trace.path)}, as torch shows it:\n")
        print(event_lists[trace.path][-1].key_averages().table(sort_by="self_cpu_time_total", row_limit=6))
        break

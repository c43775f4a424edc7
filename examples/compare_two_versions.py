"""What did my change cost? Two versions of a model, the same steps of each, compared layer by layer.

Run it with ``python examples/compare_two_versions.py``. The second version has a wider first layer, a batch norm
after it, and a tanh in place of a ReLU. The runs are saved to files, so that they can be compared later, without torch:
``torchprof compare before.json after.json``. With ``--fail-if "flops > +10%"``, that is a check for CI.
"""

import torch
from torch import Tensor, nn

import torchprof

STEPS = 20


class Net(nn.Module):
    def __init__(self, width: int, act: type[nn.Module], norm: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(width)] if norm else []
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *norms, act(), nn.MaxPool2d(4))
        self.head = nn.Linear(width * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


def record(model: nn.Module, file: str) -> None:
    images = torch.rand(16, 3, 32, 32)
    model(images).sum().backward()  # the first step pays for what later ones find ready
    # Steps are marked, so that noise is known of every layer and phase.
    with torchprof.Profile(model, with_flops=True, profile_memory=True) as prof:
        for _ in range(STEPS):
            model(images).sum().backward()
            prof.step()
    prof.run.save(file)


torch.manual_seed(0)
torch.set_num_threads(1)
record(Net(32, nn.ReLU), "before.json")
record(Net(64, nn.Tanh, norm=True), "after.json")

diff = torchprof.compare("before.json", "after.json")
print(diff)
diff.export("diff.md")  # for a pull request; diff.html is a page to look at, diff.json for other programs

change = next(pair for pair in diff.walk() if pair.path == ("Net", "features", "0")).changes["flops"]
print(
    f"\nThe first layer computes {change.ratio:.0f} times as much: {change.before} FLOPs before, {change.after} after."
)

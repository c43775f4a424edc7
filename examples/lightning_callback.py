"""Three batches of a Lightning training, layer by layer, and a validation after it.

Run it with ``python examples/lightning_callback.py``. It needs Lightning: ``pip install lightning``.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from models import LeNet5
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torchprof.integrations.lightning import ProfileCallback


class Classifier(pl.LightningModule):
    """LeNet-5 and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LeNet5()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return cross_entropy(self(images), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.log("loss", cross_entropy(self(images), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)
images = DataLoader(TensorDataset(torch.rand(256, 1, 32, 32), torch.randint(10, (256,))), batch_size=32)
training = ProfileCallback(with_flops=True)
trainer = pl.Trainer(
    max_epochs=2,
    callbacks=[training],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, images)
print(training.run, end="\n\n")

# Another stage, and a schedule: all eight batches of a validation except the first two.
validation = ProfileCallback("validate", schedule=torch.profiler.schedule(wait=1, warmup=1, active=6))
trainer.callbacks.append(validation)
trainer.validate(model, images, verbose=False)
print(f"{validation.run.meta.steps} batches of validation:\n")
print(validation.run)

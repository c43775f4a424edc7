"""A small training script, as people write them: a Dataset, a loop over epochs, an evaluation at the end.

``torchprof run examples/scripts/train.py [epochs]``
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy images with a bright square in one of ten places: which place?"""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = index % 10
        image = torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(index))
        row, column = divmod(place, 5)
        image[:, 12 * row + 2 : 12 * row + 8, 5 * column + 1 : 5 * column + 5] += 2
        return image, place


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def main(epochs: int = 2) -> None:
    torch.manual_seed(0)
    data = Shapes()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        model.train()
        for images, places in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), places)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == places).sum().item() for images, places in DataLoader(data, 64))
    print(f"{right / len(data):.0%} right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

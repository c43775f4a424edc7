"""An ordinary training of a small network."""

import torch
from torch import nn


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    running = 0.0
    for _ in range(30):
        inputs, labels = torch.rand(128, 200), torch.randint(10, (128,))
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.item()
    print(f"loss {running:.3f}")


if __name__ == "__main__":
    main()

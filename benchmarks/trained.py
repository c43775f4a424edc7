"""A loop of one of several kinds, as it is or with remedies: ``python benchmarks/trained.py LOOP [REMEDY …]``.

Remedies: fused (the optimizer), dropout (p=0), compile (the layers that have small operators), float32, bfloat16
(autocast); of loops with a DataLoader: workers, rows (whole batches are indexed), keep (the workers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

NAME, *REMEDIES = sys.argv[1:] or ["mlp"]
DROPOUT = 0.0 if "dropout" in REMEDIES else 0.1
torch.manual_seed(0)


class Gated(nn.Module):
    """A residual block with a GELU of elementwise operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * h**3)))
        return x + self.dropout(self.down(h))


class Attention(nn.Module):
    """Causal attention by hand, with dropout of its scores."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = self.dropout(scores.masked_fill(future, -torch.inf).softmax(-1))
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Autoencoder(nn.Module):
    """A variational one; its loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.moments = nn.Linear(784, 400), nn.Linear(400, 40)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.moments(self.encoder(x).relu()).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z).sigmoid(), mean, log_variance


def loss_of_autoencoder(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    decoded, mean, log_variance = output
    distance = F.binary_cross_entropy(decoded, x, reduction="sum")
    return distance - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()


def small_layers() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.SiLU(), nn.Dropout(DROPOUT)) for _ in range(24)]
    return nn.Sequential(*blocks, nn.Linear(32, 2))


def wide() -> nn.Module:
    layers = [nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(512, 1)]
    return nn.Sequential(*layers)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, DROPOUT, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class Texts(Dataset[Tensor]):
    """Items that Python reads from text."""

    def __init__(self) -> None:
        self.texts = [",".join(str((row * column) % 97) for column in range(400)) for row in range(256)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(text) for text in self.texts[index].split(",")])


class Rows(TensorDataset):
    def __getitem__(self, index: int | list[int]) -> Tensor:
        return super().__getitem__(index)[0]  # type: ignore[no-any-return, index]


def loaded(data: Dataset[Tensor], size: int, workers: int = 0) -> Callable[[], Tensor]:
    """Batches of a data set, pass after pass."""

    def batches() -> Iterator[Tensor]:
        if "rows" in REMEDIES:
            indices = BatchSampler(RandomSampler(data), size, False)  # type: ignore[arg-type]
            loader = DataLoader(data, sampler=indices, batch_size=None)
        else:
            number = 1 if "workers" in REMEDIES else workers
            keep = bool({"workers", "keep"} & {*REMEDIES})
            loader = DataLoader(data, size, shuffle=True, num_workers=number, persistent_workers=keep)
        while True:
            yield from loader

    return batches().__next__


Loss = Callable[..., Tensor]
Loop = tuple[nn.Module, Callable[[], Tensor], Loss | None, type[torch.optim.Optimizer], int]


def squared(output: Tensor, x: Tensor) -> Tensor:
    return output.square().mean()


def loop(name: str) -> Loop:
    """The model, its batches, its loss (None: inference), its optimizer, and the number of steps."""
    double = torch.float64 if name == "double" and "float32" not in REMEDIES else torch.float32
    loops: dict[str, Callable[[], Loop]] = {
        "mlp": lambda: (
            nn.Sequential(nn.Linear(64, 256), Gated(256), Gated(256)), lambda: torch.rand(128, 64), squared,
            torch.optim.Adam, 250,
        ),
        "gpt": lambda: (
            nn.Sequential(nn.Embedding(200, 128), *(Block(128) for _ in range(4)), nn.Linear(128, 200)),
            lambda: torch.randint(0, 200, (8, 128)),
            lambda output, x: F.cross_entropy(output.reshape(-1, 200), x.reshape(-1)),
            torch.optim.AdamW, 120,
        ),
        "small layers": lambda: (small_layers(), lambda: torch.rand(64, 32), squared, torch.optim.AdamW, 400),
        "autoencoder": lambda: (
            Autoencoder(), lambda: torch.rand(128, 784), loss_of_autoencoder, torch.optim.Adam, 400,
        ),
        "double": lambda: (
            wide().to(double), lambda: torch.rand(256, 128, dtype=double), squared, torch.optim.SGD, 300,
        ),
        "texts": lambda: (
            nn.Sequential(nn.Linear(400, 512), Gated(512), nn.Linear(512, 8)), loaded(Texts(), 64), squared,
            torch.optim.Adam, 120,
        ),
        "rows": lambda: (
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), loaded(Rows(torch.rand(6400, 64)), 128),
            squared, torch.optim.SGD, 600,
        ),
        "short passes": lambda: (
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), loaded(Rows(torch.rand(512, 64)), 64, 1),
            squared, torch.optim.SGD, 320,
        ),
        "inference": lambda: (encoder(), lambda: torch.rand(4, 128, 128), None, torch.optim.SGD, 150),
    }  # fmt: skip
    return loops[name]()


def main() -> None:
    model, batch, loss_of, optimizer_of, steps = loop(NAME)
    if "compile" in REMEDIES:
        for layer in model.modules():
            if isinstance(layer, Gated):
                layer.compile()
    optimizer = optimizer_of(model.parameters(), lr=1e-3, **({"fused": True} if "fused" in REMEDIES else {}))
    for step in range(steps):
        x = batch()
        if loss_of is None:
            with torch.no_grad():
                model(x)
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in REMEDIES):
            loss = loss_of(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not step % 50:
            print(step, f"{loss.item():.4g}")


main()

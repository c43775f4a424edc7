"""ResNet-50 and Llama, for tests and benchmarks on a GPU. They need only torch, and no download."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut (He et al., 2015). The stride is in the 3 x 3, as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """ResNet-50 in torchvision's layout: 4,089,184,256 multiply-accumulates for an image of 224 x 224."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for number, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            layer = []
            for at in range(blocks):
                layer.append(Bottleneck(inputs, width, 2 if at == 0 and number > 1 else 1))
                inputs = 4 * width
            self.add_module(f"layer{number}", nn.Sequential(*layer))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))


class RMSNorm(nn.Module):
    """Division by the root mean square (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype) * self.weight


class LlamaAttention(nn.Module):
    """Attention with rotary positions and fewer heads for keys and values. With ``cache``, it adds to what it knows."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, cache: Tensor | None, place: Tensor | None) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, self.size).transpose(1, 2)

        q = rotated(split(self.q_proj(x), self.heads), angles)
        k = rotated(split(self.k_proj(x), self.kv_heads), angles)
        v = split(self.v_proj(x), self.kv_heads)
        mask = None
        if cache is not None and place is not None:  # (2, batch, heads, length, size), and the place of each token
            cache[0].index_copy_(2, place, k)
            cache[1].index_copy_(2, place, v)
            k, v = cache[0], cache[1]
            mask = torch.arange(k.shape[2], device=x.device) <= place[:, None]
        groups = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, width))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): pairs of numbers are turned by angles of shape ``(length, size / 2)``."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class LlamaMlp(nn.Module):
    """A gated MLP (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = LlamaAttention(width, heads, kv_heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = LlamaMlp(width, hidden)

    def forward(self, x: Tensor, angles: Tensor, cache: Tensor | None, place: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, place)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama (Touvron et al., 2023): token numbers ``(batch, length)`` in, a score for each next token out.

    For decoding, ``caches`` has the keys and values of each layer, and ``place`` the places of the tokens.
    """

    def __init__(
        self,
        vocabulary: int = 32_000,
        width: int = 512,
        layers: int = 4,
        heads: int = 8,
        kv_heads: int = 4,
        hidden: int = 1_376,
    ) -> None:
        super().__init__()
        self.kv_heads, self.size = kv_heads, width // heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, self.size, 2) / self.size), persistent=False)

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, place: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) if place is None else place
        angles = places[:, None] * self.frequencies
        x = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, None if caches is None else caches[number], place)
        return self.lm_head(self.norm(x))

    def empty_caches(self, batch: int, length: int) -> list[Tensor]:
        """A cache for each layer, for ``length`` tokens."""
        like = self.lm_head.weight
        shape = (2, batch, self.kv_heads, length, self.size)
        return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self.layers]

    def macs(self, batch: int, queries: int, keys: int) -> int:
        """The multiply-accumulates of all matrix products of a forward, by hand."""
        width, size = self.lm_head.in_features, self.size
        layer = self.layers[0]
        heads = layer.self_attn.heads
        projections = 2 * width * width + 2 * width * self.kv_heads * size
        mlp = 3 * width * layer.mlp.up_proj.out_features
        attention = 2 * heads * size * keys
        per_token = len(self.layers) * (projections + mlp + attention) + width * self.lm_head.out_features
        return batch * queries * per_token

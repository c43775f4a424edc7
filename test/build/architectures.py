"""Small models of many architectures, each with its inputs: what the FLOPs of a model are checked on.

They have the structure of what they are named after and a few channels. ``ARCHITECTURES`` holds them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from build.models import Layers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Architecture:
    """``make`` gives the model and ``inputs`` what it is called with.

    ``layers_only``: all its multiply-accumulates are those of its convolutional, linear and recurrent modules.
    ``grouped``: it has grouped convolutions, whose backward torch's own counter counts wrong. ``attention``: the
    multiply-accumulates of its calls of ``scaled_dot_product_attention``, by hand.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    layers_only: bool = True
    grouped: bool = False
    attention: int = 0


ARCHITECTURES: dict[str, Architecture] = {}


def _image(channels: int = 3, size: int = 16, batch: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.rand(batch, channels, size, size),)


def _tensor(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.rand(*shape),)


def _tokens(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randint(20, shape),)


def attention_macs(batch: int, heads: int, queries: int, keys: int, width: int) -> int:
    """Q·Kᵀ and scores·V; ``width`` is that of a head."""
    return 2 * batch * heads * queries * keys * width


class Residual(Layers):
    """``act(body(x) + shortcut(x))``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__(body=body, shortcut=shortcut or nn.Identity(), act=act or nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


class Cat(Layers):
    """Its branches side by side, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(branches=nn.ModuleList(branches))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Permute(Layers):
    def __init__(self, *dims: int) -> None:
        super().__init__(dims=dims)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(*self.dims)


class Shuffle(Layers):
    """Mixes the channels of groups. torch's own module has no derivative before torch 2.5."""

    def __init__(self, groups: int) -> None:
        super().__init__(groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)


def conv_norm(
    inside: int, outside: int, kernel: int = 3, *, act: nn.Module | None = None, **options: Any
) -> nn.Sequential:
    options.setdefault("padding", kernel // 2)
    parts = [nn.Conv2d(inside, outside, kernel, bias=False, **options), nn.BatchNorm2d(outside)]
    return nn.Sequential(*parts, *([act] if act is not None else []))


def head(channels: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# Convolutional networks


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Linear(8, 5),
    )


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, stride=3, padding=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(2),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(72, 10),
        nn.ReLU(inplace=True),
        nn.Linear(10, 5),
    )


def resnet(blocks: int = 2) -> nn.Module:
    def block(inside: int, outside: int, stride: int) -> nn.Module:
        body = nn.Sequential(conv_norm(inside, outside, stride=stride, act=nn.ReLU()), conv_norm(outside, outside))
        shortcut = None if stride == 1 else conv_norm(inside, outside, 1, stride=stride)
        return Residual(body, shortcut, nn.ReLU())

    stem = nn.Sequential(conv_norm(3, 4, 7, stride=2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(stem, *[block(4, 4, 1), block(4, 8, 2)][-blocks:], head(8))


def bottlenecks(groups: int) -> nn.Module:
    """ResNet-50's block; with groups, ResNeXt's."""

    def block(inside: int, outside: int, stride: int) -> nn.Module:
        width = outside // 2
        body = nn.Sequential(
            conv_norm(inside, width, 1, act=nn.ReLU()),
            conv_norm(width, width, stride=stride, groups=groups, act=nn.ReLU()),
            conv_norm(width, outside, 1),
        )
        return Residual(body, conv_norm(inside, outside, 1, stride=stride), nn.ReLU())

    return nn.Sequential(conv_norm(3, 4, act=nn.ReLU()), block(4, 8, 1), block(8, 16, 2), head(16))


class SqueezeExcite(Layers):
    def __init__(self, channels: int) -> None:
        super().__init__(squeeze=nn.Conv2d(channels, 2, 1), excite=nn.Conv2d(2, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def inverted_residuals(act: type[nn.Module], excite: bool) -> nn.Module:
    """MobileNetV2; with squeeze and excitation, EfficientNet."""

    def block(inside: int, outside: int, stride: int) -> nn.Module:
        wide = 3 * inside
        body = nn.Sequential(
            conv_norm(inside, wide, 1, act=act()),
            conv_norm(wide, wide, stride=stride, groups=wide, act=act()),
            SqueezeExcite(wide) if excite else nn.Identity(),
            conv_norm(wide, outside, 1),
        )
        return Residual(body) if stride == 1 and inside == outside else body

    return nn.Sequential(conv_norm(3, 4, stride=2, act=act()), block(4, 4, 1), block(4, 6, 2), nn.Dropout(), head(6))


def shufflenet() -> nn.Module:
    unit = Residual(
        nn.Sequential(
            conv_norm(8, 4, 1, groups=2, act=nn.ReLU()),
            Shuffle(2),
            conv_norm(4, 4, 3, groups=4),
            conv_norm(4, 8, 1, groups=2),
        ),
        act=nn.ReLU(),
    )
    return nn.Sequential(conv_norm(3, 8, stride=2), unit, head(8))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = conv_norm(3, 4, act=nn.ReLU())
        self.down2 = conv_norm(4, 8, act=nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.smooth = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        low = self.down2(F.max_pool2d(high, 2))
        return self.last(torch.cat([high, self.up(low) + self.smooth(F.avg_pool2d(high, 2))], 1))


class Fpn(nn.Module):
    """A feature pyramid: what is coarse is enlarged and added to what is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.coarse = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.lateral = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        enlarged = F.interpolate(self.lateral[1](self.coarse(fine)), scale_factor=2, mode="bilinear")
        return F.interpolate(self.lateral[0](fine) + enlarged, size=16, mode="nearest")


class GatedConvolutions(nn.Module):
    """WaveNet: dilated causal convolutions, each tanh times sigmoid, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**power) for power in range(3))
        self.mix = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for dilated, mix in zip(self.dilated, self.mix):
            values, gates = dilated(F.pad(x, (dilated.dilation[0], 0))).chunk(2, 1)
            x = x + mix(torch.tanh(values) * torch.sigmoid(gates))
        return x


def video() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, (2, 3, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(4, 2, 2, stride=2),
        nn.AdaptiveAvgPool3d((1, 2, 2)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class ChannelsLast(nn.Module):
    """ConvNeXt's block: a depthwise convolution, then linear layers on the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), ChannelsLast(6), nn.Conv2d(6, 8, 2, stride=2), head(8))


def same_padding() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, (3, 5), padding="same"),
        nn.Conv2d(4, 4, (2, 4), padding="same", dilation=(1, 2)),
        nn.Conv2d(4, 4, 3, padding="valid"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    )


def dilated() -> nn.Module:
    """DeepLab's parallel dilated convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        Cat(*(nn.Conv2d(4, 2, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)), nn.Conv2d(4, 2, 1)),
    )


def generator() -> nn.Module:
    """DCGAN's: from noise to an image."""
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1, dilation=1),
        nn.Tanh(),
    )


# Networks of linear layers


def mixer() -> nn.Module:
    def mlp(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    tokens = nn.Sequential(nn.LayerNorm(6), Permute(0, 2, 1), mlp(16), Permute(0, 2, 1))
    channels = nn.Sequential(nn.LayerNorm(6), mlp(6))
    return nn.Sequential(
        nn.Conv2d(3, 6, 4, stride=4), nn.Flatten(2), Permute(0, 2, 1), Residual(tokens), Residual(channels)
    )


class Autoencoder(nn.Module):
    """A variational one: mean and deviation, a sample, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.Softplus())
        self.latent = nn.Linear(8, 6)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 12), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.latent(self.encoder(x)).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())


class Siamese(Layers):
    """One tower for two inputs."""

    def __init__(self) -> None:
        super().__init__(tower=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.cosine_similarity(self.tower(left), self.tower(right))


class TiedWords(Layers):
    """A language model whose last layer is its embedding."""

    def __init__(self) -> None:
        super().__init__(words=nn.Embedding(20, 6), body=nn.Linear(6, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.log_softmax(F.linear(self.body(self.words(tokens)), self.words.weight), -1)


class GraphConvolution(Layers):
    """Adjacency times features, with the whole adjacency matrix."""

    def __init__(self) -> None:
        super().__init__(inner=nn.Linear(4, 6), outer=nn.Linear(6, 3))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.outer(torch.relu(adjacency @ self.inner(x)))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the two that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            weighted = expert(x[token]) * weights[token, place, None]
            result = result.index_add(0, token, weighted.to(result.dtype))
        return result


class Recommender(nn.Module):
    """DLRM: bags of embeddings, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(2))
        self.dense = nn.Linear(5, 4)
        self.top = nn.Linear(9, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        features = torch.stack([self.dense(dense), *(bag(sparse) for bag in self.bags)], 1)
        pairs = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(pairs))


# Attention


class ScaledDotProduct(nn.Module):
    """Self-attention on torch's ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def gpt() -> nn.Module:
    def block() -> nn.Module:
        feed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        return nn.Sequential(
            Residual(nn.Sequential(nn.LayerNorm(8), ScaledDotProduct(8, 2, causal=True))), Residual(feed)
        )

    return nn.Sequential(nn.Embedding(20, 8), block(), block(), nn.LayerNorm(8), nn.Linear(8, 20, bias=False))


class SelfAttention(Layers):
    """``nn.MultiheadAttention`` of a sequence with itself."""

    def __init__(self, width: int, heads: int, weights: bool) -> None:
        super().__init__(attention=nn.MultiheadAttention(width, heads, batch_first=True), weights=weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


def vit() -> nn.Module:
    feed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    block = [Residual(nn.Sequential(nn.LayerNorm(8), SelfAttention(8, 2, weights=False))), Residual(feed)]
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2), Permute(0, 2, 1), *block, nn.Linear(8, 5))


class CrossAttention(nn.Module):
    """Perceiver: few learned queries look at many inputs of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.rand(1, 3, 8))
        self.attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return self.attention(self.latents.expand(len(keys), -1, -1), keys, values)[0]


class EinsumAttention(nn.Module):
    """Attention as einsum writes it, with relative positions and grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4)
        self.v = nn.Linear(8, 4)
        self.positions = nn.Parameter(torch.rand(7, 7, 2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, 2))
        k, v = (layer(x).unflatten(-1, (2, 2)) for layer in (self.k, self.v))
        scores = torch.einsum("bighd,bjgd->bghij", q, k) + torch.einsum("bighd,ijd->bghij", q, self.positions)
        return torch.einsum("bghij,bjgd->bighd", scores.softmax(-1), v).flatten(2)


class LinearAttention(Layers):
    """Keys and values first: no matrix of scores."""

    def __init__(self) -> None:
        super().__init__(project=nn.Linear(8, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(1, 2) @ v)) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, activation="gelu"), 2)


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True, norm_first=True)


# Recurrent networks


class Recurrent(nn.Module):
    """A recurrent layer on embedded tokens, and classes from its last step."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 5)
        self.rnn = kind(5, 4, batch_first=True, **options)
        self.classes = nn.Linear(8 if options.get("bidirectional") else 4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classes(self.rnn(self.words(tokens))[0][:, -1])


class Crnn(nn.Module):
    """Reads a line of text: convolutions, then an LSTM over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d((1, 8)))
        self.rnn = nn.LSTM(4, 6, num_layers=2, bidirectional=True)
        self.letters = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.letters(self.rnn(self.columns(x).squeeze(2).permute(2, 0, 1))[0])


class Translator(nn.Module):
    """Sequence to sequence: a GRU reads; a cell writes, with additive attention to what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(4, 6)
        self.write = nn.GRUCell(6, 6)
        self.keys = nn.Linear(6, 6)
        self.score = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.read(x)
        keys, state, written = self.keys(states), last[0], []
        for _ in range(3):
            weights = self.score(torch.tanh(keys + state)).softmax(0)
            state = self.write((weights * states).sum(0), state)
            written.append(state)
        return torch.stack(written)


def _architectures() -> dict[str, Architecture]:
    A = Architecture  # noqa: N806
    image, tensor, tokens = _image, _tensor, _tokens
    convolutional = {
        "LeNet": A(lenet, image(1)),
        "AlexNet": A(alexnet, image(size=32)),
        "ResNet": A(resnet, image()),
        "ResNet, bottlenecks": A(lambda: bottlenecks(1), image()),
        "ResNeXt": A(lambda: bottlenecks(2), image(), grouped=True),
        "MobileNetV2": A(lambda: inverted_residuals(nn.ReLU6, excite=False), image(), grouped=True),
        "EfficientNet": A(lambda: inverted_residuals(nn.SiLU, excite=True), image(), grouped=True),
        "ShuffleNet": A(shufflenet, image(), grouped=True),
        "U-Net": A(UNet, image(), grouped=True),
        "feature pyramid": A(Fpn, image()),
        "WaveNet": A(GatedConvolutions, tensor(2, 4, 20)),
        "video": A(video, tensor(2, 2, 5, 8, 8)),
        "ConvNeXt": A(convnext, image(), grouped=True),
        "padding as words": A(same_padding, image(size=9)),
        "dilated": A(dilated, image(size=9)),
        "without a batch": A(dilated, tensor(3, 9, 9)),
        "GAN generator": A(generator, tensor(2, 6, 1, 1)),
    }
    linear = {
        "MLP-Mixer": A(mixer, image()),
        "autoencoder": A(Autoencoder, tensor(4, 12)),
        "Siamese": A(Siamese, lambda: (torch.rand(4, 6), torch.rand(4, 6))),
        "tied words": A(TiedWords, tokens(2, 7), layers_only=False),
        "graph": A(GraphConvolution, lambda: (torch.rand(9, 4), torch.rand(9, 9)), layers_only=False),
        "mixture of experts": A(Experts, tensor(9, 6)),
        "recommender": A(Recommender, lambda: (torch.rand(4, 5), torch.randint(20, (4, 3))), layers_only=False),
    }
    attentive = {
        "GPT": A(gpt, tokens(2, 7), layers_only=False, attention=2 * attention_macs(2, 2, 7, 7, 4)),
        "ViT": A(vit, image(), layers_only=False, attention=attention_macs(2, 2, 16, 16, 4)),
        "attention with weights": A(lambda: SelfAttention(8, 2, weights=True), tensor(2, 7, 8), layers_only=False),
        "Perceiver": A(CrossAttention, lambda: (torch.rand(2, 9, 5), torch.rand(2, 9, 6)), layers_only=False),
        "einsum attention": A(EinsumAttention, tensor(2, 7, 8), layers_only=False),
        "linear attention": A(LinearAttention, tensor(2, 7, 8), layers_only=False),
        "encoder": A(encoder, tensor(2, 7, 8), layers_only=False, attention=2 * attention_macs(2, 2, 7, 7, 4)),
        "decoder": A(
            decoder,
            lambda: (torch.rand(5, 2, 8), torch.rand(7, 2, 8)),
            layers_only=False,
            attention=2 * (attention_macs(2, 2, 5, 5, 4) + attention_macs(2, 2, 5, 7, 4)),
        ),
        "encoder and decoder": A(
            transformer,
            lambda: (torch.rand(2, 7, 8), torch.rand(2, 5, 8)),
            layers_only=False,
            attention=attention_macs(2, 2, 7, 7, 4) + attention_macs(2, 2, 5, 5, 4) + attention_macs(2, 2, 5, 7, 4),
        ),
    }
    recurrent = {
        "RNN": A(lambda: Recurrent(nn.RNN, nonlinearity="relu"), tokens(2, 7), layers_only=False),
        "GRU": A(lambda: Recurrent(nn.GRU, num_layers=2), tokens(2, 7), layers_only=False),
        "LSTM": A(lambda: Recurrent(nn.LSTM, bidirectional=True), tokens(2, 7)),
        "CRNN": A(Crnn, image(1)),
        "translator": A(Translator, tensor(5, 2, 4), layers_only=False),
    }
    return {**convolutional, **linear, **attentive, **recurrent}


ARCHITECTURES.update(_architectures())

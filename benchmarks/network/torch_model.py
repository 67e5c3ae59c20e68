"""The byte model of the examples in PyTorch: the same sizes and initial distributions."""

import math

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

HEAD = 32


def matrix(outputs: int, inputs: int, scale: float = 1.0) -> nn.Linear:
    """A linear map whose entries have variance `scale / inputs`, cut off at two deviations."""
    made = nn.Linear(inputs, outputs, bias=False)
    cut(made.weight, scale / inputs)
    return made


def cut(weight: torch.Tensor, variance: float) -> None:
    deviation = math.sqrt(variance) / 0.87962566103423978  # The deviation after truncation.
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


class Block(nn.Module):
    """Causal attention and a perceptron, each on normalised inputs and added to them."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        small = 0.5 / layers
        self.before_attention = nn.RMSNorm(width, eps=1e-6)
        self.query, self.key, self.value = (matrix(width, width) for _ in range(3))
        self.attended = matrix(width, width, small)
        self.before_perceptron = nn.RMSNorm(width, eps=1e-6)
        self.up, self.down = matrix(4 * width, width), matrix(width, 4 * width, small)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before_attention(x)
        heads = (*h.shape[:-1], h.shape[-1] // HEAD, HEAD)
        query, key, value = (
            made(h).reshape(heads).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True
        )
        x = x + self.attended(attended.transpose(1, 2).reshape(x.shape))
        h = functional.gelu(self.up(self.before_perceptron(x)), approximate="tanh")
        return x + self.down(h)


class ByteModel(nn.Module):
    """A decoder-only transformer from bytes to the logits of the next ones."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        cut(self.embedding.weight, 1 / 256)
        self.blocks = nn.ModuleList(Block(width, layers) for _ in range(layers))
        self.before_logits = nn.RMSNorm(width, eps=1e-6)
        self.logits = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.before_logits(x))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: the rotation angle of each pair of elements grows with the position."""
    half = x.shape[-1] // 2
    pace = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * pace
    a, b = x[..., :half], x[..., half:]
    sin, cos = torch.sin(angle), torch.cos(angle)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

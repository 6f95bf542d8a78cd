"""A plain decoder in the shapes of well-known models, and what of it travels."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

#: Standard deviation of fresh weights.
SPREAD = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; input and output embeddings are two tensors."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    words: int


#: ``7b`` to ``0.5b`` are those of Qwen2.5 without biases; ``tiny`` has sizes that two does not
#: divide.
SHAPES = {
    "7b": Shape(3584, 28, 28, 4, 18944, 152064),
    "3b": Shape(2048, 36, 16, 2, 11008, 151936),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151936),
    "0.5b": Shape(896, 24, 14, 2, 4864, 151936),
    "tiny": Shape(64, 2, 4, 2, 161, 509),
}


class Attention(nn.Module):
    """Causal attention with grouped keys and values, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes [batch, length, width] over length."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for [batch, heads, length, size]."""
    half = x.shape[-1] // 2
    rate = torch.arange(half, device=x.device, dtype=torch.float32) * (-math.log(1e4) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate.exp()
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """Attention, then a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        x = x + self.attention(self.before(x))
        y = self.after(x)
        found: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


class Decoder(nn.Module):
    """Next-token logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of [batch, length]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def without_memory(shape: Shape) -> Decoder:
    """The model on the meta device."""
    with torch.device("meta"):
        return Decoder(shape)


def wire(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name, in the order in which both sides pack them."""
    return {name: tuple(t.shape) for name, t in without_memory(shape).state_dict().items()}


@torch.no_grad()
def fill(model: nn.Module, *, seed: int, rank: int) -> None:
    """The same fresh weights at every call with the same arguments, shard by shard.

    Each rank draws its own shard where it lies, so nothing passes through host memory.
    """
    for number, tensor in enumerate(model.state_dict().values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.dim() == 1:
            local.fill_(1.0)
            continue
        source = torch.Generator(local.device).manual_seed(seed + 1_000 * number + rank)
        local.normal_(0.0, SPREAD, generator=source)

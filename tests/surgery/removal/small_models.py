"""Small trained-looking models with norms, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

C = 8


class Block(nn.Module):
    """A pre-norm layer, or a post-norm one."""

    def __init__(self, norm: type[nn.Module], *, post: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(C), norm(C)
        self.attention = nn.MultiheadAttention(C, 2, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        self.post = post

    def attend(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attend(x))
            return self.norm2(x + self.feed_forward(x))
        x = x + self.attend(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Stack(nn.Module):
    """Two layers, a final norm where they are pre-norm, and a head."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, *, post: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C)
        self.blocks = nn.ModuleList(Block(norm, post=post) for _ in range(2))
        self.norm = nn.Identity() if post else norm(C)
        self.head = nn.Linear(C, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stack(norm: type[nn.Module] = nn.LayerNorm, *, post: bool = False) -> Stack:
    """A model whose norms have weights of their own, in evaluation mode."""
    torch.manual_seed(0)
    model = Stack(norm, post=post).double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.weight.uniform_(0.5, 1.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.uniform_(-0.5, 0.5)
    return model.eval()


def data(count: int = 6) -> list[Tensor]:
    """Batches for it."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, C, generator=generator, dtype=torch.float64) for _ in range(count)]

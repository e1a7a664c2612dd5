"""Models whose norms are functions, as nanochat's are."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = num_heads, width // num_heads
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, width, bias=False)
        self.c_v = nn.Linear(width, width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        sizes = (batch, length, self.n_head, self.head_dim)
        q, k, v = (part(x).view(sizes) for part in (self.c_q, self.c_k, self.c_v))
        q, k = norm(q), norm(k)
        heads = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(width, num_heads)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """nanochat's model, small: functional norms without parameters, all of them by one helper."""

    def __init__(self, width: int = 16, num_heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(20, width), "h": blocks})
        self.lm_head = nn.Linear(width, 20, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = norm(self.transformer["wte"](idx))
        for block in self.transformer["h"]:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(norm(x)) / 15)
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )

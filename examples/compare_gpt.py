"""A character-level GPT in a plain loop, trained with each norm.

    powernorm compare compare_gpt:train --norms ln,bn,rbn,pn --seeds 3 --goal valid_loss:min

from this folder; `--set text=FILE` trains on your text, `--set steps=2000` for longer. Only the
lines with `run` differ from a script that trains one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
import powernorm_lab as lab

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Self-attention and a feed-forward network, with a norm before each."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.num_heads = num_heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block, (batch, length, width)."""
        batch, length, width = x.shape
        heads = self.inputs(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.output(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feedforward(self.norm2(x)))


class GPT(nn.Module):
    """A decoder-only Transformer over characters."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text(text: str) -> tuple[Tensor, Tensor, int]:
    """Return the ids of the characters for training and validation, and their number."""
    if text:
        content = Path(text).read_text(encoding="utf-8")
    else:
        content = "\n".join(lab.embedded_sentences()["train"][:5000])
    ids = {character: index for index, character in enumerate(sorted(set(content)))}
    data = torch.tensor([ids[character] for character in content])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(ids)


def crops(data: Tensor, size: int, length: int) -> Batch:
    """Return random excerpts of a text, and the same one character later."""
    starts = torch.randint(len(data) - length - 1, (size,))
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def train(
    run: lab.Run,
    *,
    text: str = "",
    steps: int = 300,
    learning_rate: float = 2e-3,
    batch_size: int = 16,
    micro_batches: int = 2,
    length: int = 64,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.1,
) -> dict[str, float]:
    """Train one model, and return its loss on the validation part."""
    training, validation, vocabulary = read_text(text)
    model = run.swap(GPT(vocabulary, length, width, layers, heads, dropout)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        decay = (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))) / 2
        return min((step + 1) / warmup, 0.1 + 0.9 * decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.monitor(max(1, steps // 10))

    def updates() -> Iterator[list[Batch]]:
        while True:  # run.steps ends it
            yield [crops(training, batch_size, length) for _ in range(micro_batches)]

    def loss_of(batch: Batch) -> Tensor:
        inputs, targets = (part.to(run.device) for part in batch)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate() -> dict[str, Tensor]:
        torch.manual_seed(0)  # the same excerpts every time; the run restores its own numbers
        losses = [loss_of(crops(validation, 32, length)) for _ in range(8)]
        return {"valid_loss": torch.stack(losses).mean()}

    run.evaluate_every(max(1, steps // 5), evaluate)
    for step, batches in run.steps(updates()):
        with powernorm.training_step(model):  # the micro-batches are one step for the norms
            for batch in batches:
                loss = loss_of(batch)
                penalty = run.penalty(num_tokens=batch[1].numel())
                ((loss + penalty) / micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            run.log(step, train_loss=loss, learning_rate=schedule.get_last_lr()[0])
        schedule.step()
    model.eval()
    with torch.no_grad():
        return {name: float(value) for name, value in evaluate().items()}

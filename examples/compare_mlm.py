"""A masked language model on padded sentences, in a plain loop, trained with each norm.

    powernorm compare compare_mlm:train --norms ln,bn,rbn,pn --seeds 3 --goal valid_loss:min

from this folder, or `python compare_mlm.py`; `--set text=FILE` trains on your text, one sentence
per line. In each sentence 15 % of the tokens are hidden, to be predicted (Devlin et al. 2019).
In the first hundreds of steps little is learned from the context: use `--set steps=1000` or more
to see more than the frequencies of the tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import powernorm_lab as lab

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, some of them hidden, padding (True), and targets; each (batch, length)."""
PAD, MASK, IGNORED = 0, 1, -100
HIDDEN = 0.15


class MaskedLanguageModel(nn.Module):
    """A Transformer encoder that predicts the token at every position."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.1)  # torch's 1 hides what the layers add
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return logits, (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        # After run.swap this mask also reaches the norms: padding counts in no statistic.
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def read(text: str, vocabulary: int, length: int) -> tuple[dict[str, list[Tensor]], int]:
    """Return the ids of the sentences of each split, and the number of ids."""
    if text:
        content = Path(text).read_text(encoding="utf-8")
        lines = [line for line in content.splitlines() if line.strip()]
        parts = {"valid": lines[8::10], "test": lines[9::10]}
        parts["train"] = [line for place, line in enumerate(lines) if place % 10 < 8]
    else:
        found = lab.embedded_sentences()
        parts = {"train": found["train"][:8000], "valid": found["valid"], "test": found["test"]}
    subwords = Tokenizer(models.BPE())
    subwords.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[MASK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    subwords.train_from_iterator(parts["train"], trainer)
    ids = {
        split: [torch.tensor(one.ids[:length]) for one in subwords.encode_batch(lines)]
        for split, lines in parts.items()
    }
    return ids, subwords.get_vocab_size()


def batch_of(sentences: list[Tensor]) -> Batch:
    """Return padded sentences with at least one hidden token each."""
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    padding = tokens == PAD
    draws = torch.rand(tokens.shape).masked_fill(padding, torch.inf)
    hidden = (draws < HIDDEN) | (draws == draws.amin(1, keepdim=True))
    return tokens.masked_fill(hidden, MASK), padding, tokens.masked_fill(~hidden, IGNORED)


def train(
    run: lab.Run,
    *,
    text: str = "",
    steps: int = 300,
    learning_rate: float = 4e-3,
    batch_size: int = 32,
    vocabulary: int = 400,
    length: int = 48,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> dict[str, float]:
    """Train one model, and return its loss on the hidden tokens of the other splits, in nats."""
    parts, num_ids = read(text, vocabulary, length)
    plain = MaskedLanguageModel(num_ids, length, width, layers, heads, dropout)
    model = run.swap(plain).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate, betas=(0.9, 0.98))

    def factor(step: int) -> float:
        return min(1.0, 10 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.monitor(max(1, steps // 10))

    def loader(split: str, size: int, *, shuffle: bool = False) -> DataLoader[Any]:
        sentences: Any = parts[split]
        return DataLoader(sentences, size, shuffle, collate_fn=batch_of, drop_last=shuffle)

    def loss_of(batch: Batch, reduction: str = "mean") -> Tensor:
        tokens, padding, targets = (part.to(run.device) for part in batch)
        logits = model(tokens, padding).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction=reduction)

    def mean_loss(split: str) -> float:
        torch.manual_seed(0)  # the same tokens are hidden every time
        total, number = 0.0, 0
        for batch in loader(split, 128):
            total += float(loss_of(batch, "sum"))
            number += int((batch[2] != IGNORED).sum())
        return total / number

    run.evaluate_every(max(1, steps // 5), lambda: {"valid_loss": mean_loss("valid")})
    for step, batch in run.steps(loader("train", batch_size, shuffle=True)):
        loss = loss_of(batch)
        penalty = run.penalty(num_tokens=int((batch[2] != IGNORED).sum()))
        (loss + penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            run.log(step, train_loss=loss, learning_rate=schedule.get_last_lr()[0])
        schedule.step()
    model.eval()
    with torch.no_grad():
        return {f"{split}_loss": mean_loss(split) for split in ("valid", "test")}


if __name__ == "__main__":
    norms = ["ln", "bn", "rbn", "pn"]
    lab.compare(train, "runs/mlm", norms=norms, seeds=2, goal={"valid_loss": "min"})

"""A tagger of padded sentences: norms swapped, trained, saved without norms, loaded elsewhere.

    python tagger.py

The text is made up: a word's tag is that of its ending, but the word after "no" is negated.
"""

from __future__ import annotations

import random
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm

ENDINGS = {"ly": 0, "ing": 1, "ness": 2, "ed": 3}
NO = "no"
WORDS = [NO, *(stem + ending for stem in ("quick", "kind", "dark", "warm") for ending in ENDINGS)]
NUM_TAGS = 9
"""No itself, and four tags each in positive and negated form."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens (batch, time), padding (True at padding), tags (-100 at padding)."""


class Tagger(nn.Module):
    """Transformer encoder with a tag for each token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(16, width) / 10)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_TAGS)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return scores (batch, time, tags)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def tags(sentence: list[str]) -> list[int]:
    """Return the tag of each word."""
    found = []
    for before, word in zip(["", *sentence], sentence, strict=False):
        ending = next((tag for end, tag in ENDINGS.items() if word.endswith(end)), None)
        found.append(8 if ending is None else ending + 4 * (before == NO))
    return found


def batch(generator: random.Random, size: int = 32) -> Batch:
    """Return sentences of 3 to 12 words, padded."""
    sentences = [generator.choices(WORDS, k=generator.randint(3, 12)) for _ in range(size)]
    tokens = [torch.tensor([WORDS.index(word) + 1 for word in one]) for one in sentences]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    wanted = [torch.tensor(tags(one)) for one in sentences]
    return padded, padded == 0, nn.utils.rnn.pad_sequence(wanted, True, padding_value=-100)


def main(steps: int = 200) -> None:
    """Swap, train, check the padding, fold, save, load."""
    torch.manual_seed(0)
    generator = random.Random(0)
    model = Tagger()
    # The encoder's mask reaches its norms: the report names where each norm reads it.
    print(powernorm.swap(model, to="rbn").plan)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        tokens, padding, wanted = batch(generator)
        scores = model(tokens, padding)
        loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        loss = loss + powernorm.penalty(model, num_tokens=int((~padding).sum()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    powernorm.calibrate(model, [batch(generator)[:2] for _ in range(20)])
    model.eval()

    tokens, padding, wanted = batch(generator, 256)
    with torch.no_grad():
        scores = model(tokens, padding)
        right = (scores.argmax(-1) == wanted)[~padding].float().mean()
        shortest = int(padding.sum(1).argmax())
        length = int((~padding[shortest]).sum())
        row = slice(shortest, shortest + 1)
        alone = model(tokens[row, :length], padding[row, :length])
    difference = (alone - scores[row, :length]).abs().max()
    print(f"accuracy {right:.3f}; the shortest sentence alone differs by {difference:.0e}")

    print(powernorm.fold(model, (tokens[:8], padding[:8])))
    with tempfile.TemporaryDirectory() as folder:
        powernorm.save(model, folder)
        loaded = powernorm.load(folder, Tagger()).eval()
    with torch.no_grad():
        gap = (loaded(tokens, padding) - scores)[~padding].abs().max()
    print(f"loaded without a norm: largest difference {gap:.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

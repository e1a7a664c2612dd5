"""Part-of-speech tagging of CoNLL-U on padded sentences, trained with each norm.

    powernorm compare compare_tag:train --norms ln,bn,rbn,pn --seeds 3 --goal valid_loss:min

from this folder, or `python compare_tag.py`. Without settings it reads PetroGold (Portuguese) of
the package powernorm-data; `--set data=FOLDER` reads a treebank of Universal Dependencies
(`…-ud-train.conllu`, `…-ud-dev.conllu`, `…-ud-test.conllu`), `--set data=FILE` splits one file.
"""

from __future__ import annotations

import lzma
import math
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import powernorm_lab as lab

Sentence = list[tuple[str, str]]
"""Words in lower case, and the part of speech of each."""
Placement = Literal["pre", "post"]
PAD, UNKNOWN, IGNORED = 0, 1, -100


class Tagger(nn.Module):
    """A Transformer encoder that predicts the part of speech of every word."""

    def __init__(
        self, num_words: int, num_tags: int, length: int, width: int, layers: int, is_pre: bool
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(num_words, width), nn.Embedding(length, width)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.1)  # torch's 1 hides what the layers add
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=is_pre
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width) if is_pre else nn.Identity()
        self.head = nn.Linear(width, num_tags)

    def forward(self, words: Tensor, padding_mask: Tensor) -> Tensor:
        """Return logits, (batch, length, tags)."""
        # run.swap knows this mask and the encoder's by their names and passes them to the norms, so
        # that no statistic counts padding. A mask with another name reaches them by
        # `with powernorm.padding_mask(mask):` around the calls.
        x = self.words(words) + self.positions.weight[: words.shape[1]]
        return self.head(self.norm(self.encoder(x, src_key_padding_mask=padding_mask)))


def read_file(path: Path) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file, which may be compressed by xz."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        blocks = file.read().split("\n\n")
    rows = [[line.split("\t") for line in block.splitlines()] for block in blocks]
    # Only plain numbers are words: 9-10 is a contraction, whose parts follow, 8.1 an empty node.
    sentences = [[(row[1].lower(), row[3]) for row in block if row[0].isdigit()] for block in rows]
    return [sentence for sentence in sentences if sentence]


def read(data: str) -> dict[str, list[Sentence]]:
    """Return the sentences of each split; of one file the ninth and tenth of ten are held out."""
    path = Path(data or str(files("powernorm_data") / "dep_pt_petrogold.conllu.xz"))
    if path.is_dir():
        (train,), (dev,), (test,) = (path.glob(f"*{n}.conllu") for n in ("train", "dev", "test"))
        return {"train": read_file(train), "valid": read_file(dev), "test": read_file(test)}
    found = read_file(path)
    train = [sentence for place, sentence in enumerate(found) if place % 10 < 8]
    return {"train": train, "valid": found[8::10], "test": found[9::10]}


def encode(
    parts: dict[str, list[Sentence]], vocabulary: int, length: int
) -> tuple[dict[str, list[Tensor]], int, int]:
    """Return rows (words, 2) of word and tag, cut at `length`, and the numbers of both."""
    counts = Counter(word for sentence in parts["train"] for word, _ in sentence)
    frequent = [word for word, _ in counts.most_common(vocabulary - 2)]
    words = {word: place for place, word in enumerate(frequent, start=2)}
    names = {tag for part in parts.values() for sentence in part for _, tag in sentence}
    tags = {tag: place for place, tag in enumerate(sorted(names))}

    def rows(sentence: Sentence) -> Iterable[Tensor]:
        ids = [(words.get(word, UNKNOWN), tags[tag]) for word, tag in sentence]
        return torch.tensor(ids).split(length)

    cut = {split: [row for one in part for row in rows(one)] for split, part in parts.items()}
    return cut, len(words) + 2, len(tags)


def batch_of(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return words, padding (True), and tags, each (batch, length of the longest)."""
    words, tags = nn.utils.rnn.pad_sequence(rows, True, IGNORED).unbind(-1)
    padding = words == IGNORED
    return words.masked_fill(padding, PAD), padding, tags


def train(
    run: lab.Run,
    *,
    data: str = "",
    steps: int = 300,
    learning_rate: float = 4e-3,
    batch_size: int = 32,
    vocabulary: int = 2000,
    length: int = 64,
    width: int = 64,
    layers: int = 2,
    placement: Placement = "pre",
    evaluations: int = 5,
) -> dict[str, float]:
    """Train one model, and return its loss (nats per tag) and accuracy on the other splits."""
    rows, num_words, num_tags = encode(read(data), vocabulary, length)
    plain = Tagger(num_words, num_tags, length, width, layers, placement == "pre")
    model = run.swap(plain).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate, betas=(0.9, 0.98))

    def factor(step: int) -> float:
        return min(1.0, 10 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.monitor(max(1, steps // 10))

    def loader(split: str, size: int, *, shuffle: bool = False) -> DataLoader[Any]:
        part: Any = rows[split]
        return DataLoader(part, size, shuffle, collate_fn=batch_of, drop_last=shuffle)

    def evaluate(split: str) -> dict[str, float]:
        loss, right, number = 0.0, 0, 0
        for batch in loader(split, 128):
            words, padding, tags = (part.to(run.device) for part in batch)
            logits = model(words, padding)[~padding]
            loss += float(F.cross_entropy(logits, tags[~padding], reduction="sum"))
            right += int((logits.argmax(-1) == tags[~padding]).sum())
            number += len(logits)
        return {f"{split}_loss": loss / number, f"{split}_accuracy": right / number}

    run.evaluate_every(max(1, steps // evaluations), lambda: evaluate("valid"))
    for step, batch in run.steps(loader("train", batch_size, shuffle=True)):
        words, padding, tags = (part.to(run.device) for part in batch)
        logits = model(words, padding)[~padding]
        loss = F.cross_entropy(logits, tags[~padding])
        (loss + run.penalty(num_tokens=len(logits))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            run.log(step, train_loss=loss, learning_rate=schedule.get_last_lr()[0])
        schedule.step()
    model.eval()
    with torch.no_grad():
        return {**evaluate("valid"), **evaluate("test")}


if __name__ == "__main__":
    norms = ["ln", "bn", "rbn", "pn"]
    lab.compare(train, "runs/tag", norms=norms, seeds=2, goal={"valid_loss": "min"})

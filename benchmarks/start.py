"""How running statistics start: a text classifier in evaluation after a short training.

    python benchmarks/start.py benchmarks/results/start.jsonl

A row a run: a post-norm transformer (2 layers of 64 features, embeddings of a standard deviation of
0.02 as BERT's, sentences of up to 40 words, padded, in batches of 32, AdamW at 1e-3) learns whether
a sentence is from an address, a verse or a film review. All its LayerNorms are swapped. After 50,
100 and 300 steps: the mean training loss of the last 10, and the accuracy on 1,500 held-out
sentences by the running statistics and by statistics that `powernorm.calibrate` has measured on 16
training batches. Rows that the file has are not run again. `--table` prints means over the seeds.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
import random
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from powernorm_lab.data.embedded import address_sentences, english_chapters, review_sentences

VOCABULARY, LONGEST, WIDTH, BATCH = 2000, 40, 64, 32
NORMS = ("bn", "rbn", "brn", "mabn", "pnv")
STARTS = ("torch", "average")
MARKS = (50, 100, 300)
KEYS = ("norm", "start", "seed")
Data = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, padding_mask: Tensor) -> Tensor:
        x = self.norm(self.embed(words) + self.position.weight[: words.shape[1]])
        x = self.encoder(x, src_key_padding_mask=padding_mask)
        x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0).sum(1)
        return self.head(x / (~padding_mask).sum(1, keepdim=True))


def texts() -> tuple[Data, Data]:
    """(words, labels) of the training and of held-out sentences; word 0 is padding."""
    sources = itertools.chain(*address_sentences()), itertools.chain(*english_chapters())
    rows: list[tuple[list[int], int]] = []
    for label, sentences in enumerate((*sources, iter(review_sentences()))):
        chosen = random.Random(label).sample(list(sentences), 4500)
        for sentence in chosen:
            words = sentence.lower().split()[:LONGEST]
            numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
            rows.append((numbers + [0] * (LONGEST - len(numbers)), label))
    random.Random(9).shuffle(rows)
    words, labels = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    return (words[1500:], labels[1500:]), (words[:1500], labels[:1500])


def batches(data: Data, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(words, padding mask, labels), padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
        words = data[0][chosen]
        words = words[:, : int((words != 0).sum(1).max())]
        yield words, words == 0, data[1][chosen]


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    right = 0
    for words, labels in zip(data[0].split(250), data[1].split(250), strict=True):
        right += int((model(words, words == 0).argmax(-1) == labels).sum())
    return round(right / len(data[1]), 4)


def run(norm: str, start: str, seed: int, train: Data, held_out: Data) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Classifier()
    powernorm.swap(model, norm, start=start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    measured = [batch[:2] for batch in itertools.islice(batches(train, 1000 + seed), 16)]
    row, losses = {}, []
    for step, (words, mask, labels) in zip(
        range(1, MARKS[-1] + 1), batches(train, seed), strict=False
    ):
        loss = F.cross_entropy(model(words, mask), labels)
        losses.append(float(loss.detach()))
        loss = loss + (powernorm.penalty(model, num_tokens=BATCH) if norm == "rbn" else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in MARKS:
            evaluated = copy.deepcopy(model).eval()
            by_running = accuracy(evaluated, held_out)
            powernorm.calibrate(evaluated, measured, names="*")
            mean_loss = round(sum(losses[-10:]) / 10, 4)
            row[str(step)] = [mean_loss, by_running, accuracy(evaluated, held_out)]
    return row


def table(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("norm", "start", *(f"{mark} steps" for mark in MARKS))
    for norm, start in itertools.product(NORMS, STARTS):
        own = [row for row in rows if (row["norm"], row["start"]) == (norm, start)]
        cells = []
        for mark in map(str, MARKS):
            running, calibrated = ([row[mark][i] for row in own] for i in (1, 2))
            cells.append(f"{_spread(running)} ({_spread(calibrated)})")
        yield (f"`{norm}`", f"`{start}`", *cells)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = (
        [json.loads(line) for line in given.out.read_text().splitlines()]
        if given.out.exists()
        else []
    )
    if given.table:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table(rows))
        return
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a .* evaluates after")
    done = {tuple(row[key] for key in KEYS) for row in rows}
    train, held_out = texts()
    for case in itertools.product(NORMS, STARTS, range(5)):
        if case in done:
            continue
        begin = time.perf_counter()
        row = dict(zip(KEYS, case, strict=True)) | run(*case, train, held_out)
        row["seconds"] = round(time.perf_counter() - begin, 1)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

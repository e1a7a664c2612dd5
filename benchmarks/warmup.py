"""PowerNorm's warm-up in a small GPT: evaluation against training, and what calibrating does.

    python benchmarks/warmup.py warmup benchmarks/results/warmup.jsonl
    python benchmarks/warmup.py calibrate benchmarks/results/calibrate.jsonl

A row a run: a language model of bytes (4 blocks of 64 features, contexts of 48, batches of 24,
AdamW at 2e-3) whose LayerNorms were swapped, on the addresses and the verses that come with the
package, pre and post, two seeds. `warmup` runs 200 steps with a falling learning rate and writes
[mean training loss of the last 10 steps, loss of held-out text in evaluation] after 25, 50, 100 and
200 of them. `calibrate` runs 100 steps at a constant rate and re-estimates all statistics then.
Rows that the file has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from powernorm.ops.running_stats import Average, Momentum
from powernorm_lab.data.embedded import addresses, english_chapters

CONTEXT, WIDTH, BLOCKS, HEADS, BATCH, RATE = 48, 64, 4, 4, 24, 2e-3


class Capped(powernorm.PowerNorm):
    """Tried: the batch's own statistics throughout the warm-up, an average that forgets."""

    @property
    def update_momentum(self) -> Momentum:
        return Average() if self.stage == 0 and (self._steps + 1) * 0.1 < 1 else 0.1


class Block(nn.Module):
    def __init__(self, placement: str) -> None:
        super().__init__()
        self.is_pre = placement == "pre"
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_pre:
            x = x + self.attend(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.feed(x))


class GPT(nn.Module):
    def __init__(self, placement: str) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(placement) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH) if placement == "pre" else nn.Identity()
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def splits(name: str) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes."""
    parts = addresses() if name == "sotu" else itertools.chain(*english_chapters())
    text = torch.tensor(list("\n".join(parts).encode()[:1_500_000]))
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batches(text: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    model.eval()
    held_out = itertools.islice(batches(text, 64, 99), 8)
    mean = sum(float(loss_of(model, batch)) for batch in held_out) / 8
    model.train()
    return round(mean, 4)


def run(
    norm: str, options: dict[str, Any], placement: str, text: str, seed: int, *, calibrates: bool
) -> dict[str, Any]:
    train, held_out = splits(text)
    torch.manual_seed(seed)
    model = GPT(placement)
    if norm != "ln":
        powernorm.swap(model, norm, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    num_steps, row, losses = (100 if calibrates else 200), {}, []
    marks = (50, 100) if calibrates else (25, 50, 100, 200)
    for step, batch in zip(range(1, num_steps + 1), batches(train, BATCH, seed), strict=False):
        falling = 1 if calibrates else max(0.1, 1 - 0.9 * step / num_steps)
        optimizer.param_groups[0]["lr"] = RATE * min(step / 20, falling)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step in marks:
            row[str(step)] = [round(sum(losses[-10:]) / 10, 4), evaluate(model, held_out)]
    if calibrates:
        data = [batch[0] for batch in itertools.islice(batches(train, BATCH, 5), 40)]
        powernorm.calibrate(model, data, names="*")
        row["calibrated"] = evaluate(model, held_out)
    return row


def cases(study: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(label, norm, its options) of each run."""
    if study == "calibrate":
        yield from ((name, name, {}) for name in ("pn", "pn-static", "pn-only", "bn", "rbn", "pnv"))
        yield "brn", "brn", {"warmup_steps": 10, "ramp_steps": 20}
        yield "mabn", "mabn", {"warmup_steps": 10, "window": 8, "ratio_start": 20}
        return
    yield from (("ln", "ln", {}), ("pnv", "pnv", {}))
    for name in ("pn", "pn-only", "pn-static"):
        for steps in (10, 4000):
            yield f"{name} {steps}", name, {"warmup_steps": steps}
        presets = dict(powernorm.NORMS[name].presets)
        yield f"{name} capped 4000", "capped", presets | {"warmup_steps": 4000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("warmup", "calibrate"))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    powernorm.register_norm("capped", Capped)
    known = given.out.read_text().splitlines() if given.out.exists() else []
    done = {tuple(json.loads(line)[key] for key in KEYS) for line in known}
    texts = ("sotu",) if given.study == "calibrate" else ("sotu", "verses")
    for placement, text, seed in itertools.product(("pre", "post"), texts, (0, 1)):
        for label, norm, options in cases(given.study):
            where = (label, placement, text, seed)
            if where not in done:
                calibrates = given.study == "calibrate"
                row = run(norm, options, placement, text, seed, calibrates=calibrates)
                with given.out.open("a") as file:
                    file.write(json.dumps(dict(zip(KEYS, where, strict=True)) | row) + "\n")


KEYS = ("norm", "place", "text", "seed")


if __name__ == "__main__":
    main()

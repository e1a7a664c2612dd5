"""BatchNorm and padding: seven arms on Japanese Vowels, and repairs of a polluted model.

    python studies/padding/run.py                            # trains missing runs; resumable
    python studies/padding/run.py --write docs/padding       # the page's tables from the rows

Each run appends a row to rows.jsonl next to this file, seed by seed. After Ctrl-C the same command
continues.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
import rules
from conformer import ARMS, Conformer, Utterances, batches, build, read
from powernorm.diagnosis import evaluation_gap
from tables import write

ROWS = Path(__file__).parent / "rows.jsonl"
Row = dict[str, Any]


def split() -> tuple[Utterances, Utterances, Utterances]:
    """Return the utterances to train on, to tune on and to test."""
    train = read("train")
    rows = torch.arange(len(train.frames))
    held_out = rows % 5 == 4
    return train.chosen(rows[~held_out]), train.chosen(rows[held_out]), read("test")


def train(
    model: nn.Module, data: Utterances, seed: int, size: int, order: str, rates: list[float]
) -> float:
    """Train with a rate for each update; return the share of padding in the batches."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rates[0], weight_decay=0.01)
    model.train()
    positions = valid = 0
    endless = _endless(data, size, order, generator)
    for rate in rates:
        features, lengths, speakers = data.batch(next(endless))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(model(features, lengths), speakers)
        (loss + powernorm.penalty(model, num_tokens=len(speakers))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        positions += features.shape[0] * features.shape[1]
        valid += int(lengths.sum())
    return 1 - valid / positions


def _endless(
    data: Utterances, size: int, order: str, generator: torch.Generator
) -> Iterator[Tensor]:
    while True:
        yield from batches(data, size, is_sorted=rules.ORDERS[order], generator=generator)


def schedule(rate: float, num_steps: int) -> list[float]:
    """Return the rates of a run, which rise for a tenth and then fall linearly to 0."""
    rise = max(1, num_steps // 10)
    return [
        rate * min((step + 1) / rise, (num_steps - step) / (num_steps - rise))
        for step in range(num_steps)
    ]


def trained(
    arm: str, order: str, size: int, seed: int, rate: float, data: Utterances
) -> tuple[Conformer, float]:
    """Return the model of a run and the share of padding in its batches."""
    steps = rules.STEPS[size]
    model = build(ARMS[arm], seed, steps)
    share = train(model, padded(data, order), seed, size, order, schedule(rate, steps))
    return model.eval(), share


def padded(data: Utterances, order: str) -> Utterances:
    """Return utterances whose batches are padded as in an order."""
    return data._replace(length=rules.FIXED_LENGTH) if order == "fixed" else data


@torch.no_grad()
def logits(model: nn.Module, data: Utterances, parts: list[Tensor]) -> Tensor:
    """Return the scores of all utterances, read in the given batches."""
    scores = torch.empty(len(data.frames), len(ARMS) + 2)
    for rows in parts:
        features, lengths, _ = data.batch(rows)
        scores[rows] = model(features, lengths)
    return scores


def evaluated(model: nn.Module, data: Utterances) -> Row:
    """Return loss and accuracy alone, padded and in buckets, and the effect of padding."""
    model.eval()
    lengths = data.lengths
    by_length = lengths.argsort(stable=True)
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    ways = {
        # Batches of equal lengths have no padding, like single utterances.
        "alone": [torch.nonzero(lengths == length)[:, 0] for length in lengths.unique()],
        "padded": list(shuffled.split(rules.EVALUATION_SIZE)),
        "bucket": list(by_length.split(rules.EVALUATION_SIZE)),
    }
    found: Row = {}
    plain = data._replace(length=None)
    scores = {
        way: logits(model, data if way == "padded" else plain, parts) for way, parts in ways.items()
    }
    for way, own in scores.items():
        answers = own.argmax(1)
        found[way] = {
            "accuracy": 100 * float((answers == data.speakers).float().mean()),
            "loss": float(F.cross_entropy(own, data.speakers)),
            "changed": int((answers != scores["alone"].argmax(1)).sum()),
            "difference": float((own - scores["alone"]).abs().max()),
        }
    return found


def statistics(model: nn.Module, train_data: Utterances, size: int, test: Utterances) -> Row:
    """Return losses with running and with batch statistics, and TID of the convolution norms."""
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(len(test.frames), generator=generator)
    read_by = [test.batch(rows) for rows in shuffled.split(rules.EVALUATION_SIZE)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[float, int]:
        scores = model(batch[0], batch[1])
        return float(F.cross_entropy(scores, batch[2])), len(batch[2])

    with torch.no_grad():
        gap = evaluation_gap(model, read_by, loss)
    order = torch.randperm(len(train_data.frames), generator=generator)
    whole = [rows for rows in order.split(size) if len(rows) == size][: rules.TID_BATCHES]
    seen = [
        dict(zip(("features", "lengths"), train_data.batch(rows), strict=False)) for rows in whole
    ]
    diagnosis = powernorm.diagnose(model, seen, spectra=False)
    rows = [row for row in diagnosis.rows if row.name.endswith("conv_norm")]
    names = ("mean_tid", "var_tid", "padded_mean_tid", "padded_var_tid")
    tid = {
        name: [value for row in rows if (value := getattr(row, name)) is not None] for name in names
    }
    return {
        "running_loss": None if gap is None else gap.running_loss,
        "batch_loss": None if gap is None else gap.batch_loss,
        **{name: fmean(values) if values else None for name, values in tid.items()},
    }


def repaired(
    model: Conformer, steps: tuple[str, ...], data: Utterances, seed: int, rate: float
) -> nn.Module:
    """Apply a sequence of repairs to a polluted model."""
    for step in steps:
        if step == "mask":
            powernorm.mask_batch_norms(model)
        elif step == "fine-tune":
            train(model, data, seed + 1, 16, "random", [rate / 10] * rules.FINE_TUNING_STEPS)
        else:
            order = torch.randperm(len(data.frames), generator=torch.Generator().manual_seed(2))
            powernorm.calibrate(model, [data.batch(rows)[:2] for rows in order.split(16)])
    return model


class Store:
    """Stored rows by their keys."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = {self._key(row): row for row in map(json.loads, lines)}

    @staticmethod
    def _key(row: Row) -> str:
        return json.dumps(row["of"])

    def add(self, of: list[Any], values: Row) -> None:
        """Write a row."""
        row = {"of": of, **values}
        self.rows[self._key(row)] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def lacks(self, of: list[Any]) -> bool:
        """Return whether a row is missing."""
        return json.dumps(of) not in self.rows

    def rate(self, arm: str, size: int) -> float:
        """Return the chosen learning rate."""

        def mean_loss(rate: float) -> float:
            rows = [
                self.rows[json.dumps(["tune", arm, size, rate, seed])]
                for seed in rules.TUNING_SEEDS
            ]
            return fmean(row["loss"] for row in rows)

        return min(rules.RATES, key=mean_loss)


def run(store: Store) -> None:
    """Train missing runs seed by seed, so that all norms have the same seeds at any time."""
    data, held_out, test = split()
    for arm, size, rate, seed in product(ARMS, rules.BATCH_SIZES, rules.RATES, rules.TUNING_SEEDS):
        of = ["tune", arm, size, rate, seed]
        if store.lacks(of):
            model, _ = trained(arm, "random", size, seed, rate, data)
            store.add(of, {"loss": evaluated(model, held_out)["padded"]["loss"]})
    for seed in rules.SEEDS:
        for (order, size), arm in product(rules.SETTINGS, ARMS):
            of = ["run", arm, order, size, seed]
            if store.lacks(of):
                rate = store.rate(arm, size)
                model, share = trained(arm, order, size, seed, rate, data)
                own = padded(test, order)
                store.add(
                    of,
                    {
                        "rate": rate,
                        "padding": share,
                        **evaluated(model, own),
                        **statistics(model, padded(data, order), size, own),
                    },
                )
        missing = [steps for steps in rules.REPAIRS if store.lacks(["mend", list(steps), seed])]
        if missing:
            rate = store.rate("bn", 16)
            model, _ = trained("bn", "random", 16, seed, rate, data)
        for steps in missing:
            twin = repaired(copy.deepcopy(model), steps, data, seed, rate)
            store.add(["mend", list(steps), seed], evaluated(twin, test))


def main() -> None:
    """Parse arguments, then train or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write the tables, train nothing"
    )
    given = parser.parse_args()
    store = Store(given.rows)
    if given.write:
        figure = given.write.parent / "images" / "padding-changed.svg"
        write(given.write, list(store.rows.values()), figure)
        return
    torch.set_num_threads(1)
    run(store)


if __name__ == "__main__":
    main()

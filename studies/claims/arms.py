"""Runs for the claims: one small language model in five groups of arms.

A group is a tuning (`lab.tune`: the same trials for every norm, then seeds with its best settings)
or a sweep over learning rates (`lab.compare` at each, for claims about the stability of training).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import powernorm_lab as lab

SEEDS = (0, 1, 2, 3, 4)
TRIALS = 10

BASE = {
    "task": "lm",
    "preset": "claims",
    "data": {
        "path": "sotu",
        "vocabulary_size": 1000,
        "sequence_length": 32,
        "batch_size": 16,
        "evaluation_batch_size": 128,
    },
    "model": {
        "num_features": 64,
        "num_layers": 4,
        "num_heads": 4,
        "feedforward_features": 256,
        "placement": "pre",
    },
    "optimizer": {"learning_rate": 8e-3, "weight_decay": 0.01},
    "training": {
        "max_steps": 400,
        "num_threads": 1,
        "log_every": 20,
        "validate_every": 50,
        "validation_tokens": 8192,
        "monitor_every": 0,
        "tid_batches": 0,
    },
    # Schedules of the norms as fractions of the run: PRepBN's authors fade out the old norm before
    # the end (0.8 of all steps), and UN's authors have a warm-up of 4 %.
    "norm_options": {
        "prepbn": {"decay_steps": 320},
        "un": {"warmup_steps": 16, "ratio_start": 16},
    },
}


@dataclass(frozen=True)
class Tuning:
    """Norms that are tuned with the same number of trials each."""

    name: str
    norms: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def train(self, out: Path) -> None:
        """Train missing runs."""
        config = _config(self.norms, self.changes)
        lab.tune(config, out / self.name, trials=TRIALS, resume=_exists(out / self.name))

    def folders(self, out: Path) -> Iterator[tuple[str, Path]]:
        """Yield key and folder of the only comparison, which has all norms."""
        yield "", out / self.name


@dataclass(frozen=True)
class Sweep:
    """Placements, each at the same learning rates."""

    name: str
    norm: str
    placements: tuple[str, ...]
    rates: tuple[float, ...]
    changes: tuple[str, ...] = ()

    def train(self, out: Path) -> None:
        """Train missing runs."""
        for key, folder in self.folders(out):
            placement, _, rate = key.partition("@")
            changes = (f"model.placement={placement}", f"optimizer.learning_rate={rate}")
            config = _config((self.norm,), (*self.changes, *changes))
            lab.compare(config, folder, resume=_exists(folder))

    def folders(self, out: Path) -> Iterator[tuple[str, Path]]:
        """Yield `placement@rate` and folder of each comparison."""
        for rate in self.rates:
            for placement in self.placements:
                yield f"{placement}@{rate:g}", out / self.name / f"{placement}-{rate:g}"


Group = Tuning | Sweep

GROUPS: tuple[Group, ...] = (
    Tuning("adamw", ("ln", "rms", "derf", "dyt", "prepbn")),
    Tuning("muon", ("rms", "derf"), ("optimizer.name=muon",)),
    # 64 tokens in a batch, for which BatchNorm is known to be bad; the same total of tokens.
    Tuning(
        "small-batches",
        ("ln", "bn", "un"),
        (
            "data.batch_size=2",
            "training.max_steps=1200",
            "training.validate_every=150",
            "norm_options.un.warmup_steps=48",
            "norm_options.un.ratio_start=48",
        ),
    ),
    Sweep("peri", "ln", ("pre", "peri"), (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)),
    Sweep("bn-ffn", "bn", ("pre", "bn-ffn"), (1.6e-2, 3.2e-2, 6.4e-2, 0.128)),
)


def train(out: Path, names: list[str], say: Callable[[str], None]) -> None:
    """Train the named groups, one after the other."""
    for group in GROUPS:
        if group.name in names:
            say(f"{group.name}: {out / group.name}")
            group.train(out)


def _config(norms: tuple[str, ...], changes: tuple[str, ...]) -> lab.ComparisonSettings:
    config = replace(lab.settings_from(BASE), norms=norms, seeds=SEEDS)
    return lab.override(config, changes)


def _exists(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())

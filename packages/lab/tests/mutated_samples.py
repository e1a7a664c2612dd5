"""Small folders of all files that powernorm writes, and results of commands on mutated ones.

    export POWERNORM_MUTATIONS=200 POWERNORM_MUTATION_SEED=7
    pytest -m slow packages/lab/tests/test_mutated_files.py

tests 200 mutations of each sample with another seed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import powernorm
from powernorm.json_reading import SEAL
from watched import command, run_watched

MODULE = """
import torch
from torch import nn


def train(run, *, learning_rate: float = 1e-2, steps: int = 4):
    torch.manual_seed(run.seed)
    model = run.swap(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    run.track(model=model, optimizer=optimizer)
    run.monitor(2)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(run.seed))
    batches = list(x.split(16))
    run.evaluate_every(2, lambda: {"valid_loss": model(x).square().mean()})
    run.keep_last(2)
    for step, batch in run.steps(batches, checkpoint_every=2):
        loss = (model(batch) - 1).square().mean()
        (loss + run.penalty(num_tokens=len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(step, train_loss=loss)
    loss = float((model(x) - 1).square().mean())
    return {"valid_loss": loss, "test_loss": loss}


def build(norm=nn.LayerNorm):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), norm(8), nn.Linear(8, 16), nn.ReLU(), norm(16), nn.Linear(16, 3)]
    return nn.Sequential(*layers), [torch.randn(4, 5, 8) for _ in range(8)]
"""
LM = (
    *("compare", "lm", "--preset", "smoke", "--norms", "ln,bn", "--data", "text", "--out", "runs"),
    *("--set", "data.vocabulary_size=300", "--set", "data.sequence_length=8"),
    *("--set", "data.batch_size=4", "--set", "data.evaluation_batch_size=16"),
    *("--set", "model.num_features=8", "--set", "model.feedforward_features=8"),
    *("--set", "model.num_layers=1", "--set", "training.max_steps=6"),
    *("--set", "optimizer.learning_rate=0.03"),
    *("--set", "training.validate_every=3", "--set", "training.average_checkpoints=2"),
    *("--set", "training.record_scales=true", "--set", "training.diagnose_every=3"),
    *("--set", "training.monitor_every=2", "--set", "training.log_every=2"),
    *("--set", "training.tid_batches=2", "--device", "cpu", "--threads", "1", "-q"),
)
TRANSLATION = (
    *("compare", "translation", "--preset", "smoke", "--norms", "ln,pn", "--data", "pairs"),
    *("--set", "data.languages=de-en"),
    *("--out", "runs", "--set", "data.vocabulary_size=290", "--set", "data.sequence_length=32"),
    *("--set", "model.num_features=16", "--set", "model.num_layers=1", "--set"),
    *("model.feedforward_features=16", "--set", "model.num_heads=2", "--set"),
    *("training.max_steps=4", "--set", "training.validate_every=2", "--device", "cpu"),
    *("--set", "decoding.beam_size=1", "--threads", "1", "-q"),
)
OWN = (
    *("compare", "mine:train", "--goal", "valid_loss:min", "--norms", "ln,bn", "--seeds", "2"),
    *("--out", "runs", "--device", "cpu", "-q"),
)
TUNE = (
    *("tune", "mine:train", "--goal", "test_loss:min", "--norms", "ln,bn", "--trials", "2"),
    *("--search", "learning_rate=log:1e-4:1e-1", "--out", "runs", "--device", "cpu", "-q"),
)
REMOVE = (
    *("remove", "mine:build", "--out", "runs", "--steps", "4", "--set", "method.batches=2"),
    *("--set", "training.log_every=1", "--set", "training.validations=2", "--device", "cpu", "-q"),
)
RESUME = "--resume"
UNEQUAL = {
    *("seconds", "tokens_per_second", "examples_per_second", "steps_per_second", "ran_on", "pid"),
    *("decoding_tokens_per_second", SEAL, "statistics"),
}
"""Keys of values that are never equal, and of those that `powernorm work` leaves to `compare`."""
DRAWN = 0.05
"""Fraction of pages whose figures are really drawn, which takes most of the time."""


@dataclass
class Sample:
    """A folder, the command that makes it, and the commands that read it."""

    name: str
    make: tuple[str, ...]
    commands: dict[str, tuple[str, ...]]
    stop_at: str = ""
    """For an unfinished sample, part of the file's name at which the command is stopped."""
    stop_count: int = 1
    """Number of the opening of such a file at which it is stopped."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Further commands that add files to it."""
    home: Path = Path()
    whole: dict[str, Any] = field(default_factory=dict)
    """Results of commands on the unchanged sample."""


def samples() -> list[Sample]:
    """Return all samples, which are not made yet."""
    run = "runs/bn-pre-seed0"
    readers = {
        "report": ("report", "runs"),
        "results": ("results", "runs"),
        "figures": ("figures", "runs"),
        "report run": ("report", run),
        "work": ("work", "runs", "-q"),
    }
    tuned = {key: readers[key] for key in ("report", "results")}
    return [
        Sample(
            "lm",
            LM,
            {
                **readers,
                "compare": (*LM, RESUME),
                "diagnose": ("diagnose", run, "--batches", "2"),
                "diagnose checkpoint": (
                    *("diagnose", f"{run}/checkpoints/last.ckpt", "--batches", "2"),
                    *("--csv", "layers.csv"),
                ),
                "overlay": ("diagnose", "--overlay", "runs", "--batches", "2"),
                "fold": ("fold", run, "--out", "folded"),
                "fold checkpoint": ("fold", f"{run}/checkpoints/best.ckpt", "--out", "folded"),
                "remove": (
                    *("remove", "runs/ln-pre-seed0", "--out", "removed", "--steps", "2", "-q"),
                    *("--set", "method.batches=2", "--set", "training.validations=1"),
                    *("--device", "cpu"),
                ),
                "load": ("load", "folded-whole"),
            },
            needs=(
                ("diagnose", run, "--batches", "2"),
                ("fold", run, "--out", "folded-whole"),
            ),
        ),
        Sample(
            "lm half",
            LM,
            {**readers, "compare": (*LM, RESUME), "diagnose": ("diagnose", run, "--batches", "2")},
            stop_at="bn-pre-seed0/norms.csv",
        ),
        Sample(
            "own",
            OWN,
            {
                **{k: v for k, v in readers.items() if k != "report run"},
                "report run": ("report", "runs/bn-seed1"),
                "compare": (*OWN, RESUME),
                "more seeds": ("compare", *(part.replace("2", "3") for part in OWN[1:]), RESUME),
            },
        ),
        Sample(
            "own half",
            OWN,
            {
                **{k: v for k, v in readers.items() if k != "report run"},
                "compare": (*OWN, RESUME),
            },
            stop_at="bn-seed1/checkpoints/.last.ckpt",
        ),
        Sample(
            "translation",
            TRANSLATION,
            {
                "report": ("report", "runs"),
                "results": ("results", "runs"),
                "compare": (*TRANSLATION, RESUME),
                "diagnose": ("diagnose", "runs/pn-pre-seed0", "--batches", "2"),
                "fold": ("fold", "runs/pn-pre-seed0", "--out", "folded"),
            },
        ),
        Sample("tune", TUNE, {**tuned, "tune": (*TUNE, RESUME), "work": ("work", "runs", "-q")}),
        Sample(
            "tune half",
            TUNE,
            {**tuned, "tune": (*TUNE, RESUME), "work": ("work", "runs", "-q")},
            stop_at="bn-trial1-seed1000/checkpoints/.last.ckpt",
        ),
        Sample(
            "remove",
            REMOVE,
            {
                "report": ("report", "runs"),
                "remove": (*REMOVE, RESUME),
                "load": ("load", "runs/model"),
                "fold": ("fold", "runs/model"),
            },
        ),
        Sample(
            "remove half",
            REMOVE,
            {"remove": (*REMOVE, RESUME)},
            stop_at="checkpoints/.last.ckpt",
            stop_count=2,
        ),
        Sample("saved", ("save", "saved"), {"load": ("load", "saved"), "fold": ("fold", "saved")}),
    ]


def action_of(parts: tuple[str, ...]) -> Callable[[], Any]:
    """Return a command, or its equivalent in Python, as an action."""
    if parts[0] == "load":
        return lambda: _load(Path(parts[1]))
    if parts[0] == "save":
        return lambda: _save(Path(parts[1]))
    return command(*parts)


def _save(folder: Path) -> None:
    import mine  # type: ignore[import-not-found]

    model, batches = mine.build()
    powernorm.swap(model, to="rbn")
    model(batches[0])
    powernorm.save(model, folder)


def _load(folder: Path) -> None:
    """Write a loaded model's values to a file; print errors like the command line."""
    import mine

    from powernorm_lab.tasks.trained_models import load_folded_run

    try:
        if folder.name == "folded-whole":
            model = load_folded_run(folder).model
        else:
            model = powernorm.load(folder, mine.build()[0])
    except powernorm.InputError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    Path("loaded.json").write_text(json.dumps(_numbers(model.state_dict())))


def write_home(home: Path) -> None:
    """Write the user's module and data."""
    from lab.tests.training.tiny_translation import write_pairs

    home.mkdir(parents=True)
    (home / "mine.py").write_text(MODULE)
    write_pairs(home / "pairs", 60)
    chance = random.Random(0)
    words = [a + b for a in ("wa", "pe", "to", "mi") for b in ("r", "ace", "day", "nd", "n")]
    (home / "text").mkdir()
    for split, number in (("train", 120), ("valid", 20), ("test", 20)):
        starts = [chance.randrange(len(words)) for _ in range(number)]
        lines = [" ".join(words[(s + 3 * i) % len(words)] for i in range(8)) for s in starts]
        (home / "text" / f"tiny.{split}.txt").write_text("\n".join(lines) + "\n")


def make(sample: Sample, home: Path, cache: Path) -> Sample:
    """Run the commands that make a sample."""
    write_home(home)
    stopped: list[str] = []

    def stop(name: str) -> None:
        if sample.stop_at and sample.stop_at in name:
            stopped.append(name)
            if len(stopped) == sample.stop_count:
                signal.raise_signal(signal.SIGTERM)

    made = run_watched(home, action_of(sample.make), cache, opened=stop)
    assert made.code == (75 if sample.stop_at else 0), (made.code, made.err, made.raised)
    assert bool(stopped) == bool(sample.stop_at)
    for parts in sample.needs:
        more = run_watched(home, action_of(parts), cache)
        assert more.code == 0, more.err
    sample.home = home
    return sample


def files_of(sample: Sample) -> list[Path]:
    """Return the files to mutate: all except pages, which powernorm hardly reads."""
    given = ("mine.py", "pairs", "text")
    return sorted(
        path.relative_to(sample.home)
        for path in sample.home.rglob("*")
        if path.is_file()
        and path.relative_to(sample.home).parts[0] not in given
        and "__pycache__" not in path.parts
        and path.suffix != ".svg"
    )


def kind_of(path: Path) -> str:
    """Return the kind of a file; files of one kind have the same reader."""
    name = re.sub(r"step-\d+", "step-N", path.name)
    if path.parts[0] != "runs" or "model" in path.parts:
        return f"{'saved' if 'safetensors' in name or name == 'config.json' else 'other'} {name}"
    return f"{'trials/' if 'trials' in path.parts else ''}{name}"


def _numbers(value: Any) -> Any:
    """Return a value without times, and with checksums for tensors."""
    if isinstance(value, dict):
        return {str(k): _numbers(v) for k, v in value.items() if k not in UNEQUAL}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _content(path: Path) -> Any:
    """Return the contents of a file without times, which are never equal."""
    if path.suffix == ".json":
        return _numbers(json.loads(path.read_text()))
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [_numbers(row) for row in csv.DictReader(file)]
    if path.suffix in (".ckpt", ".html", ".db", ".log"):
        return "there"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(home: Path, besides: Path | None) -> dict[str, Any]:
    """Return the contents of a folder after a command, except for the mutated file."""
    found = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home)
        if path.is_symlink() or not path.is_file() or name.suffix in (".pyc", ".db"):
            continue
        if besides is not None and (name == besides or besides in name.parents):
            continue
        try:
            found[str(name)] = _content(path)
        except ValueError:
            found[str(name)] = "unreadable"
    return found


def pages(home: Path, besides: Path | None) -> dict[str, str]:
    """Return the texts of pages, if nothing was trained, because they contain its times."""
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*.html"))
        if not path.is_symlink() and path.is_file() and path.relative_to(home) != besides
    }

"""Speed of translation beside Joey NMT 2.3.0: training and beam search, in turns.

    python benchmarks/translation/joeynmt_speed.py --joeynmt PYTHON [--models small] [--threads 1,2]

PYTHON is that of an environment with Joey NMT (README.md). Every turn is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from joeynmt_files import write_config
from pairs import open_pairs, write_for_joeynmt, write_text
from shapes import SHAPES, Search, Shape

sys.path.append(str(Path(__file__).parents[1]))
from speed.machine import ALLOCATOR, describe_machine

FOLDER: Final = Path(__file__).parent
BASELINE: Final = "joeynmt"
LARGEST_DIFFERENCE: Final = 1e-3
"""Tolerance of log-probabilities: the epsilons of the norms differ (1e-5 and 1e-6)."""
WARMUP_LENGTH: Final = 3

Result = dict[str, Any]
Turn = Callable[[], Result]


@dataclass(frozen=True)
class Row:
    """Results of one provider in all rounds of a case."""

    provider: str
    """`joeynmt own batches` has batches of unsorted sentences, as its sampler makes them."""
    kind: str
    model: str
    threads: int
    tokens_per_second: list[float]
    """Target tokens without padding and their end marks, one number a round."""
    median: float
    lowest: float
    highest: float
    tokens_per_cpu_second: float
    """Median over the rounds of tokens by CPU time, which other programs disturb less."""
    ratio: float
    """Median over the rounds of the speed by that of `joeynmt` in the same round."""
    ratios: list[float]
    preemptions_per_second: float
    """How often other programs took a core: well over 30, and the figures are disturbed."""
    parameters: int
    settings: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where the files are, who runs, and how long."""

    folder: Path
    joeynmt: str
    shape: Shape
    threads: int
    search: Search
    updates: int
    skipped: int
    by: str
    preset: str
    batch_sizes: list[int]

    @property
    def text(self) -> Path:
        return self.folder / "text"

    @property
    def ids(self) -> Path:
        return self.folder / self.shape.name

    def run(self, worker: str, job: dict[str, Any]) -> Result:
        """Runs a job in a process of its own.

        Raises:
            SystemExit: it failed; the message has the end of what it printed.
        """
        job_file, result = self.folder / "job.json", self.folder / "result.json"
        result.unlink(missing_ok=True)
        job_file.write_text(json.dumps(job | {"threads": self.threads, "result": str(result)}))
        python = self.joeynmt if worker == "joeynmt" else sys.executable
        environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run(
            [python, str(FOLDER / f"{worker}_worker.py"), str(job_file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"{worker} failed on {job['kind']}:\n{done.stdout[-3000:]}")
        found: Result = json.loads(result.read_text())
        return found

    def ours(self, kind: str) -> Result:
        job = {
            "kind": kind,
            "shape": self.shape.name,
            "data": str(self.text),
            "search": asdict(self.search),
            "warmup_length": WARMUP_LENGTH,
            "updates": self.updates,
            "skipped": self.skipped,
            "by": self.by,
            "preset": self.preset,
            "folder": str(self.folder / "run"),
            "weights": str(self.ids / "powernorm.pt"),
            "joeynmt_weights": str(self.ids / "joeynmt.pt"),
        }
        return self.run("powernorm", job)

    def theirs(self, kind: str, *, own_batches: bool = False) -> Result:
        config = self.folder / "joeynmt.yaml"
        write_config(
            config,
            self.ids,
            self.shape,
            train="train" if own_batches else "batched",
            num_updates=self.skipped + self.updates + 1,
            search=self.search,
        )
        job = {
            "kind": kind,
            "config": str(config),
            "warmup_length": WARMUP_LENGTH,
            "updates": self.updates,
            "skipped": self.skipped,
            "batch_sizes": None if own_batches else self.batch_sizes,
            "weights": str(self.ids / "joeynmt.pt"),
        }
        return self.run("joeynmt", job)


def check_models(bench: Bench) -> None:
    """Gives both sides the same weights, and compares what they say of the same sentences.

    Raises:
        SystemExit: they are not the same model.
    """
    ours, theirs = bench.ours("score")["scores"], bench.theirs("score")["scores"]
    if len(ours) != len(theirs):
        raise SystemExit(f"{len(ours)} and {len(theirs)} targets: these are not the same sentences")
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(
        f"{bench.shape.name}: log-probabilities of {len(ours)} targets differ by {difference:.1e}"
    )
    if not difference < LARGEST_DIFFERENCE:
        raise SystemExit("these are not the same models: nothing is timed")


def measure(bench: Bench, kind: str, rounds: int, own_batches: bool) -> list[Row]:
    """Times all providers in each round, in an order that changes."""
    turns: dict[str, Turn] = {
        "powernorm": lambda: bench.ours(kind),
        BASELINE: lambda: bench.theirs(kind),
    }
    if kind == "train" and own_batches:
        turns[f"{BASELINE} own batches"] = lambda: bench.theirs(kind, own_batches=True)
    results: dict[str, list[Result]] = {provider: [] for provider in turns}
    order, shuffle = list(turns), random.Random(0)
    for number in range(rounds):
        shuffle.shuffle(order)
        for provider in order:
            results[provider].append(turns[provider]())
            speed = _speed(results[provider][-1])
            print(f"round {number + 1}/{rounds}  {provider:20} {speed:10,.1f} tokens/s", flush=True)
        _check_work(kind, results["powernorm"][-1], results[BASELINE][-1])
    return [_row(bench, kind, provider, results) for provider in turns]


def _check_work(kind: str, ours: Result, theirs: Result) -> None:
    """Both have had the same tokens to learn, or found translations of the same length."""
    if ours["tokens"] != theirs["tokens"]:
        raise SystemExit(f"{kind}: {ours['tokens']} tokens here, {theirs['tokens']} there")
    if kind == "decode":
        pairs = list(zip(ours["outputs"], theirs["outputs"], strict=True))
        same = sum(a == b for a, b in pairs)
        print(f"{same} of {len(pairs)} translations are the same")


def _row(bench: Bench, kind: str, provider: str, results: dict[str, list[Result]]) -> Row:
    own, baseline = results[provider], results[BASELINE]
    speeds = [_speed(result) for result in own]
    ratios = [a / _speed(b) for a, b in zip(speeds, baseline, strict=True)]
    settings: dict[str, Any] = asdict(bench.shape)
    if kind == "train":
        settings |= {"updates": bench.updates, "skipped": bench.skipped}
        if provider == "powernorm":
            settings["by"] = bench.by
    else:
        settings |= asdict(bench.search)
    return Row(
        provider=provider,
        kind=kind,
        model=bench.shape.name,
        threads=bench.threads,
        tokens_per_second=[round(speed, 2) for speed in speeds],
        median=round(statistics.median(speeds), 2),
        lowest=round(min(speeds), 2),
        highest=round(max(speeds), 2),
        tokens_per_cpu_second=round(
            statistics.median(result["tokens"] / result["cpu_seconds"] for result in own), 2
        ),
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
        preemptions_per_second=round(
            statistics.median(result["preemptions"] / result["seconds"] for result in own), 1
        ),
        parameters=own[0]["parameters"],
        settings=settings,
        versions={"joeynmt": "2.3.0", "torch": torch.__version__},
    )


def _speed(result: Result) -> float:
    return float(result["tokens"] / result["seconds"])


def print_row(row: Row) -> None:
    print(
        f"{row.model:10} {row.kind:7} {row.threads} threads  {row.provider:20} "
        f"{row.median:10,.1f} tokens/s ({row.lowest:,.1f} to {row.highest:,.1f})  "
        f"ratio {row.ratio:.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f})  "
        f"preemptions/s {row.preemptions_per_second:.0f}",
        flush=True,
    )


def run(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    search = Search(length=arguments.length)
    write_text(folder / "text", search)
    rows: list[Row] = []
    for name in arguments.models:
        shape = SHAPES[name]
        encoded = open_pairs(folder / "text", shape)
        num_batches = arguments.skipped + arguments.updates + 1
        batch_sizes = write_for_joeynmt(folder / name, encoded, shape, num_batches)
        for threads in arguments.threads:
            bench = Bench(
                folder=folder,
                joeynmt=arguments.joeynmt,
                shape=shape,
                threads=threads,
                search=search,
                updates=arguments.updates,
                skipped=arguments.skipped,
                by=arguments.by,
                preset=arguments.preset,
                batch_sizes=batch_sizes,
            )
            check_models(bench)
            for kind in arguments.kinds:
                found = measure(bench, kind, arguments.rounds, arguments.own_batches)
                for row in found:
                    print_row(row)
                rows += found
                if arguments.out is not None:
                    write(arguments.out, rows)
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """The machine in the first line, as in the other files of results."""
    machine = describe_machine()
    # Threads differ from row to row.
    del machine["threads"]
    lines = [{"machine": machine}, *(asdict(row) for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def parse_arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--joeynmt", required=True, metavar="PYTHON")
    parser.add_argument("--models", type=words, default=["small"], metavar=",".join(SHAPES))
    parser.add_argument("--kinds", type=words, default=["train", "decode"], metavar="train,decode")
    parser.add_argument("--threads", type=lambda t: [int(n) for n in words(t)], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=6, help="that are timed")
    parser.add_argument("--skipped", type=int, default=3, help="updates before them")
    parser.add_argument("--length", type=int, default=24, help="of every translation")
    parser.add_argument(
        "--by",
        choices=("trainer", "loop"),
        default="trainer",
        help="`powernorm compare`, or a plain loop around its parts",
    )
    parser.add_argument("--preset", default="demo", help="what `powernorm compare` starts from")
    parser.add_argument(
        "--own-batches",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train Joey NMT on the batches of its own sampler too",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="for files; a temporary one by default")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.folder is not None:
        run(arguments, arguments.folder.absolute())
        return
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder))


if __name__ == "__main__":
    main()

"""Cost of a monitor: the same training step with and without one, in turns.

    python benchmarks/monitor.py [--rounds 12] [--threads 1] [--models demo,wide] [--out FILE]

A step without a monitor, one that is attached and not due, and one that is observed are timed in
turns on one model. The cost at every 10 steps
is (9 unobserved + 1 observed) / (10 without) - 1, of the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import powernorm
from powernorm.diagnosis import NormMonitor
from powernorm.norms import build_norm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.tasks.lm.model import LanguageModel
from speed.machine import restart
from speed.training_step import TranslationModel, make_batch

EVERY = 10
WAYS = ("without", "attached", "observed")


def penalized(model: nn.Module, loss: torch.Tensor, num_tokens: int) -> torch.Tensor:
    has = any(isinstance(part, powernorm.RegularizedBatchNorm) for part in model.modules())
    return loss + powernorm.penalty(model, "mean", num_tokens) if has else loss


def factory(norm: str) -> Callable[[int], nn.Module]:
    options: dict[str, Any] = {"warmup_steps": 0} if norm.startswith("pn") and norm != "pnv" else {}
    return partial(build_norm, norm, **options)


def demo(norm: str, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Build about the language model of `powernorm compare lm --preset demo`."""
    model = LanguageModel(
        2000,
        lambda c: factory(norm)(c),
        TransformerShape(num_layers=2, dropout=0.1),
        max_length=64,
    ).to(device)
    tokens = torch.randint(2000, (16, 65), device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        value = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        return penalized(model, value, 16 * 64)

    return model, loss


def translation(
    norm: str, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Build the papers' small translation model, 4,096 tokens on each side (the preset `step`)."""
    model = TranslationModel(None if norm == "torch" else factory(norm)).to(device)
    batch = make_batch(0)
    tokens = int((~batch.target_padding[:, 1:]).sum())
    return model, lambda model: penalized(model, model(batch), tokens)


def wide(norm: str, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Build a decoder of 12 layers, 768 features, 8,192 tokens: for a GPU."""
    model = LanguageModel(
        10_000,
        lambda c: factory(norm)(c),
        TransformerShape(num_features=768, num_layers=12, num_heads=12, feedforward_features=3072),
        max_length=256,
    ).to(device)
    tokens = torch.randint(10_000, (32, 257), device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        value = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        return penalized(model, value, 32 * 256)

    return model, loss


MODELS = {"demo": demo, "translation": translation, "wide": wide}


def measure(model_name: str, norm: str, rounds: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss = MODELS[model_name](norm, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    # Others on the machine do not count; with one thread this is what the step takes.
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def timed(way: str) -> float:
        """Time one step; attaching and removing the monitor does not count."""
        monitor = None if way == "without" else NormMonitor(model, EVERY)
        number = 0 if way == "observed" else 1
        start = clock()
        if monitor is not None:
            monitor.start_step(number)
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        if monitor is not None:
            assert bool(monitor.finish_step(number)) == (way == "observed")
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
        if monitor is not None:
            monitor.detach()
        return seconds

    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    order, shuffle = list(WAYS), random.Random(0)
    for way in 2 * WAYS:
        timed(way)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for way in order:
            samples[way].append(timed(way))
    medians = {way: statistics.median(values) for way, values in samples.items()}
    attached = medians["attached"] / medians["without"]
    observed = medians["observed"] / medians["without"]
    return {
        "model": model_name,
        "norm": norm,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": rounds,
        "step_ms": medians["without"] * 1e3,
        "attached_ratio": attached,
        "observed_ratio": observed,
        "cost_every_10": ((EVERY - 1) * attached + observed) / EVERY - 1,
        "observed_cost_every_10": (observed - 1) / EVERY,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="demo,translation")
    parser.add_argument("--norms", default="ln,bn,rbn,pn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    restart()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    rows = []
    for model in arguments.models.split(","):
        for norm in arguments.norms.split(","):
            rows.append(measure(model, norm, arguments.rounds, device))
            row = rows[-1]
            print(
                f"{model:12} {norm:6} step {row['step_ms']:8.1f} ms   attached "
                f"{row['attached_ratio']:.3f}   observed {row['observed_ratio']:.3f}   "
                f"every 10: {row['cost_every_10']:+.2%} (observed steps alone "
                f"{row['observed_cost_every_10']:+.2%})",
                flush=True,
            )
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

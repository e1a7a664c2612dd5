"""Measure norms and training steps on a GPU: JSON lines, written as they come.

`tools/gpu.sh` runs it. It needs torch and triton alone, and `PYTHONPATH=src` where powernorm is not
installed:

    python benchmarks/gpu.py norms --out norms.jsonl --seconds 180
    python benchmarks/gpu.py steps --out steps.jsonl --seconds 90

The first line of a file says what machine it is from. All times of a row are medians in
microseconds:

- `us` is the time of a call as a training makes it, one after the other: of the host or of the GPU,
  whichever takes longer.
- `gpu_us` is the time of the GPU alone. The calls wait in the queue behind a product of matrices,
  so that the host is ahead of them.

`ratio` and `gpu_ratio` are over torch's LayerNorm in the same rounds. `share` is the time of a copy
that moves the bytes that nobody can avoid (5 matrices forward and backward, 2 in evaluation), over
`gpu_us`.

Without a GPU, under Triton's interpreter, small sizes run to show that everything works. Their
times say nothing about a GPU, and the rows name the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from powernorm.ops import use_backend
from speed.norms import COPY, make_step
from speed.providers import BASELINE as LAYER_NORM
from speed.providers import DTYPES, NORMS, Case, Provider
from speed.training_step import TORCH_BATCH_NORM, TokenBatchNorm

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
LIMIT = 2**27
"""Size of a matrix up to which a process of `--warm` makes a case: several share the memory."""

# What the layers are after their warm-up, which is most of a training.
OPTIONS: dict[str, dict[str, Any]] = {
    **NORMS,
    **{name: {"warmup_steps": 0} for name in ("brn", "mabn", "un")},
    **{
        name: {}
        for name in (
            "detach",
            "repbn",
            "prepbn",
            "taper",
            "seednorm",
            "scalenorm",
            "biasnorm",
            "gatednorm",
        )
    },
    **{name: {} for name in ("dyt", "derf", "dyisru")},
    "gn": {"groups": 4},
}
MASKED = ("bn", "rbn", "brn", "pnv", "pn", "pn-only", "pn-static")
"""Norms whose kernels exclude padding from their statistics."""
STEP_NORMS = ("bn", "rbn", "brn", "mabn", "pnv", "pn", "pn-static", "adanorm", "rms", "dyt")


def cases() -> list[Case]:
    """Return the cases, the most important first: time may end before the last."""
    half = partial(Case, dtype="bfloat16")
    if not IS_GPU:
        return [half(16, 64), Case(16, 64, direction="evaluation"), half(16, 64, padding=0.25)]
    widths, others = (1024, 4096, 256, 16384), (512, 768, 2048, 8192)
    found = [half(65536, 1024), half(65536, 4096), half(8192, 1024)]
    found += [half(65536, width, padding=0.25) for width in (1024, 4096)]
    found += [half(65536, width, direction="evaluation") for width in (1024, 4096)]
    found += [Case(65536, 1024), Case(65536, 4096), Case(65536, 1024, dtype="float16")]
    found += [half(65536, 256), half(65536, 16384), half(8192, 4096), half(2048, 1024)]
    counts = (65536, 8192, 2048, 32768)
    found += [half(tokens, width) for tokens in counts for width in widths + others]
    found += [Case(tokens, width) for tokens in (65536, 8192) for width in widths + others]
    found += [half(8192, width, direction="evaluation") for width in widths + others]
    return list(dict.fromkeys(found))


def providers(case: Case) -> dict[str, Callable[[int], nn.Module]]:
    """Return the function that makes each competitor's module, by name."""
    found: dict[str, Callable[[int], nn.Module]] = {
        LAYER_NORM: nn.LayerNorm,
        "torch RMSNorm": lambda features: nn.RMSNorm(features, eps=1e-5),
        TORCH_BATCH_NORM: nn.BatchNorm1d,
    }
    for name in MASKED if case.padding else OPTIONS:
        found[name] = lambda features, name=name: powernorm.build_norm(
            name, features, **OPTIONS[name]
        )
    return found


def synchronize() -> None:
    """Wait for the GPU."""
    if IS_GPU:
        torch.cuda.synchronize()


def time_calls(call: Callable[[], None], number: int, blocker: Callable[[], None]) -> float:
    """Return microseconds per call of several in a row, which begin after the blocker."""
    if not IS_GPU:
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    blocker()
    begin.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / number * 1e3


class Blocker:
    """Keeps the GPU busy for a given time, while the host fills its queue."""

    def __init__(self) -> None:
        size = 4096 if IS_GPU else 8
        self.matrix = torch.zeros(size, size, dtype=torch.bfloat16, device=DEVICE)
        self.result = torch.empty_like(self.matrix)
        self.times = 1
        self.us = 1.0
        self()
        self.us = max(time_calls(self, 5, lambda: None), 1.0)

    def __call__(self) -> None:
        """Multiply as often as was asked for."""
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix, out=self.result)

    def last(self, us: float) -> Blocker:
        """Ask for so many microseconds."""
        self.times = int(us / self.us) + 1
        return self


def measure(
    steps: dict[str, Callable[[], None]],
    blocker: Blocker | None,
    rounds: int = 5,
    number: int = 4,
) -> Iterator[dict[str, Any]]:
    """Time all steps in turn in every round, in an order that changes.

    Args:
        steps: steps by name.
        blocker: None omits the GPU's own time, as for steps with more launches than the queue
            takes.
        rounds: number of turns of each.
        number: calls per turn.
    """
    us: dict[str, list[float]] = {name: [] for name in steps}
    gpu_us: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    synchronize()
    order, shuffle = list(steps), random.Random(0)
    rounds, number = (rounds, number) if IS_GPU else (1, 1)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            steps[name]()
            us[name].append(time_calls(steps[name], number, lambda: None))
            if blocker is not None:
                ahead = blocker.last(2 * number * us[name][-1])
                gpu_us[name].append(time_calls(steps[name], number, ahead))
    for name in steps:
        row: dict[str, Any] = {"provider": name}
        for key, times in (("us", us), ("gpu_us", gpu_us))[: 1 if blocker is None else 2]:
            median = statistics.median(times[name])
            row[key] = round(median, 2)
            row[f"{key}_spread"] = round(max(times[name]) - min(times[name]), 2)
            prefix = key.removesuffix("us")
            row[f"{prefix}ratio"] = round(median / statistics.median(times[LAYER_NORM]), 3)
        if COPY in steps:
            row["copies"] = round(statistics.median(gpu_us[COPY]), 2)
        yield row


def measure_norms(out: Output, deadline: float, part: tuple[int, int] | None) -> None:
    """Time every norm on every case until the time is over.

    Args:
        out: output for the rows.
        deadline: time after which no further case begins.
        part: makes one call of this part of the steps and times nothing (Triton compiles them).
    """
    blocker = Blocker()
    for number, case in enumerate(cases()):
        if time.monotonic() > deadline:
            out.note(f"time is over: {len(cases()) - number} of {len(cases())} cases are left out")
            return
        if part and case.tokens * case.features > LIMIT:
            continue
        generator = torch.Generator(DEVICE).manual_seed(0)
        x = torch.randn(case.tokens, case.features, device=DEVICE).to(DTYPES[case.dtype])
        builders = providers(case)
        if part:
            builders = dict(list(builders.items())[part[0] - 1 :: part[1]])
        steps: dict[str, Callable[[], None]] = {}
        for name, build in builders.items():
            try:
                competitor = Provider(name, name, "triton", build, name in MASKED)
                step = make_step(competitor, case, x, generator)
                step()
                synchronize()
            except (RuntimeError, ValueError) as error:
                if not part:
                    out.row(case, {"provider": name, "error": str(error)[:500]})
                continue
            steps[name] = step
        if part:
            continue
        target = torch.empty_like(x)
        steps[COPY] = lambda x=x, target=target: target.copy_(x)
        matrices = 5 if case.direction == "forward+backward" else 2
        for row in measure(steps, blocker):
            copies = row.pop("copies")
            # A copy moves two matrices.
            row["share"] = round(copies * matrices / 2 / row["gpu_us"], 3)
            out.row(case, row)


class Model(nn.Module):
    """An encoder-decoder, pre-norm, with the norm in its encoder."""

    def __init__(self, build: Callable[[int], nn.Module] | None, width: int, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        sizes: dict[str, Any] = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        layers = 6 if IS_GPU else 1
        self.body = nn.Transformer(width, width // 64, layers, layers, 4 * width, **sizes)
        if build is not None:
            for layer in self.body.encoder.layers:
                layer.norm1, layer.norm2 = build(width), build(width)
            self.body.encoder.norm = build(width)

    def forward(self, words: Tensor, padding: Tensor) -> Tensor:
        """Return the mean cross entropy of the same words, one further."""
        embedded = self.embedding(words)
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        with powernorm.padding_mask(padding):
            memory = self.body.encoder(embedded, src_key_padding_mask=padding)
        decoded = self.body.decoder(
            embedded,
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=torch.zeros_like(padding, dtype=causal.dtype).masked_fill(
                padding, float("-inf")
            ),
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = decoded @ self.embedding.weight.t()
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten(), reduction="none"
        )
        weights = (~padding[:, 1:]).flatten()
        return (losses * weights).sum() / weights.sum()


def make_training(
    build: Callable[[int], nn.Module] | None, compiled: bool
) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return one training step under bfloat16 autocast, and a function for its last loss."""
    # Enough tokens that the GPU is the limit, and not the host that starts its kernels.
    sentences, length, width, words = (512, 128, 512, 10_000) if IS_GPU else (2, 6, 64, 50)
    model = Model(build, width, words).to(DEVICE)
    if compiled:
        # Layer by layer, which compiles one layer for all.
        for layer in (*model.body.encoder.layers, *model.body.decoder.layers):
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=IS_GPU)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(words, (sentences, length), generator=generator).to(DEVICE)
    lengths = torch.randint(length // 2, length + 1, (sentences, 1), generator=generator)
    padding = (torch.arange(length) >= lengths).to(DEVICE)
    num_tokens = int((~padding).sum())
    last: list[Tensor] = []

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(batch, padding)
        last[:] = [loss.detach()]
        total = loss + powernorm.penalty(model, reduction="mean", num_tokens=num_tokens)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: float(last[0])


def measure_trainings(out: Output, deadline: float) -> None:
    """Time a training step with each norm, then compiled ones until the time is over."""
    for compiled in (False, True):
        names = ("bn", "pn", "mabn", "dyt") if compiled or not IS_GPU else STEP_NORMS
        steps: dict[str, Callable[[], None]] = {}
        losses = {}
        for name in (LAYER_NORM, TORCH_BATCH_NORM, *names):
            if time.monotonic() > deadline:
                out.note(f"time is over: {name} {'compiled' if compiled else ''} is left out")
                continue
            build = {LAYER_NORM: None, TORCH_BATCH_NORM: TokenBatchNorm}.get(name, "ours")
            if build == "ours":
                build = lambda features, name=name: powernorm.build_norm(  # noqa: E731
                    name, features, **OPTIONS[name]
                )
            steps[name], losses[name] = make_training(build, compiled)
            steps[name]()
            synchronize()
        memory = {name: peak_memory(step) for name, step in steps.items()}
        if LAYER_NORM not in steps:
            return
        for row in measure(steps, None, rounds=6, number=2):
            name = row["provider"]
            row |= {"compiled": compiled, "loss": round(losses[name](), 4), "mib": memory[name]}
            out.row(None, row)


def peak_memory(step: Callable[[], None]) -> int | None:
    """Return the most MiB that a step holds, beyond the memory held before."""
    if not IS_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


class Output:
    """A JSON lines file, and a short form on the screen."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        if self.path:
            self.path.write_text("", encoding="utf-8")
        try:
            import triton

            version = triton.__version__
        except ImportError:
            version = None
        card = torch.cuda.get_device_name() if IS_GPU else "no GPU: Triton's interpreter"
        self.write({"device": card, "torch": torch.__version__, "triton": version})

    def write(self, row: dict[str, Any]) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)
        self.write({"note": text})

    def row(self, case: Case | None, row: dict[str, Any]) -> None:
        found = ({} if case is None else case._asdict()) | row
        self.write(found)
        print(" ".join(f"{key}={value}" for key, value in found.items() if "spread" not in key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("norms", "steps"))
    parser.add_argument("--out", help="file of JSON lines")
    parser.add_argument("--seconds", type=float, default=180, help="after which nothing begins")
    parser.add_argument("--warm", metavar="K/N", help="compile this part of the kernels, no timing")
    settings = parser.parse_args()
    deadline = time.monotonic() + settings.seconds
    part = tuple(map(int, settings.warm.split("/"))) if settings.warm else None
    if not IS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("error: torch sees no GPU (TRITON_INTERPRET=1 runs small sizes without one)")
    with use_backend("triton") if not IS_GPU else nullcontext():
        if settings.what == "norms":
            measure_norms(Output(settings.out), deadline, part)
        else:
            measure_trainings(Output(settings.out), deadline)


if __name__ == "__main__":
    main()

"""Forward and backward of norms over images beside torch.nn.BatchNorm2d, in both memory formats.

    python benchmarks/images.py [--norms bn pn-only] [--rounds 30] [--threads 1]

A row a shape and format: the time of torch's layer, and how many times as long each of ours takes.
All take turns within a round, and the processor's time is measured, not the clock's, so that what
else the machine does matters less; the figures are medians over rounds, with the quartiles of the
ratio within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import powernorm

SHAPES = ((128, 16, 32, 32), (128, 32, 16, 16), (128, 64, 8, 8), (32, 128, 28, 28))
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def step_of(norm: nn.Module, x: Tensor, cotangent: Tensor) -> Callable[[], None]:
    """Return one forward and backward, without accumulation of gradients."""
    parameters = tuple(norm.parameters())

    def step() -> None:
        torch.autograd.grad(norm(x), (x, *parameters), cotangent)

    return step


def seconds(step: Callable[[], None]) -> float:
    """Return the processor time of one call in seconds, over all threads."""
    start = time.process_time()
    step()
    return time.process_time() - start


def steps_for(
    names: list[str], shape: tuple[int, ...], layout: str
) -> dict[str, Callable[[], None]]:
    """Return the steps by provider; all get the same values."""
    generator = torch.Generator().manual_seed(0)
    x, cotangent = (
        torch.randn(shape, generator=generator).contiguous(memory_format=FORMATS[layout])
        for _ in range(2)
    )
    x.requires_grad_()
    norms: dict[str, nn.Module] = {"torch": nn.BatchNorm2d(shape[1])}
    norms |= {name: powernorm.build_norm(name, shape[1], feature_dim=1) for name in names}
    return {name: step_of(norm, x, cotangent) for name, norm in norms.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--norms", nargs="+", default=["bn", "rbn", "pn-only", "ln"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, {given.threads} threads, load {load}")
    for shape in SHAPES:
        steps = {
            (layout, name): step
            for layout in FORMATS
            for name, step in steps_for(given.norms, shape, layout).items()
        }
        times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for number in range(given.rounds + 3):
            for key, step in steps.items():
                value = seconds(step)
                if number >= 3:
                    times[key].append(value)
        for layout in FORMATS:
            base = times[layout, "torch"]
            cells = [f"torch {1e3 * statistics.median(base):7.2f} ms"]
            for name in given.norms:
                pairs = zip(times[layout, name], base, strict=True)
                low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
                cells.append(f"{name} {middle:.2f} ({low:.2f} to {high:.2f})")
            print(f"{shape} {layout:13s} {'  '.join(cells)}")
    print("load at the end: " + ", ".join(f"{value:.1f}" for value in os.getloadavg()))


if __name__ == "__main__":
    main()

"""Interleaved timing: every round asks every provider once, in an order that changes; memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from powernorm.lab.bench.cases import DTYPES, Case
from powernorm.lab.bench.memory import Step, measure_memory, nothing
from powernorm.lab.bench.providers import BASELINE, COPY, CopyMatrix, Provider
from powernorm.lab.bench.rows import Row, make_row

Call = Callable[[], object]
WARMUP_CALLS = 3
CALLS_A_TURN = 2
"""Timed calls of a provider before the next one has its turn, after one that is not timed."""


def measure(
    case: Case,
    providers: Sequence[Provider],
    *,
    seconds: float = 3.0,
    seed: int = 0,
) -> list[Row]:
    """Times all providers on one case, then measures their memory in a pass of its own.

    Args:
        case: what to run.
        providers: who runs it; the first is what the ratios are to.
        seconds: time for all of them together, without warm-up; at least 5 rounds are run.
        seed: of the inputs and of the order.

    Returns:
        A row for the copy of the input and one for each provider.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.tokens, case.features, generator=generator)
    x = x.to(DTYPES[case.dtype])
    steps = {provider.name: make_step(provider, case, x, generator) for provider in providers}
    steps[COPY] = _copy_step(x)
    samples = interleave(steps, seconds=seconds, seed=seed)
    memory = measure_memory(steps)
    baseline = BASELINE if BASELINE in steps else providers[0].name
    labels = [(COPY, "copy", "torch"), *((p.name, p.norm, p.backend) for p in providers)]
    return [
        make_row(
            case,
            name,
            norm,
            backend,
            samples[name],
            samples[baseline],
            samples[COPY],
            memory=memory[name],
            baseline_memory=memory[baseline],
        )
        for name, norm, backend in labels
    ]


def interleave(
    steps: Mapping[str, Call],
    *,
    seconds: float,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds a call of each step, all in turn in every round, in an order that changes.

    Args:
        steps: what is timed, by name.
        seconds: time for all of them together, without warm-up; at least 5 rounds are run.
        seed: of the order.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARMUP_CALLS):
            step()
    order, shuffle = list(steps), random.Random(seed)
    for _ in _rounds(seconds):
        shuffle.shuffle(order)
        for name in order:
            # The first call of a turn meets the caches as another provider left them.
            steps[name]()
            samples[name] += [_clock(steps[name]) for _ in range(CALLS_A_TURN)]
    return samples


def _rounds(seconds: float) -> Iterator[int]:
    start, count = time.perf_counter(), 0
    while count < 5 or time.perf_counter() - start < seconds:
        yield count
        count += 1


def make_step(provider: Provider, case: Case, x: Tensor, generator: torch.Generator) -> Step:
    """What is timed: one call of a provider on a case."""
    module = provider.build(case.features).to(x.dtype)
    module.train(case.direction != "evaluation")
    arguments: tuple[Tensor, ...] = ()
    if case.padding and provider.takes_mask:
        mask = torch.rand(case.tokens, generator=generator) < case.padding
        arguments = (mask,)
    if case.direction != "forward+backward":

        def forward(_: Callable[[], None] = nothing) -> None:
            with torch.no_grad(), provider.scope():
                module(x, *arguments)

        return forward
    cotangent = torch.randn(x.shape, generator=generator).to(x)
    leaf = x.clone().requires_grad_()

    def step(between: Callable[[], None] = nothing) -> None:
        with provider.scope():
            y = module(leaf, *arguments)
            between()
            y.backward(cotangent)
            # As in training, where the memory of a gradient soon serves the next layer.
            leaf.grad = None
            module.zero_grad()

    return step


def _copy_step(x: Tensor) -> Step:
    copying = CopyMatrix(x)

    def copy(_: Callable[[], None] = nothing) -> None:
        copying(x)

    return copy


def _clock(step: Call) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start

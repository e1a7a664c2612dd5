"""Single norms: the cases, a row a provider, and what the project promises of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor

from speed.providers import BASELINE, DTYPES, Case, Provider, check_providers, providers
from speed.rows import Known, Note, Row, case_of, figures
from speed.showing import MEMORY, Mark, View, print_table, text
from speed.timing import Memory, Step, interleave, measure_memory, nothing

COPY: Final = "copy"
SMALL_TOKENS: Final = 256
_SHAPES: Final = ((4096, 512), (8192, 768), (8192, 1024))
GRIDS: Final[dict[str, tuple[Case, ...]]] = {
    "quick": (Case(64, 512), Case(4096, 512)),
    "targets": (
        *(Case(*shape, padding=padding) for shape, padding in product(_SHAPES, (0.0, 0.25))),
        *(Case(*shape, dtype="bfloat16") for shape in _SHAPES),
        *(Case(*shape, direction="evaluation") for shape in _SHAPES),
        Case(64, 512),
    ),
    "rivals": (Case(4096, 512), Case(4096, 512, padding=0.25), Case(8192, 1024)),
}
"""Cases by preset; `targets` are those that the project promises figures for."""


class Target(NamedTuple):
    """A norm on a kind of case must take at most `limit` times what a rival takes."""

    norm: str
    limit: float
    rival: str = BASELINE
    dtype: str = "float32"
    direction: str = "forward+backward"
    small: bool = False

    def concerns(self, row: Row) -> bool:
        """Return whether a row is of this norm by kernels on the CPU, on this kind of case."""
        kind = (row["dtype"], row["direction"], row["tokens"] <= SMALL_TOKENS)
        own = (self.dtype, self.direction, self.small) == kind
        return own and (row["norm"], row["backend"]) == (self.norm, "cpu")


_LARGE: Final = {
    "pn-only": 0.75, "pn": 0.85, "pn-static": 1.1, "pnv": 1.2, "bn": 1.3, "rbn": 1.3,
    "adanorm": 1.0, "ln-simple": 1.0, "rms": 0.9,
}  # fmt: skip
TARGETS: Final = (
    *(Target(norm, limit) for norm, limit in _LARGE.items()),
    Target("bn", 0.85, "torch BatchNorm1d"),
    Target("rbn", 0.85, "torch BatchNorm1d"),
    Target("rms", 0.25, "torch RMSNorm"),
    *(Target(norm, 1.0, dtype="bfloat16") for norm in _LARGE),
    *(Target(norm, 1.5, small=True) for norm in _LARGE),
    *(Target(norm, 1.0, direction="evaluation") for norm in ("bn", "rbn", "pnv", "pn-only")),
)
"""Promises of the project, as ratios in the same run on two threads."""


def title(row: Row) -> str:
    """Return the case in words."""
    return Case(*case_of(row, Case._fields)).label  # type: ignore[arg-type]


VIEW: Final = View(
    case=Case._fields,
    title=title,
    name=lambda row: str(row["provider"]),
    columns={
        "µs": lambda row: text(row, "median_us", ".0f"),
        "quartiles": lambda row: f"{row['lower_us']:.0f}-{row['upper_us']:.0f}",
        "/ LayerNorm": lambda row: text(row, "ratio", ".2f"),
        "GB/s": lambda row: text(row, "gigabytes_per_second", ".1f"),
        "of copy": lambda row: text(row, "share_of_copy", ".0%"),
        **MEMORY,
    },
    heading="time over torch's LayerNorm",
    marks={
        "cpu": Mark("powernorm's kernels", "#6aaedb"),
        "compiled": Mark("through torch.compile", "#a9cfa4"),
        "eager": Mark("powernorm in eager torch", "#ccd4da"),
        "torch": Mark("torch and others", "#e3ab84"),
    },
    series="backend",
)


def measure_norms(preset: str, seconds: float, known: Known, note: Note) -> Iterator[list[Row]]:
    """Yield the rows of each case; see `Measure` in `bench.py`."""
    cases = [case for case in GRIDS[preset] if case not in known]
    competitors = providers(all_backends=preset == "rivals")
    note(f"comparing everyone with float64 on {len(cases)} cases")
    for case in cases:
        check_providers(competitors, case)
    for number, case in enumerate(cases, 1):
        note(f"case {number} of {len(cases)}: {case.label}")
        yield measure(case, competitors, seconds=seconds)


def measure(case: Case, competitors: Sequence[Provider], *, seconds: float) -> list[Row]:
    """Time all providers on one case, then measure their memory in a pass of its own.

    The first row is of the copy of the input, which shows what the memory allows.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.tokens, case.features, generator=generator).to(DTYPES[case.dtype])
    steps = {one.name: make_step(one, case, x, generator) for one in competitors}
    target = torch.empty_like(x)
    steps[COPY] = lambda _=nothing: target.copy_(x)
    samples = interleave(steps, seconds=seconds)
    memory = measure_memory(steps)
    labels = [(COPY, "copy", "torch"), *((p.name, p.norm, p.backend) for p in competitors)]
    base, copies = samples[BASELINE], samples[COPY]
    return [
        make_row(case, label, samples[label[0]], base, copies, (memory[label[0]], memory[BASELINE]))
        for label in labels
    ]


def make_row(
    case: Case,
    label: tuple[str, str, str],
    samples: Sequence[float],
    baseline: Sequence[float],
    copies: Sequence[float],
    memory: tuple[Memory, Memory],
) -> Row:
    """Return a row: of (provider, norm, backend), seconds a call, memory and LayerNorm's."""
    copy_bytes = 2 * case.tokens * case.features * DTYPES[case.dtype].itemsize
    median = statistics.median(samples)
    speed = (copy_bytes if label[1] == "copy" else case.num_bytes) / median
    return {
        **dict(zip(("provider", "norm", "backend"), label, strict=True)),
        **case._asdict(),
        **figures(samples, digits=2),
        "ratio": round(median / statistics.median(baseline), 3),
        "gigabytes_per_second": round(speed / 1e9, 2),
        "share_of_copy": round(speed / (copy_bytes / statistics.median(copies)), 3),
        "peak_bytes": memory[0].peak,
        "kept_bytes": memory[0].kept,
        "peak_ratio": round(memory[0].peak / memory[1].peak, 4),
    }


def make_step(provider: Provider, case: Case, x: Tensor, generator: torch.Generator) -> Step:
    """Return what is timed: one call of a provider on a case, by a generator of x's device."""
    module = provider.build(case.features).to(x)
    module.train(case.direction != "evaluation")
    arguments: tuple[Tensor, ...] = ()
    if case.padding and provider.takes_mask:
        mask = torch.rand(case.tokens, generator=generator, device=x.device) < case.padding
        arguments = (mask,)
    if case.direction != "forward+backward":

        def forward(_: Callable[[], None] = nothing) -> None:
            with torch.no_grad(), provider.scope():
                module(x, *arguments)

        return forward
    cotangent = torch.randn(x.shape, generator=generator, device=x.device).to(x)
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


def outcomes(rows: Sequence[Row]) -> list[tuple[Target, Row, float]]:
    """Return every target on every case that was measured with kernels on the CPU: (…, ratio)."""
    found = []
    for target in TARGETS:
        for row in filter(target.concerns, rows):
            case = case_of(row, VIEW.case)
            for other in rows:
                if other["provider"] == target.rival and case_of(other, VIEW.case) == case:
                    ratio = round(row["median_us"] / other["median_us"], 3)
                    found.append((target, row, ratio))
    return found


def mask_costs(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return what a padding mask costs the kernels: (norm, ratio of the time over that without)."""
    plain = {_unpadded(row): row["ratio"] for row in rows if not row["padding"]}
    # Both over LayerNorm of their own rounds, for they were not measured together.
    return [
        (row["norm"], round(row["ratio"] / plain[_unpadded(row)], 3))
        for row in rows
        if row["padding"] and row["backend"] == "cpu" and _unpadded(row) in plain
    ]


def _unpadded(row: Row) -> tuple[object, ...]:
    return case_of(row, ("provider", "tokens", "features", "dtype", "direction"))


def print_targets(rows: Sequence[Row]) -> None:
    """Print which of the project's targets were met, and what a mask costs."""
    found = outcomes(rows)
    if not found:
        return
    lines = []
    for target, row, ratio in found:
        verdict = "met" if ratio <= target.limit else "missed"
        lines.append(
            (row["norm"], title(row), target.rival, f"{target.limit:.2f}", f"{ratio:.2f}", verdict)
        )
    print_table("targets", ("norm", "case", "against", "limit", "found", ""), lines)
    print(f"{sum(line[-1] == 'met' for line in lines)} of {len(lines)} met")
    if costs := [cost - 1 for _, cost in mask_costs(rows)]:
        print(f"a padding mask: {min(costs):+.0%} to {max(costs):+.0%} of the time without")

"""Encoders in turn: the same answers first, then the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.bench.inference.cases import InferenceCase, Size, cases_of
from powernorm.lab.bench.inference.encoders import Kind, build_encoders, random_tokens
from powernorm.lab.bench.inference.engines import Run, runs
from powernorm.lab.bench.inference.rows import InferenceRow, make_rows
from powernorm.lab.bench.measuring import Call, interleave

TOLERANCE: Final = {"float32": 2e-5, "bfloat16": 0.1}
"""Largest error that passes, of the largest value that the reference has."""

_SAME: Final[Mapping[Kind, Kind]] = {"folded": "BatchNorm", "identity": "BatchNorm"}
"""Whose float32 answer in torch a provider has to give, where that is not its own."""


def measure_size(
    size: Size,
    *,
    seconds: float,
    on_case: Callable[[InferenceCase], None] = lambda _: None,
    on_rows: Callable[[list[InferenceRow]], None] = lambda _: None,
) -> list[InferenceRow]:
    """Times all encoders of one architecture on all its cases.

    Args:
        size: the architecture.
        seconds: time for each case, all providers together; at least 5 rounds are run.
        on_case: told what comes next.
        on_rows: told the rows of a case that is over.

    Raises:
        InputError: a provider gives wrong answers.
    """
    models = build_encoders(size)
    rows: list[InferenceRow] = []
    for case in cases_of(size):
        on_case(case)
        found = measure_case(models, case, seconds)
        on_rows(found)
        rows += found
    return rows


def measure_case(
    models: Mapping[Kind, nn.Module], case: InferenceCase, seconds: float
) -> list[InferenceRow]:
    """Times all encoders on one case.

    Raises:
        InputError: a provider gives wrong answers.
    """
    tokens = random_tokens(case.batch, case.tokens)
    steps = runs(models, case, tokens)
    check_runs(steps, models, case, tokens)
    named = dict[str, Call](steps.items())
    return make_rows(case, interleave(named, seconds=seconds))


def check_runs(
    steps: Mapping[Kind, Run], models: Mapping[Kind, nn.Module], case: InferenceCase, tokens: Tensor
) -> None:
    """Compares all providers with float32 torch on the very case that will be timed.

    The folded encoder and that without norms have to answer as the unfolded one does.

    Raises:
        InputError: a provider is wrong; it is named.
    """
    exact: dict[Kind, Tensor] = {}
    for kind, run in steps.items():
        reference = _SAME.get(kind, kind)
        if reference not in exact:
            with torch.no_grad():
                exact[reference] = models[reference](tokens)
        wanted = exact[reference]
        error = float((run().float() - wanted).abs().max() / wanted.abs().max())
        if not error <= TOLERANCE[case.dtype]:
            raise InputError(
                f"{kind} is wrong on {case.label}: the output is off by {error:.1e} of the "
                f"largest value (allowed {TOLERANCE[case.dtype]:.0e}), so nothing is timed"
            )

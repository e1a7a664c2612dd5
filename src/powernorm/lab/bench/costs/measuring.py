"""Rivals in turn: outputs first, then time, then memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.bench.costs.cases import CostCase, Rival
from powernorm.lab.bench.costs.encoders import OnnxFiles, build_rivals
from powernorm.lab.bench.costs.engines import Key, Run, cost_runs, fresh_peak
from powernorm.lab.bench.costs.rows import CostRow, case_of, make_cost_rows
from powernorm.lab.bench.inference.encoders import random_tokens
from powernorm.lab.bench.measuring import Call, interleave
from powernorm.lab.bench.memory import Step, measure_memory
from powernorm.lab.engine.isolation import threads

TOLERANCE: Final = {"float32": 2e-5, "bfloat16": 0.1}
"""Largest error that passes, as `CostRow.error`; what is quantized may be off by half."""
_QUANTIZED: Final = 0.5


def measure_costs(
    cases: Sequence[CostCase],
    *,
    seconds: float,
    known: Collection[tuple[object, ...]] = (),
    on_case: Callable[[CostCase], None] = lambda _: None,
    on_rows: Callable[[list[CostRow]], None] = lambda _: None,
) -> list[CostRow]:
    """Time all rivals on all cases.

    Args:
        cases: encoder after encoder.
        seconds: time for each case, all rivals together; at least 5 rounds are run.
        known: cases that are measured already (`CostRow.case`), and left out.
        on_case: told what comes next.
        on_rows: told the rows of a case that is over.

    Raises:
        InputError: a rival gives wrong answers or cannot run.
    """
    rows: list[CostRow] = []
    left = [case for case in cases if case_of(case) not in known]
    for size, group in groupby(left, key=lambda case: case.size):
        models = build_rivals(size)
        with tempfile.TemporaryDirectory(prefix="powernorm-bench-") as folder:
            files = OnnxFiles(models, Path(folder))
            for case in group:
                on_case(case)
                found = measure_cost_case(models, files, case, seconds)
                on_rows(found)
                rows += found
    return rows


def measure_cost_case(
    models: Mapping[Rival, nn.Module], files: OnnxFiles, case: CostCase, seconds: float
) -> list[CostRow]:
    """Time all rivals on one case.

    Raises:
        InputError: a rival gives wrong answers or cannot run.
    """
    tokens = random_tokens(case.batch, case.tokens)
    # No case uses what another compiled, and torch stops at the eighth variant of one function.
    torch.compiler.reset()
    with threads(case.threads):
        steps = cost_runs(models, files, case, tokens)
        errors = check_outputs(steps, models, case, tokens)
        named = dict[str, Call]({"/".join(key): run for key, run in steps.items()})
        samples = interleave(named, seconds=seconds)
        peaks = _peaks(steps, files, case) if case.threads == 1 else {}
    return make_cost_rows(case, {key: samples["/".join(key)] for key in steps}, errors, peaks)


def check_outputs(
    steps: Mapping[Key, Run], models: Mapping[Rival, nn.Module], case: CostCase, tokens: Tensor
) -> dict[Key, float]:
    """Return the error of each rival against its own float32 outputs in torch.

    Raises:
        InputError: one is too large for the precision.
    """
    wanted: dict[Rival, Tensor] = {}
    for rival, model in models.items():
        with torch.no_grad():
            wanted[rival] = model(tokens).double()
    allowed = TOLERANCE.get(case.precision, _QUANTIZED)
    errors: dict[Key, float] = {}
    for key, run in steps.items():
        exact = wanted[key[0]]
        errors[key] = float((run().double() - exact).norm() / exact.norm())
        if not errors[key] <= allowed:
            raise InputError(
                f"{key[0]} is wrong on {case.label}: the output is off by {errors[key]:.1e} "
                f"(allowed {allowed:.0e}), so nothing is timed"
            )
    return errors


def _peaks(steps: Mapping[Key, Run], files: OnnxFiles, case: CostCase) -> dict[Key, int]:
    if case.engine == "inductor":
        # Its buffers are made by code that torch's profiler does not see.
        return {}
    if case.engine == "torch":
        memory = measure_memory({"/".join(key): _as_step(run) for key, run in steps.items()})
        return {key: memory["/".join(key)].peak for key in steps}
    return {
        (rival, setting): fresh_peak(files.path(rival, case), case, setting)
        for rival, setting in steps
    }


def _as_step(run: Run) -> Step:
    def step(between: Callable[[], None] = lambda: None) -> None:
        del between
        run()

    return step

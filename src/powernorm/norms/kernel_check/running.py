"""Checking all backends of a machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.norms.kernel_check.cases import Case, select_cases
from powernorm.norms.kernel_check.checking import (
    ALLOWED,
    Outcome,
    check_case,
    reference,
    why_not,
)
from powernorm.ops.dispatch import BACKENDS, Backend, missing_reason

INTERPRETED_ELEMENTS: Final = 256
"""Largest input that Triton's interpreter is given."""
INTERPRETED_SECONDS: Final = 60.0
"""After which it is given no more."""


@dataclass
class Machine:
    """A backend as it is found here.

    Attributes:
        backend: its name.
        missing: why it is not available, `""` where it is.
        device: where it runs.
        interpreted: whether Triton's interpreter runs its kernels.
        seconds: spent on it so far.
        cases: checked so far.
    """

    backend: Backend
    missing: str
    device: torch.device
    interpreted: bool
    seconds: float = 0.0
    cases: int = 0

    def __str__(self) -> str:
        if self.missing:
            return f"not available: {self.missing}"
        if self.device.type == "cuda":
            return f"on {torch.cuda.get_device_name(self.device)}"
        if self.interpreted:
            return (
                f"interpreted on the CPU, so only inputs of up to {INTERPRETED_ELEMENTS:,} "
                f"elements and about {INTERPRETED_SECONDS:.0f} seconds"
            )
        return f"on the CPU, {torch.get_num_threads()} threads"

    def takes(self, case: Case) -> bool:
        """Return whether the backend is to compute a case."""
        if self.missing or why_not(case, self.backend, self.device):
            return False
        if not self.interpreted:
            return True
        is_small = max(case.tokens, 1) * case.width <= INTERPRETED_ELEMENTS
        # The interpreter cuts bfloat16 off where a GPU rounds: of sums, statistics would be taken.
        is_rounded = case.dtype != "bfloat16" or case.residual != "same"
        return is_small and is_rounded and self.seconds < INTERPRETED_SECONDS


@dataclass
class Row:
    """All cases of a norm in one type on one backend.

    Attributes:
        backend: what computed them.
        norm: short name.
        dtype: name of the type.
        cases: number of cases.
        error: largest error, in rounding errors, of which `ALLOWED` are allowed.
        failures: number of cases with a problem.
    """

    backend: Backend
    norm: str
    dtype: str
    cases: int = 0
    error: float = 0.0
    failures: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a case."""
        self.cases += 1
        self.error = max([self.error, *outcome.errors.values()])
        self.failures += bool(outcome.problems)


@dataclass
class KernelReport:
    """What `check_kernels` found, up to now.

    Attributes:
        seed: of the cases.
        num_cases: number of cases to check.
        machines: the backends.
        outcomes: those of a single case that was asked for, else the failed ones.
        rows: counts by backend, norm and type.
    """

    seed: int
    num_cases: int
    machines: list[Machine]
    outcomes: list[Outcome] = field(default_factory=list)
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)

    @property
    def failures(self) -> list[Outcome]:
        """The failed cases."""
        return [outcome for outcome in self.outcomes if outcome.problems]

    def add(self, outcome: Outcome, *, keep: bool) -> None:
        """Count an outcome, and keep it if it failed."""
        case = outcome.case
        key = (outcome.backend, case.setting.norm, case.dtype)
        self.rows.setdefault(key, Row(*key)).add(outcome)
        if keep or outcome.problems:
            self.outcomes.append(outcome)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            "seed": self.seed,
            "num_cases": self.num_cases,
            "allowed_error": ALLOWED,
            "backends": {
                machine.backend: {
                    "available": not machine.missing,
                    "detail": str(machine),
                    "cases": machine.cases,
                    "seconds": round(machine.seconds, 1),
                }
                for machine in self.machines
            },
            "rows": [asdict(row) for row in self.rows.values()],
            "cases": [outcome.facts() for outcome in self.outcomes],
        }


def find_machines() -> list[Machine]:
    """Return every backend, with the device that it runs on."""
    return [_machine(backend) for backend in BACKENDS]


def _machine(backend: Backend) -> Machine:
    runs_on_gpu = backend == "triton" and torch.cuda.is_available()
    # Triton decides when it is imported: with the variable set its programs are interpreted.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    device = torch.device("cuda" if runs_on_gpu and not interpreted else "cpu")
    return Machine(backend, missing_reason(backend), device, interpreted)


def start_report(seed: int, index: int | None = None) -> tuple[KernelReport, list[Case]]:
    """Return an empty report, and the cases to check.

    Args:
        seed: of the cases.
        index: of the only case that is wanted.

    Raises:
        InputError: there is no such case.
    """
    cases = select_cases(seed)
    if index is not None and not 0 <= index < len(cases):
        raise InputError(f"case is {index}, expected a number from 0 to {len(cases) - 1}")
    wanted = cases if index is None else [cases[index]]
    return KernelReport(seed, len(wanted), find_machines()), wanted


def check_kernels(
    report: KernelReport, cases: list[Case], on_progress: Callable[[int], None]
) -> None:
    """Let every backend compute every case, into the report.

    Args:
        report: what is found, which holds what is done when this is interrupted.
        cases: to check.
        on_progress: called after every case with the number done.
    """
    for done, case in enumerate(cases, 1):
        machines = [machine for machine in report.machines if machine.takes(case)]
        known = reference(case) if machines else None
        for machine in machines:
            assert known is not None
            start = time.perf_counter()
            report.add(check_case(known, machine.backend, machine.device), keep=len(cases) == 1)
            machine.seconds += time.perf_counter() - start
            machine.cases += 1
        on_progress(done)

"""Results as data: one JSON object a line, the machine's description first."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

import powernorm
from powernorm.errors import InputError
from powernorm.json_reading import parse_json
from powernorm.lab.bench.cases import Case
from powernorm.lab.bench.costs.rows import CostRow
from powernorm.lab.bench.inference.rows import InferenceRow
from powernorm.lab.bench.memory import Memory

_FIX: Final = "give a file that `powernorm bench --out` wrote"


@dataclass(frozen=True)
class Row:
    """One provider on one case.

    Attributes:
        provider: its label.
        norm: what it computes.
        backend: what served it.
        tokens: of the case, as the next four.
        features: C.
        dtype: name of the type.
        padding: share.
        direction: see `Case`.
        median_us: microseconds a call, median over the rounds.
        lower_us: first quartile.
        upper_us: third quartile.
        num_samples: rounds.
        ratio: median over that of torch's LayerNorm in the same rounds.
        gigabytes_per_second: unavoidable traffic over the median.
        share_of_copy: that over what copying the input reached in the same rounds.
        peak_bytes: of `Memory`, measured in a pass of its own; None in rows without it, as are the
            next two.
        kept_bytes: of `Memory`; None without a backward too.
        peak_ratio: peak over that of torch's LayerNorm.
    """

    provider: str
    norm: str
    backend: str
    tokens: int
    features: int
    dtype: str
    padding: float
    direction: str
    median_us: float
    lower_us: float
    upper_us: float
    num_samples: int
    ratio: float
    gigabytes_per_second: float
    share_of_copy: float
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    peak_ratio: float | None = None

    @property
    def case(self) -> tuple[int, int, str, float, str]:
        """What was run: rows with the same case belong together."""
        return (self.tokens, self.features, self.dtype, self.padding, self.direction)


def make_row(
    case: Case,
    provider: str,
    norm: str,
    backend: str,
    samples: Sequence[float],
    baseline: Sequence[float],
    copies: Sequence[float],
    *,
    memory: Memory | None = None,
    baseline_memory: Memory | None = None,
) -> Row:
    """A row from seconds a call: the provider's, LayerNorm's and the copy's; and from memory."""
    median = statistics.median(samples)
    lower, _, upper = statistics.quantiles(samples, n=4)
    copy_bytes = 2 * case.tokens * case.features * case.itemsize
    num_bytes = copy_bytes if norm == "copy" else case.num_bytes
    speed = num_bytes / median
    peak_ratio = None
    if memory is not None and baseline_memory is not None:
        peak_ratio = round(memory.peak / baseline_memory.peak, 4)
    return Row(
        provider=provider,
        norm=norm,
        backend=backend,
        **asdict(case),
        median_us=round(median * 1e6, 2),
        lower_us=round(lower * 1e6, 2),
        upper_us=round(upper * 1e6, 2),
        num_samples=len(samples),
        ratio=round(median / statistics.median(baseline), 3),
        gigabytes_per_second=round(speed / 1e9, 2),
        share_of_copy=round(speed / (copy_bytes / statistics.median(copies)), 3),
        peak_bytes=None if memory is None else memory.peak,
        kept_bytes=None if memory is None else memory.kept,
        peak_ratio=peak_ratio,
    )


def describe_machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    from powernorm.ops.kernels.cpu.loading import load_library

    library = load_library()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "powernorm": powernorm.__version__,
        "cpu_kernels": library.instruction_set if library.functions else library.reason,
    }


def count_preemptions() -> int:
    """How often this process has lost a core to others so far; 0 where nobody counts."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


AnyRow: TypeAlias = Row | InferenceRow | CostRow


def write_rows(path: Path, machine: dict[str, Any], rows: Iterable[AnyRow]) -> None:
    """Writes the results of a run, in place of what the file held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"machine": machine}), *(json.dumps(asdict(row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """(machine, rows) of a file on norms.

    Raises:
        InputError: not a file of such results.
    """
    machine, rows = read_any_rows(path)
    found = [row for row in rows if isinstance(row, Row)]
    if len(found) < len(rows):
        raise InputError(f"{path} holds no results of `powernorm bench` on norms, but on encoders")
    return machine, found


def read_any_rows(
    path: Path,
) -> tuple[dict[str, Any], list[Row] | list[InferenceRow] | list[CostRow]]:
    """(machine, rows) of a file, which are all of one kind.

    Raises:
        InputError: not a file of results.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head, *records = [
            parse_json(line, str(path), _FIX, line=number)
            for number, line in enumerate(lines, start=1)
        ]
        machine: dict[str, Any] = head["machine"]
        if records and "rival" in records[0]:
            return machine, [CostRow(**record) for record in records]
        if records and "engine" in records[0]:
            return machine, [InferenceRow(**record) for record in records]
        return machine, [Row(**record) for record in records]
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} holds no results of `powernorm bench`: {error}") from None

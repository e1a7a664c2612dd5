"""Encoders in torch, inductor, onnxruntime or OpenVINO: right outputs, then time, then memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from powernorm import InputError
from speed import fresh_process
from speed.encoders import Kind, OnnxFiles, Size, build_encoders, random_tokens
from speed.providers import DTYPES
from speed.rows import Row
from speed.timing import interleave, measure_memory

Run = Callable[[], Tensor]
"""One call of a model on its input."""
Key = tuple[Kind, str]
"""An encoder, and in onnxruntime whether sum and norm are one operator: `fused` or `unfused`."""

TOLERANCE: Final = {"float32": 2e-5, "bfloat16": 0.1}
"""Largest error that passes; what is quantized may be off by half."""
_QUANTIZED: Final = 0.5
_FUSED_NORMS: Final = ("LayerNorm", "RMSNorm")
"""Norms that onnxruntime fuses; the graphs of the others stay the same."""


class Case(NamedTuple):
    """One comparison of all encoders."""

    size: Size
    engine: str
    precision: str
    threads: int
    batch: int
    tokens: int

    @property
    def fields(self) -> Row:
        """Return the description of encoder and input for rows."""
        names = ("layers", "features", "heads", "hidden", "placement")
        size = {name: getattr(self.size, name) for name in names}
        return {**size, "batch": self.batch, "tokens": self.tokens}

    @property
    def label(self) -> str:
        """A short name."""
        inputs = f"{self.batch}×{self.tokens} tokens, {self.threads} threads"
        return f"{self.size.label}, {self.engine} {self.precision}, {inputs}"


class Measured(NamedTuple):
    """Results of a case, by encoder and setting."""

    case: Case
    samples: dict[Key, list[float]]
    """Seconds a call."""
    errors: dict[Key, float]
    """Largest error of the outputs."""
    peaks: dict[Key, int]
    """Bytes, of those that were measured."""


def measure_cases(
    cases: Sequence[Case],
    kinds: Collection[Kind],
    *,
    seconds: float,
    note: Callable[[str], None],
    thorough: bool,
    same: Mapping[Kind, Kind] | None = None,
) -> Iterator[Measured]:
    """Yield what is found on each case.

    Args:
        cases: encoder after encoder.
        kinds: which encoders.
        seconds: time for each case, all encoders together; at least `timing.ROUNDS` are run.
        note: told what comes next.
        thorough: measure peaks on one thread, and onnxruntime without its fusion too.
        same: whose outputs in torch an encoder has to give, where those are not its own.

    Raises:
        InputError: an encoder gives wrong outputs.
    """
    for size, group in groupby(cases, key=lambda case: case.size):
        models = build_encoders(size, kinds)
        with tempfile.TemporaryDirectory(prefix="powernorm-bench-") as folder:
            files = OnnxFiles(models, Path(folder))
            for case in group:
                note(case.label)
                # No case uses what another compiled, and torch stops at the eighth variant.
                torch.compiler.reset()
                torch.set_num_threads(case.threads)
                tokens = random_tokens(case.batch, case.tokens)
                steps = runs(models, files, case, tokens, unfused=thorough)
                errors = check_outputs(steps, models, case, tokens, same or {})
                named = {"/".join(key): run for key, run in steps.items()}
                samples = interleave(named, seconds=seconds)
                peaks = _peaks(steps, files, case) if thorough and case.threads == 1 else {}
                yield Measured(case, {key: samples["/".join(key)] for key in steps}, errors, peaks)


def runs(
    models: Mapping[Kind, nn.Module], files: OnnxFiles, case: Case, tokens: Tensor, *, unfused: bool
) -> dict[Key, Run]:
    """Return what is timed.

    Args:
        models: float32, in evaluation mode; they stay as they are.
        files: of the same.
        case: says how they run.
        tokens: the input.
        unfused: run what onnxruntime fuses without the fusion too.
    """
    if case.engine in ("torch", "inductor"):
        return {(kind, ""): _torch_run(model, case, tokens) for kind, model in models.items()}
    found: dict[Key, Run] = {}
    for kind in models:
        settings = ("fused", "unfused") if unfused and kind in _FUSED_NORMS else ("fused",)
        for setting in ("",) if case.engine == "openvino" else settings:
            found[kind, setting] = _file_run(files, kind, setting, case, tokens)
    return found


def _torch_run(model: nn.Module, case: Case, tokens: Tensor) -> Run:
    made = deepcopy(model)
    if case.precision == "int8 dynamic":
        with warnings.catch_warnings():
            # torch announces other packages for this.
            warnings.simplefilter("ignore")
            made = torch.ao.quantization.quantize_dynamic(made, {nn.Linear}, dtype=torch.qint8)
    else:
        made = made.to(DTYPES[case.precision])
    called: Callable[[Tensor], Tensor] = made
    if case.engine == "inductor":
        called = torch.compile(made, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        with torch.no_grad():
            return called(tokens)

    return run


def _file_run(files: OnnxFiles, kind: Kind, setting: str, case: Case, tokens: Tensor) -> Run:
    path = files.path(kind, (case.batch, case.tokens), case.precision)
    load = fresh_process.opener(setting or case.engine, str(path), case.threads, _hint(case))
    call, values = load(), tokens.numpy()
    return lambda: torch.from_numpy(call(values))


def _hint(case: Case) -> str:
    """Return OpenVINO's name of a precision; what is quantized has float32 around it."""
    return "bf16" if case.precision == "bfloat16" else "f32"


def check_outputs(
    steps: Mapping[Key, Run],
    models: Mapping[Kind, nn.Module],
    case: Case,
    tokens: Tensor,
    same: Mapping[Kind, Kind],
) -> dict[Key, float]:
    """Return the error of each encoder against float32 outputs in torch, on the very case.

    Raises:
        InputError: one is too large for the precision.
    """
    with torch.no_grad():
        wanted = {kind: models[same.get(kind, kind)](tokens).double() for kind in models}
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


def _peaks(steps: Mapping[Key, Run], files: OnnxFiles, case: Case) -> dict[Key, int]:
    if case.engine == "inductor":
        # Its buffers are made by code that torch's profiler does not see.
        return {}
    if case.engine == "torch":

        def as_step(run: Run) -> Any:
            return lambda _=None: run()

        memory = measure_memory({"/".join(key): as_step(run) for key, run in steps.items()})
        return {key: memory["/".join(key)].peak for key in steps}
    return {key: _fresh_peak(files, key, case) for key in steps}


def _fresh_peak(files: OnnxFiles, key: Key, case: Case) -> int:
    """Return by how many bytes a fresh process grows that opens a file and runs it three times."""
    path = files.path(key[0], (case.batch, case.tokens), case.precision)
    given = [key[1] or case.engine, path, case.threads, case.batch, case.tokens, _hint(case)]
    command = [sys.executable, "-I", fresh_process.__file__, *map(str, given)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

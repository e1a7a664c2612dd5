"""`powernorm export`: a trained model folded, as ONNX, quantized and compared, in one call."""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection import find_norms
from powernorm.inspection.examples import as_call
from powernorm.inspection.finder import FoundNorm
from powernorm.integrations.extras import check_extra
from powernorm.integrations.model_sources import ModelSource
from powernorm.integrations.onnx import export, largest_difference
from powernorm.integrations.onnx_operators import OperatorCounts, count_operators
from powernorm.integrations.onnx_runtime import (
    OnnxSession,
    optimized_graph,
    quantize_dynamic,
    quantize_static,
    read_graph,
)
from powernorm.lab.exported_calls import Agreement, TensorCall, agreement_of
from powernorm.lab.model_sources import batches_of, open_model
from powernorm.surgery import fold, match_teacher, plan_swap
from powernorm.surgery.fold_solver import static_of
from powernorm.surgery.structure import FoldedNorm
from powernorm.surgery.verification import with_masks

Quantization = Literal["dynamic", "matmul", "all"]
"""`dynamic`, or static of the matrix products or of all operators."""

TOLERANCE: Final = 1e-3
"""Largest error of a float32 file that passes; rounding gives about 1e-6."""
NUM_CALIBRATION: Final = 16
"""Batches that the ranges of a static quantization are measured on."""
NUM_COMPARED: Final = 8
"""Batches behind those on which a quantized file is compared."""
_MATCHED: Final = "pn-static"
"""The norm that matching fits: y = a ⊙ x + c."""


@dataclass(frozen=True)
class Exported:
    """What `export_model` has written.

    Attributes:
        model: where the model came from.
        kind: class of the model.
        file: the ONNX file.
        bytes: size of it, and of the weights beside it.
        inputs: shapes by name; what may vary has a name.
        fixed: why all shapes are fixed; None if they are not.
        folded: number of norms that went into the weights.
        matched: number of norms that were replaced by fitted maps before.
        left: names of the norms that stay, each with the reason.
        quantization: None in float32.
        float_error: largest error of the float32 file, relative to torch's largest output.
        agreement: of the quantized file with the folded model; None in float32.
        with_original: of the folded model with the one that it was matched to; None without.
        exported: operators in the file.
        optimized: operators that onnxruntime makes of it on this machine's processor.
        versions: of what has computed this.
    """

    model: str
    kind: str
    file: str
    bytes: int
    inputs: Mapping[str, list[int | str]]
    fixed: str | None
    folded: int
    matched: int
    left: Mapping[str, str]
    quantization: Quantization | None
    float_error: float
    agreement: Agreement | None
    with_original: Agreement | None
    exported: OperatorCounts
    optimized: OperatorCounts
    versions: Mapping[str, str]


def export_model(
    source: str,
    out: Path,
    *,
    quantization: Quantization | None = None,
    data: str | None = None,
    match: bool = False,
    fixed: bool = False,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Fold a trained model, write it as ONNX, quantize it, and compare the file with torch.

    Beside the file its report is written, with the ending `.json`. Where something fails, nothing
    is written, and what was there stays.

    Args:
        source: as `open_model` takes it.
        out: the file to write, ….onnx.
        quantization: of weights and activations to int8.
        data: a text: of a Hugging Face model, on which ranges are measured, norms matched and
            files compared; of a run another one than its own.
        match: replace LayerNorms and RMSNorms by maps fitted to them first, without training.
        fixed: fix all shapes to those of the example inputs.
        on_stage: told what comes next.

    Raises:
        InputError: there is no such model, no data for what is asked, the file cannot be written,
            or its outputs are not those of torch.
        ModuleNotFoundError: a package of the extra `export` is missing.
    """
    check_extra("export", "`powernorm export`")
    _check_file(out)
    on_stage(f"reading {source}")
    opened = open_model(source)
    batches = _batches(opened, data, is_needed=match or quantization in ("matmul", "all"))
    original = opened.model.float().eval()
    fitted, compared = batches[:NUM_CALIBRATION], batches[NUM_CALIBRATION:] or batches
    model, matched = original, 0
    if match:
        on_stage(f"fitting maps to the norms on {len(fitted)} batches")
        model, matched = _matched(original, fitted)
    model, folded, left = _folded(model, opened.example_inputs, on_stage)
    inputs = batches[0] if batches else _with_masks(opened)
    call = TensorCall(model, inputs, answer_only=opened.kind == "pretrained")
    examples = [call.tensors_of(batch) for batch in compared] or [call.example]
    origin = f"batches of {data or source}" if batches else "random inputs"
    with _new_files(out) as file:
        on_stage("exporting to ONNX")
        error, reason = _write_onnx(call, file, fixed=fixed)
        agreement = None
        if quantization is not None:
            on_stage("quantizing to int8")
            calibration = [call.tensors_of(batch) for batch in fitted]
            _quantize(file, quantization, call.runnable(calibration, is_fixed=reason is not None))
            session = OnnxSession(file)
            shown = call.runnable(examples, is_fixed=reason is not None)
            agreement = agreement_of(lambda *x: session(x)[0], call, shown, origin)
        with_original = None
        if match:
            whole = TensorCall(original, inputs, answer_only=opened.kind == "pretrained")
            with_original = agreement_of(call.first, whole, examples, origin)
        on_stage("counting operators")
        exported = Exported(
            model=source,
            kind=type(model).__name__,
            file=str(out),
            bytes=sum(part.stat().st_size for part in file.parent.iterdir()),
            inputs=OnnxSession(file).input_shapes,
            fixed=reason,
            folded=folded,
            matched=matched,
            left=left,
            quantization=quantization,
            float_error=error,
            agreement=agreement,
            with_original=with_original,
            exported=count_operators(read_graph(file)),
            optimized=count_operators(optimized_graph(file)),
            versions={
                "powernorm": powernorm.__version__,
                **{name: version(name) for name in ("torch", "onnx", "onnxruntime")},
            },
        )
        # JSON has no NaN.
        facts = json.loads(json.dumps(asdict(exported)), parse_constant=lambda _: None)
        report = file.with_suffix(".json")
        report.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return exported


def _check_file(out: Path) -> None:
    if out.suffix != ".onnx":
        raise InputError(f"{out} is no name of an ONNX file: give one that ends in .onnx")
    if out.is_dir():
        raise InputError(f"{out} is a folder: give the name of a file")


def _batches(opened: ModelSource, data: str | None, *, is_needed: bool) -> list[Any]:
    """Return batches to measure ranges on and to compare on; none where there is no text."""
    try:
        return batches_of(opened, NUM_CALIBRATION + NUM_COMPARED, data)
    except InputError:
        if is_needed or data is not None:
            raise
        return []


def _with_masks(opened: ModelSource) -> object:
    """Return example inputs, of a Hugging Face model with the masks that it takes."""
    if opened.kind != "pretrained":
        return opened.example_inputs
    masked = with_masks(opened.model, as_call(opened.example_inputs))
    return opened.example_inputs if masked is None else dict(masked.kwargs)


def _norms(model: nn.Module) -> list[FoundNorm]:
    """Return the norms of a model, without what folding left in their places."""
    return [norm for norm in find_norms(model) if not isinstance(norm.module, FoldedNorm)]


def _matched(original: nn.Module, batches: Sequence[Any]) -> tuple[nn.Module, int]:
    """Return a copy with a static map in place of each LayerNorm and RMSNorm, and their number."""
    model = copy.deepcopy(original)
    names = [norm.names[0] for norm in _norms(model) if static_of(norm) is None]
    if not names:
        raise InputError("there is no LayerNorm or RMSNorm to match: leave out --match")
    plan = plan_swap(model, _MATCHED, names)
    plan.apply()
    match_teacher(model.eval(), original, batches)
    return model.eval(), sum(row.action == "swap" for row in plan.rows)


def _folded(
    model: nn.Module, inputs: object, on_stage: Callable[[str], None]
) -> tuple[nn.Module, int, dict[str, str]]:
    """Return a model with its static norms folded, their number, and the norms that stay."""
    norms = _norms(model)
    others = {norm.names[0]: "it depends on each token" for norm in norms if not static_of(norm)}
    if len(others) == len(norms):
        return model, 0, others
    on_stage(f"folding {len(norms) - len(others)} norms")
    report = fold(model, inputs, inplace=False)
    kept = {row.name: row.reason for row in report.rows if row.action != "fold"}
    number = sum(row.action == "fold" for row in report.rows)
    return report.model, number, others | kept


@contextmanager
def _new_files(out: Path) -> Iterator[Path]:
    """Give a file in a folder of its own; in the end, what is in there goes beside `out`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as folder:
            yield Path(folder) / out.name
            for file in Path(folder).iterdir():
                file.replace(out.parent / file.name)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from error


def _write_onnx(call: TensorCall, file: Path, *, fixed: bool) -> tuple[float, str | None]:
    """Write a model, if it can be with shapes that vary.

    Returns:
        The largest error, and why the shapes are fixed, None where they are not.

    Raises:
        InputError: the model cannot be exported, or the file computes something else.
    """
    reason: str | None = "asked for"
    if not fixed:
        try:
            return _write_checked(call, file, [_free_sizes(one) for one in call.example]), None
        except InputError as error:
            reason = f"with sizes that vary, {error}"
    return _write_checked(call, file, [() for _ in call.example]), reason


_SIZES: Final = ("batch", "length")
"""Names of the dimensions of an input that may vary."""


def _free_sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return which dimensions of an input may vary: batch and length, of an image its batch."""
    has_length = tensor.ndim == 3 if tensor.is_floating_point() else tensor.ndim >= 2
    return (0, 1) if has_length else tuple(range(min(1, tensor.ndim)))


def _write_checked(call: TensorCall, file: Path, free: Sequence[tuple[int, ...]]) -> float:
    """Write a model, and compare the file with it, also on smaller inputs where sizes are free."""
    outputs = call.outputs(*call.example)
    # Sizes of other inputs that are the same take the names of the first one's.
    prefixes = ["", *(f"{name}_" for name in call.names[1:])]
    shapes = tuple(
        {dim: f"{prefix}{_SIZES[dim]}" for dim in dims}
        for prefix, dims in zip(prefixes, free, strict=True)
    )
    # torch prints the graph up to where it cannot go on; the error names the reason.
    try:
        with redirect_stderr(io.StringIO()):
            program = export(
                call,
                tuple(call.example),
                dynamic_shapes=(shapes,) if any(free) else None,
                input_names=call.names,
                output_names=["output"] if len(outputs) == 1 else None,
            )
    except InputError as error:
        text = str(error).replace(TensorCall.__name__, type(call.model).__name__)
        raise InputError(text) from error
    program.save(file)
    session = OnnxSession(file)
    shown = session.input_shapes.values()
    smaller = [_smaller(*pair) for pair in zip(call.example, shown, strict=True)]
    largest = max(
        largest_difference(session(tuple(tensors)), call.outputs(*tensors))
        for tensors in (call.example, smaller)
    )
    if not largest <= TOLERANCE:
        raise InputError(
            f"onnxruntime's outputs differ from torch's by {largest:.1e} of the largest value "
            f"(allowed {TOLERANCE:.0e})"
        )
    return largest


def _smaller(tensor: Tensor, shape: Sequence[int | str]) -> Tensor:
    """Return an input with one entry less where a size may vary."""
    sizes = zip(tensor.shape, shape, strict=True)
    cut = [size - 1 if isinstance(known, str) and size > 2 else size for size, known in sizes]
    return tensor[tuple(map(slice, cut))]


def _quantize(file: Path, quantization: Quantization, batches: Sequence[Sequence[Tensor]]) -> None:
    """Replace a float32 file by a quantized one."""
    with tempfile.TemporaryDirectory(dir=file.parent.parent, prefix=f".{file.stem}-") as folder:
        quantized = Path(folder) / file.name
        if quantization == "dynamic":
            quantize_dynamic(file, quantized)
        else:
            quantize_static(file, quantized, [tuple(batch) for batch in batches], quantization)
        for old in file.parent.iterdir():
            old.unlink()
        for new in Path(folder).iterdir():
            new.replace(file.parent / new.name)

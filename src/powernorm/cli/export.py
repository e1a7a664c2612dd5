"""`powernorm export`: a trained model as ONNX, folded, quantized and compared."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from powernorm.cli.options import TrustCode
from powernorm.errors import InputError

if TYPE_CHECKING:
    from powernorm.lab.exported_calls import Agreement
    from powernorm.lab.exporting import Exported, Quantization

_ROWS = (
    ("operators", "all"),
    ("norms", "norm operators"),
    ("reductions", "reductions"),
    ("square_roots", "square roots"),
    ("divisions", "divisions"),
    ("exponentials", "exp, erf, tanh"),
    ("casts", "casts"),
    ("quantize", "quantize"),
    ("dequantize", "dequantize"),
    ("integer", "in integers"),
    ("floating", "in floating point"),
)
USABLE_COSINE = 0.9
"""Between outputs in int8 and in float32; below it there is a warning."""
_BROKEN = (
    "int8 has lost what the model computes. Quantize less (--static matmul in place of all), "
    "measure ranges on --data like what the model will see, or stay in float32"
)


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a Hugging Face model, a run of `powernorm compare` or one of its "
            "checkpoints, a folder that `powernorm fold` or `powernorm.save` wrote (of `remove`: "
            "DIR/model), or module:name of (model, batches).",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write, ….onnx.")],
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="Quantize: weights to int8, activations by each tensor's own range at run time.",
        ),
    ] = False,
    static: Annotated[
        str | None,
        typer.Option(
            metavar="matmul|all",
            help="With --int8: activations by ranges measured on --data before, of the matrix "
            "products alone or of all operators that onnxruntime computes in integers.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A text file, a folder of them, or the name of an embedded text: what ranges are "
            "measured and outputs compared on. A run has its own.",
        ),
    ] = None,
    match: Annotated[
        bool,
        typer.Option(
            "--match",
            help="Replace LayerNorms and RMSNorms by maps fitted to them on --data first, without "
            "any training; `powernorm remove` trains.",
        ),
    ] = False,
    fixed: Annotated[
        bool,
        typer.Option("--fixed", help="Fix all shapes; else batch and length may vary."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Fold a trained model, write it as ONNX, quantize it, and compare the file with torch.

    Static norms go into the weights; others stay, and are listed. Beside FILE a report is written
    with the ending .json.
    """
    from powernorm.lab.exporting import export_model
    from powernorm.norms import named_layers

    named_layers.trust_code(trust_code)
    quantization = _quantization(int8=int8, static=static)
    exported = export_model(
        model,
        out,
        quantization=quantization,
        data=data,
        match=match,
        fixed=fixed,
        on_stage=lambda text: None if quiet else typer.echo(text, err=True),
    )
    for line in _lines(exported):
        typer.echo(line)


def _quantization(*, int8: bool, static: str | None) -> "Quantization | None":
    if static is None:
        return "dynamic" if int8 else None
    if not int8:
        raise InputError("--static says how to quantize: add --int8")
    if static not in ("matmul", "all"):
        raise InputError(f"--static is {static!r}, expected matmul or all")
    return cast("Quantization", static)


def _lines(found: "Exported") -> list[str]:
    """Return the report for the terminal."""
    kind = {None: "float32", "dynamic": "int8, dynamic", "all": "int8, static, all operators"}
    words = kind.get(found.quantization, "int8, static, matrix products")
    inputs = ", ".join(f"{name} {_shape(shape)}" for name, shape in found.inputs.items())
    lines = [
        f"{found.kind}: {found.folded} norms folded, {len(found.left)} left",
        *(f"  {name}: {reason}" for name, reason in list(found.left.items())[:3]),
        *([f"  and {len(found.left) - 3} more"] if len(found.left) > 3 else []),
        f"{found.file}: {words}, {found.bytes / 1e6:.1f} MB, {inputs}",
        f"float32 file against torch: largest error {found.float_error:.1e} of the largest output",
    ]
    if found.fixed not in (None, "asked for"):
        lines.append(f"shapes are fixed: {found.fixed}")
    if found.agreement is not None:
        lines.append(f"int8 against float32: {_agreement(found.agreement)}")
        # Of NaN, too, which is not below anything.
        if not found.agreement.cosine >= USABLE_COSINE:
            lines.append(f"warning: {_BROKEN}")
    if found.with_original is not None:
        lines.append(f"matched model against the original: {_agreement(found.with_original)}")
    return [*lines, *_operators(found), f"report: {Path(found.file).with_suffix('.json')}"]


def _shape(shape: list[int | str]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _agreement(found: "Agreement") -> str:
    return (
        f"error {found.error:.2%} (root mean square), cosine {found.cosine:.4f}, largest entry at "
        f"the same place in {found.same_largest:.1%} of {found.vectors} vectors ({found.inputs})"
    )


def _operators(found: "Exported") -> list[str]:
    lines = [f"{'operators':<18}{'in the file':>12}{'in onnxruntime':>16}"]
    for name, label in _ROWS:
        one, other = getattr(found.exported, name), getattr(found.optimized, name)
        if one or other or name == "norms":
            lines.append(f"{label:<18}{one:>12}{other:>16}")
    return lines

"""A trained model folded, as ONNX, quantized to int8, and compared with torch.

    python export_int8.py bert/ --data rt --int8 dynamic --out bert.onnx
    python export_int8.py runs/removed/model --int8 all --out lm.onnx
    python export_int8.py my_models:build --match --int8 matmul --out mine.onnx

MODEL is a folder with a Hugging Face model, a run of `powernorm compare`, a folder that `powernorm
fold`, `remove` or `powernorm.save` wrote of one of these, or `module:name` of (model, batches).
`dynamic` quantizes weights, and activations by each tensor's own range at run time; `matmul` and
`all` quantize matrix products or all that onnxruntime can, by measured ranges. FILE.json reports.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import powernorm
from int8.operators import count_operators
from int8.runtime import (
    OnnxSession,
    optimized_graph,
    quantize_dynamic,
    quantize_static,
    read_graph,
)
from powernorm.inspection import find_norms
from powernorm.inspection.affine import static_map
from powernorm.integrations.model_sources import open_source
from powernorm.integrations.onnx import export, largest_difference
from powernorm.surgery.folding.structure import FoldedNorm
from powernorm_lab.model_outputs import answer_in
from powernorm_lab.model_sources import batches_of

NUM_CALIBRATION = 16
"""Number of batches on which the ranges of a static quantization are measured."""
NUM_COMPARED = 8
"""Number of batches after those, on which outputs are compared."""
TOLERANCE = 1e-3
"""Largest allowed error of a float32 file; rounding gives about 1e-6."""
USABLE_COSINE = 0.9
"""Minimum cosine between outputs in int8 and in float32, without a warning."""
LOST = """warning: int8 has lost what the model computes. Quantize less (matmul in place of all),
measure ranges on --data like what the model will see, or stay in float32"""
SIZES = ("batch", "length")
"""Names of the dimensions of an input that may vary."""


class TensorCall(nn.Module):
    """A model as a function of its input tensors, like an ONNX file.

    Args:
        model: a model in evaluation mode.
        example: inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model.eval()
        self.is_named = isinstance(example, Mapping)
        if self.is_named:
            self.names = [*example]
        else:
            number = len(example) if isinstance(example, tuple) else 1
            self.names = [*inspect.signature(model.forward).parameters][:number]
        # torch.export would include the base of a view in its assertions about the inputs.
        self.example = [tensor.clone() for tensor in self.tensors_of(example)]
        self.eval()

    def tensors_of(self, batch: Any) -> list[Tensor]:
        """Return the tensors in a batch of the example's form."""
        if self.is_named:
            if different := {*self.names} ^ {*batch}:
                raise SystemExit(f"batches differ in {', '.join(different)}: all need the same")
            return [batch[name] for name in self.names]
        return [*batch] if isinstance(batch, tuple) else [batch]

    def forward(self, *tensors: Tensor) -> Tensor | None:
        """Return logits, last hidden states, or the first output tensor of the model."""
        if self.is_named:
            outputs = self.model(**dict(zip(self.names, tensors, strict=True)))
        else:
            outputs = self.model(*tensors)
        return answer_in(outputs)

    def compute(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the output without gradients."""
        with torch.no_grad():
            return self(*tensors)  # type: ignore[no-any-return]

    def padding(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return which positions are padding, None if the inputs do not show it."""
        named = dict(zip(self.names, tensors, strict=True))
        if "attention_mask" in named:
            return named["attention_mask"] == 0
        return named.get("padding_mask")


def norms_of(model: nn.Module) -> list[Any]:
    """Return the norms of a model, without the remainders of folded ones."""
    return [norm for norm in find_norms(model) if not isinstance(norm.module, FoldedNorm)]


def matched(original: nn.Module, batches: Sequence[Any]) -> tuple[nn.Module, int]:
    """Return a copy with maps fitted to its LayerNorms and RMSNorms, without training."""
    model = copy.deepcopy(original)
    names = [norm.names[0] for norm in norms_of(model) if static_map(norm) is None]
    if not names:
        raise SystemExit("there is no LayerNorm or RMSNorm to match: leave out --match")
    plan = powernorm.plan_swap(model, "pn-static", names)
    plan.apply()
    powernorm.match_teacher(model.eval(), original, batches)
    return model.eval(), sum(row.action == "swap" for row in plan.rows)


def folded(model: nn.Module, example: Any) -> tuple[nn.Module, int, dict[str, str]]:
    """Return the model with its static norms folded, their number, and why the others stay."""
    norms = norms_of(model)
    left = {norm.names[0]: "it depends on each token" for norm in norms if not static_map(norm)}
    if len(left) == len(norms):
        return model, 0, left
    report = powernorm.fold(model, example, inplace=False)
    kept = {row.name: row.reason for row in report.rows if row.action != "fold"}
    return report.model, sum(row.action == "fold" for row in report.rows), left | kept


def write_onnx(call: TensorCall, file: Path, *, fixed: bool) -> tuple[float, str | None]:
    """Write a model in float32, with variable sizes if torch can trace them.

    Returns:
        The largest error of onnxruntime's outputs, and why the sizes are fixed, None if they vary.
    """
    reason = "asked for"
    try:
        if not fixed:
            return write_checked(call, file, [free_sizes(one) for one in call.example]), None
    except powernorm.InputError as error:
        reason = f"with sizes that vary, {error}"
    return write_checked(call, file, [() for _ in call.example]), reason


def free_sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return which dimensions of an input may vary: batch and length, for an image its batch."""
    has_length = tensor.ndim == 3 if tensor.is_floating_point() else tensor.ndim >= 2
    return (0, 1) if has_length else tuple(range(min(1, tensor.ndim)))


def write_checked(call: TensorCall, file: Path, free: Sequence[tuple[int, ...]]) -> float:
    """Write a model, and compare the file with it, also on smaller inputs if sizes are free."""
    # Equal sizes of other inputs get the names of the first one's.
    prefixes = ["", *(f"{name}_" for name in call.names[1:])]
    shapes = tuple(
        {dim: f"{prefix}{SIZES[dim]}" for dim in dims}
        for prefix, dims in zip(prefixes, free, strict=True)
    )
    varying = (shapes,) if any(free) else None
    names = {"input_names": call.names, "output_names": ["output"]}
    export(call, tuple(call.example), dynamic_shapes=varying, **names).save(file)
    session = OnnxSession(file)
    shown = session.input_shapes.values()
    smaller = [cut(*pair) for pair in zip(call.example, shown, strict=True)]
    largest = max(
        largest_difference(session(tensors), [call.compute(tensors)])
        for tensors in (call.example, smaller)
    )
    if not largest <= TOLERANCE:
        raise powernorm.InputError(
            f"onnxruntime's outputs differ from torch's by {largest:.1e} of the largest value "
            f"(allowed {TOLERANCE:.0e})"
        )
    return largest


def cut(tensor: Tensor, shape: Sequence[int | str]) -> Tensor:
    """Return an input with one entry less in the dimensions that may vary."""
    sizes = zip(tensor.shape, shape, strict=True)
    kept = [size - 1 if isinstance(known, str) and size > 2 else size for size, known in sizes]
    return tensor[tuple(map(slice, kept))]


def agreement(
    run: Callable[[list[Tensor]], Tensor], call: TensorCall, batches: Sequence[list[Tensor]]
) -> dict[str, float]:
    """Return how well the outputs of `run` agree with those of a model.

    That is `error`, the root mean square of the differences over that of the outputs, and over all
    vectors without padding the mean `cosine` and how often the largest entry is the same one.
    """
    square = wanted_square = cosines = same = 0.0
    vectors = 0
    for tensors in batches:
        wanted, found = call.compute(tensors).double(), run(tensors).double()
        padding = call.padding(tensors)
        if padding is not None and padding.shape == wanted.shape[:-1]:
            wanted, found = wanted[~padding], found[~padding]
        # Outputs with one number per row are one vector. Values that both exclude agree.
        width = wanted.shape[-1] if wanted.ndim > 1 else max(wanted.numel(), 1)
        same_infinite = wanted.isinf() & (wanted == found)
        wanted, found = (
            x.masked_fill(same_infinite, 0).reshape(-1, width) for x in (wanted, found)
        )
        square += float((found - wanted).square().sum())
        wanted_square += float(wanted.square().sum())
        cosines += float(torch.cosine_similarity(found, wanted, dim=-1).sum())
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        vectors += len(wanted)
    return {
        "error": (square / max(wanted_square, 1e-300)) ** 0.5,
        "cosine": cosines / max(vectors, 1),
        "same_largest": same / max(vectors, 1),
        "vectors": vectors,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fold, export, quantize and compare; return the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, ….onnx")
    parser.add_argument("--int8", choices=("dynamic", "matmul", "all"), help="else float32")
    parser.add_argument("--data", help="a text of a Hugging Face model; a run has its own")
    parser.add_argument("--match", action="store_true", help="fit maps to per-token norms first")
    parser.add_argument("--fixed", action="store_true", help="fix all sizes")
    given = parser.parse_args(arguments)

    opened = open_source(given.model)
    batches = batches_of(opened, NUM_CALIBRATION + NUM_COMPARED, given.data)
    fitted, compared = batches[:NUM_CALIBRATION], batches[NUM_CALIBRATION:] or batches
    original = opened.model.float().eval()
    model, num_matched = matched(original, fitted) if given.match else (original, 0)
    model, num_folded, left = folded(model, opened.example_inputs)
    call = TensorCall(model, batches[0])
    shown = [call.tensors_of(batch) for batch in compared]
    whole = TensorCall(original, batches[0])
    with_original = agreement(call.compute, whole, shown) if given.match else None

    given.out.parent.mkdir(parents=True, exist_ok=True)
    # In a separate folder, so that a failure does not change existing files.
    with TemporaryDirectory(dir=given.out.parent) as folder:
        file = Path(folder) / given.out.name
        error, reason = write_onnx(call, file, fixed=given.fixed)
        found = None
        if given.int8:
            sizes = [tensor.shape for tensor in call.example]

            def fit(all_of: list[list[Tensor]]) -> list[list[Tensor]]:
                same = [one for one in all_of if [tensor.shape for tensor in one] == sizes]
                return all_of if reason is None else same or [call.example]

            source = file.rename(Path(folder) / "float32.onnx")
            if given.int8 == "dynamic":
                quantize_dynamic(source, file)
            else:
                ranges = fit([call.tensors_of(batch) for batch in fitted])
                quantize_static(source, file, ranges, given.int8)
            source.unlink()
            session = OnnxSession(file)
            found = agreement(lambda tensors: session(tensors)[0], call, fit(shown))
        report = {
            "kind": type(model).__name__,
            "bytes": sum(part.stat().st_size for part in Path(folder).iterdir()),
            "inputs": OnnxSession(file).input_shapes,
            "fixed": reason,
            "folded": num_folded,
            "matched": num_matched,
            "left": left,
            "quantization": given.int8,
            "float_error": error,
            "agreement": found,
            "with_original": with_original,
            "exported": asdict(count_operators(read_graph(file))),
            "optimized": asdict(count_operators(optimized_graph(file))),
            "versions": {
                name: version(name) for name in ("powernorm", "torch", "onnx", "onnxruntime")
            },
        }
        for part in Path(folder).iterdir():
            part.replace(given.out.parent / part.name)
    given.out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    if found is not None and not found["cosine"] >= USABLE_COSINE:  # NaN, too
        print(LOST, file=sys.stderr)
    return report


if __name__ == "__main__":
    main()

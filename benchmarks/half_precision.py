"""Effect of half precision on LayerNorm, RMSNorm, DynamicTanh and a folded BatchNorm.

    python benchmarks/half_precision.py --runs runs/half --out benchmarks/results/half.jsonl
    python benchmarks/half_precision.py --removed runs/minilm runs/antiberty --out MORE.jsonl
    python benchmarks/half_precision.py --show benchmarks/results/half.jsonl --plot half.svg

Language models are trained with each norm (the recipe `demo` of `lm`, pre-norm), then changed so
that they compute the same function while the residual stream is larger (`scale`), shifted
(`offset`, where the norm does not see it) or has features on unlike scales (`spread`, BatchNorm
alone). With --removed it is post-norm encoders of Hugging Face and what `studies/removal/run.py`
made of them, whose whole stream is larger. Outputs in half precision are compared with those in
float64. Errors do not depend on how busy the machine is.

The ways: `float16 runtime` is the exported graph with the norm written out and float16
accumulation in reductions, by ONNX's reference evaluator, as engines without a fused norm compute
it; `onnxruntime` and `openvino` run the same file on the CPU; `torch float16` and `torch bfloat16`
have torch's own kernels, which accumulate in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import powernorm
import powernorm_lab as lab
from powernorm.integrations.onnx import export

NORMS = ("ln", "rms", "dyt", "bn")
SEEDS = (0, 1, 2)
SCALES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
OFFSETS = (1, 3, 10, 30, 100, 300, 1000)
SPREADS = (1, 2, 3, 4)
"""Decades between the smallest and the largest feature, half of them below 1."""
ROWS, LENGTH = 2, 32
"""Size of the batch of validation text on which the errors are measured."""
BROKEN = 0.1
"""Relative error of the logits from which a model counts as broken, or infinite ones."""


class Written(nn.Module):
    """A norm in elementary operators, as converters without a fused one write it."""

    def __init__(self, norm: Any, eps: float, *, centers: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.eps, self.centers = eps, centers

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the normalized x."""
        del padding_mask  # the statistics are a token's
        if self.centers:
            x = x - x.mean(-1, keepdim=True)
        y: Tensor = x / ((x * x).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
        return y if self.bias is None else y + self.bias


def trained(runs: Path, seeds: tuple[int, ...]) -> Iterator[tuple[str, int, Any, Tensor]]:
    """Train what is missing; yield norm, seed, model in float64 and tokens."""
    changes = [f"norms={','.join(NORMS)}", f"seeds={','.join(map(str, seeds))},"]
    config = lab.override(
        lab.recipe("lm", "demo"), [*changes, "training.num_threads=1", "training.tid_batches=0"]
    )
    lab.compare(config, runs, resume=runs.exists())
    for norm in NORMS:
        for seed in seeds:
            found = lab.load_trained(runs / f"{norm}-pre-seed{seed}")
            batch = next(iter(lab.run_data(found.settings).evaluation("valid")))
            yield norm, seed, found.model.double().eval(), batch.named["tokens"][:ROWS, :LENGTH]


@torch.no_grad()
def changed(model: Any, by: Tensor, offset: float = 0.0) -> Any:
    """Return the same function with another residual stream.

    Args:
        model: pre-norm.
        by: what each feature of the stream is multiplied by, (features,); equal ones but for
            BatchNorm.
        offset: what is added to all features afterwards; for norms that do not see it.
    """
    model = deepcopy(model)
    model.head.weight = nn.Parameter(model.head.weight.clone())
    writers = [layer.attention.output for layer in model.layers]
    writers += [layer.feedforward[3] for layer in model.layers]
    for part in (model.embedding, model.positions):
        part.weight.mul_(by)
    model.positions.weight.add_(offset)
    for part in writers:
        part.weight.mul_(by[:, None])
        part.bias.mul_(by)
    for norm in model.modules():
        if isinstance(norm, powernorm.BatchNorm):
            # eps is added to a variance of this feature.
            norm.running_var.add_(norm.eps).mul_(by.square()).sub_(norm.eps)
            norm.running_mean.mul_(by).add_(offset)
        elif isinstance(norm, powernorm.DynamicTanh):
            norm.alpha.div_(by[0])
        elif isinstance(norm, powernorm.LayerNorm | powernorm.RMSNorm):
            norm.eps *= float(by[0]) ** 2
    return model


def written(model: nn.Module) -> nn.Module:
    """Return a copy whose LayerNorms and RMSNorms are elementary operators."""
    model = deepcopy(model)
    for name, norm in list(model.named_modules()):
        if isinstance(norm, powernorm.LayerNorm | powernorm.RMSNorm | nn.LayerNorm):
            centers = not isinstance(norm, powernorm.RMSNorm)
            model.set_submodule(name, Written(norm, norm.eps, centers=centers))
    return model


class Answer(nn.Module):
    """A BERT whose stream is `scale` times as large, as tokens to logits or to hidden states."""

    @torch.no_grad()
    def __init__(self, bert: Any, scale: float) -> None:
        super().__init__()
        self.bert, self.scale = deepcopy(bert), scale
        if (head := self.bert.get_output_embeddings()) is not None:
            head.weight = nn.Parameter(head.weight.clone())
        for name, part in self.bert.named_modules():
            if name.endswith(("output.dense", "_embeddings")):  # writes into the stream
                for parameter in part.parameters():
                    parameter.mul_(scale)
            elif name.endswith(
                (".query", ".key", ".value", "intermediate.dense", "transform.dense")
            ):
                part.weight.div_(scale)
            elif isinstance(part, nn.LayerNorm) and "transform" not in name:
                part.weight.mul_(scale)
                part.bias.mul_(scale)
                part.eps *= scale**2

    def forward(self, tokens: Tensor) -> Tensor:
        # The reference evaluator fails at the slice of zeros that is the default.
        found = self.bert(input_ids=tokens, token_type_ids=torch.zeros_like(tokens))
        # Hidden states are the stream itself.
        answer: Tensor = found.logits if "logits" in found else found[0] / self.scale
        return answer


def removed_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for the model of a study and for what its removal left, each scale and way."""
    import transformers

    sys.path.append(str(Path(__file__).parents[1] / "studies" / "removal"))
    import run as removal

    name = folder.name
    original = transformers.AutoModel if name == "minilm" else transformers.AutoModelForMaskedLM
    source = removal.PREPARATIONS[name](folder)
    text = (folder / "text/test.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    joined = tokenizer(" ".join(text[:50]), return_tensors="pt")["input_ids"]
    tokens = joined[:, : ROWS * LENGTH].reshape(ROWS, LENGTH)
    for norm in ("ln", "folded"):
        is_original = norm == "ln"
        folded = folder / "removal" / "model"
        bert = original.from_pretrained(source) if is_original else powernorm.load(folded)
        with torch.no_grad():
            exact = Answer(bert.double(), 1).eval()(tokens).numpy()
        for scale in SCALES:
            row = {"norm": f"{name}, {norm}", "scale": scale}
            yield from measured(Answer(bert, scale).eval(), tokens, exact, row)


def outputs(model: nn.Module, tokens: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each way with its logits; `model` is in float64."""
    for dtype in (torch.float16, torch.bfloat16):
        with torch.no_grad():
            logits = deepcopy(model).to(dtype)(tokens)
        yield f"torch {str(dtype).removeprefix('torch.')}", logits.double().numpy()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export(written(model).half().eval(), tokens).save(str(file))
        for name, run in ENGINES.items():
            with np.errstate(all="ignore"):
                yield name, run(file, tokens.numpy()).astype(np.float64)


def _reference(file: Path, tokens: np.ndarray) -> np.ndarray:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(file))
    (found,) = evaluator.run(None, {evaluator.input_names[0]: tokens})
    return np.asarray(found)


def _onnxruntime(file: Path, tokens: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: tokens})
    return np.asarray(found)


def _openvino(file: Path, tokens: np.ndarray) -> np.ndarray:
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f16"})
    return np.asarray(compiled([tokens])[0])


ENGINES: dict[str, Callable[[Path, np.ndarray], np.ndarray]] = {
    "float16 runtime": _reference,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def variants(norm: str, num_features: int) -> Iterator[tuple[dict[str, float], Tensor, float]]:
    """Yield what a row says of the stream, its factors and its offset."""
    ones = torch.ones(num_features, dtype=torch.float64)
    for scale in SCALES:
        yield {"scale": scale}, ones * scale, 0.0
    if norm in ("ln", "bn"):
        for offset in OFFSETS:
            yield {"offset": offset}, ones, float(offset)
    if norm == "bn":
        order = torch.randperm(num_features, generator=torch.Generator().manual_seed(0))
        for spread in SPREADS:
            exponents = torch.linspace(-spread / 2, spread / 2, num_features, dtype=torch.float64)
            yield {"spread": spread}, 10 ** exponents[order], 0.0


def own_rows(runs: Path, seeds: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each norm, seed, stream and way."""
    for norm, seed, model, tokens in trained(runs, seeds):
        with torch.no_grad():
            exact = model(tokens).numpy()
        for stream, by, offset in variants(norm, model.embedding.weight.shape[1]):
            same = changed(model, by, offset)
            if norm == "bn":
                same = powernorm.fold(same, tokens, tied="untie").model
            row = {"norm": "bn, folded" if norm == "bn" else norm, "seed": seed, **stream}
            yield from measured(same, tokens, exact, row)


def measured(
    model: nn.Module, tokens: Tensor, exact: np.ndarray, row: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the row of each way; `model`, in float64, computes what is exact."""
    with torch.no_grad():
        error = _error(model(tokens).numpy(), exact)
    if error > 1e-6:
        raise SystemExit(f"{row}: another function, by {error}")
    for way, logits in outputs(model, tokens):
        found = _error(logits, exact)
        error = float(f"{found:.3g}") if math.isfinite(found) else None
        yield {**row, "way": way, "error": error}


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def limits(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: the error as trained, and the scale from which a way is broken."""
    frame = pd.DataFrame(found).dropna(subset=["scale"]).fillna({"error": math.inf})
    ways = list(dict.fromkeys(frame["way"]))
    yield f"| norm | {' | '.join(ways)} |"
    yield "|---" * (len(ways) + 1) + "|"
    for norm in dict.fromkeys(frame["norm"]):
        cells = []
        for way in ways:
            own = frame[(frame["norm"] == norm) & (frame["way"] == way)]
            worst = own.groupby("scale")["error"].max()
            broken = worst[worst >= BROKEN]
            until = f"from {broken.index[0]:,.0f}" if len(broken) else "never"
            cells.append(f"{own[own['scale'] == 1]['error'].median():.1g}, {until}")
        yield f"| `{norm}` | {' | '.join(cells)} |"


def errors(found: list[dict[str, Any]], stream: str) -> Iterator[str]:
    """Yield a Markdown table of the median errors by offset or spread."""
    frame = pd.DataFrame(found).dropna(subset=[stream]).fillna({"error": math.inf})
    values = sorted(frame[stream].unique())
    yield f"| {stream} | | {' | '.join(f'{value:,.0f}' for value in values)} |"
    yield "|---" * (len(values) + 2) + "|"
    for way in ("float16 runtime", "torch float16", "torch bfloat16"):
        for norm in dict.fromkeys(frame["norm"]):
            own = frame[(frame["norm"] == norm) & (frame["way"] == way)]
            cells = [f"{error:.2g}" for error in own.groupby(stream)["error"].median()]
            yield f"| {way} | `{norm}` | {' | '.join(cells)} |"


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the error over the scale, a panel a way: median and range over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    frame = pd.DataFrame(found).dropna(subset=["scale"])
    ways = list(dict.fromkeys(frame["way"]))
    figure, axes = plt.subplots(2, 3, figsize=(8, 5), sharex=True, sharey=True)
    for panel, way in zip(axes.flat, ways, strict=False):
        for norm, own in frame[frame["way"] == way].groupby("norm", sort=False):
            by_scale = own.groupby("scale")["error"]
            (line,) = panel.plot(by_scale.median(), marker="o", markersize=3, label=norm)
            ends = by_scale.min(), by_scale.max()
            panel.fill_between(ends[0].index, *ends, alpha=0.2, color=line.get_color())
        panel.axhline(BROKEN, color="gray", linewidth=0.8, linestyle=":")
        panel.set(title=way, xscale="log", yscale="log")
        panel.minorticks_off()
    axes[1, 2].axis("off")
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center")
    figure.supxlabel("scale of the residual stream (lines end where logits are infinite)")
    figure.supylabel("relative error of the logits")
    figure.tight_layout()
    with mpl.rc_context({"svg.hashsalt": "powernorm", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/half"), help="of the models")
    parser.add_argument("--removed", type=Path, nargs="+", help="of the study, in place of --runs")
    parser.add_argument("--out", type=Path, help="measure; JSON lines")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--show", type=Path, metavar="ROWS", help="print tables of stored rows")
    parser.add_argument("--plot", type=Path, help="with --show: the picture")
    given = parser.parse_args()
    if given.out:
        warnings.simplefilter("ignore", UserWarning)
        rows = own_rows(given.runs, tuple(range(given.seeds)))
        if given.removed:
            rows = itertools.chain.from_iterable(map(removed_rows, given.removed))
        found = []
        for row in rows:
            print(row, flush=True)
            found.append(row)
        given.out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    if given.show:
        lines = given.show.read_text(encoding="utf-8").splitlines()
        stored = [json.loads(line) for line in lines]
        for lines in (limits(stored), errors(stored, "offset"), errors(stored, "spread")):
            print("\n".join(lines), end="\n\n")
        if given.plot:
            plot(stored, given.plot)


if __name__ == "__main__":
    main()

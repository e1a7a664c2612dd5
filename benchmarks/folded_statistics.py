"""Savings from folding the weights of norms whose statistics stay: parameters, operators, time.

    python benchmarks/folded_statistics.py --out benchmarks/results/folded_statistics.jsonl
    python benchmarks/folded_statistics.py --operators   # count only: the same everywhere

Small random models of transformers, one sequence of 128 tokens, in torch, inductor and onnxruntime.
All models of an engine are timed in turn, so that ratios hold on a busy machine as well, as far as
anything does there: minima and medians are stored.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import powernorm
from powernorm.integrations.onnx import export
from speed.timing import interleave

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "max_position_embeddings": 256,
}
LENGTH = 128


class Logits(nn.Module):
    """A language model from tokens to logits, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def build(name: str) -> nn.Module:
    """Return a random model whose norms do not have their initial values."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return Logits(model).eval()


def without_weights(model: nn.Module) -> nn.Module:
    """Return a folded model without the weights of its norms, if all of them are neutral."""
    bare = copy.deepcopy(model)
    for norm in powernorm.inspection.find_norms(bare):
        bias = getattr(norm.module, "bias", None)
        if bias is not None and bool(bias.any()):
            continue
        reading = norm.reading
        assert reading is not None
        assert bool((norm.module.weight == 1).all())
        kind = nn.LayerNorm if reading.kind == "layer" else nn.RMSNorm
        made = kind(reading.num_features, eps=reading.eps, elementwise_affine=False)
        for name in norm.names:
            bare.set_submodule(name, made)
    return bare


def variants(name: str, ids: Tensor) -> tuple[dict[str, nn.Module], int]:
    """Return the model before and after, and the number of weights and biases without effect."""
    model = build(name)
    report = powernorm.fold(model, ids, keep="statistics", inplace=False)
    found = {
        "before": model,
        "folded": report.model,
        "folded, weights removed": without_weights(report.model),
    }
    if name == "GPTNeoX":
        found["folded, centered"] = powernorm.fold(
            model, ids, keep="statistics", centering="weights", inplace=False
        ).model
    return found, report.plan.num_neutral


def calls(
    engine: str, models: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by model."""
    if engine == "onnxruntime":
        return {name: _session(export(model, ids), ids) for name, model in models.items()}
    runs = {
        name: torch.compile(copy.deepcopy(model)) if engine == "inductor" else model
        for name, model in models.items()
    }

    def timed(model: Any) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return model(ids)

        return call

    return {name: timed(model) for name, model in runs.items()}


def _session(program: Any, ids: Tensor) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {session.get_inputs()[0].name: ids.numpy()}
    return lambda: session.run(None, given)


def operators(model: nn.Module, ids: Tensor) -> dict[str, int]:
    """Return how often each operator is in the exported graph."""
    graph = export(model, ids).model_proto.graph
    return dict(Counter(node.op_type for node in graph.node).most_common())


def count(name: str) -> list[dict[str, Any]]:
    """Return the rows of one model without times."""
    ids = torch.randint(SIZES["vocab_size"], (1, LENGTH))
    models, neutral = variants(name, ids)
    rows = []
    for one, model in models.items():
        kinds = operators(model, ids)
        row = {
            "model": name,
            "features": SIZES["hidden_size"],
            "variant": one,
            "neutral": neutral,
            "operators": sum(kinds.values()),
            "kinds": kinds,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def measure(name: str, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    ids = torch.randint(SIZES["vocab_size"], (1, LENGTH))
    models, neutral = variants(name, ids)
    counts = {one: operators(model, ids) for one, model in models.items()}
    rows = []
    for engine in ("torch", "inductor", "onnxruntime"):
        steps = calls(engine, models, ids)
        wanted = torch.as_tensor(steps["before"]()[0])
        for one, step in steps.items():
            gap = (torch.as_tensor(step()[0]) - wanted).abs().max() / wanted.abs().max()
            assert gap < 1e-4, (name, engine, one, float(gap))
        samples = interleave(steps, seconds=seconds)
        for one, found in samples.items():
            base = samples["before"]
            row = {
                "model": name,
                "engine": engine,
                "variant": one,
                "neutral": neutral,
                "operators": sum(counts[one].values()),
                "kinds": counts[one],
                "calls": len(found),
                "min_ms": round(min(found) * 1e3, 3),
                "median_ms": round(statistics.median(found) * 1e3, 3),
                "min_ratio": round(min(found) / min(base), 3),
                "median_ratio": round(statistics.median(found) / statistics.median(base), 3),
            }
            rows.append(row)
            shown = {key: value for key, value in row.items() if key != "kinds"}
            print(json.dumps(shown), flush=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each model and engine")
    parser.add_argument("--operators", action="store_true", help="count operators, time nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON lines")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run = count if given.operators else partial(measure, seconds=given.seconds)
    rows = [row for name in ("GPTNeoX", "Llama") for row in run(name)]
    if given.out is not None:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

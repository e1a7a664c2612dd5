"""Small trained encoders in the runtimes of phones: operators by kind, and errors.

    python benchmarks/edge.py --runs runs/edge --programs edge        # what torch.export traces
    edge-executorch/bin/python benchmarks/edge.py --engine executorch --programs edge --out ROWS
    python benchmarks/edge.py --show benchmarks/results/edge.jsonl

An engine runs in an environment of its own, which has no powernorm: `pip install torch==2.13.0`
and `executorch`, `litert-torch` or `coremltools`. The models classify film reviews (the recipe
`smoke` of `classify`: one layer of 32 features, 40 steps), in float32 and float16. What does not
convert or run is a row with the message.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NORMS = ("ln", "rms", "dyt", "bn")
ROWS, LENGTH = 2, 16
"""Sizes of the example for which the programs are made."""
PARTS = ("layer_norm", "mean", "rsqrt", "tanh")
"""Parts of the names of operators that norms become."""


def write_programs(runs: Path, folder: Path) -> None:
    """Export the models, with tokens and exact logits."""
    import powernorm
    import powernorm_lab as lab

    folder.mkdir(parents=True, exist_ok=True)
    changes = [f"norms={','.join(NORMS)}", "seeds=0,"]
    lab.compare(lab.override(lab.recipe("classify", "smoke"), changes), runs, resume=runs.exists())
    for norm in NORMS:
        found = lab.load_trained(runs / f"{norm}-pre-seed0")
        batch = next(iter(lab.run_data(found.settings).evaluation("valid")))
        tokens = batch.named["tokens"][:ROWS, :LENGTH]
        model = found.model.double().eval()
        exact = model(tokens).detach()
        name = norm
        if norm == "bn":
            name, model = "bn, folded", powernorm.fold(model, tokens, tied="untie").model
        for dtype in (torch.float32, torch.float16):
            program = torch.export.export(model.to(dtype), (tokens,))
            file = folder / f"{norm}-{str(dtype).removeprefix('torch.')}.pt2"
            torch.export.save(program, file)
            torch.save((name, tokens, exact), file.with_suffix(".pt"))


def executorch(program: Any, tokens: Tensor, file: Path) -> tuple[list[str], Tensor]:
    """Convert with XNNPACK as far as it can, and run; a delegate is one operator."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    calls = [node for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    names = [str(getattr(node.target, "__name__", "")) for node in calls]
    file.write_bytes(edge.to_executorch().buffer)
    method = Runtime.get().load_program(str(file)).load_method("forward")
    return [name for name in names if name != "getitem"], method.execute([tokens])[0]


def litert(program: Any, tokens: Tensor, file: Path) -> tuple[list[str], Tensor]:
    """Convert, and run in LiteRT's interpreter."""
    import litert_torch
    from ai_edge_litert.interpreter import Interpreter

    litert_torch.convert(program.module(), (tokens,)).export(str(file))
    runner = Interpreter(str(file))
    runner.allocate_tensors()
    (given,), (found,) = runner.get_input_details(), runner.get_output_details()
    runner.set_tensor(given["index"], tokens.numpy().astype(given["dtype"]))
    runner.invoke()
    names = [one["op_name"] for one in runner._get_ops_details()]
    return [name for name in names if name != "DELEGATE"], torch.tensor(
        runner.get_tensor(found["index"])
    )


def coreml(program: Any, tokens: Tensor, file: Path) -> tuple[list[str], None]:
    """Convert; it runs only on macOS."""
    import coremltools

    del tokens, file
    model = coremltools.convert(program.run_decompositions({}))
    operators = model._mil_program.functions["main"].operations
    return [one.op_type for one in operators if one.op_type != "const"], None


ENGINES: dict[str, tuple[Callable[..., tuple[list[str], Tensor | None]], str]] = {
    "executorch": (executorch, "executorch"),
    "litert": (litert, "litert-torch"),
    "coreml": (coreml, "coremltools"),
}


def rows(engine: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each program."""
    run, package = ENGINES[engine]
    for file in sorted(folder.glob("*.pt2")):
        norm, tokens, exact = torch.load(file.with_suffix(".pt"))
        row = {"engine": engine, "version": version(package), "norm": norm}
        row["dtype"] = file.stem.split("-")[-1]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                names, found = run(torch.export.load(file), tokens, Path(scratch) / "model")
            except (RuntimeError, ValueError) as error:
                message = str(error).strip().splitlines()[0]
                yield {**row, "failed": message.split("error: ")[-1]}
                continue
        error = None
        if found is not None:
            error = float(f"{float((found - exact).norm() / exact.norm()):.3g}")
        yield {**row, "error": error, "operators": dict(Counter(names).most_common())}


def table(found: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the lines of a table: operators, those of norms, delegates, the error."""
    head = ("engine", "type", "norm", "operators", "norm, mean, root, tanh", "delegates", "error")
    yield head
    for row in found:
        start = (f"{row['engine']} {row['version']}", row["dtype"], f"`{row['norm']}`")
        if "failed" in row:
            yield (*start, "does not convert", "", "", "")
            continue
        counts = row["operators"]
        norms = sum(n for name, n in counts.items() if any(p in name.lower() for p in PARTS))
        delegates = counts.get("executorch_call_delegate", "")
        error = "not run" if row["error"] is None else f"{row['error']:.1g}"
        yield (*start, sum(counts.values()), norms, delegates, error)


def main() -> None:
    """Export, measure or show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="of the models: write --programs")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help="measure; needs --programs and --out")
    parser.add_argument("--out", type=Path, help="JSON lines, appended to")
    parser.add_argument("--show", type=Path, metavar="ROWS", help="print stored rows as CSV")
    given = parser.parse_args()
    if given.runs:
        write_programs(given.runs, given.programs)
    if given.engine:
        warnings.simplefilter("ignore")
        with given.out.open("a", encoding="utf-8") as file:
            for row in rows(given.engine, given.programs):
                print({key: row[key] for key in row if key != "operators"}, flush=True)
                file.write(json.dumps(row) + "\n")
    if given.show:
        stored = map(json.loads, given.show.read_text(encoding="utf-8").splitlines())
        csv.writer(sys.stdout, lineterminator="\n").writerows(table(list(stored)))


if __name__ == "__main__":
    main()

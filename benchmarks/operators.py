"""Operators of encoders with LayerNorm, RMSNorm, DynamicTanh and none, by kind and precision.

    python benchmarks/operators.py --out benchmarks/results/operators.jsonl

Six layers of 384 features, pre-norm and post-norm, as the preset `removal` of `bench.py` has them;
each as exported, as quantized, and as onnxruntime rewrites it for the processor. Nothing is timed,
so the rows are the same on every quiet or busy machine of one kind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speed.costs import COMPILED_FEATURES, INPUTS, PRECISIONS, RIVALS
from speed.encoders import SIZES, OnnxFiles, build_encoders
from speed.int8_example import count_operators, optimized_graph, read_graph


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each encoder, rival, precision and stage."""
    for size in (size for size in SIZES if size.features == COMPILED_FEATURES):
        models = build_encoders(size, RIVALS)
        with tempfile.TemporaryDirectory() as folder:
            files = OnnxFiles(models, Path(folder))
            for rival in models:
                for precision in PRECISIONS["onnxruntime"]:
                    file = files.path(rival, INPUTS, precision)
                    graphs = {"file": read_graph(file), "onnxruntime": optimized_graph(file)}
                    for stage, graph in graphs.items():
                        yield {
                            "placement": size.placement,
                            "rival": rival,
                            "precision": precision,
                            "stage": stage,
                            "bytes": file.stat().st_size,
                            **asdict(count_operators(graph)),
                        }


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    out: Path = parser.parse_args().out
    found = []
    for row in rows():
        print({key: value for key, value in row.items() if key != "by_type"}, flush=True)
        found.append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()

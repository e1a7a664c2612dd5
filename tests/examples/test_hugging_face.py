"""examples/hugging_face.py runs as its first lines say, on made-up texts and on a CSV file."""

from __future__ import annotations

import csv
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

pytestmark = [
    # torch's own: its exporter to ONNX, and its loader on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hugging_face.py"))


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_classifier_from_texts_to_onnx(
    made: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Callable[..., Any] = EXAMPLE["main"]
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *EXAMPLE["made_up"]()])
    main("" if made else str(tmp_path / "reviews.csv"))
    printed = capsys.readouterr().out
    assert "5 of 5 norms change to rbn" in printed
    epochs = re.findall(r"epoch \d+: accuracy ([\d.]+)", printed)
    assert len(epochs) < 12, "it stops early"
    assert f"best, loaded: accuracy {max(epochs, key=float)}" in printed
    assert max(map(float, epochs)) > 0.9
    assert re.search(r"means: \d\.\d+\n", printed)
    assert "loaded, equal scores" in printed
    assert "folded: no norm is left, equal scores" in printed
    error = re.search(r"ONNX: relative error ([\de.-]+)", printed)
    assert error
    assert float(error[1]) < 1e-5

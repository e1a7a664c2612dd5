"""examples/speech.py runs as its first lines say, on made-up and on real utterances' format."""

from __future__ import annotations

import lzma
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")

# torch's own: its exporter to ONNX.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "speech.py"))


def write(path: Path) -> None:
    """Utterances in the format of Japanese Vowels, with a header."""
    lines = ["# Japanese Vowels", "@dimensions 12", "@data"]
    for features, speaker in EXAMPLE["made_up"](90):
        dimensions = [",".join(f"{value:.6f}" for value in row) for row in features.T.tolist()]
        lines.append(":".join([*dimensions, str(speaker + 1)]))
    with lzma.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True])
def test_a_conformer_from_diagnosis_to_export(
    made: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Callable[..., Any] = EXAMPLE["main"]
    write(tmp_path / "vowels.ts.xz")
    main("" if made else str(tmp_path / "vowels.ts.xz"), epochs=4)
    printed = capsys.readouterr().out
    assert "verdict: " in printed
    assert "layers.0.batch_norm  batch  swap    bn    layers.0.key_padding_mask" in printed
    before = re.search(r"padding changes outputs by ([\d.]+)", printed)
    after = re.search(r"differs from the same alone by ([\de.-]+)", printed)
    assert before
    assert after
    assert float(after[1]) < 1e-4 < float(before[1])
    assert "torch.export: equal" in printed
    error = re.search(r"ONNX: relative error ([\de.-]+)", printed)
    assert error
    assert float(error[1]) < 1e-5


def test_the_format_is_read(tmp_path: Path) -> None:
    write(tmp_path / "vowels.ts.xz")
    found, wanted = EXAMPLE["read"](tmp_path / "vowels.ts.xz"), EXAMPLE["made_up"](90)
    assert [speaker for _, speaker in found] == [speaker for _, speaker in wanted]
    for (one, _), (other, _) in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)

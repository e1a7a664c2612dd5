"""Examples by task run as their first lines say, and what they print holds."""

from __future__ import annotations

import io
import json
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from surgery import foreign_models

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    return capsys.readouterr().out


def number(pattern: str, text: str) -> float:
    found = re.search(pattern + r" ([-\d.e]+)", text)
    assert found, text
    return float(found[1])


def test_a_tagger_is_swapped_trained_folded_and_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("tagger", capsys)
    assert "4 of 4 norms change to rbn" in printed
    assert number("accuracy", printed) > 0.9
    assert number("alone differs by", printed) < 1e-5
    assert number("largest difference", printed) < 1e-4


@pytest.mark.slow
def test_an_encoder_decoder_writes_the_same_when_its_encoder_is_folded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    printed = printed_by("translate", capsys)
    assert number("right with BatchNorm:", printed) > 0.9
    assert "the same sequences: True" in printed


@pytest.mark.slow
def test_a_vision_transformer_is_exported_without_norms(capsys: pytest.CaptureFixture[str]) -> None:
    foreign_models.timm()
    printed = printed_by("vision", capsys)
    assert number("accuracy with BatchNorm:", printed) > 0.9
    assert number("accuracy folded:", printed) == number("accuracy with BatchNorm:", printed)
    operators = number("exported graph:", printed.replace(",", ""))
    assert number("exported graph: .* folded", printed) < operators


@pytest.mark.slow
def test_layer_norm_leaves_a_gpt2(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("powernorm_lab")
    printed = printed_by("removal", capsys)
    assert number("loss without:", printed) < number("loss with LayerNorm:", printed) + 0.15
    assert number("class differs by", printed) < 1e-4


def test_the_notebook_shows_what_its_cells_print(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        with redirect_stdout(io.StringIO()) as shown:
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), names)
        stored = "".join(
            "".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream"
        )
        # Rounding differs between processors.
        assert re.sub(r"\d[-\d.e]*", "#", shown.getvalue()) == re.sub(r"\d[-\d.e]*", "#", stored)

"""`powernorm export` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import SMALL, Outcome, powernorm
from integrations.tiny_encoder import TEXTS, write_encoder
from powernorm.cli.export import USABLE_COSINE
from powernorm.integrations.extras import EXTRAS

for _package in EXTRAS["export"]:
    pytest.importorskip(_package)

MODELS = """
import torch
from torch import nn

import powernorm

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    return model.append(nn.Linear(16, 3)), [torch.randn(4, 5, 16) for _ in range(30)]

def static():
    model, batches = build()
    powernorm.swap(model, to="bn")
    powernorm.calibrate(model, batches)
    return model, batches

def unlike():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(16, 16), stack)
    batches = [torch.randn(4, 5, 16) for _ in range(30)]
    powernorm.swap(model, to="bn")
    powernorm.calibrate(model, batches)
    with torch.no_grad():
        # The stream before it holds this feature, and all that is written to it, 1e-9 times.
        stack.layers[-1].norm2.weight[3] = 1e-9
    return model, batches

def ruined():
    # The difference of two features is what counts, and far below a step of int8.
    layer = nn.Linear(16, 3)
    batches = [torch.randn(4, 5, 16) for _ in range(30)]
    with torch.no_grad():
        layer.weight[:, 1] = -layer.weight[:, 0]
        for batch in batches:
            batch[..., 0] = batch[..., 1] = 1e4 * batch[..., 2]
    return nn.Sequential(layer), batches

class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

def untraceable():
    return Branching(4, 4), [torch.randn(2, 4) for _ in range(2)]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


def report(outcome: Outcome, file: Path) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    assert f"{file.stem}.json" in outcome.out
    found: dict[str, Any] = json.loads(file.with_suffix(".json").read_text())
    return found


def outputs(file: Path, *inputs: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(["output"], dict(zip(names, inputs, strict=True)))[0]


def test_static_norms_fold_and_everything_is_computed_in_integers(home: Path) -> None:
    import numpy

    given = ("export", "my_models:static", "--int8", "--static", "all", "--out", "x.onnx")
    outcome = powernorm(home, *given, fresh=True)
    found = report(outcome, home / "x.onnx")
    assert "Sequential: 2 norms folded, 0 left" in outcome.out
    assert "x.onnx: int8, static, all operators" in outcome.out
    assert (found["folded"], found["left"], found["fixed"]) == (2, {}, None)
    assert found["float_error"] < 1e-5
    assert found["agreement"]["error"] < 0.1
    assert "warning" not in outcome.out
    assert found["agreement"]["inputs"] == "batches of my_models:static"
    assert found["agreement"]["vectors"] == 8 * 4 * 5
    assert found["exported"]["quantize"] > found["optimized"]["quantize"]
    assert (found["optimized"]["floating"], found["optimized"]["norms"]) == (0, 0)
    assert found["optimized"]["integer"] > 10
    assert found["bytes"] == (home / "x.onnx").stat().st_size
    assert found["inputs"] == {"input": ["batch", "length", 16]}
    # Others than those of the example.
    assert outputs(home / "x.onnx", numpy.zeros((1, 9, 16), "float32")).shape == (1, 9, 3)
    assert {path.name for path in home.iterdir()} >= {"x.onnx", "x.json"}
    assert not [path for path in home.iterdir() if path.name.startswith(".x-")]


def test_a_file_that_int8_has_ruined_is_warned_of(home: Path) -> None:
    outcome = powernorm(home, "export", "my_models:ruined", "--int8", "--out", "x.onnx", fresh=True)
    found = report(outcome, home / "x.onnx")
    assert found["agreement"]["cosine"] < USABLE_COSINE
    assert "warning: int8 has lost what the model computes. Quantize less" in outcome.out


@pytest.mark.parametrize("static", [(), ("--static", "matmul"), ("--static", "all")])
def test_norms_folded_on_the_stream_leave_int8_usable(home: Path, static: tuple[str, ...]) -> None:
    given = ("export", "my_models:unlike", "--int8", *static, "-q", "--out", "x.onnx")
    found = report(powernorm(home, *given), home / "x.onnx")
    assert found["folded"] == 4
    assert found["float_error"] < 1e-5
    assert found["agreement"]["cosine"] > 0.99


def test_layer_norms_stay_or_are_matched(home: Path) -> None:
    kept = powernorm(home, "export", "my_models:build", "--fixed", "-q", "--out", "sub/kept.onnx")
    found = report(kept, home / "sub" / "kept.onnx")
    assert kept.err == ""
    assert list(found["left"]) == ["0.layers.0.norm1", "0.layers.0.norm2"]
    assert found["exported"]["norms"] == 2
    assert found["inputs"] == {"input": [4, 5, 16]}
    assert found["agreement"] is None
    matched = powernorm(home, "export", "my_models:build", "--match", "--out", "matched.onnx")
    found = report(matched, home / "matched.onnx")
    assert (found["matched"], found["folded"], found["left"]) == (2, 2, {})
    assert found["exported"]["norms"] == 0
    assert 0.001 < found["with_original"]["error"] < 0.5
    assert "matched model against the original: error" in matched.out


def test_a_hugging_face_folder(home: Path) -> None:
    import numpy

    write_encoder(home / "bert")
    (home / "text.txt").write_text("\n\n".join(TEXTS * 8))
    given = ("export", "bert", "--int8", "--data", "text.txt", "--out", "bert.onnx")
    found = report(powernorm(home, *given), home / "bert.onnx")
    # A mask of one row would be broadcast: its batch is a size of its own.
    masks = ["attention_mask_batch", "length"]
    assert found["inputs"] == {"input_ids": ["batch", "length"], "attention_mask": masks}
    assert found["agreement"]["inputs"] == "batches of text.txt"
    assert found["agreement"]["cosine"] > 0.99
    assert found["exported"]["integer"] > 5
    ids, mask = numpy.ones((3, 7), "int64"), numpy.ones((3, 7), "int64")
    assert outputs(home / "bert.onnx", ids, mask).shape == (3, 7, 16)
    without = powernorm(home, *given[:3], "--static", "all", "--out", "bert.onnx")
    assert without.code == 2
    assert "error: bert comes without a text: give one, --data TEXT" in without.err


def test_a_run_and_what_fold_made_of_it(home: Path, text_file: Path) -> None:
    runs = ("compare", "lm", "--preset", "smoke", "--norms", "bn", "--data", text_file, *SMALL)
    assert powernorm(home, *runs).code == 0
    run = home / "runs" / "lm-smoke" / "bn-pre-seed0"
    found = report(powernorm(home, "export", run, "--int8", "--out", "run.onnx"), home / "run.onnx")
    assert found["folded"] > 0
    assert found["left"] == {}
    assert found["agreement"]["same_largest"] > 0.8
    assert powernorm(home, "fold", run, "--out", "folded").code == 0
    again = report(powernorm(home, "export", "folded", "--out", "again.onnx"), home / "again.onnx")
    assert (again["folded"], again["left"]) == (0, {})
    assert again["exported"]["norms"] == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (("nothing", "--out", "x.onnx"), "nothing does not exist: give the folder"),
        (("my_models:build", "--out", "x.pt"), "x.pt is no name of an ONNX file"),
        (("my_models:build", "--static", "all", "--out", "x.onnx"), "add --int8"),
        (
            ("my_models:build", "--int8", "--static", "half", "--out", "x.onnx"),
            "--static is 'half', expected matmul or all",
        ),
        (("my_models:build", "--data", "rt", "--out", "x.onnx"), "leave out --data"),
        (("my_models:untraceable", "--match", "--out", "x.onnx"), "leave out --match"),
    ],
)
def test_bad_input(home: Path, given: tuple[str, ...], match: str) -> None:
    outcome = powernorm(home, "export", *given, "-q")
    assert match in outcome.refused()
    assert not (home / "x.onnx").exists()


def test_a_failure_leaves_what_was_there(home: Path) -> None:
    (home / "x.onnx").write_text("mine")
    refused = powernorm(home, "export", "my_models:untraceable", "-q", "--out", "x.onnx").refused()
    assert "cannot trace Branching on the example inputs" in refused
    assert (home / "x.onnx").read_text() == "mine"
    assert sorted(path.suffix for path in home.iterdir() if path.name.startswith("x")) == [".onnx"]

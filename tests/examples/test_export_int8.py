"""examples/export_int8.py runs as its first lines say, on small models."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import some_default
from integrations.tiny_encoder import TEXTS, write_encoder
from powernorm.errors import InputError

for _package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(_package)

# torch's own: its exporter to ONNX.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "export_int8.py"))
MAIN: Callable[[list[str]], dict[str, Any]] = EXAMPLE["main"]
RUN = ROOT / "packages/lab/tests/frozen/releases" / "0.2.0" / "runs" / "lm" / "rbn-pre-seed0"
MODELS = """
import torch
from torch import nn

import powernorm

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    return model.append(nn.Linear(16, 3)), [torch.randn(4, 5, 16) for _ in range(30)]

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
    torch.manual_seed(0)
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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "export_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs(file: str, *inputs: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(["output"], dict(zip(names, inputs, strict=True)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_default(["dynamic", "matmul", "all"], "all"))
def test_norms_folded_on_the_stream_leave_int8_usable(kind: str, home: Path) -> None:
    import numpy

    found = MAIN(["export_models:unlike", "--int8", kind, "--out", "x.onnx"])
    assert (found["folded"], found["left"], found["fixed"]) == (4, {}, None)
    assert found["float_error"] < 1e-5
    assert found["agreement"]["cosine"] > 0.99
    assert found["agreement"]["vectors"] == 8 * 4 * 5
    assert found["optimized"]["norms"] == 0
    assert found["optimized"]["integer"] > 5
    assert found["inputs"] == {"input": ["batch", "length", 16]}
    assert found["bytes"] == (home / "x.onnx").stat().st_size
    # Others than those of the example.
    assert outputs("x.onnx", numpy.zeros((1, 9, 16), "float32")).shape == (1, 9, 16)
    assert json.loads((home / "x.json").read_text()) == found
    assert {file.name for file in home.iterdir()} >= {"x.onnx", "x.json"}
    assert [file for file in home.iterdir() if file.is_dir() and file.name != "__pycache__"] == []


@pytest.mark.slow
def test_a_run_gives_the_numbers_that_the_command_gave() -> None:
    """Numbers of the command that this example replaced, on a stored run."""
    found = MAIN([str(RUN), "--int8", "matmul", "--out", "lm.onnx"])
    assert (found["folded"], found["left"]) == (3, {})
    assert found["agreement"]["vectors"] == 256
    assert found["agreement"]["error"] == pytest.approx(0.03464, rel=0.05)
    assert found["agreement"]["cosine"] == pytest.approx(0.99945, abs=1e-4)
    counted = {"operators": 98, "norms": 0, "quantize": 17, "dequantize": 23, "floating": 25}
    assert {name: found["exported"][name] for name in counted} == counted


@pytest.mark.slow
def test_layer_norms_stay_or_are_matched() -> None:
    found = MAIN(["export_models:build", "--fixed", "--out", "sub/kept.onnx"])
    assert (found["inputs"], found["fixed"]) == ({"input": [4, 5, 16]}, "asked for")
    assert list(found["left"]) == ["0.layers.0.norm1", "0.layers.0.norm2"]
    assert (found["exported"]["norms"], found["agreement"]) == (2, None)
    found = MAIN(["export_models:build", "--match", "--out", "matched.onnx"])
    assert (found["matched"], found["folded"], found["left"]) == (2, 2, {})
    assert found["exported"]["norms"] == 0
    assert 0.001 < found["with_original"]["error"] < 0.5


@pytest.mark.slow
def test_a_hugging_face_folder(home: Path) -> None:
    import numpy

    write_encoder(home / "bert")
    (home / "text.txt").write_text("\n\n".join(TEXTS * 8))
    given = ["bert", "--int8", "dynamic", "--data", "text.txt", "--out", "bert.onnx"]
    found = MAIN(given)
    # A mask of one row would be broadcast: its batch is a size of its own.
    masks = ["attention_mask_batch", "length"]
    assert found["inputs"] == {"input_ids": ["batch", "length"], "attention_mask": masks}
    assert found["agreement"]["cosine"] > 0.99
    ids, mask = numpy.ones((3, 7), "int64"), numpy.ones((3, 7), "int64")
    assert outputs("bert.onnx", ids, mask).shape == (3, 7, 16)
    with pytest.raises(InputError, match="bert comes without a text: give one, --data TEXT"):
        MAIN(["bert", "--out", "other.onnx"])


def test_a_file_that_int8_has_ruined_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    found = MAIN(["export_models:ruined", "--int8", "dynamic", "--out", "x.onnx"])
    assert found["agreement"]["cosine"] < EXAMPLE["USABLE_COSINE"]
    assert capsys.readouterr().err.startswith("warning: int8 has lost what the model computes.")


def test_a_failure_leaves_what_was_there(home: Path) -> None:
    (home / "x.onnx").write_text("mine")
    with pytest.raises(InputError, match=r"torch\.export cannot trace"):
        MAIN(["export_models:untraceable", "--out", "x.onnx"])
    assert (home / "x.onnx").read_text() == "mine"
    with pytest.raises(SystemExit, match="leave out --match"):
        MAIN(["export_models:untraceable", "--match", "--out", "x.onnx"])


def agreement(wanted: Tensor, found: Tensor, *more: Tensor) -> dict[str, Any]:
    """Return the agreement of given outputs, for one batch; `more` is its padding mask."""

    class Says(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            del x, padding_mask
            return wanted

    call = EXAMPLE["TensorCall"](Says(), (torch.zeros(1), *more))
    agreed: dict[str, Any] = EXAMPLE["agreement"](lambda _: found, call, [call.example])
    return agreed


def test_rows_are_vectors_and_padding_does_not_count() -> None:
    wanted = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    found = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    whole = agreement(wanted, found)
    assert (whole["vectors"], whole["cosine"], whole["same_largest"]) == (2, 0.5, 0.5)
    assert whole["error"] == pytest.approx(math.sqrt(2 / 26))
    masked = agreement(wanted, found, torch.tensor([[False, True]]))
    assert (masked["vectors"], masked["cosine"], masked["error"]) == (1, 1.0, 0.0)
    nothing = agreement(wanted, found, torch.tensor([[True, True]]))
    assert (nothing["vectors"], nothing["error"]) == (0, 0.0)


def test_a_number_for_each_row_is_one_vector() -> None:
    found = agreement(torch.ones(3), 2 * torch.ones(3))
    assert (found["vectors"], found["cosine"], found["error"]) == (1, pytest.approx(1.0), 1.0)


def test_zeros_and_infinities() -> None:
    assert agreement(torch.zeros(2, 3), torch.zeros(2, 3))["error"] == 0
    ruled_out = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert agreement(ruled_out, ruled_out)["cosine"] == pytest.approx(1)
    # Not a good agreement, whatever it is compared with.
    assert math.isnan(agreement(torch.ones(2, 3), torch.full((2, 3), torch.nan))["cosine"])


def test_batches_have_the_arguments_of_the_first() -> None:
    x = torch.randn(2, 3)
    call = EXAMPLE["TensorCall"](nn.Linear(3, 3), {"x": x, "mask": x})
    assert call.tensors_of({"mask": x, "x": x})[0] is x
    with pytest.raises(SystemExit, match="batches differ in mask: all need the same"):
        call.tensors_of({"x": x})

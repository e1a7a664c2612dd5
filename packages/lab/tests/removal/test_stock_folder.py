"""`powernorm_lab.remove(…, stock=True)`: a folder that transformers loads without powernorm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab.tests.removal.test_removing import SHORT, norms_in, own, pretrained, refused

import powernorm_lab as lab
from powernorm.integrations.onnx import export, largest_error
from powernorm_lab.removal.removing import Removed

SMALL = ("data.batch_size=4", "data.sequence_length=8", "training.validation_tokens=64")


def removed(tmp_path: Path, head: str, method: str) -> Removed:
    folder, text = pretrained(tmp_path, head)
    settings = [*SHORT, *SMALL, f"method.name={method}"]
    return lab.remove(
        folder, tmp_path / "out", data=str(text), settings=settings, stock=True, quiet=True
    )


def test_pre_norm_model_is_handed_over_and_folded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = removed(tmp_path, "GPT2LMHeadModel", "match-centered")
    assert done.is_folded
    assert done.stock is not None
    assert norms_in(done.model) == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.stock).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.stock)
    inputs = tokenizer(["war pace tor war"], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, done.model(**inputs).logits)
    result = json.loads((done.folder / "result.json").read_text())
    assert [row["dtype"] for row in result["stock_errors"]] == ["torch.float64", "torch.float32"]
    assert result["stock_errors"][0]["relative"] < 1e-6
    assert "Loaded by transformers" in done.report.read_text()
    assert (done.stock / "removal.json").is_file()


def test_post_norm_model_that_cannot_fold_is_handed_over_alone(tmp_path: Path) -> None:
    done = removed(tmp_path, "BertForMaskedLM", "freeze")
    assert not done.is_folded
    assert not (done.folder / "model").exists()
    assert type(done.model).__module__.startswith("transformers.")
    result = json.loads((done.folder / "result.json").read_text())
    assert "fold" not in result
    assert result["metrics"]["valid_loss"] > 0
    page = done.report.read_text()
    assert "4 norms of the model&#39;s class divide by a constant" in page


def test_what_the_class_cannot_hold_is_refused_before_the_training(tmp_path: Path) -> None:
    folder, text = pretrained(tmp_path, "GPT2LMHeadModel")
    out = tmp_path / "out"
    message = refused(folder, out, data=str(text), settings=[*SHORT, *SMALL], stock=True)
    assert "method.name=match-centered or freeze" in message
    assert not out.exists()
    message = refused(own(), out, settings=SHORT, stock=True)
    assert "is not a model of transformers" in message


@pytest.mark.slow
def test_exported_graph_has_no_operator_of_a_norm(tmp_path: Path) -> None:
    """The ONNX graph of the folded model has neither LayerNorm nor its parts."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import transformers

    done = removed(tmp_path, "GPT2LMHeadModel", "match-centered")
    original = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model").eval()
    example = {"input_ids": torch.arange(4).repeat(2, 2), "use_cache": False}
    kinds = {}
    for name, model in (("original", original), ("without", done.model)):
        program = export(model, example)
        assert largest_error(program, model, example) < 1e-5
        kinds[name] = [node.op_type for node in program.model_proto.graph.node]
    parts = ("ReduceMean", "Sqrt", "Div", "Reciprocal", "Pow", "Sub")
    assert kinds["original"].count("LayerNormalization") == 3
    assert "LayerNormalization" not in kinds["without"]
    for part in parts:
        assert kinds["without"].count(part) <= kinds["original"].count(part)
    assert not {"ReduceMean", "Sqrt", "Reciprocal"} & set(kinds["without"])

"""Small files that are copied from a model's folder into that of the result."""

import json
from pathlib import Path

from powernorm.integrations.folded_pretrained import copy_companions


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_neither_weights_nor_what_is_written_anew(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for name in ("vocab.txt", "config.json", "model.safetensors", "rust_model.ot", "64.tflite"):
        (source / name).write_text("x")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("x")
    copy_companions(source, out)
    assert written(out) == ["vocab.txt"]


def test_parts_of_sentence_transformers(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "1_Pooling").mkdir(parents=True)
    (source / "2_Dense").mkdir()
    out.mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "2_Dense" / "model.safetensors").write_text("x")
    paths = ["", "1_Pooling", "2_Dense", "../elsewhere", "3_Normalize"]
    (source / "modules.json").write_text(json.dumps([{"path": path} for path in paths]))
    copy_companions(source, out)
    copy_companions(source, out)
    assert written(out) == ["1_Pooling/config.json", "2_Dense/model.safetensors", "modules.json"]

"""The mechanics of the study on a tiny encoder and a few steps; its figures are in docs/."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import powernorm
from powernorm.errors import InputError
from powernorm.surgery.structure import FoldedNorm

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SCRIPT = Path(__file__).parents[2] / "studies" / "minilm" / "run.py"
WORDS = [f"{a}{b}" for a in ("wa", "pe", "to", "mi", "lu") for b in ("r", "ace", "day", "nd", "n")]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minilm_study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A folder with a random BERT and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path / "encoder"
    BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sentences() -> dict[str, list[str]]:
    rows = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 9)) for i in range(120)]
    return {"train": rows[:80], "valid": rows[80:100], "test": rows[100:]}


def run(study: ModuleType, folder: Path, out: Path, steps: int) -> dict[str, Any]:
    model, tokenizer = study.load_encoder(folder)
    settings = study.Settings(
        steps=steps, batch_size=8, fit_batches=4, eval_batches=2, learning_rate=3e-3
    )
    return study.run(model, tokenizer, sentences(), settings, out, latency_seconds=0.01)


def test_from_layer_norm_to_none(study: ModuleType, encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run(study, encoder, out, steps=12)
    assert results["steps"] == 12
    assert results["norms_left"] == 0
    assert results["curve"][0]["mean_cosine"] > 0.9
    assert results["curve"][-1]["mean_cosine"] > results["curve"][0]["mean_cosine"]
    errors = {name: relative for name, _, relative in results["fold_errors"]}
    assert errors["torch.float64"] <= 1e-12
    assert errors["torch.float32"] <= 2e-5
    assert [row["batch"] for row in results["latency_ms"]] == [1, 1, 16]
    assert json.loads((out / "results.json").read_text())["test"]["sentences"] == 12
    fresh, _ = study.load_encoder(encoder)
    powernorm.load(out / "folded", fresh)
    assert sum(isinstance(module, FoldedNorm) for module in fresh.modules()) == 5
    assert not [module for module in fresh.modules() if isinstance(module, nn.LayerNorm)]


def test_goes_on_where_it_stopped(study: ModuleType, encoder: Path, tmp_path: Path) -> None:
    run(study, encoder, tmp_path / "out", steps=4)
    results = run(study, encoder, tmp_path / "out", steps=8)
    assert results["steps"] == 8
    assert [row["step"] for row in results["curve"]] == [0, 1, 2, 3, 4, 6, 8]


def test_folder_without_a_model(study: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        study.load_encoder(tmp_path)

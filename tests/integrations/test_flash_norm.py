"""The keys by which loaders leave out the weights of RMSNorms that were folded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from commands import refusal
from powernorm.cli import main

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def written(folder: Path, *, tied: bool, gemma: bool = False) -> Path:
    """A tiny model whose norms have weights of their own."""
    torch.manual_seed(0)
    model = (
        Gemma2ForCausalLM(Gemma2Config(**SIZES, tie_word_embeddings=tied))
        if gemma
        else LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    model.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("tied", "keys"), [(False, ["flash_norm", "flashnorm_folded"]), (True, ["flash_norm"])]
)
def test_what_is_folded_is_said(
    tied: bool, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm in front of a tied head keeps its weights."""
    folder, out = written(tmp_path, tied=tied), tmp_path / "out"
    arguments = ["powernorm", "fold", str(folder), "--keep", "statistics", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*arguments, "--flash-norm"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert [key for key in ("flash_norm", "flashnorm_folded") if config.get(key)] == keys
    ids = torch.arange(12)[None]
    folded, original = (LlamaForCausalLM.from_pretrained(one).double() for one in (out, folder))
    assert torch.allclose(folded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-6)
    norms = [module for name, module in folded.named_modules() if "norm" in name]
    assert sum(bool((norm.weight == 1).all()) for norm in norms) == len(norms) - tied


def test_it_is_refused_where_it_would_not_be_true(tmp_path: Path) -> None:
    gemma = written(tmp_path, tied=True, gemma=True)  # its norms multiply by 1 + weight
    fold = ("fold", gemma, "--out", tmp_path / "out", "--flash-norm")
    assert "has weights other than 1" in refusal(tmp_path, *fold, "--keep", "statistics")
    assert not (tmp_path / "out").exists()
    assert "--flash-norm needs a Hugging Face folder and --keep statistics" in refusal(
        tmp_path, *fold
    )

"""Files that the study of packages reads and writes, with small synthetic packages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from powernorm.errors import InputError

transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "studies" / "removal" / "run.py"
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
GENES = {
    "V": {
        "H": {
            "human": {f"IGHV{i}*0{j}": f"QV{RESIDUES[i]}-LV" for i in range(20) for j in (1, 2)},
            "cow": {"IGHV1*01": "EV-Q"},
        },
        "K": {},
        "L": {"rat": {"IGLV1*01": "QS"}},
        "A": {"human": {"TRAV1*01": "GQ"}},
    },
    "J": {"H": {"human": {"a": "--WG", "b": "--YG", "c": "--FG"}, "cow": {"a": "WW"}}, "L": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("removal_study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def packages(folder: Path) -> None:
    """Write two packages as installed, with the files that the study reads."""
    weights = folder / "antiberty" / "trained_models" / "AntiBERTy_md_smooth"
    weights.mkdir(parents=True)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES)
    (weights.parent / "vocab.txt").write_text("\n".join(words))
    config = transformers.BertConfig(
        vocab_size=25, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, architectures=["AntiBERTy"],
    )  # fmt: skip
    described = {**config.to_dict(), "architectures": ["AntiBERTy"], "model_type": "bert"}
    (weights / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    state = transformers.BertForMaskedLM(config).state_dict()
    torch.save({**state, "cls.species.weight": torch.zeros(6, 16)}, weights / "pytorch_model.bin")
    (folder / "anarci").mkdir()
    (folder / "anarci" / "germlines.py").write_text(f"all_germlines = {GENES}\n")
    for name in ("anarci", "antiberty"):
        (folder / name / "__init__.py").write_text("raise SystemExit('is never run')\n")


def test_packages_become_a_model_and_texts(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    out = tmp_path / "out"
    folder = study.antiberty(out)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    saved = torch.load(
        tmp_path / "site/antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("A Y")["input_ids"] == [2, 5, 24, 3]
    texts = {
        split: (out / "text" / f"{split}.txt").read_text().split("\n")[:-1]
        for split in study.SPLITS
    }
    lines = [line for part in texts.values() for line in part]
    assert len(lines) == 80  # a gene with no J gene, T cells and cows are not there
    assert all(line.startswith("Q V ") and line.endswith("G") for line in lines)
    third = [{line.split()[2] for line in texts[split]} for split in study.SPLITS]
    assert third[0].isdisjoint(third[1] | third[2])  # alleles of a gene are in one split
    assert set((out / "other" / "test.txt").read_text().split("\n")) == {"E V Q W W", ""}


def test_package_that_is_missing_is_named(study: ModuleType) -> None:
    with pytest.raises(InputError, match="no_such is missing: pip install --no-deps it"):
        study.package("no_such", "it")


def test_other_text_is_sentences(study: ModuleType) -> None:
    from itertools import islice

    found = list(islice(study.docstring_sentences(), 200))
    assert all(20 <= len(sentence) <= 400 for sentence in found)
    assert not any("\n" in sentence for sentence in found)

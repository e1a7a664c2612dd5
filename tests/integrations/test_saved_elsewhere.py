"""Swapped models in the files of other libraries: the loaded state, or the way that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import powernorm
from integrations.tiny_encoder import TEXTS, write_encoder
from powernorm.errors import InputError
from powernorm.norms import BatchNorm
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, SMALL, VOCABULARY, WIDTH, run, transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]


def swapped_bert(folder: Path) -> nn.Module:
    """BERT with `bn` after some batches, and what `powernorm.save` wrote of it."""
    model, _ = FAMILIES["bert"]()
    powernorm.swap(model, "bn")
    train(model)
    powernorm.save(model, folder)
    return model


def train(model: nn.Module) -> None:
    for extra in (0, 2):
        run(model.train(), PADDED["bert"](extra))
    model.eval()


class TestPeft:
    """An adapter's file holds what it trains, and statistics only where it is told so."""

    def saved_adapter(self, peft: Any, model: Any, config: Any, folder: Path) -> Any:
        """A trained adapter that is the same after loading."""
        adapted = peft.get_peft_model(model, config)
        train(adapted)
        expected = run(adapted, PADDED["bert"](1))
        adapted.save_pretrained(folder / "adapter")
        again = peft.PeftModel.from_pretrained(
            powernorm.load(folder / "base"), folder / "adapter"
        ).eval()
        assert torch.equal(run(again, PADDED["bert"](1)), expected)
        return adapted

    def test_norms_among_the_modules_to_save(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = swapped_bert(tmp_path / "base")
        config = peft.LoraConfig(
            target_modules=["query", "value"],
            modules_to_save=["LayerNorm"],
            init_lora_weights=False,
        )
        adapted = self.saved_adapter(peft, model, config, tmp_path)
        with pytest.raises(InputError, match="modules_to_save naming the norms; or save what mer"):
            powernorm.save(adapted, tmp_path / "all")
        merged = adapted.merge_and_unload()
        powernorm.save(merged, tmp_path / "merged")
        loaded = powernorm.load(tmp_path / "merged")
        assert torch.equal(run(loaded, PADDED["bert"](1)), run(merged.eval(), PADDED["bert"](1)))

    def test_frozen_statistics_need_no_place_in_the_file(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = swapped_bert(tmp_path / "unfrozen")
        powernorm.freeze_statistics(model)
        powernorm.save(model, tmp_path / "base")
        config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
        self.saved_adapter(peft, model, config, tmp_path)


def test_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = write_encoder(tmp_path / "encoder")

    def build() -> Any:
        return library.SentenceTransformer(modules=[Transformer(str(encoder)), Pooling(16)])

    model = build()
    powernorm.swap(model, "bn")
    model.train()(model.preprocess(TEXTS[:8]))
    expected = model.eval().encode(TEXTS[:4])
    powernorm.save(model, tmp_path / "saved")
    loaded = powernorm.load(tmp_path / "saved", build())
    assert (loaded.encode(TEXTS[:4]) == expected).all()  # type: ignore[operator]
    # Its own file has LayerNorms when it is read, and the record that puts the norms back.
    model.save(str(tmp_path / "own"))
    own = library.SentenceTransformer(str(tmp_path / "own"))
    assert abs(own.encode(TEXTS[:4]) - expected).max() > 0.1
    own[0].model = powernorm.load(tmp_path / "own", own[0].model)
    assert (own.encode(TEXTS[:4]) == expected).all()


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(5, VOCABULARY, (6,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(6) < 6 - index % 3).long()
        ids = ids.masked_fill(mask == 0, SMALL["pad_token_id"])
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_bert() -> nn.Module:
    hf = transformers()
    torch.manual_seed(0)
    config = hf.BertConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def trainer(folder: Path, steps: int) -> Any:
    hf = transformers()
    model = masked_bert()
    powernorm.swap(model, "bn")
    arguments = hf.TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, eval_steps=2, logging_steps=2,
        eval_strategy="steps", load_best_model_at_end=True, per_device_train_batch_size=4,
        learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True, save_total_limit=None,
    )  # fmt: skip
    return hf.Trainer(
        model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences()
    )


def test_checkpoints_of_the_trainer(tmp_path: Path) -> None:
    """It finds its own weights again, and `powernorm.load` the model of each checkpoint."""
    whole = trainer(tmp_path / "whole", 6)
    whole.train()
    resumed = trainer(tmp_path / "resumed", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert whole.state.best_model_checkpoint is not None
    state, other = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []
    best = powernorm.load(whole.state.best_model_checkpoint)
    state = best.state_dict()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert "powernorm" in json.loads((checkpoint / "config.json").read_text())
    first = powernorm.load(checkpoint)
    assert isinstance(first.bert.encoder.layer[0].output.LayerNorm, BatchNorm)
    (tmp_path / "whole" / "checkpoint-2" / "model.safetensors").write_bytes(b"broken")
    refuses("is damaged", powernorm.load, checkpoint)


def test_a_checkpoint_of_the_trainer_without_its_head(tmp_path: Path) -> None:
    """AutoModel builds it with LayerNorms; loaded, it is the model that was trained."""
    hf = transformers()
    trainer(tmp_path, 2).train()
    folder = tmp_path / "checkpoint-2"
    whole = powernorm.load(folder)
    base = hf.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    assert not isinstance(base.embeddings.LayerNorm, BatchNorm)
    loaded = powernorm.load(folder, base)
    assert loaded is base
    batch = {name: value[None] for name, value in Sentences()[1].items() if name != "labels"}
    expected = whole.bert(**batch).last_hidden_state
    assert torch.equal(loaded(**batch).last_hidden_state, expected)
    head = hf.AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(powernorm.load(folder, head)(**batch).logits, whole(**batch).logits)
    with pytest.raises(InputError, match=r"lacks pooler.*such as add_pooling_layer=False"):
        powernorm.load(folder, hf.AutoModel.from_pretrained(folder))


def test_lightning(tmp_path: Path) -> None:
    """A module that swaps while it is built comes back; another one is an error, not LayerNorms."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, swaps: bool = True) -> None:
            super().__init__()
            self.model = masked_bert()
            if swaps:
                powernorm.swap(self.model, "bn")

    module = Module()
    train(module.model)
    path = tmp_path / "module.ckpt"
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6"}, path)
    inputs = PADDED["bert"](1)
    loaded = Module.load_from_checkpoint(path).eval()
    assert torch.equal(run(loaded.model, inputs), run(module.model, inputs))
    with pytest.raises(RuntimeError, match="running_mean"):
        Module.load_from_checkpoint(path, swaps=False)

"""Statistics of evaluations and checkpoints during training: measured again, and nothing else."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import powernorm
from powernorm.errors import InputError
from powernorm.integrations.huggingface import TrainerCalibrateCallback
from powernorm.integrations.lightning import CalibrateCallback
from refusals import refuses

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def bert() -> Any:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.1,
        )
    )
    # So slow and so far off that evaluations would be of no use.
    powernorm.swap(model, to="bn", start="torch", momentum=0.01)
    return model


def sentences(number: int = 40) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for label in torch.randint(2, (number,), generator=generator).tolist():
        words = torch.randint(20 * label, 20 * label + 20, (8,), generator=generator)
        mask = torch.arange(8) < torch.randint(3, 9, (1,), generator=generator)
        rows.append({"input_ids": words, "attention_mask": mask.long(), "labels": label})
    return rows


def trained(
    folder: Path, callbacks: Any = None, model: Any = None, **options: Any
) -> tuple[Trainer, Any]:
    """The Trainer after its training, and its callback."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 6}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **{**settings, **options},
    )
    trainer = Trainer(
        model=model or bert(), args=arguments, train_dataset=sentences(), eval_dataset=sentences(8)
    )
    made = None
    for build in callbacks or ():
        trainer.add_callback(made := build(trainer))
    trainer.train()
    return trainer, made


def assert_calibrated(model: Any, batches: Any, forward: Any = None) -> None:
    expected = deepcopy(model)
    powernorm.calibrate(expected, batches, forward)
    torch.testing.assert_close(statistics(model), statistics(expected))


def calibrating(trainer: Trainer) -> TrainerCallback:
    return TrainerCalibrateCallback(trainer, 3)


def test_trainer_evaluates_and_saves_by_statistics_measured_anew(tmp_path: Path) -> None:
    trainer, callback = trained(tmp_path, [calibrating])
    assert len(callback._batches) == 3
    for step in (2, 4, 6):
        saved = bert()
        saved.load_state_dict(load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors"))
        assert_calibrated(saved.eval(), callback._batches)
        losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
        with torch.no_grad():
            loss = saved(**trainer.data_collator(sentences(8))).loss
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
    assert_calibrated(trainer.model, callback._batches)


def test_trainer_trains_as_without_the_callback(tmp_path: Path) -> None:
    """Batches are drawn without moving the random numbers of order and dropout."""
    plain, _ = trained(tmp_path / "plain")
    ours, _ = trained(tmp_path / "ours", [calibrating])
    for one, other in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_trainer_calibrates_at_the_end_and_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    module = "powernorm.integrations.huggingface.calibrate"
    real = powernorm.calibrate

    def counted(model: Any, *args: Any, **options: Any) -> Any:
        steps.append(int(model.bert.embeddings.LayerNorm.num_batches_tracked))
        return real(model, *args, **options)

    monkeypatch.setattr(module, counted)
    trained(tmp_path, [calibrating], eval_strategy="epoch", save_strategy="no", max_steps=7)
    assert steps == [5, 7]


def test_the_best_model_keeps_the_statistics_it_was_chosen_by(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, [calibrating], load_best_model_at_end=True)
    best = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in best.items())


def test_trainer_callback_that_cannot_work(tmp_path: Path) -> None:
    refuses(r"trainer is None.*CalibrateCallback", TrainerCalibrateCallback, None)
    with pytest.raises(InputError, match="num_batches is 0"):
        trained(tmp_path, [lambda trainer: TrainerCalibrateCallback(trainer, 0)])
    with pytest.raises(InputError, match="no layer"):
        trained(tmp_path, [calibrating], model=BertForSequenceClassification(bert().config))


def test_trainer_measures_batch_norms_of_torch(tmp_path: Path) -> None:
    model = BertForSequenceClassification(bert().config)
    model.bert.pooler.activation = nn.Sequential(nn.BatchNorm1d(8, momentum=0.01), nn.Tanh())
    trainer, callback = trained(tmp_path, [calibrating], model=model)
    assert_calibrated(trainer.model, callback._batches)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = powernorm.BatchNorm(4, momentum=0.01, start="torch")
        self.model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, *_: Any) -> None:
        self.seen.append(float(self.model[1].running_var.mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(module: Module, batch: Any) -> Any:
    return module.model(batch[0])


def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (0.01 * torch.randn(16, 4, generator=generator), torch.arange(16) % 2)
        for _ in range(number)
    ]


def fitted(
    folder: Path, callback: pl.Callback, norm: nn.Module | None = None, **options: Any
) -> Module:
    module = Module()
    module.model[1] = norm or module.model[1]
    data: Any = pairs(5)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=[callback, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    loader = DataLoader(data, batch_size=None)
    trainer.fit(module, loader, loader)
    return module


def test_lightning_validates_and_saves_by_statistics_measured_anew(tmp_path: Path) -> None:
    module = fitted(tmp_path, CalibrateCallback(2, forward=run))
    assert_calibrated(module, pairs(5)[-2:], run)
    assert module.seen[-1] == pytest.approx(float(module.model[1].running_var.mean()))
    for step in (2, 4):
        saved = Module()
        state = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)["state_dict"]
        saved.load_state_dict(state)
        assert_calibrated(saved, pairs(5)[step - 2 : step], run)


def test_lightning_measures_batch_norms_of_torch(tmp_path: Path) -> None:
    module = fitted(tmp_path, CalibrateCallback(2, forward=run), norm=nn.BatchNorm1d(4))
    assert isinstance(module.model[1], nn.BatchNorm1d)
    assert_calibrated(module, pairs(5)[-2:], run)


@pytest.mark.parametrize("steps", [3, 5])
def test_lightning_calibrates_at_the_end(tmp_path: Path, steps: int) -> None:
    module = fitted(
        tmp_path, CalibrateCallback(1, forward=run), max_steps=steps, limit_val_batches=0
    )
    assert_calibrated(module, pairs(5)[steps - 1 : steps], run)


def test_lightning_callback_that_cannot_work() -> None:
    refuses("num_batches is -1", CalibrateCallback, -1)
    refuses("forward is 3", CalibrateCallback, forward=3)
    without = Module()
    without.model[1] = nn.Identity()
    refuses("no layer", CalibrateCallback(2).on_train_start, pl.Trainer(logger=False), without)

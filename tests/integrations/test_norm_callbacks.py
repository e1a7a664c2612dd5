"""The life of the callbacks' hooks, over several trainings of a model that is compiled."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import powernorm
from powernorm.integrations.huggingface import TrainerNormCallback
from powernorm.integrations.lightning import NormCallback
from powernorm.norms import BatchNorm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), BatchNorm(4)
        self.fails = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.linear(x))
        if self.fails:
            raise RuntimeError("in the middle")
        return {"loss": (y - x).square().mean()}


class Module(pl.LightningModule):
    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def hooks_of(model: nn.Module) -> int:
    return sum(len(layer._forward_pre_hooks) for layer in model.modules())


def fit(model: Network, callback: NormCallback, folder: Path) -> str:
    """Logged entries, as text."""
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        max_epochs=1,
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = list(torch.randn(2, 8, 4))
    trainer.fit(Module(model), DataLoader(data, batch_size=None))
    return (folder / "metrics.csv").read_text()


def test_lightning_model_that_was_given_is_trained_twice(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Network()
    callback = NormCallback(1, model=model)
    model.compile(backend="eager")
    for name in ("first", "second"):
        text = fit(model, callback, tmp_path / name)
        assert "norm/norm/mean_tid" in text
        assert len(text.splitlines()) == 3  # a header, two updates
        assert hooks_of(model) == 1
        model(torch.randn(8, 4))
        assert callback._monitor is not None
        assert not callback._monitor._records
    callback.detach()
    callback.detach()
    assert hooks_of(model) == 0
    torch.compiler.reset()


def test_lightning_model_that_was_given_stays_watched_after_an_exception(tmp_path: Path) -> None:
    model = Network()
    callback = NormCallback(1, model=model)
    model.fails = True
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(model, callback, tmp_path / "fails")
    monitor = callback._monitor
    assert monitor is not None
    assert monitor.finish_step(0) == []
    assert not monitor._records
    model.fails = False
    assert "norm/norm/mean_tid" in fit(model, callback, tmp_path / "again")


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.arange(4.0) * (index + 1)}


def trainer_of(folder: Path, save_strategy: str = "no", **model: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy=save_strategy,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return Trainer(args=arguments, train_dataset=Rows(), **model)


def test_a_checkpoint_says_which_norms_the_model_has(tmp_path: Path) -> None:
    """The Trainer writes the weights of a model that is not Hugging Face's, and nothing else."""
    model = Network()
    trainer = trainer_of(tmp_path, model=model, save_strategy="epoch")
    trainer.add_callback(TrainerNormCallback(trainer))
    trainer.train()
    loaded = powernorm.load(tmp_path / "checkpoint-2", Network())
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in loaded.state_dict().items())


def observed_steps(trainer: Trainer) -> list[int]:
    return [e["step"] for e in trainer.state.log_history if "norm/norm/mean_tid" in e]


def test_trainers_model_is_trained_twice(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Network()
    trainer = trainer_of(tmp_path, model=model)
    trainer.add_callback(callback := TrainerNormCallback(trainer))
    model.compile(backend="eager")
    for _ in range(2):
        trainer.train()
        assert observed_steps(trainer) == [1, 2]
        assert hooks_of(model) == 1
    callback.detach()
    assert hooks_of(model) == 0
    torch.compiler.reset()


def test_trainer_begins_anew_after_an_exception(tmp_path: Path) -> None:
    model = Network()
    trainer = trainer_of(tmp_path, model=model)
    trainer.add_callback(callback := TrainerNormCallback(trainer, 2))
    monitor = callback._monitor
    assert monitor is not None
    monitor.start_step(0)  # as an exception in an observed step leaves it
    model(torch.randn(8, 4))
    trainer.train()
    assert callback._monitor is monitor
    assert observed_steps(trainer) == [2]


def test_hooks_go_from_a_model_that_the_trainer_made(tmp_path: Path) -> None:
    made: list[Network] = []

    def make() -> Network:
        made.append(Network())
        return made[-1]

    trainer = trainer_of(tmp_path, model_init=make)
    trainer.add_callback(TrainerNormCallback(trainer))
    for _ in range(2):
        trainer.train()
        assert observed_steps(trainer) == [1, 2]
        assert [hooks_of(model) for model in made] == [0] * len(made)

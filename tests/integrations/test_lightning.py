from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from regularized_models import (
    LEARNING_RATE,
    Batch,
    Classifier,
    assert_same_state,
    batches,
    by_hand,
    cross_entropy_sum,
    mean_of_means,
    mean_tid_by_hand,
    num_labels,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import powernorm
from powernorm.diagnosis import NormRow
from powernorm.integrations.lightning import (
    LossScaleFollower,
    NormCallback,
    PenaltyCallback,
)
from powernorm.norms import BatchNorm
from powernorm.records import NORMS_COLUMNS
from refusals import refuses

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found 2 module.* in eval mode"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*is a wrapper over"),
    # Lightning's own, of torch's internals
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


class Module(pl.LightningModule):
    def __init__(self, model: Classifier, *, token_sum: bool = False) -> None:
        super().__init__()
        self.model = model
        self.token_sum = token_sum
        self.losses: list[float] = []
        self.valid_losses: list[float] = []

    def loss_of(self, batch: Batch) -> Tensor:
        logits = self.model.logits(batch["x"], batch["labels"] == -100)
        loss = cross_entropy_sum(logits, batch["labels"])
        return loss if self.token_sum else loss / num_labels(batch)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return self.loss_of(batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Batch, _: int) -> None:
        self.valid_losses.append(float(self.loss_of(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)


def loader(data: list[dict[str, Tensor]]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def fit(
    module: pl.LightningModule,
    callbacks: list[pl.Callback],
    data: list[dict[str, Tensor]],
    folder: Path,
    *,
    valid: list[dict[str, Tensor]] | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )
    trainer.fit(
        module,
        loader(data),
        None if valid is None else loader(valid),
        ckpt_path=ckpt_path,
        weights_only=False,
    )
    return trainer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_tokens", ["labels", num_labels])
def test_update_equals_one_written_by_hand(
    tmp_path: Path, accumulation: int, num_tokens: Any
) -> None:
    model, data = Classifier(), batches(6)
    updates = [data[i : i + accumulation] for i in range(0, 6, accumulation)]
    expected = by_hand(model, updates, mean_of_means)
    module = Module(model)
    fit(
        module,
        [PenaltyCallback(num_tokens)],
        data,
        tmp_path,
        accumulate_grad_batches=accumulation,
    )
    assert_same_state(model, expected)


def test_token_sum(tmp_path: Path) -> None:
    model, data = Classifier(), batches(4)
    for parameter in model.parameters():
        parameter.data /= 2
    expected = by_hand(model, [data[:2], data[2:]], lambda update, _: 1 / len(update))
    callback = PenaltyCallback(reduction="token_sum")
    fit(Module(model, token_sum=True), [callback], data, tmp_path, accumulate_grad_batches=2)
    assert_same_state(model, expected)


class Scaled(MixedPrecision):
    """Autocast off: only the scale matters here."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def test_scaled_loss(tmp_path: Path) -> None:
    model, data = Classifier(), batches(4)
    expected = by_hand(model, [data[:2], data[2:]], mean_of_means)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = Scaled("16-mixed", "cpu", scaler)
    callback = PenaltyCallback("labels")
    fit(
        Module(model),
        [callback],
        data,
        tmp_path,
        accumulate_grad_batches=2,
        plugins=[plugin],
    )
    assert scaler.get_scale() == 1024.0
    assert_same_state(model, expected)


class Skips(Module):
    """Leaves out the second batch, which is spoilt."""

    def training_step(self, batch: Batch, index: int) -> Tensor | None:  # type: ignore[override]
        if index == 1:
            batch = {**batch, "x": batch["x"] * float("nan")}
        loss = super().training_step(batch, index)
        return loss if loss.isfinite() else None

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_skipped_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    model, data = Classifier(), batches(3)
    expected = by_hand(model, [data[:1], data[2:]], mean_of_means)
    fit(Skips(model), [PenaltyCallback("labels")], data, tmp_path)
    assert_same_state(model, expected)


def test_loss_scale_is_followed_in_any_module(tmp_path: Path) -> None:
    plain, module = Module(Classifier("pn")), Module(Classifier("pn"))
    data = batches(4)
    fit(plain, [], data, tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    plugin = Scaled("16-mixed", "cpu", scaler)
    fit(module, [LossScaleFollower(module, scaler)], data, tmp_path, plugins=[plugin])
    assert scaler.get_scale() == 1024.0 * 2**4
    for name in ("lower", "upper"):
        expected = plain.model.get_submodule(name).running_gradient_moment
        assert expected.abs().max() > 0
        found = module.model.get_submodule(name).running_gradient_moment
        torch.testing.assert_close(found, expected)


def test_logged_and_validation_losses_have_no_penalty(tmp_path: Path) -> None:
    plain, module = Module(Classifier()), Module(Classifier())
    data = batches(2)
    fit(plain, [], data[:1], tmp_path, valid=data)
    fit(module, [PenaltyCallback("labels")], data[:1], tmp_path, valid=data)
    assert module.losses == plain.losses
    module.model.eval()
    expected = [module.loss_of(batch).item() for batch in data]
    assert module.valid_losses == pytest.approx(expected, rel=1e-12)
    assert module.valid_losses != pytest.approx(plain.valid_losses, rel=1e-3)


def test_model_without_such_layers_is_left_alone(tmp_path: Path) -> None:
    plain, module = Module(Classifier("bn")), Module(Classifier("bn"))
    data = batches(3)
    fit(plain, [], data, tmp_path)
    # Nor are its tokens counted.
    fit(module, [PenaltyCallback(lambda _: 1)], data, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_frozen_layers_add_nothing(tmp_path: Path) -> None:
    def frozen() -> Module:
        module = Module(Classifier())
        for layer in (module.model.lower, module.model.upper):
            layer.num_batches_tracked.fill_(1)
            layer.freeze_statistics()
        return module

    plain, module = frozen(), frozen()
    data = batches(3)
    fit(plain, [], data, tmp_path)
    fit(module, [PenaltyCallback("labels")], data, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_resumed_run_is_the_same(tmp_path: Path) -> None:
    data = batches(6)
    straight = Module(Classifier())
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    fit(straight, [PenaltyCallback("labels"), NormCallback(1)], data, tmp_path, **options)
    first = Module(Classifier())
    trainer = fit(
        first,
        [PenaltyCallback("labels"), NormCallback(1)],
        data,
        tmp_path,
        **{**options, "max_epochs": 1},
    )
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = Module(Classifier())
    fit(
        second,
        [PenaltyCallback("labels"), NormCallback(1)],
        data,
        tmp_path,
        ckpt_path=tmp_path / "half.ckpt",
        **options,
    )
    assert_same_state(second, straight)


def logged(folder: Path) -> list[dict[str, float]]:
    import csv

    with (folder / "metrics.csv").open() as file:
        rows = [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return [row for row in rows if any(key.startswith("norm/") for key in row)]


@pytest.mark.parametrize("early", [False, True])
def test_tid_is_logged(tmp_path: Path, early: bool) -> None:
    module = Module(Classifier())
    data = batches(10)
    callback = NormCallback(2, model=module if early else None)
    reference = copy.deepcopy(module)
    fit(
        module,
        [callback],
        data,
        tmp_path,
        logger=CSVLogger(tmp_path, name="", version=""),
        accumulate_grad_batches=2,
    )
    rows = logged(tmp_path)
    # Five updates of two micro-batches; the second and the fourth are due.
    assert [row["step"] for row in rows] == [2, 4]
    # What it was given stays watched for the next training.
    assert any(layer._forward_pre_hooks for layer in module.modules()) == early
    callback.detach()
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    # The second update by hand: the mean over its micro-batches, against statistics after it.
    fit(reference, [], data[:2], tmp_path, accumulate_grad_batches=2)
    expected = mean_tid_by_hand(reference.model.lower, data[2:4])
    assert rows[0]["norm/model.lower/mean_tid"] == pytest.approx(expected)
    assert rows[0]["norm/model.upper/num_nonfinite_batches"] == 0
    assert {key.rsplit("/", 1)[1] for key in rows[0] if key.startswith("norm/")} == {
        "mean_tid",
        "var_tid",
        "mean_distance",
        "var_distance",
        "num_nonfinite_batches",
        "gradient_norm",
        "mean_gradient_norm",
        "var_gradient_norm",
        "token_gradient_mean",
        "token_gradient_var",
        "nonfinite_input",
        "nonfinite_gradient",
        "first_nonfinite",
    }


def test_incomplete_last_update_is_logged_too(tmp_path: Path) -> None:
    module = Module(Classifier("pnv"))
    logger = CSVLogger(tmp_path, name="", version="")
    fit(module, [NormCallback(1)], batches(5), tmp_path, logger=logger, accumulate_grad_batches=2)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "norm/model.lower/mean_tid" not in rows[0]  # it does not center


def test_hooks_are_gone_after_an_exception(tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Batch, index: int) -> Tensor:
            if index:
                raise RuntimeError("in the middle")
            return super().training_step(batch, index)

    module = Fails(Classifier())
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(module, [NormCallback(1)], batches(3), tmp_path)
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_rows_go_to_a_function_too(tmp_path: Path) -> None:
    seen: list[NormRow] = []
    halves: list[NormRow] = []
    for rows, scale in ((seen, 1.0), (halves, 2.0)):
        callback = NormCallback(2, on_rows=rows.extend, loss_scale=scale)
        fit(Module(Classifier()), [callback], batches(5), tmp_path)
    assert [(row["step"], row["layer"]) for row in seen] == [
        (step, f"model.{name}") for step in (2, 4) for name in ("lower", "upper")
    ]
    assert set(seen[0]) == set(NORMS_COLUMNS)
    # Nothing below the lower one has a gradient.
    for whole, half in zip(seen[1::2], halves[1::2], strict=True):
        assert 2 * half["gradient_norm"] == pytest.approx(whole["gradient_norm"])  # type: ignore[operator]
        assert half["mean_tid"] == whole["mean_tid"]


class Manual(Module):
    def __init__(self, model: Classifier) -> None:
        super().__init__(model)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "num_tokens", "message"),
    [
        (Manual, "labels", "Manual optimizes manually"),
        (Module, "targets", "num_tokens is 'targets', but the batch, a dict, has no"),
    ],
)
def test_bad_configuration(
    tmp_path: Path, module: type[Module], num_tokens: str, message: str
) -> None:
    refuses(message, fit, module(Classifier()), [PenaltyCallback(num_tokens)], batches(2), tmp_path)


def test_bad_arguments() -> None:
    refuses("reduction='mean' needs num_tokens", PenaltyCallback)
    refuses("'token_sum' does not use num_tokens", PenaltyCallback, "labels", reduction="token_sum")
    refuses("reduction is 'sum'", PenaltyCallback, "labels", reduction="sum")
    refuses("num_tokens is 3, expected a function", PenaltyCallback, 3)
    for every in (0, "often", 2.5, None):
        refuses(f"every is {every!r}, expected a number of steps", NormCallback, every)
    refuses("on_rows is 3, expected a function", NormCallback, on_rows=3)
    refuses("loss_scale is 0", NormCallback, loss_scale=0)
    refuses("model is 3", NormCallback, model=3)


def test_compiled_model_has_to_be_given_before(tmp_path: Path) -> None:
    model = nn.Sequential(BatchNorm(4))
    NormCallback(1, model=model)
    compiled = torch.compile(model, backend="eager")
    refuses("before torch", NormCallback, 1, model=compiled)
    module = Module(Classifier())
    module.model.lower.compile(backend="eager")
    refuses("before torch", fit, module, [NormCallback(1)], batches(2), tmp_path)


def test_attribute_of_the_batch() -> None:
    class Packed:
        labels = torch.tensor([1, -100, 3])

    callback = PenaltyCallback("labels")
    nothing: Any = None
    callback.on_train_batch_start(nothing, Module(Classifier()), Packed(), 0)
    assert int(callback._count()) == 2
    assert powernorm.penalty(nn.Linear(2, 2), "token_sum") == 0


def test_gradients_are_logged_without_the_loss_scale(tmp_path: Path) -> None:
    rows = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        folder = tmp_path / str(scale)
        fit(
            Module(Classifier()),
            [NormCallback(1)],
            batches(3),
            tmp_path,
            logger=CSVLogger(folder, name="", version=""),
            plugins=[Scaled("16-mixed", "cpu", scaler)],
        )
        assert scaler.get_scale() == scale
        rows.append(logged(folder))
    assert len(rows[0]) == 3
    assert rows[0][2]["norm/model.upper/gradient_norm"] > 0
    for one, other in zip(*rows, strict=True):
        assert one == pytest.approx(other)

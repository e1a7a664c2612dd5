from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regularized_models import (
    LEARNING_RATE,
    Classifier,
    assert_same_state,
    batches,
    by_hand,
    cross_entropy_sum,
    library_by_hand,
    library_model,
    mean_of_means,
    mean_tid_by_hand,
    over_all_tokens,
    undivided_mean,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from covering import some_default
from powernorm.errors import InputError
from powernorm.integrations.huggingface import PenaltyTrainerMixin, TrainerNormCallback, _follows
from refusals import refuses

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp"),
]

MICRO_BATCHES = 6


class Mean(Classifier):
    """Its loss is the mean over the micro-batch."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        mask = torch.zeros(x.shape[:-1], dtype=torch.bool) if labels is None else labels == -100
        logits = self.logits(x, mask)
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy_sum(logits, labels) / (labels != -100).sum()
        return {"loss": loss, "logits": logits}


class PerItem(Classifier):
    """Its loss is a sum over the number of items of the whole update, if it is told."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.logits(x, labels == -100)
        items = kwargs.get("num_items_in_batch", (labels != -100).sum())
        return {"loss": cross_entropy_sum(logits, labels) / items, "logits": logits}


class ForgetfulMean(Mean):
    """Takes kwargs but ignores the number of items."""

    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        return super().forward(x, labels)


class PlainTrainer(Trainer):
    """Goes through the micro-batches in order, as they are."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=lambda items: items[0])

    def get_eval_dataloader(self, _: Any = None) -> DataLoader[Any]:
        return DataLoader(self.eval_dataset, batch_size=None)


class RegularizedTrainer(PenaltyTrainerMixin, PlainTrainer):
    pass


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "optim": "sgd",
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "seed": 0,
            "label_names": ["labels"],
            **options,
        }
    )


def trained(
    model: nn.Module,
    folder: Path,
    *,
    trainer: type[Trainer] = RegularizedTrainer,
    data: Any = None,
    callback: bool = False,
    resume: str | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    data = data or batches(MICRO_BATCHES)
    made = trainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=data,
        eval_dataset=data[:2],
        **(more or {}),
    )
    if callback:
        made.add_callback(TrainerNormCallback(made))
    made.train(resume_from_checkpoint=resume)
    return made


def updates(accumulation: int) -> list[list[dict[str, Tensor]]]:
    data = batches(MICRO_BATCHES)
    return [data[i : i + accumulation] for i in range(0, MICRO_BATCHES, accumulation)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("accumulation", [1, 3, 4])
@pytest.mark.parametrize(
    ("kind", "weight"),
    [(Mean, mean_of_means), (PerItem, over_all_tokens), (ForgetfulMean, undivided_mean)],
    ids=["mean", "items", "ignored"],
)
def test_update_equals_one_written_by_hand(
    tmp_path: Path, kind: type[Classifier], weight: Any, accumulation: int
) -> None:
    model = kind()
    expected = by_hand(model, updates(accumulation), weight)
    trained(model, tmp_path, gradient_accumulation_steps=accumulation)
    assert_same_state(model, expected)


def test_loss_kwargs_that_are_ignored(tmp_path: Path) -> None:
    class Told(RegularizedTrainer):
        loss_is_scaled_for_ga = False

    model = ForgetfulMean()
    expected = by_hand(model, updates(3), mean_of_means)
    trained(model, tmp_path, trainer=Told, gradient_accumulation_steps=3)
    assert_same_state(model, expected)


def test_loss_function_of_its_own(tmp_path: Path) -> None:
    def per_item(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return cross_entropy_sum(outputs["logits"], labels) / num_items_in_batch

    class Padded(Mean):
        # The labels are taken away, and with them this model's mask.
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            assert labels is None
            return super().forward(x)

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy_sum(model(batch["x"])["logits"], batch["labels"])

    reference = library_by_hand(model := Padded(), updates(3), loss_sum, over_all_tokens)
    trained(model, tmp_path, gradient_accumulation_steps=3, more={"compute_loss_func": per_item})
    assert_same_state(model, reference)


def smoothed_sum(logits: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """The Trainer's label smoothing: the uniform part is the mean over classes."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=epsilon, reduction="sum"
    )


def test_label_smoothing(tmp_path: Path) -> None:
    model = Mean()
    # The Trainer looks there before it smooths.
    model.config = SimpleNamespace(problem_type=None)

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        return smoothed_sum(model(batch["x"])["logits"], batch["labels"], 0.1)

    reference = library_by_hand(model, updates(3), loss_sum, mean_of_means)
    trained(model, tmp_path, gradient_accumulation_steps=3, label_smoothing_factor=0.1)
    # The Trainer sums the uniform part in float32.
    assert_same_state(model, reference, rtol=1e-6, atol=1e-8)


def shifted(weight: Any) -> Any:
    """A causal model's labels are shifted: the first of each row is no prediction."""

    def cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"labels": batch["labels"][:, 1:]}

    return lambda update, batch: weight([cut(micro) for micro in update], cut(batch))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "weight", "kwargs"),
    [
        ("llama", shifted(over_all_tokens), None),
        ("llama", shifted(mean_of_means), False),
        # The Trainer takes it for a model that does not shift, and counts the first of each row.
        pytest.param("gpt2", over_all_tokens, None, marks=pytest.mark.slow),
        # These take the number of items and ignore it: the Trainer adds up their means.
        ("bert", undivided_mean, None),
        pytest.param("t5", undivided_mean, None, marks=pytest.mark.slow),
    ],
)
def test_models_of_the_library(
    tmp_path: Path, name: str, weight: Any, kwargs: bool | None, accumulation: int
) -> None:
    model, loss_sum, data = library_model(name)
    if kwargs is not None:
        model.accepts_loss_kwargs = kwargs
    made = [data[i : i + accumulation] for i in range(0, 4, accumulation)]
    expected = library_by_hand(model, made, loss_sum, weight)
    trained(model, tmp_path, data=data, gradient_accumulation_steps=accumulation)
    # The library's loss is in float32.
    assert_same_state(model, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_kinds_of_loss_are_told_apart_once(tmp_path: Path) -> None:
    """By two forwards that leave nothing behind, dropout's random numbers included."""
    calls = []

    class Noisy(ForgetfulMean):
        def logits(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            calls.append(self.training)
            return super().logits(F.dropout(x, 0.5, self.training), padding_mask)

    class Told(RegularizedTrainer):
        _divides = False

    asked, told = Noisy(), Noisy()
    trained(asked, tmp_path, gradient_accumulation_steps=3)
    assert calls == [False, False] + [True] * MICRO_BATCHES
    trained(told, tmp_path, trainer=Told, gradient_accumulation_steps=3)
    for name, tensor in told.state_dict().items():
        assert torch.equal(asked.state_dict()[name], tensor), name


@pytest.mark.slow
def test_loss_of_neither_kind(tmp_path: Path) -> None:
    class Half(PerItem):
        def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
            found = super().forward(x, labels, **kwargs)
            return {**found, "loss": found["loss"] + super().forward(x, labels)["loss"]}

    refuses(r"does not show whether .*: set loss_is_scaled_for_ga", trained, Half(), tmp_path)


def test_losses_that_say_nothing() -> None:
    nan = float("nan")
    assert _follows(torch.tensor([[0.0, 0.0], [nan, nan]])) is None
    assert _follows(torch.tensor([[0.0, 0.0], [2.0, 1.0]])) is True
    assert _follows(torch.tensor([[nan, nan], [2.0, 2.0]])) is False


def test_skipped_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    """A trainer that tries again with half the batch when memory runs out."""

    class Large(Mean):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found = super().forward(x, labels)
            if len(x) > 2:
                raise MemoryError
            return found

    model, (whole,) = Large(), batches(1)
    half = {key: tensor[2:] for key, tensor in whole.items()}
    trainer = RegularizedTrainer(model=model, args=arguments(tmp_path), train_dataset=[whole])
    expected = trainer.compute_loss(model, dict(half)).item()
    model.train()
    with pytest.raises(MemoryError):
        trainer.compute_loss(model, dict(whole))
    assert trainer.compute_loss(model, dict(half)).item() == expected


def test_evaluation_has_no_penalty(tmp_path: Path) -> None:
    model = Mean()
    trainer = trained(model, tmp_path, eval_strategy="steps", eval_steps=3)
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 2
    model.eval()
    with torch.no_grad():
        expected = [model(**batch)["loss"].item() for batch in batches(2)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert evaluated[-1] == pytest.approx(sum(expected) / len(expected), rel=1e-6)


@pytest.mark.parametrize("norm", some_default(["pn", "ln"], "pn"))
def test_model_without_such_layers_is_left_alone(tmp_path: Path, norm: str) -> None:
    plain, model = Mean(norm), Mean(norm)
    trained(plain, tmp_path, trainer=PlainTrainer)
    trained(model, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("first", some_default([False, True], True))
def test_tid_is_in_the_log_history(tmp_path: Path, first: bool) -> None:
    model = Mean()
    reference = copy.deepcopy(model)
    trainer = trained(
        model,
        tmp_path,
        callback=True,
        logging_steps=2,
        logging_first_step=first,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    history = trainer.state.log_history
    steps = [entry["step"] for entry in history if "norm/lower/mean_tid" in entry]
    assert steps == ([1, 2] if first else [2])
    assert [entry["step"] for entry in history if "loss" in entry] == steps
    (entry,) = [e for e in history if "norm/lower/mean_tid" in e and e["step"] == 2]
    data = batches(4)
    trained(reference, tmp_path, data=data[:2], gradient_accumulation_steps=2)
    expected = mean_tid_by_hand(reference.lower, data[2:4])
    assert entry["norm/lower/mean_tid"] == pytest.approx(expected)
    assert entry["norm/upper/num_nonfinite_batches"] == 0


@pytest.mark.parametrize(
    "options", [{"logging_steps": 1}, {"logging_strategy": "no"}], ids=["logging", "silent"]
)
def test_schedule_of_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = RegularizedTrainer(
        model=Mean(), args=arguments(tmp_path, **options), train_dataset=batches(MICRO_BATCHES)
    )
    trainer.add_callback(TrainerNormCallback(trainer, "log:4"))
    trainer.train()
    entries = [e for e in trainer.state.log_history if "norm/lower/var_tid" in e]
    # Of 1, 2, 3, 6, 10, … those that a training of six updates comes to.
    assert [entry["step"] for entry in entries] == [1, 2, 3, 6]
    assert all(entry["norm/upper/gradient_norm"] > 0 for entry in entries)
    losses = [e["step"] for e in trainer.state.log_history if "loss" in e]
    assert losses == (list(range(1, 7)) if "logging_steps" in options else [])


def test_resumed_run_is_the_same(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "callback": True, "save_strategy": "steps"}
    straight = Mean()
    whole = trained(straight, tmp_path, save_steps=2, **options)  # type: ignore[arg-type]
    resumed = Mean()
    trainer = trained(
        resumed,
        tmp_path / "again",
        resume=str(tmp_path / "checkpoint-2"),
        save_steps=100,
        **options,  # type: ignore[arg-type]
    )
    assert_same_state(resumed, straight)

    def tid(entries: list[dict[str, float]]) -> list[tuple[float, float]]:
        return [
            (entry["step"], entry["norm/lower/mean_tid"])
            for entry in entries
            if "norm/lower/mean_tid" in entry
        ]

    assert tid(trainer.state.log_history) == tid(whole.state.log_history)


class Unlabeled(Classifier):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.zeros(x.shape[:-1], dtype=torch.bool)
        return {"loss": self.logits(x, mask).square().mean()}


def test_labels_are_needed_or_counting_of_ones_own(tmp_path: Path) -> None:
    data = [{"x": batch["x"]} for batch in batches(2)]
    refuses(r"no 'labels' .*override count_loss_tokens", trained, Unlabeled(), tmp_path, data=data)

    class Counts(RegularizedTrainer):
        def count_loss_tokens(self, inputs: Any) -> int:
            return inputs["x"][..., 0].numel()

    trained(Unlabeled(), tmp_path, data=data, trainer=Counts)


def test_wrong_configuration(tmp_path: Path) -> None:
    class Scaled(RegularizedTrainer):
        loss_is_scaled_for_ga = True

    refuses("could not count them", trained, Mean(), tmp_path, trainer=Scaled)
    with pytest.raises(InputError, match=r"logging_strategy is 'epoch'.*'steps'"):
        trained(Mean(), tmp_path, callback=True, logging_strategy="epoch")
    refuses(r"trainer is None, expected the transformers\.Trainer", TrainerNormCallback, None)
    with pytest.raises(InputError, match="before torch"):
        TrainerNormCallback(
            PlainTrainer(
                model=nn.Sequential(torch.compile(Mean(), backend="eager")),
                args=arguments(tmp_path),
            )
        )


@pytest.mark.slow
def test_hooks_after_an_exception(tmp_path: Path) -> None:
    class Fails(Mean):
        def logits(self, *_: Tensor) -> Tensor:  # type: ignore[override]
            raise RuntimeError("in the middle")

    model = Fails()
    trainer = RegularizedTrainer(model=model, args=arguments(tmp_path), train_dataset=batches(2))
    trainer.add_callback(callback := TrainerNormCallback(trainer))
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    callback.detach()
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    model = Mean()
    trainer = RegularizedTrainer(model=model, args=arguments(tmp_path), train_dataset=batches(2))
    trainer.args._n_gpu = 2
    refuses("2 GPUs in one process", trainer.compute_loss, model, dict(batches(1)[0]))

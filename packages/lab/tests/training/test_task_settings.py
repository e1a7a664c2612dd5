"""Settings of all tasks, and the optimizers and schedules that they choose."""

import pytest
import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.recipes import paths_of, recipe
from powernorm_lab.settings.overrides import known_keys, override
from powernorm_lab.settings.training import OptimizerSettings, ScheduleSettings
from powernorm_lab.tasks import TASKS as NAMES
from powernorm_lab.tasks.registry import CLASSES
from powernorm_lab.tasks.settings import CLASSES as SETTINGS
from powernorm_lab.tasks.settings import settings_of
from powernorm_lab.training.losses import outputs_nll, training_losses
from powernorm_lab.training.optimization import build_optimizer, rate_factor

OTHERS = {
    "data.languages": "de-en",
    "data.max_examples": "10",
    "data.vectors": "vectors.txt",
    "data.augmentation": "true",
    "model.memory_length": "8",
    "model.sees_future": "true",
    "model.character_features": "4",
    "model.pooling": "max",
    "decoding.beam_size": "2",
}


def test_every_task_has_settings_and_recipes() -> None:
    assert set(CLASSES) == set(SETTINGS)
    assert list(SETTINGS) == list(NAMES)
    assert all(paths_of(task) for task in CLASSES)


@pytest.mark.parametrize("task", CLASSES)
def test_settings_of_other_tasks_are_refused(task: str) -> None:
    config = recipe(task, "demo")
    known = known_keys(settings_of(task))
    foreign = {key: value for key, value in OTHERS.items() if key not in known}
    assert foreign
    for key, value in foreign.items():
        with pytest.raises(InputError, match=f"'{key}' is not a setting of the task {task}"):
            override(config, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("task", "least"),
    [
        *(("lm", 257), ("translation", 257)),
        *(("ner", 3), ("classify", 3), ("parse", 4)),
    ],
)
def test_a_vocabulary_is_as_large_as_its_kind_needs(task: str, least: int) -> None:
    """Subwords need all bytes; words need only marks and one word."""
    config = recipe(task, "smoke")
    override(config, [f"data.vocabulary_size={least}"])
    message = f"data.vocabulary_size={least - 1} is too small: give at least {least}"
    with pytest.raises(InputError, match=message):
        override(config, [f"data.vocabulary_size={least - 1}"])


def test_momentum_of_another_optimizer_is_refused() -> None:
    config = recipe("image", "demo")
    setting, choice = "optimizer.momentum=0.5", "optimizer.name=sgd"
    message = rf"^{setting} has no effect with .*: set {choice}, or leave it out"
    with pytest.raises(InputError, match=message):
        override(config, [setting])
    override(config, [setting, choice])


@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad"])
def test_optimisers_go_downhill_and_decay_matrices_only(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    config = OptimizerSettings(name=name, learning_rate=0.05, weight_decay=0.1, clip_norm=None)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]
    x, y = torch.randn(32, 4), torch.randn(32, 4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_sgd_has_the_momentum_that_is_set() -> None:
    config = OptimizerSettings(name="sgd", momentum=0.5)
    assert build_optimizer(nn.Linear(2, 2), config).param_groups[0]["momentum"] == 0.5


def test_a_rate_that_falls_in_steps() -> None:
    schedule = ScheduleSettings(name="steps", warmup_fraction=0.0)
    factors = [rate_factor(schedule, step, 8) for step in range(8)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    "assignment",
    [
        "schedule.warmup_fraction=1.5",
        "optimizer.name=lion",
        "model.activation=sum",
    ],
)
def test_bad_values_are_named(assignment: str) -> None:
    with pytest.raises(InputError, match=assignment.split("=")[0]):
        override(recipe("lm", "smoke"), [assignment])


class Halved(nn.Module):
    """A model with its own likelihood."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[targets != IGNORED].sum() / 2


def test_a_model_may_have_a_likelihood_of_its_own() -> None:
    outputs = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    targets = torch.tensor([0, IGNORED, 1])
    minimized, plain = training_losses(Halved(), outputs, targets, 0.0)
    assert float(minimized.detach()) == float(plain) == 2.5
    assert minimized.requires_grad
    assert not plain.requires_grad
    assert float(outputs_nll(Halved(), outputs, targets).detach()) == 2.5


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_classes_are_in_the_last_dimension(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*shape, 4)
    targets = torch.randint(4, shape)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    minimized, plain = training_losses(nn.Identity(), logits, targets, 0.0)
    for found in (minimized, plain, outputs_nll(nn.Identity(), logits, targets)):
        torch.testing.assert_close(found, expected)

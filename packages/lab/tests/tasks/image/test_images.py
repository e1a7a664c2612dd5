import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.tests.training.tiny_training import compare
from torch import Tensor, nn

from powernorm.inspection.modules import batch_layers
from powernorm.surgery import fold
from powernorm_lab.engine.events import DataPrepared, Event
from powernorm_lab.runs import ComparisonResults
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import ClassifierTrainingSettings, OptimizerSettings
from powernorm_lab.tasks.image.data import EncodedImages, ImageData, encode_images
from powernorm_lab.tasks.image.model import ConvNet, ResNet
from powernorm_lab.tasks.image.settings import ImageDataSettings, ImageModelSettings, ImageSettings
from powernorm_lab.tasks.image.sources import load_images
from powernorm_lab.tasks.image.task import ImageTask
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import load_trained, run_data, run_text, training_batches

DRAWN = "drawn-digits"


def image_config(**changes: object) -> ComparisonSettings:
    config = ImageSettings(
        preset="test",
        norms=("bn",),
        data=ImageDataSettings(
            path=DRAWN, batch_size=16, evaluation_batch_size=100, max_examples=400
        ),
        optimizer=OptimizerSettings(learning_rate=2e-3),
        training=ClassifierTrainingSettings(
            max_steps=60, log_every=5, validate_every=30, monitor_every=10, tid_batches=3
        ),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def encoded() -> EncodedImages:
    return encode_images(load_images(DRAWN), 400)


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, ComparisonResults, list[Event]]:
    events: list[Event] = []
    folder = tmp_path_factory.mktemp("images")
    config = image_config(norms=("ln", "bn"))
    return folder, compare(config, folder, on_event=events.append), events


def test_networks_soon_know_more_than_the_frequencies(
    compared: tuple[Path, ComparisonResults, list[Event]],
) -> None:
    _, results, events = compared
    (unigram,) = results.baselines
    for run in results.runs:
        assert run.status == "finished"
        for split in ("valid", "test"):
            found, prior = (
                metrics[f"{split}_accuracy"] for metrics in (run.metrics, unigram["metrics"])
            )
            assert found is not None
            assert prior is not None
            assert found > 35 > 15 > prior, run.norm
        loss = run.metrics["test_loss"]
        assert loss is not None
        assert run.metrics["test_perplexity"] == pytest.approx(math.exp(loss))
        assert run.examples_per_second is not None
    ln, bn = results.runs
    assert ln.tid is None
    assert bn.tid is not None
    assert results.data["splits"] == {
        "train": {"images": 400},
        "valid": {"images": 291},
        "test": {"images": 500},
    }
    (prepared,) = (event for event in events if isinstance(event, DataPrepared))
    assert (prepared.name, prepared.units) == (DRAWN, "classes")


def test_the_best_checkpoint_is_the_most_accurate(
    compared: tuple[Path, ComparisonResults, list[Event]],
) -> None:
    folder, results, _ = compared
    trained = load_trained(folder / "bn-pre-seed0")
    data = run_data(trained.settings)
    with torch.no_grad():
        found = data.scores("valid", trained.model, torch.device("cpu"))["accuracy"]
    assert found == results.runs[1].metrics["valid_accuracy"]


def test_a_run_of_images_is_loaded_folded_and_read_again(
    compared: tuple[Path, ComparisonResults, list[Event]], encoded: EncodedImages
) -> None:
    folder, _, _ = compared
    trained = load_trained(folder / "bn-pre-seed0")
    assert isinstance(trained.model, ConvNet)
    (pixels,) = trained.example_inputs()
    assert pixels.shape == (2, 1, 28, 28)
    batches = training_batches(trained.settings, 2)
    expected = ImageData(encoded, image_config(), 0).batches.batch(1).inputs()["pixels"]
    assert torch.equal(batches[1]["pixels"], expected)
    other = run_text(trained.settings, data=DRAWN)
    assert other.fingerprint == encoded.fingerprint
    before = trained.model(expected)
    fold(trained.model, (expected,))
    assert not batch_layers(trained.model)
    assert torch.allclose(trained.model(expected), before, atol=1e-4)


def test_the_prior_is_that_of_the_training_images(encoded: EncodedImages) -> None:
    (found,) = ImageTask().baselines(encoded, image_config())
    counts = torch.bincount(encoded.splits["train"].labels, minlength=10) + 1
    labels = encoded.splits["test"].labels
    nll = -sum(math.log(float(counts[label]) / float(counts.sum())) for label in labels)
    assert found["metrics"]["test_loss"] == pytest.approx(nll / len(labels))
    majority = int(counts.argmax())
    share = 100 * int((labels == majority).sum()) / len(labels)
    assert found["metrics"]["test_accuracy"] == pytest.approx(share)


def test_accuracy_is_the_share_of_right_answers(encoded: EncodedImages) -> None:
    class Corner(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            return pixels[:, 0, 9, 5:15]

    data = ImageData(encoded, image_config(), 0)
    right, number = 0, 0
    for batch in data.evaluation("test"):
        for row, label in zip(batch.inputs()["pixels"], batch.targets.tolist(), strict=True):
            logits = row[0, 9, 5:15].tolist()
            right += logits.index(max(logits)) == label
            number += 1
    assert number == 500
    assert 0 < right < 500
    found = data.accuracy("test", Corner(), torch.device("cpu"))
    assert found == pytest.approx(100 * right / 500)


@pytest.mark.parametrize(
    ("architecture", "side", "num_norms"),
    [("convnet", 28, 1), ("convnet", 32, 1), ("resnet20", 28, 19), ("resnet18", 28, 20)],
)
def test_architectures(architecture: str | None, side: int, num_norms: int) -> None:
    config = image_config(model=ImageModelSettings(architecture=architecture))  # type: ignore[arg-type]
    sizes = (3, side, 10)
    model = ImageTask().build(config, "bn", sizes, 0)
    assert isinstance(model, ConvNet if num_norms == 1 else ResNet)
    assert len(batch_layers(model)) == num_norms
    assert all(layer.feature_dim == 1 for layer in batch_layers(model).values())
    task = task_of(config)
    assert task.sizes_of_weights(model.state_dict()) == sizes
    (pixels,) = task.example_inputs(config, sizes)
    assert model(pixels).shape == (2, 10)

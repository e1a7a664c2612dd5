"""Classification of series from the file to the table, and its sensitivity to padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import compare

import powernorm
from powernorm_lab.recipes import recipe
from powernorm_lab.runs import ComparisonResults
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.sequences.data import SequenceData, SeriesRows, SeriesSet, load_series
from powernorm_lab.tasks.sequences.model import SequenceClassifier
from powernorm_lab.tasks.trained_models import load_trained

CPU = torch.device("cpu")
ARCHITECTURES = ("conformer", "patch", "encoder")
SCORES = {
    *("accuracy", "macro_f1", "calibration_error"),
    *("padding_changed", "bucket_changed", "padding_difference"),
}


def config(*changes: str) -> Any:
    return override(recipe("sequences", "smoke"), list(changes))


def built(norm: str, *changes: str) -> SequenceClassifier:
    chosen = config(*changes)
    model = task_of(chosen).build(chosen, norm, (12, 9), 0)
    assert isinstance(model, SequenceClassifier)
    return model


@pytest.fixture(scope="module")
def series() -> SeriesSet:
    return load_series(None)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ComparisonResults]:
    folder = tmp_path_factory.mktemp("sequences")
    return folder, compare(config("norms=bn,none"), folder)


def test_a_comparison_has_every_score(compared: tuple[Path, ComparisonResults]) -> None:
    _, results = compared
    unigram = results.baselines[0]["metrics"]
    assert 5 < unigram["test_accuracy"] < 25  # type: ignore[operator]
    for run in results.runs:
        assert run.status == "finished"
        assert run.metrics["test_accuracy"] > 60  # type: ignore[operator]
        assert run.metrics["test_macro_f1"] > 50  # type: ignore[operator]
        assert 0 < run.metrics["test_calibration_error"] < 60  # type: ignore[operator]
        # The norms and the convolutions get the mask, so that batches change only rounding.
        assert run.metrics["test_padding_changed"] == run.metrics["test_bucket_changed"] == 0
        assert run.metrics["test_padding_difference"] < 1e-4  # type: ignore[operator]


def test_a_trained_model_is_read_back_and_clean(compared: tuple[Path, ComparisonResults]) -> None:
    folder, _ = compared
    run = load_trained(folder / "bn-pre-seed0")
    batch = SeriesRows(load_series(None).splits["test"]).batch(torch.arange(6))
    report = powernorm.padding_check(run.model, batch.inputs())
    assert report.is_clean, str(report)


def test_scores_tell_a_model_that_padding_changes(series: SeriesSet) -> None:
    """Without masks, as in most code, BatchNorm counts padding and the convolution reads it."""
    plain = built("bn", "model.mask_padding=false")
    masked = built("bn")
    masked.load_state_dict(plain.state_dict())
    data = SequenceData(series, config(), 0)
    scores = {
        name: data.scores("valid", model.eval(), CPU)
        for name, model in (("plain", plain), ("masked", masked))
    }
    assert set(scores["plain"]) == SCORES
    assert scores["plain"]["padding_difference"] > 1e-3
    assert scores["masked"]["padding_difference"] < 1e-5
    assert set(data.scores("valid", masked, CPU, brief=True)) == {"accuracy"}


@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_are_clean_and_know_their_sizes(
    series: SeriesSet, architecture: str, norm: str
) -> None:
    model = built(norm, f"model.architecture={architecture}").eval()
    batch = SeriesRows(series.splits["test"]).batch(torch.arange(8))
    report = powernorm.padding_check(model, batch.inputs())
    assert report.is_clean, str(report)
    assert task_of(config()).sizes_of_weights(model.state_dict()) == (12, 9)


def test_sorted_batches_have_little_padding(series: SeriesSet) -> None:
    shares = []
    for by_length in (False, True):
        rows = SeriesRows(series.splits["train"], by_length=by_length)
        batches = rows.training(batch_size=16, seed=0)
        masks = [batches.batch(at).named["padding_mask"].float().mean() for at in range(13)]
        shares.append(float(torch.stack(masks).mean()))
    assert shares[0] > 0.25
    assert shares[1] < 0.12


def test_processes_share_a_batch_of_series(series: SeriesSet) -> None:
    batch = SeriesRows(series.splits["test"]).batch(torch.tensor([0, 1, 2]))
    parts = [batch.shard(rank, 4) for rank in range(4)]
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    # A process without rows gets a row of padding, and calls every layer.
    assert parts[3].named["padding_mask"].all()
    assert parts[3].named["padding_mask"].shape == parts[0].named["series"].shape[:2]
    assert bool(torch.isfinite(built("bn")(**parts[3].inputs())).all())
    whole = parts[0].joined_with(parts[1:3])
    assert whole.num_tokens == batch.num_tokens

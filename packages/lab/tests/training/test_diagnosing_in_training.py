"""Diagnoses during training: their steps, absence of side effects, and resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.tasks.lm_char.tiny_characters import tiny_characters
from same_runs import assert_same_run
from tiny_training import compare, tiny_config
from tiny_translation import tiny_translation, write_pairs

from covering import some_default
from powernorm_lab.runs import DIAGNOSES_FILE
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.training.losses import Losses, TrainingLoss


def with_training(config: ComparisonSettings, **changes: Any) -> ComparisonSettings:
    return replace(config, training=replace(config.training, **changes))


def diagnoses(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / DIAGNOSES_FILE).read_text().splitlines()]


def the_run(folder: Path) -> Path:
    (config,) = folder.glob("*/config.json")
    return config.parent


def configuration(case: str, text: Path, folder: Path) -> ComparisonSettings:
    """Return settings with dropout, which draws from torch's random numbers."""
    task, _, norm = case.partition(" ")
    if task == "translation":
        return tiny_translation(write_pairs(folder / "pairs"), norms=(norm,))
    if task == "lm-char":
        stream = folder / "stream.txt"
        stream.write_text("\n".join(f"line {n} of a text that goes on" for n in range(300)))
        return tiny_characters(stream, norms=(norm,))
    return tiny_config(str(text), norms=(norm,))


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powernorm_lab.training.training.DIAGNOSED_BATCHES", 3)


@pytest.mark.parametrize(
    "case",
    some_default(
        ["lm bn", "lm rbn", "lm pn", "lm brn", "translation pn", "translation mabn", "lm-char bn"],
        *("lm bn", "lm brn", "translation pn", "lm-char bn"),
    ),
)
def test_a_run_trains_as_it_would_without(case: str, text: Path, tmp_path: Path) -> None:
    """Logs, weights and random states are bitwise equal."""
    config = with_training(configuration(case, text, tmp_path), max_steps=8)
    compare(config, tmp_path / "plain")
    watched = with_training(config, diagnose_every=3)
    compare(watched, tmp_path / "watched")
    assert_same_run(the_run(tmp_path / "plain"), the_run(tmp_path / "watched"))
    assert not (the_run(tmp_path / "plain") / DIAGNOSES_FILE).exists()
    rows = diagnoses(the_run(tmp_path / "watched"))
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    assert all(row["layers"] and row["spectra"] and not row["notes"] for row in rows)


def test_a_diagnosis_is_that_of_the_weights_at_its_step(text: Path, tmp_path: Path) -> None:
    config = tiny_config(str(text), norms=("bn",))
    compare(with_training(config, diagnose_every=12), tmp_path)
    run = the_run(tmp_path)
    report = diagnose_run(run / "checkpoints" / "last.ckpt", num_batches=3)
    first, last = diagnoses(run)
    assert last["layers"] == report.to_json()["layers"]
    assert last["spectra"] == report.to_json()["spectra"]
    assert (last["num_batches"], last["num_tokens"]) == (3, report.num_tokens)
    assert first["layers"] != last["layers"]


def test_epochs_are_those_of_the_data(text: Path, tmp_path: Path) -> None:
    """With three micro-batches, updates begin in one epoch and end in the next."""
    config = tiny_config(str(text), norms=("ln",))
    config = replace(
        config,
        data=replace(config.data, batch_size=32),
        optimizer=replace(config.optimizer, accumulation=3),
    )
    config = with_training(config, diagnose_every="epoch", max_steps=20)
    compare(config, tmp_path)
    rows = diagnoses(the_run(tmp_path))
    epochs = [row["epoch"] for row in rows]
    assert epochs[0] == 0.0
    # Each is the first update at or after the end of an epoch; the last one ends the run.
    assert len(rows) > 4
    for number, (row, epoch) in enumerate(zip(rows[:-1], epochs, strict=False)):
        assert number <= epoch < number + epochs[1] / rows[1]["step"] + 1e-9
        assert epoch == pytest.approx(row["step"] * epochs[1] / rows[1]["step"])
    assert rows[-1]["step"] == 20


def test_broken_weights_end_the_run_as_without(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diagnosis reports the problem, and the run ends as it would without it."""
    real = TrainingLoss.forward

    def forward(self: TrainingLoss, batch: Any) -> Losses:
        return Losses(*(loss * float("nan") for loss in real(self, batch)))

    monkeypatch.setattr(TrainingLoss, "forward", forward)
    config = with_training(tiny_config(str(text), norms=("ln",)), diagnose_every=1)
    (run,) = compare(config, tmp_path).runs
    assert run.status == "nonfinite"
    first, second, *_ = diagnoses(the_run(tmp_path))
    assert first["layers"]
    assert second["layers"] == []
    assert "holds NaN or infinite values in batch 0" in second["notes"][0]

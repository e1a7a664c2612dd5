"""Scores by running, re-estimated and batch statistics equal those of plain scoring functions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import Configure, compare
from lab.tests.training.tiny_translation import tiny_translation, write_pairs
from torch import Tensor

from powernorm.errors import InputError
from powernorm.inspection.modules import batch_layers
from powernorm.records import EvaluationRow
from powernorm.surgery import calibrate
from powernorm_lab.recipes import recipe
from powernorm_lab.tasks import run_diagnosis
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.run_diagnosis import diagnose_run, split_scores
from powernorm_lab.tasks.trained_models import load_trained, run_config, run_data, run_text

CPU = torch.device("cpu")
SIZES = (16, 32, 4096)
KINDS = ["running", "re-estimated", "re-estimated in one pass", "batch", "batch"]


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with batch statistics on both sides, and one without any."""
    folder = tmp_path_factory.mktemp("scored")
    config = tiny_translation(
        write_pairs(folder / "pairs"),
        norms=("bn", "ln"),
        model={"decoder_norm": "same"},
        training={"max_steps": 60, "validate_every": 20, "log_every": 20, "monitor_every": 20},
    )
    compare(config, folder / "runs")
    return folder / "runs"


def loaded(run: Path) -> tuple[Any, Any, Any]:
    """Return model, settings and text of a run."""
    trained = load_trained(run)
    return trained.model, run_config(trained.settings), run_text(trained.settings)


def plain_bleu(model: Any, config: Any, encoded: Any) -> dict[str, float | None]:
    """Return the scores that a run's result would have."""
    metrics = task_of(config).score(model, encoded, config, CPU).metrics
    return {name: value for name, value in metrics.items() if name.startswith("test_")}


def rows_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EvaluationRow, ...]:
    monkeypatch.setattr(run_diagnosis, "BATCH_SIZES", SIZES)
    return tuple(diagnose_run(run, num_batches=4, scores="test").evaluation)


def test_rows_of_translations_are_the_plain_scores(
    translation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = translation / "bn-pre-seed0"
    rows = rows_of(run, monkeypatch)
    assert [row["statistics"] for row in rows] == KINDS
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert rows[0]["scores"] == {name: result[name] for name in rows[0]["scores"]}
    assert rows[0]["loss"] == pytest.approx(result["test_loss"], rel=1e-12)
    assert result["test_chrf"] > 0
    model, config, encoded = loaded(run)
    settings = load_trained(run).settings
    population = [run_data(settings).batches.batch(at).inputs() for at in range(4)]
    for row, way in ((rows[1], "layer_by_layer"), (rows[2], "one_pass")):
        again = load_trained(run).model
        calibrate(again, population, lambda m, b: m.features(**b), names="*", way=way)
        assert row["scores"] == plain_bleu(again, config, encoded), way
    for row in rows[3:]:
        assert row["scores"] == by_hand(model, config, encoded, row["size"], monkeypatch)
    # The statistics do make a difference here.
    assert len({json.dumps(row["scores"]) for row in rows}) > 2


def by_hand(
    model: Any, config: Any, encoded: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float | None]:
    """Score with an encoder whose BatchNorm is in training mode and uses batch statistics.

    No batch may have more positions than asked for.
    """
    encode: Callable[[Tensor, Tensor | None], Tensor] = type(model).encode
    norms = [layer for name, layer in batch_layers(model).items() if name.startswith("encoder.")]
    num_positions = []

    def encode_by_batch(source: Tensor, mask: Tensor | None = None) -> Tensor:
        num_positions.append(source.numel())
        for norm in norms:
            norm.train()
        memory = encode(model, source, mask)
        for norm in norms:
            norm.eval()
        return memory

    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoding = replace(config.decoding, batch_tokens=size)
    with monkeypatch.context() as patch:
        patch.setattr(model, "encode", encode_by_batch)
        scores = plain_bleu(model, replace(config, decoding=decoding), encoded)
    model.load_state_dict(before)
    assert len(num_positions) > 1
    assert max(num_positions) <= size
    return scores


def test_nothing_of_the_model_changes(translation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_diagnosis, "BATCH_SIZES", SIZES)
    model, config, encoded = loaded(translation / "bn-pre-seed0")
    model.decoder.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    scores = split_scores(model, config, encoded, 0, "valid")
    population = [scores.data.batches.batch(at).inputs() for at in range(2)]
    seen: list[tuple[int, int]] = []
    rows = run_diagnosis.score_by_statistics(
        scores, population, lambda m, b: m.features(**b), lambda *step: seen.append(step)
    )
    assert seen == [(number, 5) for number in range(1, 6)]
    assert {name.partition("_")[0] for row in rows for name in row["scores"]} == {"valid"}
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_batches_of_translations_count_real_tokens(translation: Path) -> None:
    scores = split_scores(*loaded(translation / "bn-pre-seed0"), 0, "test")
    split = scores.encoded.splits["test"]
    positions = len(split) * int(split.source.lengths.max())
    num_tokens = int(split.source.lengths.sum())
    assert num_tokens < positions
    assert scores.measure(positions).tokens == num_tokens


def test_a_model_without_batch_statistics_is_refused_before_any_work(translation: Path) -> None:
    seen: list[int] = []
    with pytest.raises(InputError, match="has no norm with batch statistics"):
        diagnose_run(
            translation / "ln-pre-seed0",
            scores="test",
            on_progress=lambda done, _: seen.append(done),
        )
    assert not seen


def test_rows_of_perplexities(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics give the run's perplexity, batch statistics that of training mode."""
    (result,) = compare(configure(norms=("bn",), dropout=0.0), tmp_path).runs
    run = tmp_path / result.folder
    monkeypatch.setattr(run_diagnosis, "BATCH_SIZES", (48, 96))
    rows = diagnose_run(run, num_batches=3, scores="test").evaluation
    assert rows[0]["scores"] == {"test_perplexity": result.metrics["test_perplexity"]}
    assert [row.get("size") for row in rows] == [None, None, None, 48, 96]
    model, config, encoded = loaded(run)
    scores: Any = split_scores(model, config, encoded, 0, "test")
    for row in rows[3:]:
        batches = scores._data_of(row["size"]).evaluation("test")
        counts = [batch.num_tokens for batch in batches]
        assert row["tokens"] == round(sum(counts) / len(counts))
        assert row["tokens"] == pytest.approx(row["size"], rel=0.35)
        total = 0.0
        with torch.no_grad():
            for batch in batches:
                again = load_trained(run).model.train()
                total += evaluate_in_training(again, batch)
        number = sum(batch.num_targets for batch in batches)
        assert row["loss"] == pytest.approx(total / number, rel=1e-5)


def evaluate_in_training(model: Any, batch: Any) -> float:
    logits = model(**batch.inputs())
    return float(
        torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), batch.targets.flatten(), reduction="sum", ignore_index=-100
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "ner", "parse", "image", "lm-char"])
def test_the_row_by_running_statistics_is_the_result_of_the_run(task: str, tmp_path: Path) -> None:
    (result,) = compare(replace(recipe(task, "smoke"), norms=("bn",)), tmp_path).runs
    rows = diagnose_run(tmp_path / result.folder, num_batches=3, scores="test").evaluation
    metrics = result.metrics
    scores = rows[0]["scores"]
    assert scores
    assert scores == {name: metrics[name] for name in scores}
    assert all(row["scores"].keys() == scores.keys() for row in rows)
    assert rows[-1]["size"] >= 512

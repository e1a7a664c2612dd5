"""Diagnosis of trained runs."""

from pathlib import Path

import pytest
from tiny_training import compare, tiny_config

from powernorm.diagnosis import training_inference_discrepancy
from powernorm.errors import InputError
from powernorm_lab.runs import CHECKPOINTS_FOLDER
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained, run_text, training_batches


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    out = tmp_path_factory.mktemp("runs")
    compare(tiny_config(str(text), norms=("ln", "bn")), out)
    return out


def test_a_run_with_batch_statistics(runs: Path) -> None:
    path = runs / "bn-pre-seed0"
    seen: list[int] = []
    report = diagnose_run(path, num_batches=4, on_progress=lambda done, _: seen.append(done))
    assert seen == list(range(1, 9))
    assert (report.model, report.step, report.num_batches) == ("bn-pre-seed0", 12, 4)
    assert report.num_tokens == 4 * 8 * 12
    trained = load_trained(path)
    batches = training_batches(trained.settings, 4)
    expected = training_inference_discrepancy(trained.model, batches)
    assert report.summary() == pytest.approx(expected.summary())
    names = [row["statistics"] for row in report.evaluation]
    assert names[:4] == ["running", "re-estimated", "re-estimated in one pass", "batch"]
    assert all(row["loss"] > 0 for row in report.evaluation)
    assert report.scales


def test_a_run_without_and_its_checkpoint(runs: Path) -> None:
    path = runs / "ln-pre-seed0"
    report = diagnose_run(path, num_batches=3)
    assert report.evaluation == ()
    last = diagnose_run(path / CHECKPOINTS_FOLDER / "last.ckpt", num_batches=3)
    assert last.model == report.model
    assert last.step == 12
    assert [layer.name for layer in last.rows] == [layer.name for layer in report.rows]


def test_another_text_keeps_the_subwords(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n".join(["wace today mind pear"] * 400) + "\n")
    path = runs / "ln-pre-seed0"
    settings = load_trained(path).settings
    encoded = run_text(settings, data=str(other))
    assert encoded.vocabulary_size == run_text(settings).vocabulary_size
    assert encoded.fingerprint != settings["data_fingerprint"]
    assert diagnose_run(path, data=str(other), num_batches=3).num_tokens == 3 * 8 * 12
    # Other subwords than the run's would differ: those of the text alone are whole words.
    own, run = encoded.splits["train"].tokens, run_text(settings).splits["train"].tokens
    assert set(own.tolist()) <= set(range(encoded.vocabulary_size))
    assert len(set(own.tolist())) < len(set(run.tolist()))


def test_bad_input(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="num_batches is 1"):
        diagnose_run(runs / "ln-pre-seed0", num_batches=1)
    with pytest.raises(InputError, match="is no run"):
        diagnose_run(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        diagnose_run(runs / "ln-pre-seed0", data=str(tmp_path / "missing.txt"))

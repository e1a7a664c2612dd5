"""Overlays of models: new and stored diagnoses, and names of lines."""

import json
import shutil
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare, tiny_config

from powernorm.errors import InputError
from powernorm_lab import diagnosing
from powernorm_lab.diagnosing import Look, diagnose_source, overlay
from powernorm_lab.runs import DIAGNOSIS_FILE
from sharing import made_once

LOOK = Look(num_batches=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    config = tiny_config(str(text), norms=("ln", "bn"), seeds=(0, 1))
    return made_once(tmp_path_factory, "overlaid", lambda out: compare(config, out))[0]


@pytest.fixture
def comparison(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "comparison"))


def test_only_runs_without_a_diagnosis_of_these_batches_are_diagnosed(comparison: Path) -> None:
    asked: list[str] = []

    def on_model(name: str, number: int, total: int) -> None:
        asked.append(f"{name} {number}/{total}")

    first = overlay([str(comparison / "bn-pre-seed0")], LOOK, on_model)
    assert (first.num_diagnosed, first.num_known) == (1, 0)
    asked.clear()
    found = overlay([str(comparison)], LOOK, on_model)
    assert (found.num_diagnosed, found.num_known) == (3, 1)
    assert asked == ["ln-pre-seed0 0/4", "ln-pre-seed1 1/4", "bn-pre-seed1 3/4"]
    assert [(line.name, len(line.diagnoses)) for line in found.lines] == [("ln", 2), ("bn", 2)]
    # Another number of batches needs new diagnoses.
    assert overlay([str(comparison)], Look(num_batches=4)).num_diagnosed == 4
    # A diagnosis of other weights, as if the run had been resumed afterwards.
    file = comparison / "ln-pre-seed0" / DIAGNOSIS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 3}))
    assert overlay([str(comparison)], Look(num_batches=4)).num_diagnosed == 1


def test_an_overlay_has_the_numbers_of_the_diagnosis(comparison: Path) -> None:
    run = str(comparison / "bn-pre-seed1")
    (line,) = overlay([run, run], LOOK).lines
    assert line.diagnoses == [diagnose_source(run, LOOK).to_json()]


def test_another_text_leaves_the_runs_as_they_are(comparison: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n".join(["wace today mind pear"] * 400) + "\n")
    look = Look(num_batches=3, data=str(other))
    lines = overlay([str(comparison)], look).lines
    assert [len(line.diagnoses) for line in lines] == [2, 2]
    assert not list(comparison.glob(f"*/{DIAGNOSIS_FILE}"))


def test_checkpoints_and_runs_of_several_comparisons_have_lines_of_their_own(
    comparison: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(comparison, tmp_path / "other"))
    run = comparison / "bn-pre-seed0"
    last = run / "checkpoints" / "last.ckpt"
    sources = [run, other / "bn-pre-seed0", other / "ln-pre-seed0", last]
    lines = overlay([*map(str, sources)], LOOK).lines
    assert [line.name for line in lines] == [
        *("comparison bn", "other bn", "ln"),
        "bn-pre-seed0, step 12",
    ]


def test_a_run_of_a_comparison_that_cannot_be_diagnosed_is_left_out(comparison: Path) -> None:
    run = comparison / "bn-pre-seed1"
    (run / "checkpoints" / "best.ckpt").unlink()
    found = overlay([str(comparison)], LOOK)
    assert list(found.left_out) == [str(run)]
    assert [len(line.diagnoses) for line in found.lines] == [2, 1]
    # A named run that cannot be diagnosed is an error.
    with pytest.raises(InputError, match="bn-pre-seed1"):
        overlay([str(run)], LOOK)


def test_what_was_diagnosed_before_an_interruption_stays(
    comparison: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = diagnose_source, 0

    def diagnose(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(diagnosing, "diagnose_source", diagnose)
    with pytest.raises(KeyboardInterrupt):
        overlay([str(comparison)], LOOK)
    found = overlay([str(comparison)], LOOK)
    assert (found.num_diagnosed, found.num_known) == (2, 2)


def test_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run of"):
        overlay([str(tmp_path)], LOOK)
    with pytest.raises(InputError, match="cannot be loaded"):
        overlay(["no_such_module:model"], LOOK)

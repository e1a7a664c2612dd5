"""The task's score at validations: its data, its steps, and the selection by it."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import compare
from same_runs import assert_same_run
from tiny_translation import tiny_translation

from covering import some_default
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.engine.events import Event, Measured
from powernorm_lab.engine.state import read_checkpoint
from powernorm_lab.recipes import recipe
from powernorm_lab.recipes.differences import changes_of
from powernorm_lab.report import read_comparison
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.registry import settings_of, task_of
from powernorm_lab.tasks.trained_models import load_trained
from powernorm_lab.tasks.translation.batches import TranslationData
from powernorm_lab.tasks.translation.scores import corpus_scores
from powernorm_lab.tasks.translation.search import BeamSearch, beam_search

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powernorm_lab.tasks.translation.batches.NUM_SCORED", 7)


def scored(pairs: Path, norm: str = "bn", **training: Any) -> ComparisonSettings:
    changes = {"score_every": 1, "tid_batches": 0} | training
    return tiny_translation(pairs, norms=(norm,), training=changes)


def scores(folder: Path) -> dict[int, float]:
    """Return the scores by step of a comparison's only run."""
    (path,) = folder.glob("*/metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row["valid_score"]) for row in rows if row["valid_score"]}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Return a function that sets the scores of validations, and lists which were brief."""

    def give(*values: float) -> list[bool]:
        left, asked = list(values), []

        def found(
            self: TranslationData,
            split: EvaluatedSplit,
            model: torch.nn.Module,
            device: torch.device,
            *,
            brief: bool = False,
        ) -> dict[str, float]:
            del self, model, device
            assert split == "valid"
            asked.append(brief)
            return {"bleu": left.pop(0)}

        monkeypatch.setattr(TranslationData, "scores", found)
        return asked

    return give


def test_the_score_is_sacrebleus_of_a_sample(pairs: Path, tmp_path: Path) -> None:
    """Users compare it with the BLEU of the table."""
    events: list[Event] = []
    config = scored(pairs, max_steps=4)
    compare(config, tmp_path, on_event=events.append)
    (run,) = tmp_path.glob("bn*")
    task = task_of(config)
    encoded = task.encode(config)
    split = encoded.splits["valid"]
    chosen = [index * len(split) // 7 for index in range(7)]
    model = load_trained(run).model
    lines = []
    for index in chosen:
        search = BeamSearch(beam_size=1, max_length_offset=3)
        best = beam_search(model, split.source.row(index)[None].long(), None, search)
        lines += encoded.target_subwords.decode([best[0][0].tokens])
    truths = [encoded.references("valid")[index] for index in chosen]
    wanted = corpus_scores(lines, truths, encoded.corpus).metrics["test_bleu"]
    assert scores(tmp_path) == {4: wanted}
    (measured,) = [event for event in events if isinstance(event, Measured)]
    assert (measured.score, measured.values["valid_score"]) == ("bleu", wanted)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == {"metric": "valid_bleu", "direction": "max"}
    assert read_comparison(str(tmp_path)).score_measure.metric == "test_bleu"


def test_scores_of_a_whole_split_are_those_of_the_result(pairs: Path, tmp_path: Path) -> None:
    config = tiny_translation(pairs)
    (run,) = compare(config, tmp_path).runs
    data = task_of(config).data(task_of(config).encode(config), config, 0)
    model = load_trained(tmp_path / run.folder).model
    found = data.scores("test", model, CPU)
    assert {f"test_{name}": value for name, value in found.items()}.items() <= run.metrics.items()
    assert len(found) == 4


def test_scoring_changes_nothing_else(pairs: Path, tmp_path: Path) -> None:
    """Losses, weights and random states equal those of the run without it."""
    runs = []
    for name, every in (("with", 1), ("without", 0)):
        training = {"score_every": every}
        compare(tiny_translation(pairs, norms=("bn",), training=training), tmp_path / name)
        (run,) = (tmp_path / name).glob("bn*")
        runs.append(run)
    text = (runs[0] / "metrics.csv").read_text().splitlines()
    assert len(scores(tmp_path / "with")) == 3
    cut = [line.rpartition(",")[0] + "," for line in text[1:]]
    (runs[0] / "metrics.csv").write_text("\n".join([text[0], *cut]) + "\n")
    assert_same_run(*runs)


@pytest.mark.parametrize(
    ("select_by", "values", "best"),
    [
        ("score", (1.0, 3.0, 2.0), 8),
        ("score", (1.0, 1.0, 1.0), 4),
        ("score", (0.0, float("nan"), 0.1), 12),
        ("loss", (3.0, 2.0, 1.0), None),
    ],
)
def test_the_best_checkpoint_is_that_of_what_selects(
    pairs: Path,
    tmp_path: Path,
    given: Callable[..., list[bool]],
    select_by: str,
    values: tuple[float, ...],
    best: int | None,
) -> None:
    asked = given(*values)
    (run,) = compare(scored(pairs, select_by=select_by), tmp_path).runs
    assert asked == [True] * 3
    with (tmp_path / run.folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["valid_loss"]]
    if best is None:
        best = int(min(rows, key=lambda row: float(row["valid_loss"]))["step"])
    content = read_checkpoint(tmp_path / run.folder / "checkpoints/best.ckpt")
    assert content["step"] == best
    by = " by valid_bleu" if select_by == "score" else ""
    assert run.scored == f"best checkpoint{by}"


def test_a_validation_without_a_score_is_never_the_best(
    pairs: Path, tmp_path: Path, given: Callable[..., list[bool]]
) -> None:
    """The fourth and the last of six validations have a score."""
    given(5.0, 4.0)
    compare(scored(pairs, score_every=4, select_by="score", validate_every=2), tmp_path)
    assert scores(tmp_path) == {8: 5.0, 12: 4.0}
    (best,) = tmp_path.glob("*/checkpoints/best.ckpt")
    assert read_checkpoint(best)["step"] == 8


def test_patience_waits_for_scores_where_they_select(
    pairs: Path, tmp_path: Path, given: Callable[..., list[bool]]
) -> None:
    given(3.0, 2.0, 1.0)
    patient = scored(pairs, score_every=2, select_by="score", validate_every=2, patience=1)
    compare(patient, tmp_path)
    assert scores(tmp_path) == {4: 3.0, 8: 2.0}


def test_the_validation_at_which_patience_ends_has_a_score(pairs: Path, tmp_path: Path) -> None:
    changes = {"max_steps": 60, "validate_every": 1, "patience": 1, "score_every": 100}
    config = scored(pairs, "ln", **changes)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=0.5))
    (run,) = compare(config, tmp_path).runs
    last = read_checkpoint(tmp_path / run.folder / "checkpoints/last.ckpt")["step"]
    assert last < 60
    assert list(scores(tmp_path)) == [last]


@pytest.mark.parametrize(
    ("task", "metric", "direction"),
    [
        ("classify", "valid_accuracy", "max"),
        pytest.param(*("lm-char", "valid_bits_per_character", "min"), marks=pytest.mark.slow),
    ],
)
def test_tasks_whose_score_costs_little_tell_it_always(
    tmp_path: Path, task: str, metric: str, direction: str
) -> None:
    changes = ("norms=ln", "training.max_steps=4", "training.validate_every=2")
    changes += ("training.validation_tokens=none",)
    (run,) = compare(override(recipe(task, "smoke"), changes), tmp_path).runs
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == {"metric": metric, "direction": direction}
    assert run.scored is not None
    assert run.scored.startswith("best checkpoint")
    told = scores(tmp_path)
    assert list(told) == [2, 4]
    # The valid split is read whole.
    best = max if direction == "max" else min
    assert run.metrics[metric] == pytest.approx(best(told.values()))


def test_what_is_only_told_is_no_change_of_a_paper() -> None:
    told = override(recipe("translation", "demo"), ("training.score_every=1",))
    assert changes_of(told) == changes_of(recipe("translation", "demo"))
    chosen = changes_of(override(told, ("training.select_by=score",)))
    assert chosen is not None
    assert {"training.score_every", "training.select_by"} <= chosen["settings"].keys()


SCORING = [task for task in TASKS if settings_of(task).score]


@pytest.mark.parametrize(
    "task", some_default(SCORING, *(task for task in SCORING if task not in ("parse", "ner")))
)
def test_every_task_scores_by_one_interface(task: str) -> None:
    """Other evaluations of a model call the same method, and find the score by its name."""
    config = recipe(task, "smoke")
    task_object = task_of(config)
    encoded = task_object.encode(config)
    data = task_object.data(encoded, config, 0)
    model = task_object.build(config, "ln", task_object.sizes(encoded), 0).eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        found = {**data.from_loss(2.0), **data.scores("valid", model, CPU, brief=True)}
    assert torch.equal(before, torch.get_rng_state())
    assert config.score_name in found

"""The task of language modeling over bytes: its metrics, and its memory in checkpoints."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lab.tests.training.same_runs import rows
from lab.tests.training.tiny_training import compare
from tiny_characters import tiny_characters, write_stream

from powernorm_lab.engine.events import Event, RunStarted, StepsDone
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.lm_char.model import TransformerXL
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained
from powernorm_lab.training import training


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("characters") / "stream")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, stream: Path) -> Path:
    out = tmp_path_factory.mktemp("character-runs")
    longer = {"max_steps": 60, "validate_every": 30}
    config = tiny_characters(
        stream, norms=("ln", "bn"), training=longer, model={"placement": "pre"}
    )
    compare(config, out)
    return out


def test_a_comparison(runs: Path) -> None:
    results = json.loads((runs / "results.json").read_text())
    names = [row["name"] for row in results["baselines"]]
    assert names == ["unigram", "bigram", "trigram"]
    assert results["data"]["vocabulary_size"] == 256
    assert results["data"]["splits"]["valid"] == {"bytes": 611}
    for run in results["runs"]:
        assert run["status"] == "finished"
        metrics = run["metrics"]
        for split in ("valid", "test"):
            bits = metrics[f"{split}_bits_per_character"]
            assert bits == pytest.approx(metrics[f"{split}_loss"] / math.log(2))
            assert bits < results["baselines"][0]["metrics"][f"{split}_bits_per_character"]
            assert metrics[f"{split}_perplexity"] == pytest.approx(2**bits)
    assert results["runs"][1]["tid"]["var_last"] > 0


def test_a_run_is_diagnosed(runs: Path) -> None:
    report = diagnose_run(runs / "bn-pre-seed0", num_batches=4)
    assert report.num_tokens == 4 * 3 * 12
    names = [row["statistics"] for row in report.evaluation]
    assert names[:4] == ["running", "re-estimated", "re-estimated in one pass", "batch"]
    again = diagnose_run(runs / "bn-pre-seed0", num_batches=4)
    assert again.summary() == report.summary()
    assert [row["loss"] for row in again.evaluation] == [row["loss"] for row in report.evaluation]


def test_evaluation_goes_on_with_the_memory(runs: Path) -> None:
    trained = load_trained(runs / "ln-pre-seed0")
    config = tiny_characters(Path(str(trained.settings["data"]["path"])))
    task = task_of(config)
    data = task.data(task.encode(config), config, 0)
    batches = list(data.evaluation("test"))

    def losses(*, remembering: bool) -> list[float]:
        found = []
        for batch in batches:
            inputs = batch.inputs() if remembering else {"tokens": batch.named["tokens"]}
            logits = trained.model(**inputs)
            mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            found.append(float(mean))
        return found

    with torch.no_grad():
        with_memory, without = losses(remembering=True), losses(remembering=False)
    assert with_memory[0] == without[0]
    assert sum(with_memory) < sum(without), "words go on over the ends of segments"


def fail_at(step: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step >= step:
            raise RuntimeError("stopped by the test")

    return listen


def interrupted(config: ComparisonSettings, folder: Path) -> tuple[Path, Path]:
    """Return the folders of an uninterrupted run and of one resumed from step 8."""
    compare(config, folder / "whole")
    (failed,) = compare(config, folder / "parts", on_event=fail_at(11)).runs
    assert failed.status == "failed"
    started: list[Event] = []
    compare(config, folder / "parts", resume=True, on_event=started.append)
    assert next(e for e in started if isinstance(e, RunStarted)).first_step == 8
    (name,) = [path.parent.name for path in (folder / "whole").glob("*/config.json")]
    return folder / "whole" / name, folder / "parts" / name


def test_without_the_memory_it_would_not(stream: Path, tmp_path: Path) -> None:
    config = tiny_characters(stream, training={"validate_every": 8, "log_every": 1})

    with patch.object(training._BatchMemory, "load_state_dict", print):
        whole, parts = interrupted(config, tmp_path)
    before, after = rows(whole / "metrics.csv"), rows(parts / "metrics.csv")
    assert before[:8] == after[:8]
    assert before[8]["train_loss"] != after[8]["train_loss"]


def test_micro_batches_have_memories_of_their_own(stream: Path, tmp_path: Path) -> None:
    """An update in two micro-batches equals one in a single batch: each row has its memory."""
    training = {"max_steps": 6, "log_every": 1, "validate_every": 3, "tid_batches": 0}
    whole = tiny_characters(
        stream,
        data={"batch_size": 6},
        model={"dropout": 0.0},
        optimizer={"accumulation": 1, "eps": 1e-3},
        training=training,
    )
    data, optimizer = replace(whole.data, batch_size=3), replace(whole.optimizer, accumulation=2)
    losses = []
    for name, config in (
        ("whole", whole),
        ("parts", replace(whole, data=data, optimizer=optimizer)),
    ):
        compare(config, tmp_path / name)
        log = rows(tmp_path / name / "ln-post-seed0/metrics.csv")
        losses.append([float(row["train_loss"]) for row in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_validation_leaves_the_training_as_it_was(stream: Path, tmp_path: Path) -> None:
    often = tiny_characters(stream, training={"validate_every": 2, "monitor_every": 0})
    seldom = replace(often, training=replace(often.training, validate_every=12))
    logs = []
    for name, config in (("often", often), ("seldom", seldom)):
        compare(config, tmp_path / name)
        log = rows(tmp_path / name / "ln-post-seed0/metrics.csv")
        logs.append([row["train_loss"] for row in log])
    assert logs[0] == logs[1]


def test_the_model_is_what_the_settings_say(stream: Path) -> None:
    config = tiny_characters(stream, model={"evaluation_memory_length": 40})
    model = task_of(config).build(config, "ln", (256,), 0)
    assert isinstance(model, TransformerXL)
    assert model.max_distance == 16 + 12 - 1
    assert model._training_memory.length == 16
    assert model._evaluation_memory.length == 40
    default = tiny_characters(stream, model={"memory_length": None})
    model = task_of(default).build(default, "ln", (256,), 0)
    assert isinstance(model, TransformerXL)
    assert model._training_memory.length == model._evaluation_memory.length == 12

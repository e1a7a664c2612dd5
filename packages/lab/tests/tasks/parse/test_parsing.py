"""Dependency parsing from the treebank to the table."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.tests.training.tiny_training import compare
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.engine.events import DataPrepared, Event
from powernorm_lab.runs import ComparisonResults
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.settings.training import ClassifierTrainingSettings, OptimizerSettings
from powernorm_lab.tasks.parse.data import STATES, EncodedTreebank, ParsingData, parse_split
from powernorm_lab.tasks.parse.settings import ParserShape, ParsingDataSettings, ParsingSettings
from powernorm_lab.tasks.parse.task import ParsingTask
from powernorm_lab.tasks.parse.trees import NUM_FEATURES, NUM_LABEL_MARKS
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import load_trained, run_text, training_batches

CPU = torch.device("cpu")


def parsing_config(path: str = "turkish", **changes: object) -> ComparisonSettings:
    config = ParsingSettings(
        preset="test",
        norms=("bn",),
        data=ParsingDataSettings(
            path=path, vocabulary_size=500, batch_size=128, evaluation_batch_size=1000
        ),
        model=ParserShape(
            num_features=32, num_layers=1, embedding_features=8, activation="relu", dropout=0.1
        ),
        optimizer=OptimizerSettings(learning_rate=3e-2),
        training=ClassifierTrainingSettings(
            max_steps=160,
            log_every=20,
            validate_every=80,
            validation_tokens=2000,
            monitor_every=40,
            tid_batches=3,
        ),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, ComparisonResults, list[Event]]:
    events: list[Event] = []
    folder = tmp_path_factory.mktemp("parsing")
    config = parsing_config(norms=("ln", "bn"))
    return folder, compare(config, folder, on_event=events.append), events


@pytest.fixture(scope="module")
def encoded() -> EncodedTreebank:
    return ParsingTask().encode(parsing_config())


@pytest.mark.slow
def test_parsers_soon_beat_the_neighbors(
    compared: tuple[Path, ComparisonResults, list[Event]],
) -> None:
    _, results, events = compared
    unigram, attach = results.baselines
    assert (unigram["name"], attach["name"]) == ("unigram", "attach")
    for run in results.runs:
        assert run.status == "finished"
        metrics, loss = run.metrics, unigram["metrics"]["test_loss"]
        assert loss is not None
        assert metrics["test_loss"] is not None
        assert metrics["test_loss"] < loss - 0.5, run.norm
        for split in ("valid", "test"):
            found, nearest = metrics[f"{split}_uas"], attach["metrics"][f"{split}_uas"]
            labeled = metrics[f"{split}_las"]
            assert found is not None
            assert labeled is not None
            assert nearest is not None
            assert 100 > found > nearest + 5, run.norm
            assert found > labeled > 0
        assert metrics["parsing_sentences_per_second"] is not None
        assert run.examples_per_second is not None
    ln, bn = results.runs
    assert ln.tid is None
    assert bn.tid is not None
    splits = results.data["splits"]
    assert [splits[split]["sentences"] for split in splits] == [3881, 485, 485]
    assert splits["train"]["without_transitions"] == {
        "trees with crossing arcs": 256,
        "trees with several roots": 0,
    }
    (prepared,) = (event for event in events if isinstance(event, DataPrepared))
    assert (prepared.name, prepared.unit, prepared.units) == ("turkish", "transitions", "words")
    assert prepared.left_out == {"trees with crossing arcs": 256}


@pytest.mark.slow
def test_the_best_checkpoint_is_that_with_the_best_score(
    compared: tuple[Path, ComparisonResults, list[Event]],
) -> None:
    folder, results, _ = compared
    for run in results.runs:
        rows = (folder / run.folder / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("valid_score")
        scores = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
        assert len(scores) == 2
        assert run.metrics["valid_uas"] == pytest.approx(max(scores), abs=1e-3)


def test_a_trained_parser_parses_as_it_was_scored(
    compared: tuple[Path, ComparisonResults, list[Event]],
) -> None:
    folder, results, _ = compared
    trained = load_trained(folder / results.runs[1].folder)
    settings = trained.settings
    (batch,) = training_batches(settings, 1)
    assert {name: value.shape for name, value in batch.items()} == {STATES: (128, NUM_FEATURES)}
    with pytest.raises(InputError, match=r"^rt is a data set of classify"):
        run_text(settings, data="rt")
    text = run_text(settings)
    assert isinstance(text, EncodedTreebank)
    assert text.fingerprint == settings["data_fingerprint"]
    parsed = parse_split(text, "test", trained.model.eval(), CPU)
    trees = text.trees["test"]
    counted = trees.is_scored
    share = (parsed.heads == trees.heads)[counted].double().mean()
    assert 100 * float(share) == pytest.approx(results.runs[1].metrics["test_uas"])


class GoldScores(nn.Module):
    """Scores the gold transition of every state of a split; equal states share one."""

    def __init__(self, encoded: EncodedTreebank) -> None:
        super().__init__()
        gold = encoded.gold["valid"]
        self._number = len(encoded.inventory)
        self._known = {
            tuple(state): target
            for state, target in zip(gold.states.tolist(), gold.targets.tolist(), strict=True)
        }

    def forward(self, states: Tensor) -> Tensor:
        targets = [max(self._known.get(tuple(row), 0), 0) for row in states.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(targets), self._number).double()


def test_who_knows_the_oracle_parses_well(encoded: EncodedTreebank) -> None:
    data = ParsingData(encoded, parsing_config(), seed=0)
    scores = data.scores("valid", GoldScores(encoded), CPU)
    # Equal states sometimes have different transitions, and crossing arcs have none.
    assert scores["uas"] > 80
    assert scores["las"] > 75
    gold = encoded.gold["valid"]
    assert sum(batch.num_targets for batch in data.evaluation("valid")) == int(
        (gold.targets != IGNORED).sum()
    )
    assert sum(batch.num_tokens for batch in data.evaluation("valid", 500)) == 500


def test_the_model_has_the_sizes_of_the_treebank(encoded: EncodedTreebank) -> None:
    config = parsing_config()
    task = task_of(config)
    sizes = task.sizes(encoded)
    num_labels = len(encoded.vocabulary.labels)
    assert sizes == (500, sizes[1], num_labels + NUM_LABEL_MARKS, 1 + 2 * num_labels)
    model = task.build(config, "bn", sizes, seed=0)
    assert task.sizes_of_weights(model.state_dict()) == sizes
    (states,) = task.example_inputs(config, sizes)
    assert model(states).shape == (2, sizes[-1])
    batch = task.data(encoded, config, 0).batches.batch(0)
    assert model(**batch.inputs()).shape == (128, sizes[-1])


def test_max_examples_shortens_the_training(encoded: EncodedTreebank) -> None:
    config = override(parsing_config(), ["data.max_examples=1000"])
    data = task_of(config).data(encoded, config, 0)
    assert data.batches.batches_per_epoch == 7


def test_a_text_without_trees_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name of an embedded treebank"):
        compare(parsing_config("rt"), tmp_path / "out")
    lines = "1\ta\t_\tNOUN\t_\t_\t2\tx\t_\t_\n2\tb\t_\tNOUN\t_\t_\t1\tx\t_\t_\n\n"
    path = tmp_path / "circles.conllu"
    path.write_text(lines * 12)
    with pytest.raises(InputError, match=r"circles\.conllu, line 1, column 7 \(HEAD\): '2'"):
        compare(parsing_config(str(path)), tmp_path / "out")

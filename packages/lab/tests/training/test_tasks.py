from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_training import TRAINING, Configure, compare

from powernorm.errors import InputError
from powernorm.inspection.modules import batch_layers
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.data.subwords import encode_corpus
from powernorm_lab.engine.folders import EARLY
from powernorm_lab.engine.state import read_checkpoint
from powernorm_lab.settings.comparison import early_step, to_json
from powernorm_lab.tasks.registry import settings_from, task_of
from powernorm_lab.tasks.trained_models import load_trained, run_data, training_batches
from powernorm_lab.training.evaluation import evaluate


def test_an_unknown_task_lists_the_known_ones(configure: Configure) -> None:
    with pytest.raises(InputError, match="no task 'mt': choose one of lm, translation, classify"):
        settings_from(to_json(configure()) | {"task": "mt"})


def test_a_trained_model_knows_its_batches(configure: Configure, tmp_path: Path) -> None:
    config = configure(norms=("bn",), seeds=(3,))
    results = compare(config, tmp_path)
    trained = load_trained(str(tmp_path / "bn-pre-seed3"))
    batches = training_batches(trained.settings, 4)
    assert set(batches[0]) == {"tokens"}
    encoded = encode_corpus(load_corpus(config.data.path), config.data.vocabulary_size)
    expected = task_of(config).data(encoded, config, 3).batches.batch(2)
    assert torch.equal(batches[2]["tokens"], expected.named["tokens"])
    loss = evaluate(
        trained.model,
        run_data(trained.settings).evaluation("test"),
        words_per_token=1.0,
        device=torch.device("cpu"),
    ).loss
    assert loss == pytest.approx(results.runs[0].metrics["test_loss"])


EARLY_TRAINING = replace(TRAINING, early_checkpoint=0.4)


def test_the_early_checkpoint_is_of_its_update(configure: Configure, tmp_path: Path) -> None:
    config = configure(norms=("bn",), training=EARLY_TRAINING)
    assert early_step(config) == 5
    compare(config, tmp_path / "long")
    early = tmp_path / "long" / "bn-pre-seed0" / "checkpoints" / EARLY
    assert read_checkpoint(early)["step"] == 5
    model = load_trained(early).model
    # All batches of the first five updates were used, and none after them.
    (layer, *_) = batch_layers(model).values()
    assert int(layer.num_batches_tracked) == 5


def test_accumulated_updates_count_once(configure: Configure, tmp_path: Path) -> None:
    optimizer = replace(configure().optimizer, accumulation=2)
    config = configure(norms=("bn",), training=EARLY_TRAINING, optimizer=optimizer)
    compare(config, tmp_path)
    early = tmp_path / "bn-pre-seed0" / "checkpoints" / EARLY
    assert read_checkpoint(early)["step"] == 5
    (layer, *_) = batch_layers(load_trained(early).model).values()
    assert int(layer.num_batches_tracked) == 10


def test_without_the_setting_no_early_checkpoint_is_kept(
    configure: Configure, tmp_path: Path
) -> None:
    compare(configure(), tmp_path)
    assert not (tmp_path / "ln-pre-seed0" / "checkpoints" / EARLY).exists()
    with pytest.raises(InputError, match=r"early_checkpoint=1\.5 is too large"):
        replace(TRAINING, early_checkpoint=1.5)

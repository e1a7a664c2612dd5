"""The tensorized attention and the adaptive softmax, from settings to a scored run."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lab.tests.training.tiny_training import Configure, compare

from powernorm.errors import InputError
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.lm.model import AdaptiveLanguageModel, LanguageModel
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained
from powernorm_lab.training.evaluation import evaluate

TENSORIZED = ("model.architecture=tensorized", "model.num_heads=1", "model.head_features=5")
ADAPTIVE = ("model.adaptive_cutoffs=280",)
"""In so small a vocabulary the last ids are words, which get a quarter of the features."""
FUTURE = (*TENSORIZED, "model.sees_future=true")


@pytest.mark.parametrize(
    ("assignments", "remark"),
    [
        (TENSORIZED, None),
        (FUTURE, "sees the future"),
        (ADAPTIVE, None),
        (TENSORIZED + ADAPTIVE, None),
    ],
)
def test_run_is_scored_and_its_checkpoint_loads(
    configure: Configure, tmp_path: Path, assignments: tuple[str, ...], remark: str | None
) -> None:
    longer = ("training.max_steps=40", "training.validate_every=20")
    config = override(configure(norms=("bn",)), [*assignments, *longer])
    (run,) = compare(config, tmp_path).runs
    assert run.status == "finished"
    assert (run.remark or None) == remark
    folder = tmp_path / run.folder
    assert json.loads((folder / "result.json").read_text()).get("remark") == remark
    trained = load_trained(folder)
    assert isinstance(trained.model, AdaptiveLanguageModel) == bool(config.model.adaptive_cutoffs)
    task = task_of(config)
    encoded = task.encode(config)
    data = task.data(encoded, config, seed=0)
    measured = evaluate(
        trained.model, data.evaluation("test"), words_per_token=1.0, device=torch.device("cpu")
    )
    assert measured.loss == pytest.approx(run.metrics["test_loss"], rel=1e-5)
    # An untrained model is near the uniform distribution; this one is not.
    assert measured.loss < math.log(encoded.vocabulary_size)
    assert diagnose_run(folder, num_batches=3).rows


def test_adaptive_softmax_is_trained_by_its_own_likelihood(configure: Configure) -> None:
    config = override(configure(), ADAPTIVE)
    model = task_of(config).build(config, "ln", (300,), seed=0)
    assert isinstance(model, AdaptiveLanguageModel)
    tokens = torch.arange(24).view(2, 12)
    outputs = model.eval()(tokens)
    whole = F.nll_loss(
        model.log_probabilities(outputs).flatten(0, 1), tokens.flatten(), reduction="sum"
    )
    torch.testing.assert_close(model.nll(outputs, tokens), whole)


def test_sizes_come_from_the_weights_of_every_model(configure: Configure) -> None:
    for assignments in ((), TENSORIZED, ADAPTIVE):
        config = override(configure(), assignments)
        model = task_of(config).build(config, "bn", (300,), seed=0)
        assert task_of(config).sizes_of_weights(model.state_dict()) == (300,)


def test_head_is_as_large_as_the_features_where_it_is_not_set(configure: Configure) -> None:
    model = task_of(override(configure(), TENSORIZED[:2])).build(
        override(configure(), TENSORIZED[:2]), "ln", (300,), seed=0
    )
    assert isinstance(model, LanguageModel)
    assert model.layers[0].attention.core_weight.shape == (16,)


def test_cutoffs_beyond_the_vocabulary_end_before_anything_is_trained(configure: Configure) -> None:
    config = override(configure(), ["model.adaptive_cutoffs=40,5000"])
    with pytest.raises(InputError, match="adaptive_cutoffs=40,5000 do not fit a vocabulary of 300"):
        task_of(config).build(config, "ln", (300,), seed=0)


def test_settings_that_do_not_fit_the_data_leave_no_run(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure()
    with pytest.raises(InputError, match="adaptive_cutoffs=40,5000 do not fit"):
        compare(override(config, ["model.adaptive_cutoffs=40,5000"]), tmp_path)
    (run,) = compare(config, tmp_path).runs
    assert run.status == "finished"

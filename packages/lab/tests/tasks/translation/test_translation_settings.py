"""Settings of the translation task: refused combinations, and their effects."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.training.tiny_training import compare
from lab.tests.training.tiny_translation import tiny_translation

from powernorm.errors import InputError
from powernorm.norms import BatchNorm
from powernorm_lab.settings.training import ScheduleSettings
from powernorm_lab.tasks.trained_models import load_trained
from powernorm_lab.training.optimization import rate_factor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"batch_tokens": 5}}, "data.batch_tokens=5 is less than the 24 subwords"),
        ({"data": {"languages": "de-fr"}}, "fr"),
        ({"data": {"path": "/no/such/pairs"}}, "/no/such/pairs"),
        ({"model": {"decoder_norm": "batch"}}, "unknown norm 'batch'"),
    ],
    ids=str,
)
def test_bad_settings_are_found_before_any_work(
    pairs: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError) as caught:
        compare(tiny_translation(pairs, **changes), out)
    assert message in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_batch_norm_in_the_decoder_trains_and_decodes(
    pairs: Path, tmp_path: Path, placement: str
) -> None:
    config = tiny_translation(
        pairs, model={"decoder_norm": "bn", "placement": placement}, training={"max_steps": 30}
    )
    (run,) = compare(config, tmp_path).runs
    assert run.status == "finished"
    assert run.tid is not None
    assert run.metrics["test_bleu"] is not None
    folder = tmp_path / run.folder
    with (folder / "metrics.csv").open(newline="") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0] - 1
    names = [
        name
        for name, module in load_trained(folder).model.named_modules()
        if isinstance(module, BatchNorm)
    ]
    assert names
    assert all(name.startswith("decoder") for name in names)
    assert len(json.loads((folder / "result.json").read_text())["signatures"]) == 4


def test_warmup_steps_win_over_the_fraction() -> None:
    schedule = ScheduleSettings(name="inverse_sqrt", warmup_fraction=0.5, warmup_steps=4)
    factors = [rate_factor(schedule, step, 100) for step in range(16)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[15] == pytest.approx((4 / 16) ** 0.5)

"""Every study: its variants, its settings, and at a tiny size its training and its page."""

import json
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.recipes.studies import STUDIES, study_config
from powernorm.lab.recipes.studies.recipes import PRESETS
from powernorm.lab.report import read_comparison
from powernorm.lab.report.studies import study_contents
from powernorm.lab.settings.comparison import to_json
from powernorm.lab.settings.variants import lines_of
from powernorm.lab.tasks import STUDIES as NAMES
from powernorm.lab.tasks.builtin import check_norms, compare
from powernorm.lab.tasks.settings import settings_from

TINY = (
    "data.vocabulary_size=300",
    "data.sequence_length=8",
    "data.batch_size=8",
    "model.num_features=8",
    "model.feedforward_features=8",
    "optimizer.learning_rate=3e-2",
    "training.max_steps=8",
    "training.validate_every=4",
    "training.log_every=1",
    "training.monitor_every=1",
    "training.tid_batches=2",
    "training.num_threads=1",
)


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name in STUDIES for preset in PRESETS]
)
def test_studies_say_what_they_are_and_can_be_built(name: str, preset: str) -> None:
    config = study_config("lm", name, preset)
    assert config.study is not None
    assert (config.task, config.study.name, config.preset) == ("lm", name, preset)
    check_norms(config)
    assert settings_from(to_json(config)) == config
    assert {line.norm for line in lines_of(config)} == set(config.norms)


def test_micro_batches_divide_an_update() -> None:
    lines = lines_of(study_config("lm", "micro-batches", "full"))
    assert [line.variant.x for line in lines[1:5] if line.variant] == [512, 1024, 2048, 4096]
    for line in lines[1:]:
        data, accumulation = line.config.data, line.config.optimizer.accumulation
        assert line.variant is not None
        assert data.batch_size * data.sequence_length == line.variant.x
        assert line.variant.x * accumulation == 4096
        tid_tokens = line.variant.x * line.config.training.tid_batches
        assert tid_tokens == lines[1].config.training.tid_batches * 512
    chosen = study_config("lm", "micro-batches", "smoke", ["data.batch_size=4", "norms=bn"])
    assert [line.label for line in lines_of(chosen)] == ["bn-32", "bn-64", "bn-128"]


def test_lowest_layers_follow_the_depth() -> None:
    lines = lines_of(study_config("lm", "lowest-layers", "demo", ["model.num_layers=3"]))
    assert [line.label for line in lines] == ["ln", "bn-1of3", "bn-2of3", "bn-3of3"]
    assert [line.config.model.num_norm_layers for line in lines] == [None, 1, 2, 3]
    assert {line.config.placement for line in lines} == {"post"}


def test_grids_are_complete() -> None:
    for name, options in (
        ("penalties", ("mean_penalty", "var_penalty")),
        ("alphas", ("momentum", "backward_momentum")),
    ):
        lines = [line for line in lines_of(study_config("lm", name)) if line.norm != "ln"]
        xs, ys = ({getattr(line.variant, axis) for line in lines} for axis in "xy")
        assert len(lines) == len(xs) * len(ys)
        for line in lines:
            chosen = line.config.norm_options[line.norm]
            assert line.variant is not None
            values = [line.variant.x, line.variant.y]
            if name == "alphas":
                values = [1 - value for value in values if value is not None]
            assert [chosen[option] for option in options] == pytest.approx(values)


@pytest.mark.parametrize(
    ("task", "name", "preset", "assignments", "message"),
    [
        ("lm", "alpha", "demo", [], "no study 'alpha': choose one of micro-batches, lowest-layers"),
        ("mt", "alphas", "demo", [], "'mt' has no studies: choose lm"),
        ("lm", "alphas", "big", [], "no preset 'big': choose one of smoke, demo, full"),
        ("lm", "alphas", "smoke", ["norms=bn"], "alphas has no variant of bn; choose from ln, pn"),
        (
            "lm",
            "alphas",
            "smoke",
            ["norm_options.pn.momentum=0.3"],
            "norm_options.pn.momentum=0.3 has no effect on the study alphas",
        ),
        (
            "lm",
            "lowest-layers",
            "smoke",
            ["norms=bn", "model.num_norm_layers=1"],
            "model.num_norm_layers=1 has no effect",
        ),
        (
            "lm",
            "lowest-layers",
            "smoke",
            ["model.num_norm_layers=1"],
            "model.num_norm_layers=1 has no effect",
        ),
        (
            "lm",
            "scales",
            "smoke",
            ["training.record_scales=false"],
            "training.record_scales=false has no effect",
        ),
        ("lm", "alphas", "smoke", ["data.batchsize=1"], "did you mean data.batch_size"),
    ],
)
def test_bad_input(task: str, name: str, preset: str, assignments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study_config(task, name, preset, assignments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_every_variant_of_the_lowest_layers_finishes(tmp_path: Path) -> None:
    """The recipe as it is, on a part of its text: a study of diverged runs would show nothing."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(load_corpus(None).documents["train"])[:300_000], encoding="utf-8")
    settings = [f"data.path={text}", "training.tid_batches=0", "training.monitor_every=0"]
    results = compare(study_config("lm", "lowest-layers", "smoke", settings), tmp_path / "out")
    assert [run["status"] for run in results["runs"]] == ["finished"] * 3


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_ends_in_its_figure(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"The number {n} comes before {n + 1}.\n" for n in range(400)), encoding="utf-8"
    )
    fewer = {"micro-batches": ["norms=ln,bn"], "layernorm-parts": ["norms=ln,none"]}.get(name, [])
    config = study_config("lm", name, "smoke", [f"data.path={text}", *TINY, *fewer])
    results = compare(config, tmp_path / "out")
    assert "failed" not in {run["status"] for run in results["runs"]}
    comparison = read_comparison(tmp_path / "out")
    assert any("<svg" in part for part in study_contents(comparison))
    assert comparison.names == [line.label for line in lines_of(config)]
    for run in comparison.runs:
        own = json.loads((tmp_path / "out" / run.folder / "result.json").read_text())
        assert own["study"] == comparison.study
    assert all("study" not in run for run in results["runs"])


def test_settings_of_a_study_may_need_each_other() -> None:
    """Each alone does not fit the preset's model."""
    config = study_config("lm", "alphas", "smoke", ["model.num_heads=5", "model.num_features=100"])
    assert (config.model.num_heads, config.model.num_features) == (5, 100)


def test_the_command_line_names_every_study() -> None:
    assert tuple(STUDIES) == NAMES

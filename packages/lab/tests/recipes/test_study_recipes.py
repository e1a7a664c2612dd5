"""Every study on every task: variants, settings, training at a tiny size, and page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare
from lab.tests.training.tiny_translation import write_pairs

from covering import some_default
from powernorm.errors import InputError
from powernorm_lab.comparing import notes_of
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.recipes import check_choice, paper_records
from powernorm_lab.recipes.studies import STUDIES, presets_of, study_config, tasks_of
from powernorm_lab.report import read_comparison
from powernorm_lab.report.studies import study_figures
from powernorm_lab.runs import STUDIES as NAMES
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import to_json
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.registry import settings_from

PAIRS = [(task, name) for task in TASKS for name in STUDIES if task in tasks_of(name)]
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


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_studies_say_what_they_are_and_can_be_built(task: str, name: str) -> None:
    for preset in ("smoke", "demo"):
        config = study_config(task, name, preset)
        assert config.study is not None
        assert (config.task, config.study.name, config.preset) == (task, name, preset)
        check_norms(config)
        check_choice(config)
        assert settings_from(to_json(config)) == config
        assert {line.norm for line in lines_of(config)} == set(config.norms)
        assert (notes_of(config).paper, notes_of(config).changes) == ((), None)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_a_study_begins_with_any_recipe_of_its_task(task: str, name: str) -> None:
    for preset in presets_of(task, name):
        config = study_config(task, name, preset)
        labels = {line.name for line in lines_of(config)}
        assert {record["norm"] for record in paper_records(config)} <= labels
        for record in paper_records(config):
            assert set(record["against"]) <= labels


def test_full_is_where_a_paper_has_the_study() -> None:
    has_full = {pair for pair in PAIRS if "full" in presets_of(*pair)}
    parts = {(task, "layernorm-parts") for task in ("classify", "image", "parse", "lm-char")}
    others = {pair for pair in PAIRS if pair[0] in ("lm", "translation")}
    assert has_full == parts | others
    assert study_config("lm-char", "layernorm-parts", "full").data.path == "enwik8"
    with pytest.raises(InputError, match="penalties of ner has no preset 'full': choose one of"):
        study_config("ner", "penalties", "full")


def test_micro_batches_divide_an_update() -> None:
    lines = lines_of(study_config("lm", "micro-batches", "full"))
    assert [line.x for line in lines[1:5]] == [512, 1024, 2048, 4096]
    for line in lines[1:]:
        data, accumulation = line.settings.data, line.settings.optimizer.accumulation
        assert data.batch_size * data.sequence_length == line.x
        assert line.x * accumulation == 4096
        tid_tokens = line.x * line.settings.training.tid_batches
        assert tid_tokens == lines[1].settings.training.tid_batches * 512
    chosen = study_config("lm", "micro-batches", "smoke", ["data.batch_size=4", "norms=bn"])
    assert [line.name for line in lines_of(chosen)] == ["bn-32", "bn-64", "bn-128"]


def test_a_budget_of_tokens_is_divided_too() -> None:
    config = study_config("translation", "micro-batches", "full")
    lines = {line.name: line.settings for line in lines_of(config)}
    assert [label for label in lines if label.startswith("pn-")] == [
        f"pn-{tokens}" for tokens in (512, 1024, 2048, 4096)
    ]
    smallest = lines["pn-512"]
    assert (smallest.data.batch_tokens, smallest.optimizer.accumulation) == (512, 8)
    # The number of updates does not depend on the division.
    assert smallest.norm_options["pn"]["warmup_steps"] == 8 * 8000
    assert smallest.model.final_norm_warmup == 8 * 1000
    assert config.study is not None
    assert config.study.x_label == "tokens in a micro-batch"


@pytest.mark.parametrize(
    ("task", "unit", "largest"),
    [("ner", "sentences", 16), ("parse", "transitions", 256), ("image", "images", 32)],
)
def test_rows_of_a_micro_batch_are_called_what_they_are(task: str, unit: str, largest: int) -> None:
    config = study_config(task, "micro-batches", "smoke")
    assert config.study is not None
    assert config.study.x_label == f"{unit} in a micro-batch"
    assert max(variant.x or 0 for variant in config.variants) == largest


def test_lowest_layers_follow_the_depth() -> None:
    lines = lines_of(study_config("lm", "lowest-layers", "demo", ["model.num_layers=3"]))
    assert [line.name for line in lines] == ["ln", "bn-1of3", "bn-2of3", "bn-3of3"]
    assert [line.settings.model.num_norm_layers for line in lines] == [None, 1, 2, 3]
    assert {line.settings.placement for line in lines} == {"post"}


def test_lowest_layers_of_a_pre_norm_recipe() -> None:
    config = study_config("translation", "lowest-layers", "verses-reduced")
    assert (config.placement, config.model.final_norm_warmup) == ("post", None)
    with pytest.raises(InputError, match="use --preset iwslt14-wang2022-post"):
        check_choice(study_config("translation", "lowest-layers", "iwslt14-wang2022-pre"))


def test_grids_are_complete() -> None:
    for name, options in (
        ("penalties", ("mean_penalty", "var_penalty")),
        ("alphas", ("momentum", "backward_momentum")),
    ):
        lines = [line for line in lines_of(study_config("lm", name)) if line.norm != "ln"]
        xs, ys = ({getattr(line, axis) for line in lines} for axis in "xy")
        assert len(lines) == len(xs) * len(ys)
        for line in lines:
            chosen = line.settings.norm_options[line.norm]
            values = [line.x, line.y]
            if name == "alphas":
                values = [1 - value for value in values if value is not None]
            assert [chosen[option] for option in options] == pytest.approx(values)


def test_penalties_are_in_the_unit_of_the_task() -> None:
    """The loss of ner is a mean over sentences."""
    config = study_config("ner", "penalties", "demo", ["data.batch_size=8"])
    assert sorted({variant.x for variant in config.variants if variant.x is not None}) == [
        *(0, 0.08, 0.8, 8)
    ]


def test_numbers_of_a_paper_stand_beside_the_variants_that_repeat_them() -> None:
    def printed(task: str, name: str, preset: str) -> dict[str, float | None]:
        records = paper_records(study_config(task, name, preset))
        return {record["norm"]: record["value"] for record in records}

    whole = {"ln": 35.5, "bn-4096": 34.4, "pnv-4096": 35.5, "pn-4096": 35.9}
    assert printed("translation", "micro-batches", "full") == whole
    assert printed("translation", "lowest-layers", "full") == {"ln": 35.5, "bn-6of6": 34.0}
    penalties = printed("translation", "penalties", "full")
    assert penalties == {"ln": 35.5, "rbn-0-0": 34.8, "rbn-0.1-0.01": 35.6}
    parts = printed("classify", "layernorm-parts", "full")
    assert (parts["none"], parts["detach-mean"]) == (76.85, 75.02)
    notes = notes_of(study_config("translation", "micro-batches", "verses-reduced"))
    assert "these of the embedded verses" in str(notes.reduced)
    # Other batch sizes and depths have no published results.
    assert printed("lm", "micro-batches", "full") == printed("lm", "lowest-layers", "full") == {}


@pytest.mark.parametrize(
    ("task", "name", "preset", "assignments", "message"),
    [
        ("lm", "alpha", "demo", [], "no study 'alpha': choose one of micro-batches, lowest-layers"),
        ("mt", "alphas", "demo", [], "there is no task 'mt': choose one of lm, translation"),
        (
            "image",
            "lowest-layers",
            "demo",
            [],
            "lowest-layers does not apply to the task image, whose model has no setting "
            "model.num_norm_layers: choose one of lm, translation, classify, ner, lm-char",
        ),
        ("ner", "future", "demo", [], "does not apply to the task ner.*: choose one of lm"),
        (
            "lm",
            "future",
            "smoke",
            ["model.architecture=plain", "model.head_features=none"],
            "model.architecture=plain has only the causal form.*set model.architecture=tensorized",
        ),
        (
            "lm",
            "alphas",
            "big",
            [],
            "no preset 'big': choose one of smoke, demo, full, addresses, ptb",
        ),
        ("parse", "alphas", "rows", [], "no preset 'rows': choose one of smoke, demo, petrogold"),
        ("lm", "alphas", "smoke", ["norms=bn"], "alphas has no variant of bn; choose from ln, pn"),
        (
            "lm",
            "micro-batches",
            "smoke",
            ["data.batch_size=7"],
            "data.batch_size=7 cannot be divided for the study micro-batches: choose an even",
        ),
        (
            "lm",
            "alphas",
            "smoke",
            ["norm_options.pn.momentum=0.3"],
            "norm_options.pn.momentum=0.3 has no effect on the study alphas",
        ),
        (
            "classify",
            "penalties",
            "demo",
            ["norm_options.rbn.mean_penalty=0.3"],
            "norm_options.rbn.mean_penalty=0.3 has no effect on the study penalties",
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
        ("lm", "lowest-layers", "demo", ["model.num_layers=0"], "model.num_layers=0"),
    ],
)
def test_bad_input(task: str, name: str, preset: str, assignments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study_config(task, name, preset, assignments)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_every_variant_of_the_lowest_layers_finishes(tmp_path: Path) -> None:
    """The unchanged recipe on a part of its text: diverged runs would make the study useless."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(load_corpus(None).documents["train"])[:300_000], encoding="utf-8")
    settings = [f"data.path={text}", "training.tid_batches=0", "training.monitor_every=0"]
    results = compare(study_config("lm", "lowest-layers", "smoke", settings), tmp_path / "out")
    assert [run.status for run in results.runs] == ["finished"] * 3


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", some_default(STUDIES, "penalties", "scales"))
def test_every_study_ends_in_its_figure(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"The number {n} comes before {n + 1}.\n" for n in range(400)), encoding="utf-8"
    )
    fewer = {
        "micro-batches": ["norms=ln,bn"],
        "layernorm-parts": ["norms=ln,none"],
        "future": ["norms=ln,bn"],
    }.get(name, [])
    config = study_config("lm", name, "smoke", [f"data.path={text}", *TINY, *fewer])
    results = compare(config, tmp_path / "out")
    assert "failed" not in {run.status for run in results.runs}
    comparison = read_comparison(tmp_path / "out")
    assert study_figures(comparison)
    assert comparison.names == [line.name for line in lines_of(config)]
    for run in comparison.runs:
        own = json.loads((tmp_path / "out" / run.folder / "result.json").read_text())
        assert own["study"] == comparison.study
    assert all(run.study is None for run in results.runs)


SHORT = ("training.max_steps=6", "training.validate_every=3", "training.tid_batches=2")
PAIRS_OF_NUMBERS = ("data.languages=de-en", "data.vocabulary_size=290", "data.max_pairs=none")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("task", "name", "norms", "label", "settings"),
    [
        pytest.param(
            *("translation", "micro-batches", "ln,bn", "Test BLEU", PAIRS_OF_NUMBERS),
            marks=pytest.mark.slow,
        ),
        ("translation", "lowest-layers", "ln,bn", "Test BLEU, gap to ln", PAIRS_OF_NUMBERS),
        ("image", "layernorm-parts", "ln,none", "Test accuracy", ("data.max_examples=100",)),
    ],
)
def test_the_axis_is_the_score_of_the_task(
    task: str, name: str, norms: str, label: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    own = [f"data.path={write_pairs(tmp_path / 'pairs')}"] if task == "translation" else []
    config = study_config(task, name, "smoke", [f"norms={norms}", *SHORT, *settings, *own])
    notes = notes_of(config)
    compare(config, tmp_path / "out", notes=notes)
    comparison = read_comparison(tmp_path / "out")
    assert comparison.measure.metric == notes.goal["metric"]
    # Such short runs need not learn anything.
    runs = [replace(run, status="finished") for run in comparison.runs]
    shown = "".join(drawn.svg for drawn in study_figures(replace(comparison, runs=runs)))
    assert f">{label}<" in shown
    assert "perplexity" not in shown


def test_settings_of_a_study_may_need_each_other() -> None:
    """Each of them alone does not fit the preset's model."""
    config = study_config("lm", "alphas", "smoke", ["model.num_heads=5", "model.num_features=100"])
    assert (config.model.num_heads, config.model.num_features) == (5, 100)


def test_the_command_line_names_every_study() -> None:
    assert tuple(STUDIES) == NAMES

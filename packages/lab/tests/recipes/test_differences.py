"""Differences between a comparison and the papers: settings, data, placement."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.data.official_images import write_mnist

from powernorm_lab.recipes import changes_of, differences, paths_of, recipe, reduced_note
from powernorm_lab.recipes.files import named_recipe
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.settings.comparison import Study
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.image import sources as image_sets
from powernorm_lab.tasks.registry import task_of

EXPERIMENTS = [
    name
    for name in paths_of("translation")
    if named_recipe("translation", name).about.source and name != "verses-small"
]


def note_of(preset: str, *assignments: str, task: str = "translation") -> str:
    note = reduced_note(override(recipe(task, preset), assignments))
    assert note is not None
    return note


def settings_of(preset: str, *assignments: str, task: str = "translation") -> dict[str, Any]:
    """Return changed values here and in the preset; absent values are defaults."""
    changes = changes_of(override(recipe(task, preset), assignments))
    return {} if changes is None else {**changes["settings"]}


@pytest.mark.parametrize("preset", EXPERIMENTS)
def test_unchanged_experiment_is_not_reduced(preset: str) -> None:
    config = recipe("translation", preset)
    assert (reduced_note(config), changes_of(config)) == (None, None)
    same_folder = f"data.path=./{config.data.path}/"
    harmless = [same_folder, "seeds=0,1", "training.num_threads=2", "training.log_every=7"]
    config = override(config, harmless)
    assert (reduced_note(config), changes_of(config)) == (None, None)


def test_changed_experiment_says_what_was_changed() -> None:
    config = override(
        recipe("translation", "iwslt14-wang2022-pre"),
        [
            "training.max_steps=500",
            "norm_options.rbn.mean_penalty=0.5",
            "norm_options.mabn.window=3",  # which is not among the norms
            "norm_options.ln.bias=false",
        ],
    )
    assert reduced_note(config) is None
    assert changes_of(config) == {
        "preset": "iwslt14-wang2022-pre",
        "settings": {
            "training.max_steps": {"here": 500, "preset": 66000},
            "norm_options.rbn.mean_penalty": {"here": 0.5, "preset": 0.1},
            "norm_options.ln.bias": {"here": False},
        },
    }


@pytest.mark.parametrize(
    ("preset", "dataset"),
    [
        ("iwslt14-shen2020", "IWSLT14 De-En"),
        ("wmt14-xu2019", "WMT14 En-De"),
        ("wmt16-wang2022-post", "WMT16 En-De"),
        ("iwslt15-xu2019", "IWSLT15 En-Vi"),
        ("verses-small", "IWSLT14 De-En"),
        ("verses-reduced", "IWSLT14 De-En"),
    ],
)
def test_other_data_are_named(preset: str, dataset: str) -> None:
    note = note_of(preset, "data.path=my/folder")
    assert f"The data are my/folder; whether they are {dataset} is not known." in note
    assert "verses:" not in note
    assert "data.path" not in note


@pytest.mark.parametrize(
    ("task", "preset", "path", "words"),
    [
        ("parse", "petrogold", "petrogold", "these of PetroGold, Portuguese"),
        ("parse", "petrogold", "turkish", "The data are turkish, not Penn Treebank."),
        ("parse", "petrogold", "mine", "whether they are Penn Treebank is not known."),
        ("classify", "rt-xu2019", "rt", "These are four fifths of the paper's sentences."),
        ("classify", "rt-xu2019", "none", "These are four fifths of the paper's sentences."),
        # A folder of that name.
        ("classify", "rt-xu2019", "./rt", "whether they are RT is not known."),
        ("classify", "rt-xu2019", "mine", "whether they are RT is not known."),
        ("classify", "imdb-wang2022-pre", "none", "The data are rt, not IMDB."),
        ("classify", "imdb-wang2022-pre", "imdb", "IMDB's training half only."),
        ("classify", "imdb-wang2022-pre", "aclImdb", "whether they are IMDB is not known."),
        ("ner", "conll-reduced", "msra", "The data are msra, not CoNLL-2003."),
        ("ner", "conll-reduced", "conll2003", None),
        ("ner", "conll-reduced", "mine", "whether they are CoNLL-2003 is not known"),
        ("ner", "conll-reduced", "none", "The data are hironsan, not CoNLL-2003."),
        ("ner", "resume-wang2022-pre", "ResumeNER/", None),
        ("image", "mnist-xu2019", "mnist", None),
        ("image", "mnist-xu2019", "drawn-digits", "The data are drawn-digits, not MNIST."),
        ("image", "cifar10-resnet20", "mnist", "The data are mnist, not CIFAR-10."),
        ("image", "mnist-xu2019", "none", None),
        ("image", "cifar10-resnet20", "none", "The data are mnist, not CIFAR-10."),
        ("lm-char", "enwik8-xu2019", "sotu", "The data are sotu, not enwik8."),
        ("lm-char", "enwik8-xu2019", "./enwik8", None),
        ("lm-char", "enwik8-xu2019", "none", "The data are sotu, not enwik8."),
    ],
)
def test_data_are_called_what_they_are(
    task: str, preset: str, path: str, words: str | None
) -> None:
    note = str(reduced_note(override(recipe(task, preset), [f"data.path={path}"])))
    said = [
        sentence
        for sentence in note.split(". ")
        if sentence.startswith(("The data", "These are", "The paper's numbers"))
    ]
    assert len(said) == (words is not None)
    if words is not None:
        assert words.rstrip(".") in said[0]


@pytest.mark.parametrize("path", ["none", "verses"])
@pytest.mark.parametrize("preset", EXPERIMENTS)
def test_verses_in_place_of_an_experiments_data_are_named(preset: str, path: str) -> None:
    note = note_of(preset, f"data.path={path}")
    assert note.startswith("The data are the embedded verses, not ")


@pytest.mark.parametrize("preset", ["verses-small", "verses-reduced", "verses-mini-pre"])
def test_presets_of_the_verses_say_so_of_the_verses(preset: str) -> None:
    known = (
        "The papers' numbers are of IWSLT14 De-En, these of the embedded verses: compare the "
        "norms' differences, not the levels."
    )
    assert known in note_of(preset)
    assert known in note_of(preset, "data.path=verses")


def test_reduced_verses_say_how() -> None:
    note = note_of("verses-reduced")
    assert note.startswith("A reduced verses-small. The papers' numbers are of IWSLT14")
    assert "in place of" not in note
    changed = settings_of("verses-reduced")
    assert changed["model.num_features"] == {"here": 128, "preset": 512}
    # These settings affect the validation, and so the best checkpoint.
    assert changed["training.validation_tokens"] == {"here": 32768, "preset": None}
    assert settings_of("verses-small") == {}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none", "The text is an embedded one, not the Penn Treebank."),
        ("verses-en", "The text is an embedded one, not the Penn Treebank."),
        ("ptb", "The data are ptb; whether they are the Penn Treebank is not known."),
    ],
)
def test_language_model_says_that_it_is_another_one(path: str, words: str) -> None:
    note = note_of("full", f"data.path={path}", task="lm")
    assert "sees the future" in note
    assert words in note
    assert ("embedded" in note) == ("embedded" in words)


@pytest.mark.parametrize("preset", ["ptb-wang2022-pre", "ptb-wang2022-post", "ptb-shen2020"])
def test_note_says_that_the_model_is_masked(preset: str) -> None:
    note = note_of(preset, task="lm")
    assert "code of the same model sees the future; here it is masked" in note
    assert "an embedded one, not the Penn Treebank" in note
    assert "its perplexity is that of no language model" not in note
    sees = ("model.sees_future=true", "norms=ln,bn")
    seeing = note_of(preset, *sees, task="lm")
    assert seeing.startswith("ln and bn: without the causal mask")
    assert "its perplexity is that of no language model" in seeing
    changed = {"model.sees_future": {"here": True, "preset": False}}
    assert settings_of(preset, *sees, task="lm") == changed


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        ("ner", "conll-reduced", "A reduced conll-wang2022-pre. Without data.vectors there are no"),
        *(
            ("ner", f"{data}-wang2022-{placement}", "Without data.vectors")
            for data in ("conll", "resume")
            for placement in ("pre", "post")
        ),
        (
            *("parse", "petrogold"),
            "A reduced ptb-xu2019. The paper's numbers are of Penn Treebank, these ",
        ),
        ("parse", "demo", "nothing was searched for"),
    ],
)
def test_presets_say_what_they_lack(task: str, preset: str, words: str) -> None:
    note = note_of(preset, task=task)
    assert words in note
    assert note.startswith("A reduced") == words.startswith("A reduced")


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        ("classify", "demo"),
        ("image", "mnist-xu2019"),
        ("lm-char", "enwik8-xu2019"),
        ("parse", "ptb-xu2019"),
    ],
)
def test_nothing_is_said_of_the_papers_own_settings(task: str, preset: str) -> None:
    assert reduced_note(recipe(task, preset)) is None


@pytest.mark.parametrize(
    ("task", "preset", "assignments", "changed"),
    [
        ("lm", "full", ["data.batch_size=60"], {"data.batch_size": (60, 120)}),
        ("classify", "rt-xu2019", ["training.max_steps=50"], {"training.max_steps": (50, 390)}),
        ("lm-char", "enwik8-xu2019", ["training.max_steps=9"], {"training.max_steps": (9, 400000)}),
        ("ner", "conll-reduced", [], {"model.num_features": (128, 1792)}),
        ("parse", "petrogold", [], {"training.max_steps": (3410, 18500)}),
    ],
)
def test_changed_settings_are_named_with_both_values(
    task: str, preset: str, assignments: list[str], changed: dict[str, tuple[int, int]]
) -> None:
    found = settings_of(preset, *assignments, task=task)
    for key, (here, before) in changed.items():
        assert found[key] == {"here": here, "preset": before}
    assert not assignments or found.keys() == changed.keys()


def test_settings_of_the_other_placement_are_named() -> None:
    moved = ("verses-small", "model.placement=post", "model.final_norm_warmup=none")
    note = note_of(*moved)
    assert (
        "optimizer.learning_rate 0.0015, norm_options.rbn.mean_penalty 0.1 and "
        "norm_options.rbn.var_penalty 0.01 are those of pre-norm."
    ) in note
    assert settings_of(*moved)["model.placement"] == {"here": "post", "preset": "pre"}
    # Wang et al. 2022 have both.
    assert "Shen et al. 2020 have pre-norm only: no number of theirs is of post-norm." in note
    assert "Wang et al." not in note


def test_settings_that_were_changed_too_are_not_those_of_the_other_placement() -> None:
    note = note_of(
        "verses-small",
        *("model.placement=post", "model.final_norm_warmup=none", "norms=ln,bn"),
        "optimizer.learning_rate=5e-4",
    )
    assert "of pre-norm." not in note
    note = note_of("full", "model.placement=post", "norm_options.rbn.mean_penalty=0.1", task="lm")
    assert "norm_options.rbn.var_penalty 0 is that of pre-norm." in note


@pytest.mark.parametrize(
    ("preset", "twin", "rate"),
    [
        ("iwslt14-wang2022-pre", "iwslt14-wang2022-post", "0.0015"),
        ("iwslt14-wang2022-post", "iwslt14-wang2022-pre", "0.0005"),
        ("wmt16-wang2022-pre", "wmt16-wang2022-post", "0.0015"),
        ("wmt16-wang2022-post", "wmt16-wang2022-pre", "0.0005"),
    ],
)
def test_preset_of_the_other_placement_is_named(preset: str, twin: str, rate: str) -> None:
    free = ("model.final_norm=none", "model.final_norm_warmup=none")
    note = note_of(preset, f"model.placement={twin.rpartition('-')[2]}", *free)
    assert f"optimizer.learning_rate {rate}" in note
    assert f"are those of {preset.rpartition('-')[2]}-norm: use {twin}." in note


@pytest.mark.parametrize(
    ("preset", "paper"),
    [("iwslt14-shen2020", "Shen et al. 2020"), ("iwslt14-xu2019", "Xu et al. 2019")],
)
def test_paper_without_the_placement_is_named(preset: str, paper: str) -> None:
    note = note_of(preset, "model.placement=post", "model.final_norm_warmup=none")
    assert f"{paper} have pre-norm only: no number of theirs is of post-norm." in note
    assert "optimizer.learning_rate 0.0015 is that of pre-norm." in note


def test_changed_preset_without_a_papers_numbers_says_so() -> None:
    assert changes_of(recipe("image", "demo")) is None
    chosen = ["training.max_steps=20", "norms=bn", "seeds=1,2"]
    config = override(recipe("image", "demo"), chosen)
    assert reduced_note(config) is None
    changed = {"training.max_steps": {"here": 20, "preset": 1720}}
    assert changes_of(config) == {"preset": "demo", "settings": changed}


def test_changed_study_says_so() -> None:
    assert changes_of(study_config("lm", "lowest-layers", "smoke")) is None
    chosen = ["model.num_layers=3", "norms=bn"]
    changed = {"model.num_layers": {"here": 3, "preset": 2}}
    assert changes_of(study_config("lm", "lowest-layers", "smoke", chosen)) == {
        "preset": "smoke",
        "settings": changed,
    }


def test_nothing_is_said_of_a_study_of_the_users_own() -> None:
    config = replace(recipe("lm", "smoke"), study=Study("mine", "Mine", "nobody"))
    assert (reduced_note(config), changes_of(config)) == (None, None)


def test_changes_of_a_variants_norm_are_named() -> None:
    preset = ("iwslt14-xu2019", "norm_options.adanorm.scale=3")
    assert settings_of(*preset) == {"norm_options.adanorm.scale": {"here": 3, "preset": 2}}
    assert settings_of(*preset, "norms=detach-mean") == {}
    others = settings_of(*preset, "norms=detach-mean", "norm_options.detach.eps=1e-3")
    assert others == {"norm_options.detach.eps": {"here": 0.001}}


def test_a_stand_in_is_one_for_its_own_data() -> None:
    assert "the images are MNIST's" in note_of("mnist-resnet20", task="image")
    other = override(recipe("image", "mnist-resnet20"), ["data.path=drawn-digits"])
    assert "MNIST's" not in str(reduced_note(other))


@pytest.mark.parametrize(
    "task",
    ["classify", "ner", pytest.param("parse", marks=pytest.mark.slow), "image", "lm-char"],
)
def test_default_data_are_what_a_reader_takes(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MNIST in the official format, as in a user's cache.
    folders = {"mnist": write_mnist(tmp_path / "mnist", 1000, 20)}
    monkeypatch.setattr(image_sets, "fetched", folders.__getitem__)
    config = recipe(task, "demo")
    named = task_of(config).encode(
        replace(config, data=replace(config.data, path=differences._DEFAULTS[task]))
    )
    unnamed = task_of(config).encode(replace(config, data=replace(config.data, path=None)))
    assert named.fingerprint == unnamed.fingerprint

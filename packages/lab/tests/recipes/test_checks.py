"""Choices that do not fit a preset."""

from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.recipes import check_choice, chosen_settings, named_recipe, recipe
from powernorm_lab.recipes.files import EMBEDDED, recipes_of
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.overrides import override

FETCHED = ("imdb", "conll2003")


@pytest.mark.parametrize(
    ("task", "preset", "twin"),
    [
        ("translation", "iwslt14-wang2022-pre", "iwslt14-wang2022-post"),
        ("translation", "wmt16-wang2022-post", "wmt16-wang2022-pre"),
        ("classify", "imdb-wang2022-pre", "imdb-wang2022-post"),
        ("ner", "conll-wang2022-pre", "conll-wang2022-post"),
        ("lm", "ptb-wang2022-pre", "ptb-wang2022-post"),
    ],
)
def test_placement_of_another_preset_is_refused(
    task: str, preset: str, twin: str, tmp_path: Path
) -> None:
    own, other = preset.rpartition("-")[2], twin.rpartition("-")[2]
    found = named_recipe(task, preset)
    message = (
        rf"^model.placement={other}: .* of the preset {preset} are for {own}-norm; use "
        rf"--preset {twin}$"
    )
    path = f"data.path={tmp_path}"
    with pytest.raises(InputError, match=message):
        chosen_settings(found, [f"model.placement={other}", path])
    assert chosen_settings(found, [f"model.placement={own}", path]).placement == own


def test_placement_is_free_where_no_preset_has_the_other() -> None:
    for task, preset, more in (
        ("lm", "full", []),
        ("translation", "verses-small", ["model.final_norm_warmup=none"]),
        ("classify", "demo", []),
    ):
        chosen_settings(named_recipe(task, preset), ["model.placement=post", *more])
    check_choice(study_config("lm", "penalties", "full"))


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        (task, preset)
        for task in TASKS
        for preset, found in recipes_of(task).items()
        # A fetched data set needs no file of the user's.
        if found.about.data.startswith(EMBEDDED) or found.settings.data.path in FETCHED
    ],
)
def test_preset_without_files_may_be_chosen(
    task: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_choice(recipe(task, preset))


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        (
            *("translation", "iwslt14-shen2020"),
            "prepare-iwslt14.sh before BPE: --data iwslt14.tokenized.de-en/tmp",
        ),
        ("translation", "wmt14-shen2020", "prepare-wmt14en2de.sh"),
        ("translation", "wmt16-wang2022-pre", "the prepared WMT16 .*: --data FOLDER"),
        ("translation", "iwslt15-xu2019", "tst2013 as test.*: --data FOLDER"),
        ("classify", "sst5-xu2019", r"train\.txt, dev\.txt"),
        ("classify", "sogou-wang2022-post", r"train\.csv"),
        ("ner", "resume-wang2022-pre", r"with train\.char\.bmes"),
        ("lm", "wikitext103-wang2022-pre", r"files of your own, wiki\.train\.tokens"),
    ],
)
def test_files_that_are_not_there_are_described(
    task: str, preset: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe(task, preset)
    message = rf"^{config.data.path} does not exist: the preset {preset} takes .*{words}"
    with pytest.raises(InputError, match=message):
        check_choice(config)
    assert config.data.path is not None
    Path(config.data.path).mkdir(parents=True)
    check_choice(config)


def test_own_path_is_left_to_the_readers() -> None:
    check_choice(override(recipe("translation", "iwslt15-xu2019"), ["data.path=nowhere"]))


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        ("classify", "conll2003", "of ner, not of classify: use one of rt, imdb, sst-5"),
        ("image", "rt", "of classify, lm, lm-char, not of image: use one of drawn-digits"),
        ("parse", "mnist", "of image, not of parse: use one of petrogold, turkish"),
    ],
)
def test_data_set_of_another_task_is_refused(
    task: str, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = override(recipe(task, "demo"), [f"data.path={name}"])
    with pytest.raises(InputError, match=rf"^{name} is a data set {words}"):
        check_choice(config)
    Path(name).mkdir()
    check_choice(config)


def test_data_set_that_the_user_brings_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = override(recipe("classify", "demo"), ["data.path=sst-5"])
    message = r"^sst-5 does not exist: .* get it from nlp\.stanford\.edu/sentiment .* --data trees"
    with pytest.raises(InputError, match=message):
        check_choice(config)
    Path("sst-5").mkdir()
    check_choice(config)

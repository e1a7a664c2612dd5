"""Settings and results of the papers' experiments with named entities."""

import pytest

from powernorm.errors import InputError
from powernorm.norms import NORMS
from powernorm_lab.recipes import changes_of, paper_records, paths_of, recipe, reduced_note
from powernorm_lab.recipes.checks import check_choice
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.settings.overrides import override


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(
    ("name", "num_layers", "epochs", "sentences", "width"),
    [("conll", 2, 100, 14041, 14 * 128), ("resume", 4, 50, 3821, 4 * 64)],
)
def test_the_experiments_of_wang_et_al(
    placement: str, name: str, num_layers: int, epochs: int, sentences: int, width: int
) -> None:
    """App. A: "two and four layers … SGD optimizer with 0.9 momentum and 1% total steps as warmup";
    App. B: (0.01, 0) for both data sets and placements.
    """
    config = recipe("ner", f"{name}-wang2022-{placement}")
    assert config.placement == placement
    assert (config.model.num_layers, config.model.num_features) == (num_layers, width)
    assert (config.optimizer.name, config.optimizer.momentum) == ("sgd", 0.9)
    assert config.schedule.warmup_fraction == 0.01
    steps = config.training.max_steps * config.data.batch_size
    assert 0.99 * epochs * sentences < steps <= epochs * sentences
    penalties = config.norm_options["rbn"]
    # Per sentence, because the penalty is divided by the sentences of a batch.
    assert penalties["mean_penalty"] == pytest.approx(0.01 * config.data.batch_size)
    assert penalties["var_penalty"] == 0
    assert config.norm_options["pn"]["warmup_steps"] == 4000
    assert (config.model.character_features is not None) == (name == "conll")
    assert config.model.bigram_features == (50 if name == "resume" else None)
    # Yan et al. 2019 drop fewer of the characters than of the words.
    assert config.model.character_dropout == (0.3 if name == "conll" else None)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "conll-wang2022-pre",
            [91.0, 89.9, 90.6, 11.1, 54.1, 91.1, 90.9],
        ),
        (
            "conll-wang2022-post",
            [91.3, 90.9, 91.4, 67.1, 90.9, 89.9, 90.8],
        ),
        (
            "resume-wang2022-pre",
            [94.0, 93.2, 94.0, 5.0, 93.3, 94.1, 94.8],
        ),
        (
            "resume-wang2022-post",
            [94.8, 94.5, 94.8, 94.4, 94.3, 93.6, 94.4],
        ),
    ],
)
def test_columns_of_wang_et_al(preset: str, expected: list[float]) -> None:
    records = paper_records(recipe("ner", preset))
    names = ["ln", "bn", "rbn", "pn-only", "pn", "brn", "mabn"]
    assert [(record["norm"], record["value"]) for record in records] == list(
        zip(names, expected, strict=True)
    )
    assert set(names) <= set(NORMS)
    assert {record["metric"] for record in records} == {"test_f1"}
    assert "Without data.vectors" in str(reduced_note(recipe("ner", preset)))


def test_the_reduced_preset_says_what_it_lacks() -> None:
    config = recipe("ner", "conll-reduced")
    note, changes = reduced_note(config), changes_of(config)
    assert note is not None
    assert changes is not None
    assert note.startswith("A reduced conll-wang2022-pre. Without data.vectors there are no pre")
    assert changes["settings"]["model.num_features"] == {"here": 128, "preset": 1792}
    own = override(config, ["data.path=mine"])
    assert "The data are mine; whether they are CoNLL-2003 is not known" in str(reduced_note(own))


@pytest.mark.parametrize("preset", paths_of("ner"))
def test_own_warmups_of_norms_end_within_the_run(preset: str) -> None:
    config = recipe("ner", preset)
    for norm in ("pn", "pn-only", "brn", "mabn"):
        warmup = options_of(config, norm)["warmup_steps"]
        assert isinstance(warmup, int)
        assert 0 < warmup <= config.training.max_steps / 2


def test_choices_that_do_not_fit_are_refused() -> None:
    # A fetched data set needs no file.
    check_choice(recipe("ner", "conll-wang2022-pre"))
    moved = override(recipe("ner", "conll-wang2022-pre"), ["model.placement=post"])
    with pytest.raises(InputError, match="use --preset conll-wang2022-post"):
        check_choice(moved)
    with pytest.raises(InputError, match=r"ResumeNER does not exist: .* with train\.char\.bmes"):
        check_choice(recipe("ner", "resume-wang2022-pre"))

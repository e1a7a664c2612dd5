"""Users' recipes: inheritance, and errors about invalid files."""

from pathlib import Path

import pytest

from commands import powernorm, refusal
from powernorm.errors import InputError
from powernorm_lab.recipes import find_recipe, named_recipe, paper_records, read_recipe, recipe
from powernorm_lab.recipes.files import task_of_path
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.registry import settings_of


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


VARIANTS = """
extends = "lm/smoke"
[[variants]]
label = "fast"
norm = "pn"
norm_options = { momentum = 0.5 }
settings = { "data.batch_size" = "8" }
[[variants]]
label = "slow"
norm = "rbn"
"""


def test_variants_are_trained_in_place_of_the_norms_of_what_is_extended(tmp_path: Path) -> None:
    """The variants are those of docs/recipes.md; `norms` in the file selects among them."""
    lines = lines_of(read_recipe(written(tmp_path, VARIANTS)).settings)
    assert [line.name for line in lines] == ["fast", "slow"]
    chosen = written(tmp_path, f'norms = ["pn"]\n{VARIANTS}', "chosen.toml")
    (line,) = lines_of(read_recipe(chosen).settings)
    assert (line.name, line.settings.data.batch_size) == ("fast", 8)


@pytest.mark.parametrize("variants", ["3", "[3]", '[{ norm = ["pn"] }]', "[{ label = 1 }]"])
def test_variants_that_are_none(tmp_path: Path, variants: str) -> None:
    with pytest.raises(InputError, match=r"mine\.toml: variants"):
        read_recipe(written(tmp_path, f'task = "lm"\nvariants = {variants}'))


def test_a_recipe_says_only_what_is_different(tmp_path: Path) -> None:
    text = """
extends = "translation/iwslt14-shen2020"
norms = ["ln", "rbn"]
[optimizer]
learning_rate = 1e-3
clip_norm = 2
[norm_options]
rbn = { mean_penalty = 0.1 }
pn = { momentum = 0.2 }
"""
    found = read_recipe(written(tmp_path, text))
    own, base = found.settings, recipe("translation", "iwslt14-shen2020")
    assert (own.preset, own.norms, own.optimizer.learning_rate) == ("mine", ("ln", "rbn"), 1e-3)
    assert own.optimizer.clip_norm == 2.0
    assert (own.data, own.model, own.training) == (base.data, base.model, base.training)
    assert own.optimizer.weight_decay == base.optimizer.weight_decay
    assert own.norm_options["pn"] == {**base.norm_options["pn"], "momentum": 0.2}
    assert own.norm_options["rbn"] == {"mean_penalty": 0.1}
    # The paper's numbers come with its settings.
    assert {row["norm"] for row in paper_records(own, found)} == {"ln", "bn", "pnv", "pn"}
    assert paper_records(own) == []  # no built-in recipe has this name


def test_files_extend_files_beside_them(tmp_path: Path) -> None:
    written(tmp_path, 'task = "lm"\n[training]\nmax_steps = 7\nnum_threads = 1\n', "base.toml")
    (tmp_path / "below").mkdir()
    path = written(
        tmp_path / "below", 'extends = "../base.toml"\n[training]\nnum_threads = "none"\n'
    )
    training = read_recipe(path).settings.training
    assert (training.max_steps, training.num_threads) == (7, None)
    beside = written(tmp_path, 'extends = "base"\nseeds = [3]\n', "other.toml")
    assert read_recipe(beside).settings.seeds == (3,)


def test_a_recipe_without_the_variants_of_its_base_keeps_the_norms(tmp_path: Path) -> None:
    text = 'extends = "classify/rt-xu2019"\nvariants = []\n'
    found = read_recipe(written(tmp_path, text)).settings
    base = recipe("classify", "rt-xu2019")
    assert base.variants
    assert (found.norms, found.variants) == (base.norms, ())


def test_numbers_of_ones_own_stand_in_place_of_those_that_are_extended(tmp_path: Path) -> None:
    text = """
extends = "lm/full"
[[results]]
dataset = "Mine"
source = "our last paper"
values = { ln = 50, bn = "diverged", pn = inf }
"""
    found = read_recipe(written(tmp_path, text))
    assert {row.norm: row.value for row in found.results} == {
        "ln": 50.0,
        "bn": None,
        "pn": float("inf"),
    }
    assert (
        read_recipe(written(tmp_path, 'extends = "lm/full"\nresults = []\n', "n.toml")).results
        == ()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norms = ", "is not valid TOML"),
        ("norms = ['ln']", "neither a task nor a base"),
        ("task = 'mt'", "no task 'mt': choose one of lm"),
        ("extends = 'lm/big'", "no recipe 'lm/big'"),
        ("extends = 'demo'", "several recipes 'demo': choose one of lm/demo, translation/demo"),
        ("extends = 'mine.toml'", "is circular"),
        ("task = 'lm'\nextends = 'ner/demo'", "task=lm: it extends ner/demo, a recipe of ner"),
        ("task = 'lm'\nspeed = 3", "'speed' is not a setting"),
        ("task = 'lm'\n[data]\nlanguages = 'de-en'", r"'data\.languages' is not a setting"),
        ("task = 'lm'\n[training]\nmax_steps = '7'", r"training\.max_steps='7' has the wrong type"),
        ("task = 'lm'\ndata = 3", "data=3 has the wrong type: expected a section"),
        (
            "task = 'lm'\n[about]\nsumary = ''",
            r"'about\.sumary' .*; did you mean about\.summary\?$",
        ),
        ("task = 'lm'\n[optimizer]\nlr = 1", r"'optimizer\.lr' .*; known are .*\.learning_rate, "),
        ("task = 'lm'\n[[results]]\ndataset = 'a'\nsource = 'b'", r"results\.values is required"),
        ("task = 'translation'", r"data\.batch_tokens is required: set it"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_name_finds_its_file() -> None:
    for task in TASKS:
        path = find_recipe(f"{task}/smoke")
        assert (task_of_path(path), path.stem) == (task, "smoke")
    assert find_recipe("rt-xu2019") == named_recipe("classify", "rt-xu2019").path
    with pytest.raises(InputError, match="no recipe 'rt'"):
        find_recipe("rt")


@pytest.mark.parametrize("task", TASKS)
def test_files_hold_nothing_that_is_the_default_anyway(task: str) -> None:
    """Every value in a file differs from its default."""
    import tomllib
    from dataclasses import MISSING

    owner = settings_of(task)
    for path in find_recipe(f"{task}/smoke").parent.glob("*.toml"):
        values = tomllib.loads(path.read_text())
        if "extends" in values:
            continue
        for section in ("data", "model", "optimizer", "schedule", "training", "decoding"):
            for name, value in values.get(section, {}).items():
                kind = owner.__dataclass_fields__[section].type
                default = kind.__dataclass_fields__[name].default
                assert default is MISSING or value != default, (path.name, name)


def test_the_command_line_runs_a_file_and_prints_one(tmp_path: Path, text_file: Path) -> None:
    written(
        tmp_path,
        'extends = "lm/smoke"\nnorms = ["ln"]\n[training]\nmax_steps = 5\nvalidate_every = 5\n'
        "monitor_every = 0\ntid_batches = 0\n",
    )
    chosen = ("--quiet", "--set", "seeds=2,", "--data", text_file)
    done = powernorm(tmp_path, "compare", "mine.toml", *chosen)
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "lm-mine" / "ln-pre-seed2" / "result.json").exists()
    shown = powernorm(tmp_path, "recipes", "show", "iwslt14-shen2020")
    assert shown.out == find_recipe("iwslt14-shen2020").read_text()
    refused = refusal(tmp_path, "compare", "mine.toml", "--preset", "demo")
    assert "--preset cannot be used with the recipe mine.toml" in refused
    assert "cannot be read (No such file" in refusal(tmp_path, "compare", "nowhere.toml")


def test_help_lists_the_settings_of_a_task_with_their_defaults(tmp_path: Path) -> None:
    plain = " ".join(powernorm(tmp_path, "compare", "--help").out.split())
    assert "data.vocabulary_size" not in plain
    shown = " ".join(powernorm(tmp_path, "compare", "ner", "--help").out.split())
    assert "data.vocabulary_size Number of words, including two marks. [default 2000]" in shown
    assert "schedule.warmup_steps" in shown
    assert "decoding.beam_size" not in shown
    pairs = " ".join(powernorm(tmp_path, "compare", "translation", "--help").out.split())
    assert "decoding.beam_size" in pairs
    assert "over all processes. [needed]" in pairs

"""Presets of translation have the settings and results of the papers."""

from dataclasses import replace

import pytest

from powernorm.errors import InputError
from powernorm.norms import NORMS
from powernorm_lab.recipes import named_recipe, paths_of, recipe
from powernorm_lab.recipes.paper_results import PaperResult
from powernorm_lab.settings.comparison import ComparisonSettings, options_of
from powernorm_lab.settings.variants import lines_of

TASK = "translation"
PAPERS = [preset for preset in paths_of(TASK) if preset.partition("-")[0] not in ("smoke", "demo")]


def of(preset: str) -> ComparisonSettings:
    return recipe(TASK, preset)


def values(preset: str, placement: str = "pre") -> dict[str, float | None]:
    rows = [row for row in named_recipe(TASK, preset).results if row.placement == placement]
    assert len({row.norm for row in rows}) == len(rows)
    return {row.norm: row.value for row in rows}


@pytest.mark.parametrize("preset", ["iwslt14-xu2019", "wmt14-xu2019", "iwslt15-xu2019"])
def test_xu(preset: str) -> None:
    config = of(preset)
    assert config.model.decoder_norm == "same"
    assert config.model.initialization == "kaiming"
    assert config.study is None
    lines = {line.name: options_of(line.settings, line.norm) for line in lines_of(config)}
    assert lines["adanorm"] == {"scale": 2.0}
    assert lines["detach-mean"] == {"detach_mean": True, "detach_std": False}
    assert lines["detach-std"] == {"detach_mean": False, "detach_std": True}
    assert set(lines) == set(values(preset))
    some = replace(config, norms=("ln", "detach"))
    assert [line.name for line in lines_of(some)] == [
        "ln",
        "detach-both",
        "detach-mean",
        "detach-std",
    ]
    some = replace(config, norms=("ln", "detach-mean"))
    assert [line.name for line in lines_of(some)] == ["ln", "detach-mean"]
    with pytest.raises(InputError, match=rf"the preset {preset} has no variant of rms; choose"):
        replace(config, norms=("rms",))


def test_table_of_shen() -> None:
    assert values("iwslt14-shen2020") == {"ln": 35.5, "bn": 34.4, "pnv": 35.5, "pn": 35.9}
    assert values("wmt14-shen2020") == {"ln": 29.5, "bn": 28.1, "pnv": 28.5, "pn": 30.1}
    # "PN outperforms LN by 0.4/0.6 BLEU"; BatchNorm is 1.1 and 1.4 below LayerNorm.
    for preset, better, worse in (("iwslt14-shen2020", 0.4, 1.1), ("wmt14-shen2020", 0.6, 1.4)):
        rows = {norm: value or 0.0 for norm, value in values(preset).items()}
        assert rows["pn"] - rows["ln"] == pytest.approx(better)
        assert rows["ln"] - rows["bn"] == pytest.approx(worse)


def test_tables_of_wang() -> None:
    assert values("iwslt14-wang2022-post", "post") == {
        "ln": 35.5, "bn": 34.0, "rbn": 35.5, "pn-only": 0, "pn": 35.6, "brn": 35.3, "mabn": 0,
    }  # fmt: skip
    assert values("iwslt14-wang2022-pre", "pre") == {
        "ln": 35.5, "bn": 34.8, "rbn": 35.6, "pn-only": 34.5, "pn": 35.6, "brn": 35.2, "mabn": 35.0,
    }  # fmt: skip
    assert values("wmt16-wang2022-post", "post") == {
        "ln": 27.3, "bn": 25.0, "rbn": 26.5, "pn-only": 0, "pn": 0, "brn": 25.8, "mabn": 0,
    }  # fmt: skip
    assert values("wmt16-wang2022-pre", "pre") == {
        "ln": 27.3, "bn": 25.2, "rbn": 26.2, "pn-only": 26.0, "pn": 27.2, "brn": 25.3, "mabn": 26.8,
    }  # fmt: skip


def test_tables_of_xu() -> None:
    assert values("wmt14-xu2019") == {
        "none": None, "ln": 28.3, "ln-simple": 28.4, "detach-both": None,
        "detach-mean": 28.3, "detach-std": None, "adanorm": 28.5,
    }  # fmt: skip
    assert values("iwslt14-xu2019") == {
        "none": 34.0, "ln": 35.5, "ln-simple": 35.5, "detach-both": 33.9,
        "detach-mean": 35.6, "detach-std": 34.2, "adanorm": 35.6,
    }  # fmt: skip
    assert values("iwslt15-xu2019") == {
        "none": 28.4, "ln": 31.2, "ln-simple": 31.6, "detach-both": 27.7,
        "detach-mean": 31.3, "detach-std": 29.8, "adanorm": 31.4,
    }  # fmt: skip


@pytest.mark.parametrize("preset", PAPERS)
def test_paper_results_name_norms_that_can_be_run(preset: str) -> None:
    config = of(preset)
    known = set(NORMS) | {variant.label for variant in config.variants}
    for row in named_recipe(TASK, preset).results:
        assert isinstance(row, PaperResult)
        assert row.norm in known
        forms = ("test_bleu_tokenised", "test_bleu_lowercase")
        assert row.metric in (("test_bleu_compound",) if config.data.split_compounds else forms)
        assert "Table" in row.source

"""Ranges of users and of norms."""

import csv
import inspect
import re
from pathlib import Path

import pytest
from torch import nn

from powernorm import build_norm, register_norm
from powernorm.errors import InputError
from powernorm.norms.registry import NORMS, REGISTERED, search_space
from powernorm_lab.tuning.ranges import parse_range, parse_search


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("log:1e-4:1e-2", (1e-4, 1e-2)),
        ("linear:-1:0.5", (-1, 0.5)),
        ("int:2:8", (2, 8)),
        ("choice:1,0.5,none,true,paper", (1, 0.5, None, True, "paper")),
    ],
)
def test_ranges(text: str, values: tuple[object, ...]) -> None:
    found = parse_range("key", text)
    assert found.values == values
    assert found.text == text
    assert all(map(found.holds, values))
    assert not found.holds("else")
    found.distribution()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1e-4:1e-2", "is not a range: give log:LOW:HIGH"),
        ("log:1e-4", "needs two numbers"),
        ("log:1:2:3", "needs two numbers"),
        ("log:a:b", "needs two numbers"),
        ("log:1:inf", "needs two numbers"),
        ("log:0:1", "a logarithmic range must begin above 0"),
        ("linear:2:2", "2 is not below 2"),
        ("int:1:2.5", "needs two numbers"),
        ("choice:1", "at least two different values"),
        ("choice:1,1", "at least two different values"),
        ("choice:1,,2", "at least two different values"),
    ],
)
def test_what_is_no_range_is_named_with_what_to_give(text: str, words: str) -> None:
    with pytest.raises(InputError, match=f"key={text}.*{words}"):
        parse_range("key", text)


def test_ranges_of_settings_and_of_norms_are_told_apart() -> None:
    given = ["optimizer.learning_rate=log:1e-4:1e-2", "norm_options.my.module:Norm.k=fixed"]
    settings, options = parse_search(given)
    assert settings == {"optimizer.learning_rate": "log:1e-4:1e-2"}
    assert options == {"my.module:Norm": {"k": "fixed"}}
    with pytest.raises(InputError, match="'rate' is not of the form KEY=RANGE, such as"):
        parse_search(["rate"])


def test_every_norm_declares_ranges_of_options_that_it_takes() -> None:
    for name, info in NORMS.items():
        ranges = info.search
        assert set(ranges) <= set(inspect.signature(NORMS[name].layer).parameters), name
        for option, text in ranges.items():
            for value in parse_range(option, text).values:
                build_norm(name, 8, **{option: value})


def test_the_page_names_what_each_norm_declares() -> None:
    table = Path(__file__).parents[4] / "docs" / "tuning" / "norms.csv"
    rows = csv.reader(table.read_text(encoding="utf-8").splitlines())
    told = {name: text for names, text in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert NORMS.keys() <= told.keys()
    for name, info in NORMS.items():
        assert ("nothing" in told[name]) == (not info.search), name
        if "the same" not in told[name]:
            assert all(f"`{option}`" in told[name] for option in info.search), name


class Scaled(nn.LayerNorm):
    search_space = {"eps": "log:1e-8:1e-3"}  # noqa: RUF012


class Careless(nn.LayerNorm):
    search_space = ("eps",)


def test_an_own_norm_declares_its_own() -> None:
    try:
        register_norm("scaled", Scaled)
        register_norm("careless", Careless)
        assert search_space("scaled") == Scaled.search_space
        with pytest.raises(InputError, match="search_space of careless is"):
            search_space("careless")
    finally:
        REGISTERED.pop("scaled", None)
        REGISTERED.pop("careless", None)

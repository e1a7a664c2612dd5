from pathlib import Path

import pytest
from lab.tests.report.synthetic import printed

from powernorm_lab.report import read_comparison, summarize
from powernorm_lab.report.comparison_tables import table_of


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_what_does_not_fit_is_named(comparison_folder: Path, width: int) -> None:
    text = printed(comparison_folder, width)
    assert max(map(len, text.splitlines())) <= width
    words = text.replace(";", "").split()
    comparison = read_comparison(comparison_folder)
    for heading in table_of(comparison, summarize(comparison)).headings:
        assert all(word in words for word in heading.split()), heading
    for word in ("adanorm", "unigram", "250.0", "99.00 ± 1.41", "+30.00 (+30.0 %)"):
        assert word in text
    assert ("not shown" in text) == (width < 200)
    # The column of statuses precedes less important columns if a norm lost a run.
    assert ("diverged:" in text) == (width >= 80)


def test_no_control_characters_without_a_terminal(comparison_folder: Path) -> None:
    text = printed(comparison_folder, 80, terminal=False)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_names_are_not_taken_for_markup(comparison_folder: Path) -> None:
    results = comparison_folder / "results.json"
    results.write_text(results.read_text().replace('"adanorm"', '"[red]a[/x]\\u001b[2J"'))
    text = printed(comparison_folder, 200)
    assert "[red]a[/x]\N{REPLACEMENT CHARACTER}[2J" in text


def test_a_pipe_has_80_characters_or_as_many_as_asked(comparison_folder: Path) -> None:
    """A file has the same lines on every machine, unless `COLUMNS` or `wide` change them."""
    narrow = printed(comparison_folder, 60, terminal=False, asked=True)
    assert max(map(len, narrow.splitlines())) <= 60
    text = printed(comparison_folder, 200, terminal=False)
    assert 60 < max(map(len, text.splitlines())) <= 80
    text = printed(comparison_folder, 40, terminal=False, wide=True)
    (line,) = [line for line in text.splitlines() if line.startswith("bn ")]
    assert "1 of 2 finished; diverged: seed 1" in line
    assert "not shown" not in text
    assert "2 seeds: no conclusion. The paired test needs 3 that finished both with ln" in text

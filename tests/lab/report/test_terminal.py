from pathlib import Path

import pytest

from lab.report.synthetic import printed
from powernorm.lab.report.columns import COLUMNS


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_column_is_lost(comparison_folder: Path, width: int) -> None:
    text = printed(comparison_folder, width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for column in COLUMNS:
        assert all(word in words for word in column.heading.split()), column.heading
    for word in ("adanorm", "unigram", "240.0", "42.2k", "diverged:", "NaN:", "1.23M"):
        assert word in words


def test_no_control_characters_without_a_terminal(comparison_folder: Path) -> None:
    text = printed(comparison_folder, 80, terminal=False)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_names_are_not_taken_for_markup(comparison_folder: Path) -> None:
    results = comparison_folder / "results.json"
    results.write_text(results.read_text().replace('"adanorm"', '"[red]a[/x]\\u001b[2J"'))
    text = printed(comparison_folder, 200)
    assert "[red]a[/x]\N{REPLACEMENT CHARACTER}[2J" in text


def test_a_pipe_gets_whole_lines(comparison_folder: Path) -> None:
    """What a script or a pager reads has one line a norm, and no word in two pieces."""
    narrow = printed(comparison_folder, 60, terminal=False, asked=True)
    assert max(map(len, narrow.splitlines())) <= 60
    text = printed(comparison_folder, 40, terminal=False)
    (line,) = [line for line in text.splitlines() if line.startswith("│ bn ")]
    assert "1 of 2 finished; diverged: seed 1" in line
    assert text.count("│ adanorm ") == 1
    assert "2 seeds: no conclusion. The paired test needs 3 that finished both with ln" in text

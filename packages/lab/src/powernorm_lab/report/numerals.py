"""Formatting of numbers and names for the terminal, pages and figures."""

from collections.abc import Iterable, Mapping
from math import isfinite, isnan
from typing import Final

from powernorm.errors import printable as printable
from powernorm_lab.report.records import BEHIND, STATUS_WORDS, ShownStatus
from powernorm_lab.report.statistics import PairedGap, Spread

MOST_DECIMALS: Final = 6
"""Largest number of decimals; numbers that need more have an exponent."""

NOTHING: Final = "–"
"""Text of an empty cell."""


def shorten(text: str, length: int) -> str:
    """Shorten a text by cutting out its middle.

    >>> shorten("a-very-long-name", 9), shorten("short", 9)
    ('a-ve…name', 'short')
    """
    text = printable(text)
    if len(text) <= length:
        return text
    return f"{text[: (length - 1) // 2]}…{text[len(text) - length // 2 :]}"


def setting_text(value: object) -> str:
    """Format a setting in the form of `--set`.

    >>> setting_text(0.1), setting_text([0.9, 0.98]), setting_text([]), setting_text(None)
    ('0.1', '0.9, 0.98', '–', 'None')
    """
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ", ".join(map(str, value)) or NOTHING
    return str(value)


def _decimals_for(value: float) -> int:
    """Return the number of decimals for about four digits.

    >>> _decimals_for(7.25), _decimals_for(72.5), _decimals_for(725.0), _decimals_for(7250.0)
    (2, 2, 1, 0)
    >>> _decimals_for(0.0214), _decimals_for(0.0)
    (4, 2)
    """
    size = abs(value)
    if 0 < size < 0.1:
        return 4
    if size >= 1000:
        return 0
    return 1 if size >= 100 else 2


def number(value: float | None, decimals: int | None = None) -> str:
    """Format a number, with an exponent from a million.

    >>> number(123.456), number(5e9), number(float("nan")), number(None)
    ('123.5', '5.00e+09', 'NaN', '–')
    >>> number(3.21e-7, 9)
    '3.21e-07'
    """
    if value is None:
        return NOTHING
    if isnan(value):
        return "NaN"
    if abs(value) >= 1e6 or (decimals is not None and decimals > MOST_DECIMALS):
        return f"{value:.2e}".replace("inf", "∞")
    return f"{value:.{_decimals_for(value) if decimals is None else decimals}f}"


def spread(value: Spread | None, decimals: int | None = None) -> str:
    """Format mean ± standard deviation, with the decimals of the mean.

    >>> spread(Spread(123.456, 1.234, 2)), spread(Spread(12.3, None, 1))
    ('123.5 ± 1.2', '12.30')
    """
    if value is None:
        return NOTHING
    if value.std is None:
        return number(value.mean, decimals)
    std = number(value.std, _decimals_for(value.mean) if decimals is None else decimals)
    return f"{number(value.mean, decimals)} ± {std}"


def gap(value: PairedGap | None, decimals: int | None = None) -> str:
    """Format a difference with its sign, and in percent.

    >>> gap(PairedGap(-3.21, -4.0, -2.4, 0.01, 2, ratio=-0.0254))
    '-3.21 (-2.5 %)'
    >>> gap(PairedGap(4.5, 3.0, 6.0, 0.01, 1))
    '+4.50'
    """
    if value is None:
        return NOTHING
    sign = "+" if value.difference >= 0 else ""
    difference = f"{sign}{number(value.difference, decimals)}"
    if value.ratio is None:
        return difference
    return f"{difference} ({100 * value.ratio:+.{0 if abs(value.ratio) >= 1 else 1}f} %)"


def percent(value: float | None) -> str:
    """Format a fraction in percent, without the percent sign.

    >>> percent(0.01234), percent(0.5), percent(None)
    ('1.23', '50.00', '–')
    """
    return number(None if value is None else 100 * value)


def count(value: float | None) -> str:
    """Format a large count with a unit prefix.

    >>> count(950), count(28_400), count(1_234_567)
    ('950', '28.4k', '1.23M')
    """
    if value is None:
        return NOTHING
    if not isfinite(value):
        return number(value)
    for limit, unit, decimals in ((1e9, "G", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if value >= limit:
            return f"{value / limit:.{decimals}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units.

    >>> duration(7.4), duration(75), duration(7322)
    ('7 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds is None:
        return NOTHING
    if not isfinite(seconds):
        return number(seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def outcome(statuses: Mapping[ShownStatus, tuple[int, ...]], behind: tuple[int, ...] = ()) -> str:
    """Summarize the statuses of a norm's runs, with the seeds of unfinished ones.

    Args:
        statuses: seeds by status.
        behind: finished seeds that are worse than a baseline.

    >>> outcome({"finished": (0, 1)}), outcome({"finished": (0,), "diverged": (1,)})
    ('2 finished', '1 of 2 finished; diverged: seed 1')
    >>> outcome({"nonfinite": (0, 1)})
    'NaN: seeds 0, 1'
    """
    if not statuses:
        return NOTHING
    total = sum(len(seeds) for seeds in statuses.values())
    done = len(statuses.get("finished", ()))
    parts = [f"{total} finished" if done == total else f"{done} of {total} finished"] * bool(done)
    for status, seeds in [*statuses.items(), *([(BEHIND, behind)] if behind else [])]:
        if status != "finished":
            word = "seed" if len(seeds) == 1 else "seeds"
            parts.append(f"{STATUS_WORDS[status]}: {word} {', '.join(map(str, seeds))}")
    return "; ".join(parts)


def mark(statuses: Iterable[ShownStatus]) -> str:
    """Return the text that replaces a number if no run finished.

    >>> mark({"nonfinite": (0,), "diverged": (1,)})
    'NaN/diverged'
    """
    words = [STATUS_WORDS[status] for status in statuses if status != "finished"]
    return "/".join(words) or NOTHING


def counted(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "run"), counted(3, "run")
    ('1 run', '3 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interval(gap: PairedGap | None, decimals: int) -> str:
    """Format a difference with its interval.

    >>> interval(PairedGap(0.5, 0.1, 0.9, 0.02, 5), 2)
    '+0.50 (+0.10 to +0.90)'
    >>> interval(PairedGap(-0.04, float("nan"), 0, 0, 2), 2)
    '-0.04'
    >>> interval(PairedGap(0.006, 0.001, 0.011, 0.02, 5), 2)
    '+0.006 (+0.001 to +0.011)'
    >>> interval(PairedGap(3e-9, 1e-9, 5e-9, 0.02, 5), 12)
    '+3.00e-09 (+1.00e-09 to +5.00e-09)'
    """
    if gap is None:
        return NOTHING
    known = [gap.difference] if isnan(gap.low) else [gap.difference, gap.low, gap.high]
    # More decimals for numbers that would be rounded to 0.
    while decimals < MOST_DECIMALS and any(0 < abs(one) < 0.5 / 10**decimals for one in known):
        decimals += 1
    form = f"+.{decimals}f" if decimals <= MOST_DECIMALS else "+.2e"
    text, *ends = (f"{value:{form}}" for value in known)
    return f"{text} ({' to '.join(ends)})" if ends else text


def probability(p: float | None) -> str:
    """Format a p-value with two digits.

    >>> probability(0.0234), probability(1e-7), probability(None)
    ('0.023', '< 0.001', '–')
    """
    if p is None or isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.2g}"

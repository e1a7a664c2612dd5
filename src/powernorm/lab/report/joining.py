"""One comparison out of several folders: its seeds or norms were trained side by side."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.lab.report.records import Comparison
from powernorm.runs import ChangesRecord

_DIVIDED: Final = frozenset({"norms", "seeds", "norm_options", "variants", "date"})
"""Settings that may differ: what the folders divide among them, and the day."""
_BY_NAME: Final = ("norm_options", "variants")
"""Of these a name that two folders have must mean the same."""
_SENTENCES: Final = re.compile(r"(?<=\.) (?=[A-Z])")
"""Between two sentences; the name of a paper has a small letter or a number behind its period."""


def joined(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Put together what has the same settings, data, versions and machine, but for norms and seeds.

    Args:
        comparisons: in their order, in which each of the results stands where its first part does.

    Raises:
        InputError: two parts of one comparison hold the same run.
    """
    groups: list[list[Comparison]] = []
    for comparison in comparisons:
        for group in groups:
            if all(_belong_together(comparison, other) for other in group):
                group.append(comparison)
                break
        else:
            groups.append([comparison])
    return [_join(group) for group in groups]


def _belong_together(one: Comparison, other: Comparison) -> bool:
    same = _shared(one) == _shared(other)
    return same and all(_agree(one.settings, other.settings, key) for key in _BY_NAME)


def _shared(comparison: Comparison) -> tuple[Any, ...]:
    settings = {key: value for key, value in comparison.settings.items() if key not in _DIVIDED}
    # Where the function's file lies may differ between machines; what is in it may not.
    function = comparison.function and (comparison.function["name"], comparison.function["sha256"])
    return (
        *(comparison.task, comparison.preset, comparison.placement, comparison.study),
        *(comparison.goal, function, comparison.data, settings, comparison.tuning),
    )


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    ours, theirs = one.get(key) or {}, other.get(key) or {}
    same = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    return same and bool(ours) == bool(theirs)


def _join(parts: Sequence[Comparison]) -> Comparison:
    first = parts[0]
    if len(parts) == 1:
        return first
    _check_divided(parts)
    merged = {
        key: dict(item for part in parts for item in part.settings[key].items())
        for key in _BY_NAME
        if first.settings.get(key)
    }
    days = sorted({str(part.settings["date"]) for part in parts if part.settings.get("date")})
    dates = {"date": " to ".join(dict.fromkeys((days[0], days[-1])))} if days else {}
    return replace(
        first,
        settings={**first.settings, **merged, **dates},
        runs=[run for part in parts for run in part.runs],
        paper=next((part.paper for part in parts if part.paper), []),
        paper_statistics=next((p.paper_statistics for p in parts if p.paper_statistics), []),
        reduced=_merged_notes([part.reduced for part in parts]),
        changes=_merged_changes([part.changes for part in parts if part.changes is not None]),
        race=next((part.race for part in parts if part.race is not None), None),
        standing=None,
    )


def _merged_notes(notes: Sequence[str]) -> str:
    """Every sentence once: some name their own norms."""
    return " ".join(dict.fromkeys(part for note in notes for part in _SENTENCES.split(note)))


def _merged_changes(changes: Sequence[ChangesRecord]) -> ChangesRecord | None:
    """Of the same preset: each names the options of its own norms."""
    if not changes:
        return None
    settings = {name: change for one in changes for name, change in one["settings"].items()}
    return ChangesRecord(preset=changes[0]["preset"], settings=settings)


def _check_divided(parts: Sequence[Comparison]) -> None:
    held: dict[tuple[str, str | None, int], Comparison] = {}
    for part in parts:
        for run in part.runs:
            holder = held.setdefault((run.name, run.placement, run.seed), part)
            if holder is not part:
                raise InputError(
                    f"{holder.folder} and {part.folder} both hold {run.name}, seed {run.seed}, of "
                    "one comparison: give one of the two"
                )

"""The formats of `results.json` and `comparison.json`: older files are upgraded when read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from powernorm.lab.report.json_files import JsonObject
from powernorm.lab.report.measures import MAIN, PERPLEXITY, goal_of

NEWEST: Final = 2

FORMAT_1_NAMES: Final[Mapping[str, str]] = {"measure": "goal"}
"""What keys of format 1 are called in format 2."""


def upgraded(results: JsonObject) -> JsonObject:
    """The same in the newest format.

    Raises:
        InputError: the format is newer, there is no such, or the file does not say its goal.
    """
    if results.values.get("format") == 1 and results.values["format"] is not True:
        return replace(results, values=_from_1(results))
    results.check_format(NEWEST, "the version of powernorm that wrote the comparison")
    results.child("goal")
    return results


def _from_1(results: JsonObject) -> dict[str, Any]:
    """A measure was the name of its metric alone: which way is better, its metric says."""
    values = {FORMAT_1_NAMES.get(key, key): value for key, value in results.values.items()}
    if "measure" in results.values:
        values["goal"] = goal_of(results.choice("measure", (PERPLEXITY, *MAIN)))
    return values | {"format": NEWEST}

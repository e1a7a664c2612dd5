"""The formats of `results.json` and `comparison.json`: older files are upgraded when read."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from powernorm.lab.report.json_files import JsonObject
from powernorm.lab.report.measures import MAIN, PERPLEXITY, goal_of
from powernorm.runs import ChangeRecord, ChangesRecord

NEWEST: Final = 2

FORMAT_1_NAMES: Final[Mapping[str, str]] = {"measure": "goal"}
"""What keys of format 1 are called in format 2."""

_SENTENCE: Final = re.compile(r"Against the preset (?P<preset>\S+): (?P<changes>.+)\.\Z", re.DOTALL)
_SETTING: Final = r"(?:[a-z_]+(?:\.[\w:-]+)+|placement|variants)"
_CHANGE: Final = re.compile(
    rf"(?P<name>{_SETTING}) (?P<here>.+?) in place of (?P<there>.+?)(?=, {_SETTING} |\Z)", re.DOTALL
)


def upgraded_results(results: JsonObject) -> JsonObject:
    """The same in the newest format.

    Raises:
        InputError: the format is newer, there is no such, or the file does not say its goal.
    """
    values = results.values
    if values.get("format") == 1 and values["format"] is not True:
        values = _from_1(results)
    else:
        results.check_format(NEWEST, "the version of powernorm that wrote the comparison")
        results.child("goal")
    if "reduced" in values and "changes" not in values:
        note, changes = read_changes(results.text("reduced"))
        if changes is not None:
            values = {**values, "reduced": note, "changes": changes}
    return replace(results, values=values)


def _from_1(results: JsonObject) -> dict[str, Any]:
    """A measure was the name of its metric alone: which way is better, its metric says."""
    values = {FORMAT_1_NAMES.get(key, key): value for key, value in results.values.items()}
    if "measure" in results.values:
        values["goal"] = goal_of(results.choice("measure", (PERPLEXITY, *MAIN)))
    return values | {"format": NEWEST}


def read_changes(reduced: str) -> tuple[str, ChangesRecord | None]:
    """Take an older note apart, which ends in the settings that are not the preset's.

    >>> read_changes("A reduced big. Against the preset big: model.num_layers 3 in place of 6.")[0]
    'A reduced big.'
    >>> read_changes("Against the preset big: model.num_layers 3 in place of 6.")[1]
    {'preset': 'big', 'settings': {'model.num_layers': {'here': '3', 'preset': '6'}}}
    """
    sentence = _SENTENCE.search(reduced)
    settings = {
        match["name"]: ChangeRecord(here=match["here"], preset=match["there"])
        for match in (_CHANGE.finditer(sentence["changes"]) if sentence else ())
    }
    if sentence is None or not settings:
        return reduced, None
    note = reduced[: sentence.start()].strip()
    return note, ChangesRecord(preset=sentence["preset"], settings=settings)

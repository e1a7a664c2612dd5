"""Settings that are not the preset's, out of the words in which results say so."""

import re
from dataclasses import dataclass
from typing import Final

_SENTENCE: Final = re.compile(r"Against the preset (?P<preset>\S+): (?P<changes>.+)\.\Z", re.DOTALL)
_SETTING: Final = r"(?:[a-z_]+(?:\.[\w:-]+)+|placement|variants)"
_CHANGE: Final = re.compile(
    rf"(?P<name>{_SETTING}) (?P<here>.+?) in place of (?P<there>.+?)(?=, {_SETTING} |\Z)", re.DOTALL
)


@dataclass(frozen=True)
class Changes:
    """How a comparison differs from the one that it stands for.

    Attributes:
        note: what else is said of it.
        preset: name of the other's preset; empty where no setting differs.
        settings: by name, the value here and the preset's.
    """

    note: str
    preset: str
    settings: dict[str, tuple[str, str]]


def changes_of(reduced: str) -> Changes:
    """Take the note of a comparison apart.

    >>> changes_of("A reduced big. Against the preset big: model.num_layers 3 in place of 6.")
    Changes(note='A reduced big.', preset='big', settings={'model.num_layers': ('3', '6')})
    >>> changes_of("The text is an embedded one.").settings
    {}
    """
    sentence = _SENTENCE.search(reduced)
    if sentence is None:
        return Changes(reduced, "", {})
    found = {
        match["name"]: (match["here"], match["there"])
        for match in _CHANGE.finditer(sentence["changes"])
    }
    if not found:
        return Changes(reduced, "", {})
    return Changes(reduced[: sentence.start()].strip(), sentence["preset"], found)

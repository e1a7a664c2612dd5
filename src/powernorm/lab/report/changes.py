"""Settings that are not as in the preset that a comparison stands for."""

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from powernorm.lab.report.document import part
from powernorm.lab.report.numerals import counted, printable, setting_text
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.tables import Table, copies
from powernorm.runs import ChangesRecord

_DEFAULT: Final = "its default"


def changes_sentence(changes: ChangesRecord) -> str:
    """How many they are.

    >>> changes_sentence({"preset": "big", "settings": {"data.path": {"here": "sotu"}}})
    '1 setting differs from the preset big'
    """
    count = len(changes["settings"])
    verb = "differs" if count == 1 else "differ"
    return f"{counted(count, 'setting')} {verb} from the preset {printable(changes['preset'])}"


def changes_table(changes: ChangesRecord) -> Table:
    """One row a setting: what it is here, and what in the preset."""
    here, there = (_values(changes, side) for side in ("here", "preset"))
    lines = [[printable(name), here[name], there[name]] for name in changes["settings"]]
    return Table(["setting", "here", printable(changes["preset"])], [False] * 3, lines)


def preset_values(changes: ChangesRecord | None) -> dict[str, str]:
    """The preset's values of the settings that are others here."""
    return {} if changes is None else _values(changes, "preset")


def _values(changes: ChangesRecord, side: str) -> dict[str, str]:
    # A TypedDict takes literal keys only.
    found: Mapping[str, Mapping[str, object]] = {**changes["settings"]}
    return {
        name: setting_text(change[side]) if side in change else _DEFAULT
        for name, change in found.items()
    }


def difference_note(comparison: Comparison) -> list[Markup]:
    """How the comparison differs from what it stands for; it may, with no number to stand beside.

    Such are the papers' presets where they have no number of this placement.
    """
    parts = []
    if comparison.reduced:
        parts.append(part("paragraph", comparison.reduced, kind="reduced"))
    if comparison.changes is not None:
        table = changes_table(comparison.changes)
        title = f"Not as in the preset {comparison.changes['preset']}"
        parts += [table.html(title, f"{title}."), copies(table)]
    return parts

"""The list of data sets, in the terminal and as JSON."""

import json
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from powernorm.data.fetching import cached_state, places
from powernorm.data.sets.catalogue import SETS
from powernorm.data.sets.entries import DataSet, Home
from powernorm.data.sets.folders import sets_folder

_TITLES: Final[dict[Home, str]] = {
    "embedded": "embedded: come with powernorm",
    "fetched": "fetched on request: powernorm data get NAME",
    "own": "bring your own: the official files, on your disk",
}
_HERE: Final = {"whole": "here", "damaged": "damaged, get it again"}
_MEGABYTE: Final = 1e6


def print_sets() -> None:
    """Prints all data sets: what they are, for which tasks, whose, and whether they are here."""
    console = Console()
    for home, title in _TITLES.items():
        entries = [entry for entry in SETS.values() if entry.home == home]
        console.print(_table(title, entries))
        console.print()
    console.print(Text(f"cache: {sets_folder()} (another one: POWERNORM_CACHE)"), soft_wrap=True)
    console.print(
        Text("use: powernorm compare TASK --data NAME, or --data PATH of your own files"),
        soft_wrap=True,
    )


def sets_as_json() -> str:
    """Return the same, and more of each, as a JSON list."""
    return json.dumps([_facts(entry) for entry in SETS.values()], indent=2, ensure_ascii=False)


def _facts(entry: DataSet) -> dict[str, object]:
    wheel = entry.wheel
    return {
        "name": entry.name,
        "home": entry.home,
        "tasks": list(entry.tasks),
        "summary": entry.summary,
        "amount": entry.amount,
        "licence": entry.licence,
        "source": entry.source,
        "usage": entry.usage,
        # Null: only the user knows whether it is on the disk.
        "state": cached_state(entry.name),
        "paths": [] if entry.home == "own" else [str(path) for path in places(entry.name)],
        "download_bytes": wheel.size if wheel else None,
        "bytes": wheel.unpacked_size if wheel else None,
        "rights": entry.rights,
    }


def _table(title: str, entries: Sequence[DataSet]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(title), "left", "bold"
    for entry in entries:
        lines = [(_what(entry), ""), (f"licence: {entry.licence}; from {entry.source}", "dim")]
        if entry.usage != f"--data {entry.name}":
            lines.append((entry.usage, "dim"))
        table.add_row(
            Text(entry.name), Text("\n").join(Text(line, style=style) for line, style in lines)
        )
    return table


def _what(entry: DataSet) -> str:
    what = f"{', '.join(entry.tasks)}: {entry.summary}; {entry.amount}"
    if entry.wheel is None:
        return what
    size = f"download {entry.wheel.size / _MEGABYTE:.0f} MB"
    return f"[{_HERE.get(str(cached_state(entry.name)), size)}] {what}"

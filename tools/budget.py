"""Check the size of the project against the ceilings in tools/budget.toml.

    python tools/budget.py                     # the ceilings and today's counts
    python tools/budget.py --against HEAD~5    # the counts of a commit and today's
    python tools/budget.py --lower             # lower ceilings to today's counts, raise none
    python tools/budget.py --init              # set all ceilings to today's counts, keep the goals

The exit code is 1 if a count is above its ceiling. tools/counting.py describes the counts. The
sums `src/*` and the shares in percent are printed and not checked.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from counting import Count, Counts, count, read_commit, read_folder, shares

SHOWN: Final = 40
"""Maximum number of offenders in a message."""
HEADER: Final = """\
# Ceilings and goals for tools/budget.py, which rewrites this file. A commit that raises a ceiling
# says why in its message. Goals are not checked.
"""


class Row(NamedTuple):
    """An entry of tools/budget.toml."""

    ceiling: int
    goal: int | None = None


Budget = Mapping[str, Mapping[str, Row]]
"""The entries by section (`lines`, `counts`) and name."""


def read_budget(path: Path) -> Budget:
    """Read the ceilings and goals; without a file there are none."""
    stored = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        section: {name: Row(**row) for name, row in stored.get(section, {}).items()}
        for section in ("lines", "counts")
    }


def write_budget(path: Path, budget: Budget) -> None:
    """Write the ceilings and goals; directories with neither are left out."""
    text = HEADER
    for section, rows in budget.items():
        text += f"\n[{section}]\n"
        for name, (ceiling, goal) in sorted(rows.items()):
            if ceiling or goal or section == "counts":
                end = "" if goal is None else f", goal = {goal}"
                text += f'"{name}" = {{ ceiling = {ceiling}{end} }}\n'
    path.write_text(text, encoding="utf-8")


def initial(budget: Budget, counts: Counts) -> Budget:
    """Return the budget with all ceilings at the counts."""
    return {
        section: {
            name: rows.get(name, Row(0))._replace(ceiling=counts[section].get(name, Count(0)).value)
            for name in {**rows, **counts[section]}
        }
        for section, rows in budget.items()
    }


def lowered(budget: Budget, counts: Counts) -> Budget:
    """Return the budget with each ceiling lowered to its count if that is lower."""
    return {
        section: {
            name: min(row, rows[name])
            for name, row in initial(budget, counts)[section].items()
            if name in rows
        }
        for section, rows in budget.items()
    }


def failures(budget: Budget, counts: Counts, base: Callable[[], Counts | None]) -> list[str]:
    """Return a message for each count above its ceiling.

    Args:
        budget: the ceilings.
        counts: counts of today.
        base: returns earlier counts, or None. A message names the offenders that are new since
            then, or all if none is new.
    """
    messages = []
    for section, found in counts.items():
        for name, (value, offenders) in found.items():
            ceiling = budget[section].get(name, Row(0)).ceiling
            if value > ceiling:
                messages.append(_message(section, name, value, budget[section].get(name)))
                old = (base() or {}).get(section, {}).get(name, Count(0)) if offenders else Count(0)
                new = {n: p for n, p in offenders.items() if len(p) > len(old.offenders.get(n, ()))}
                messages += _listed(new or offenders)
    return messages


def _message(section: str, name: str, value: int, row: Row | None) -> str:
    lines = " lines" if section == "lines" else ""
    if row is None:
        entry = f'"{name}" = {{ ceiling = {value} }}'
        return (
            f"{name}: {value:,}{lines} without a ceiling. Add `{entry}` to [{section}] of "
            "tools/budget.toml and say why in the commit message."
        )
    return (
        f"{name}: {value:,}{lines}, {value - row.ceiling:,} above the ceiling of {row.ceiling:,}. "
        "Lower the count, or raise the number in tools/budget.toml and say why in the commit "
        "message."
    )


def _listed(offenders: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [f"    {name}: {', '.join(places)}" for name, places in offenders.items()]
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], f"    and {more} more"] if more > 0 else lines


def counts_of_budget(root: Path) -> Counts | None:
    """Return the counts of the last commit that changed the budget, or None without one."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%H", "--", "tools/budget.toml"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    commit = done.stdout.strip()
    return count(read_commit(root, commit)) if commit else None


def table(
    head: str, before: Mapping[str, float], after: Mapping[str, float], budget: Budget
) -> str:
    """Return the table of two columns of numbers, their differences and the goals."""
    goals = {name: row.goal for rows in budget.values() for name, row in rows.items()}
    lines = [("", head, "now", "change", "goal")]
    for name in {**after, **before}:
        form = ",.1f" if "%" in name else ",.0f"
        old, new, goal = before.get(name), after.get(name, 0), goals.get(name)
        change = "" if old is None or old == new else f"{new - old:+{form}}"
        was, aim = ("" if each is None else f"{each:{form}}" for each in (old, goal))
        lines.append((name, was, f"{new:{form}}", change, aim))
    first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
    rows = ([name.ljust(first), *map(str.rjust, cells, rest)] for name, *cells in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def numbers(values: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the numbers of all rows of the table, sums of lines among them."""
    sums: Counter[str] = Counter()
    for name, value in values["lines"].items():
        if "/" in name:
            sums[f"{name.partition('/')[0]}/*"] += value
    return {**dict(sorted(values["lines"].items())), **sums, **values["counts"]}


def of_files(files: Mapping[str, str]) -> tuple[Counts, dict[str, float]]:
    """Return the counts of files, and the numbers of their table."""
    counts = count(files)
    values = {section: {n: c.value for n, c in found.items()} for section, found in counts.items()}
    return counts, {**numbers(values), **shares(files)}


def main() -> None:
    """Print the table, then the counts above their ceilings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="compare with the counts of a commit")
    parser.add_argument("--lower", action="store_true", help="lower ceilings to today's counts")
    parser.add_argument("--init", action="store_true", help="set all ceilings to today's counts")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    options = parser.parse_args()
    root, path = options.root, options.root / "tools" / "budget.toml"
    if not (path.exists() or options.init):
        parser.error(f"{path} is missing: python tools/budget.py --init writes it")

    gc.disable()  # Parsing takes a quarter of the time, and the process is short.
    budget = read_budget(path)
    counts, after = of_files(read_folder(root))
    ceilings = {
        section: {n: row.ceiling for n, row in rows.items()} for section, rows in budget.items()
    }
    head, before = "ceiling", numbers(ceilings)
    if options.against:
        head, before = options.against, of_files(read_commit(root, options.against))[1]
    print(table(head, before, after, budget))
    if options.init or options.lower:
        budget = (initial if options.init else lowered)(budget, counts)
        write_budget(path, budget)
    messages = failures(budget, counts, lambda: counts_of_budget(root))
    if lowered(budget, counts) != budget:
        print("\nSome counts are below their ceilings: python tools/budget.py --lower")
    if messages:
        sys.exit("\n".join(["", *messages]))


if __name__ == "__main__":
    main()

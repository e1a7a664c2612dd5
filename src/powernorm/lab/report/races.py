"""A race on its page and in a terminal: what was dropped when and why, and what that saved."""

from collections.abc import Iterator
from math import inf
from statistics import fmean

from markupsafe import Markup

from powernorm.lab.engine.race_words import drop_sentences, end_sentence
from powernorm.lab.report import numerals
from powernorm.lab.report.measures import heading_of
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.tables import Table
from powernorm.lab.report.templates import part
from powernorm.runs import RaceRecord


def race_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield what a race has shown, in place of tests for a number of seeds fixed beforehand.

    Args:
        comparison: with a race.
    """
    race, standing = comparison.race, comparison.standing
    assert race is not None
    if standing is None:
        yield "Parts of a race: no conclusion. Each part has its own report."
        return
    yield from drop_sentences(standing)
    yield end_sentence(standing)
    yield (
        f"The best norm stays in with a confidence of {100 * race['confidence']:g} %, by a paired "
        f"test of the {heading_of(standing['metric'])} that may be looked at after every seed."
    )
    saved = _saved(comparison, standing)
    if saved:
        yield saved


def _saved(comparison: Comparison, standing: RaceRecord) -> str:
    """Return how many of the runs were not needed, and about how long they would have taken."""
    seeds = comparison.settings.get("seeds")
    if standing["outcome"] == "open" or not isinstance(seeds, list):
        return ""
    names = (*standing["left"], *(drop["label"] for drop in standing["dropped"]))
    num_saved, seconds, spent = 0, 0.0, 0.0
    for name in names:
        times = [
            run.seconds
            for run in comparison.runs
            if run.name == name and run.seed in seeds and run.status != "dropped"
        ]
        num_saved += len(seeds) - len(times)
        seconds += (len(seeds) - len(times)) * (fmean(times) if times else 0.0)
        spent += sum(times)
    total = len(names) * len(seeds)
    if not num_saved:
        return f"All {total} runs were needed."
    share = f", {100 * seconds / (seconds + spent):.0f} % of the time" if seconds + spent else ""
    return (
        f"{num_saved} of {total} runs were not needed: about {numerals.duration(seconds)}{share}."
    )


def race_contents(comparison: Comparison) -> list[Markup]:
    """Return the section of the page; empty without a race."""
    race, standing = comparison.race, comparison.standing
    if race is None or standing is None:
        return []
    error = f"{100 * (1 - race['confidence']):.3g} %"
    margin = (
        ""
        if race["margin"] is None
        else f" Differences below {race['margin']:g} do not matter: norms that are so close are "
        "level."
    )
    return [
        _table(comparison, standing).html(
            "The race",
            f"Behind: how much worse than the leader at that time in the "
            f"{heading_of(standing['metric'])}, mean over the seeds that finished with both, and "
            "the lower confidence bound of that.",
        ),
        part(
            "paragraph",
            "After every seed from the third on, a norm is dropped whose differences to the "
            "leader, seed by seed, have a lower confidence bound above 0. The levels of all these "
            "tests are chosen such that the best norm is dropped with a chance of at most "
            f"{error}, whenever one stops; it is assumed that what varies over the seeds is "
            f"independent, normal and about as large for all norms.{margin} Tests and intervals "
            "for a number of seeds that is fixed beforehand would be wrong here, and are left out.",
            kind="soft",
        ),
    ]


def _table(comparison: Comparison, standing: RaceRecord) -> Table:
    dropped = {drop["label"]: drop for drop in standing["dropped"]}
    last = {name: drop["after"] for name, drop in dropped.items()}
    lines = []
    places = sorted(
        [*standing["left"], *dropped],
        key=lambda one: (-last.get(one, inf), one != standing["leader"]),
    )
    for name in places:
        drop = dropped.get(name)
        finished = sum(run.name == name and run.finished for run in comparison.runs)
        if drop is None:
            word = "leads" if name == standing["leader"] else "still in"
            lines.append([name, str(finished), word, "", "", ""])
            continue
        numbers = [
            numerals.NOTHING if value is None else f"{value:.3g}"
            for value in (drop["difference"], drop["at_least"])
        ]
        word = f"out after {numerals.counted(drop['after'], 'seed')}"
        lines.append([name, str(finished), word, drop["behind"], *numbers])
    headings = ("norm", "seeds finished", "race", "leader then", "behind by", "at least by")
    return Table(headings, [False, True, False, False, True, True], lines)

"""Sentences on the standing of a race, for notices and reports; needs no torch."""

from collections.abc import Iterator

from powernorm_lab.runs import DropRecord, RaceRecord


def drop_sentences(record: RaceRecord) -> Iterator[str]:
    """Yield a sentence for each round in which norms were dropped."""
    for after in dict.fromkeys(drop["after"] for drop in record["dropped"]):
        texts = [
            f"{drop['label']} ({reason(drop)})"
            for drop in record["dropped"]
            if drop["after"] == after
        ]
        yield f"Out of the race after {after} seeds: {', '.join(texts)}."


def reason(drop: DropRecord) -> str:
    """Return the reason why a norm was dropped, in words.

    >>> reason(DropRecord(
    ...     label="bn", after=3, behind="ln", difference=0.12, at_least=0.034, seeds=3))
    'behind ln by 0.12, by 0.034 at least'
    """
    if drop["difference"] is None or drop["at_least"] is None:
        return f"lost runs that finished with {drop['behind']}"
    difference, at_least = drop["difference"], drop["at_least"]
    return f"behind {drop['behind']} by {difference:.3g}, by {at_least:.3g} at least"


def end_sentence(record: RaceRecord) -> str:
    """Return a sentence on the outcome of a race."""
    left, seeds = ", ".join(record["left"]), record["rounds"]
    match record["outcome"]:
        case "one left":
            return f"The race is over after {seeds} seeds: {left} is left."
        case "level":
            return f"The race is over after {seeds} seeds: level within the margin are {left}."
        case "undecided":
            return f"The race has used its {seeds} seeds; still in are {left}."
        case _:
            return f"The race is not over: {seeds} seeds are complete; still in are {left}."

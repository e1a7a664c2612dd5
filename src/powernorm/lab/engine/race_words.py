"""What a race has come to, in words: the same while it goes on and in its report; without torch."""

from powernorm.runs import DropRecord, RaceRecord


def drop_sentence(drop: DropRecord) -> str:
    """Return in words why a norm is out of the race.

    >>> drop_sentence(DropRecord(
    ...     label="bn", after=3, behind="ln", difference=0.12, at_least=0.034, seeds=3))
    'bn is out after 3 seeds: behind ln by 0.12, by 0.034 at least'
    """
    text = f"{drop['label']} is out after {drop['after']} seeds"
    if drop["difference"] is None or drop["at_least"] is None:
        return f"{text}: it lost runs that finished with {drop['behind']}"
    return (
        f"{text}: behind {drop['behind']} by {drop['difference']:.3g}, by "
        f"{drop['at_least']:.3g} at least"
    )


def end_sentence(record: RaceRecord) -> str:
    """Return how a race has ended, in words, or that it has not."""
    left = ", ".join(record["left"])
    match record["outcome"]:
        case "one left":
            return f"the race is over after {record['rounds']} seeds: {left} is left"
        case "level":
            return (
                f"the race is over after {record['rounds']} seeds: what is left is level within "
                f"the margin ({left})"
            )
        case "undecided":
            return f"the race has used its {record['rounds']} seeds; still in: {left}"
        case _:
            return f"the race goes on after {record['rounds']} seeds; still in: {left}"

"""Schedule of the norms' removal, if they are removed one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from powernorm.inspection.selection import Role, Site

_LENGTH: Final = 300
"""Steps of the published schedule for the smallest model, to which the numbers below refer."""
_PHASES: Final[Mapping[Role, tuple[int, int]]] = {
    "feed-forward": (20, 24),
    "attention": (44, 60),
    "embedding": (44, 60),
    "other": (44, 60),
    "final": (104, 0),
}
"""First step of the norms of a role, and the steps from it to the next phase. In the published code
the queries' and keys' part of an attention norm is removed first and the values' afterwards, but
its constant is only fixed by the latter: here a norm is removed at once, in the time of both."""


def removal_steps(sites: Sequence[Site], num_steps: int) -> dict[str, int]:
    """Return the step before which each norm is removed: feed-forward, attention, final norm.

    The published schedule for GPT-2 small, scaled to another number of steps: the first norm is
    removed after 20 of 300 steps, 12 norms of feed-forward networks within 24 steps, those of
    attentions within 60, and the final norm at 104. The model recovers in the rest of the training.

    Args:
        sites: the norms, in the order of the model.
        num_steps: number of updates of the training.

    Returns:
        Number of updates before each norm's removal, by its name, in the order of removal.
    """
    found: dict[str, int] = {}
    phases: dict[tuple[int, int], list[Site]] = {}
    for site in sites:
        phases.setdefault(_PHASES[site.role], []).append(site)
    for (first, length), members in sorted(phases.items()):
        for index, site in enumerate(members):
            place = first + length * index / len(members)
            found[site.name] = round(place * num_steps / _LENGTH)
    return found

"""When each norm goes, where they go one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from powernorm.inspection.selection import Role, Site

_LENGTH: Final = 300
"""Steps of the published schedule, of which the numbers below are, for the smallest model."""
_PHASES: Final[Mapping[Role, tuple[int, int]]] = {
    "feed-forward": (20, 24),
    "attention": (44, 60),
    "embedding": (44, 60),
    "other": (44, 60),
    "final": (104, 0),
}
"""First step of the norms of a role, and the steps from it to the next phase. In the published code
the queries' and keys' share of an attention norm goes first and the values' afterwards, but its
constant is only settled by the latter: here a norm goes at once, in the time of both."""


def removal_steps(sites: Sequence[Site], num_steps: int) -> dict[str, int]:
    """Return the step before which each norm goes: feed-forward, then attention, then final norm.

    The published schedule for GPT-2 small, scaled to another number of steps: the first norm goes
    after 20 of 300 steps, 12 norms of feed-forward networks within 24 steps, those of attentions
    within 60, and the final norm at 104. The rest of the training heals.

    Args:
        sites: of the norms, in the order of the model.
        num_steps: of the training.

    Returns:
        Updates that are done before, by the norm's name, in the order of their going.
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

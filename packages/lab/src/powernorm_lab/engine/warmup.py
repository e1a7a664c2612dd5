"""Warm-ups of norms, scaled to the length of a run."""

from typing import Final

WARMUP_FRACTION: Final = 0.1
"""Default fraction of a run after which the warm-ups of norms end."""
WARMED_UP_NORMS: Final = ("pn", "pn-only", "pn-static", "brn", "mabn", "un", "prepbn", "taper")

_TAPERING: Final = 0.05
"""Fraction of a run after which TaperNorm's gate begins to fall, as in the paper."""
_FADING: Final = 0.8
"""Fraction of a run over which PRepBN's LayerNorm fades out."""


def warmup_options(
    norm: str, num_forwards: int, fraction: float = WARMUP_FRACTION
) -> dict[str, int | str]:
    """Return the options that end the warm-up of a norm after a fraction of a run.

    Args:
        norm: short name; a norm without a warm-up has no options.
        num_forwards: number of forwards in training over the whole run, which norms count.
        fraction: fraction of the run.
    """
    if norm not in WARMED_UP_NORMS:
        return {}
    if norm == "prepbn":
        # Evaluate the trained mixture: RepBN alone is another model until the schedule ends.
        steps = max(1, round(num_forwards * _FADING))
        return {"decay_steps": steps, "evaluation": "blend"}
    if norm == "taper":
        start = max(1, round(num_forwards * _TAPERING))
        return {"start_step": start, "end_step": max(start + 1, num_forwards)}
    steps = round(num_forwards * fraction)
    options: dict[str, int | str] = {"warmup_steps": steps}
    if norm == "brn":
        options["ramp_steps"] = steps
    if norm in ("mabn", "un"):
        options["ratio_start"] = steps
    return options

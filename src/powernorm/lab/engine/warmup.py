"""The warm-ups of the norms that have one, made to fit into a run."""

from typing import Final

WARMED_UP_NORMS: Final = ("pn", "pn-only", "pn-static", "brn", "mabn")


def warmup_options(norm: str, num_forwards: int, fraction: float) -> dict[str, int]:
    """Return the options that end the warm-up of a norm after a fraction of a run.

    Args:
        norm: short name; one without a warm-up has no options.
        num_forwards: forwards in training of the whole run, which is what norms count.
        fraction: of them.
    """
    if norm not in WARMED_UP_NORMS:
        return {}
    steps = round(num_forwards * fraction)
    options = {"warmup_steps": steps}
    if norm == "brn":
        options["ramp_steps"] = steps
    if norm == "mabn":
        options["ratio_start"] = steps
    return options

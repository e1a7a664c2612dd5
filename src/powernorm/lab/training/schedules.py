"""Learning rates over a run, as a factor of the highest rate."""

import math

from powernorm.lab.settings.training import ScheduleSettings


def rate_factor(schedule: ScheduleSettings, step: int, max_steps: int) -> float:
    """Return the learning rate of an update as a fraction of the highest.

    With w = warmup_steps, or warmup_fraction · max_steps (rounded, at least 1) where that is None,
    and t = step + 1, the number of the update from 1: t / w up to t = w for all schedules; after
    that, with progress
    p = (t - w) / (max_steps - w) and the fraction f = final_fraction,

    - `constant`: 1
    - `inverse_sqrt`: √(w / t) (Vaswani et al. 2017)
    - `linear`: 1 - (1 - f) p
    - `cosine`: f + (1 - f) (1 + cos πp) / 2 (Loshchilov and Hutter 2017)
    - `steps`: decay^m after m of the milestones, which are parts of max_steps (He et al. 2016)

    Args:
        schedule: the kind and its fractions.
        step: updates done so far, from 0.
        max_steps: updates of the whole run.
    """
    warmup = schedule.warmup_steps or max(1, round(schedule.warmup_fraction * max_steps))
    update = step + 1
    if update <= warmup:
        return update / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "steps":
        passed = sum(update > milestone * max_steps for milestone in schedule.milestones)
        return float(schedule.decay**passed)
    if schedule.name == "inverse_sqrt":
        return math.sqrt(warmup / update)
    # The scheduler also asks for the update after the last one.
    progress = min(1.0, (update - warmup) / max(1, max_steps - warmup))
    fall = (1 - math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else progress
    return 1 - (1 - schedule.final_fraction) * fall

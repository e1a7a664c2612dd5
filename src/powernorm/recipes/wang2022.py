"""What Wang et al. 2022 say of the norms in all of their tasks."""

from powernorm.training.config import NormOptions


def norm_options(
    penalties: NormOptions,
    *,
    groups: int,
    pn_warmup: int,
    brn_warmup: int,
    brn_ramp: int,
) -> dict[str, NormOptions]:
    """Return the settings of App. F, and of the published code where that says nothing.

    BatchNorm and RegularizedBatchNorm keep their running statistics with the code's momentum of
    0.05. BatchRenorm's limits rise to 3 and 5. All warm-ups count forward passes.

    Args:
        penalties: λ of RegularizedBatchNorm.
        groups: of PowerNorm, a group for each head.
        pn_warmup: of PowerNorm, with and without groups.
        brn_warmup: of BatchRenorm, an epoch of plain batch statistics.
        brn_ramp: in which the limits of BatchRenorm rise.
    """
    return {
        "bn": {"momentum": 0.05},
        "rbn": {"momentum": 0.05, **penalties},
        "pn": {"groups": groups, "warmup_steps": pn_warmup},
        "pn-only": {"warmup_steps": pn_warmup},
        "brn": {"warmup_steps": brn_warmup, "ramp_steps": brn_ramp, "max_r": 3.0, "max_d": 5.0},
        "mabn": {"window": 16, "warmup_steps": 100, "ratio_start": 1000},
    }

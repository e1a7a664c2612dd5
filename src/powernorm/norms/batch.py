"""BatchNorm and PowerNormV: statistics of the batch, exact gradient."""

from __future__ import annotations

from torch import Tensor

from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.stateful import rename_key


class BatchNorm(BatchStatisticsNorm):
    """Batch normalization over the valid tokens of a batch (Ioffe and Szegedy 2015).

    In training `y = γ (x - μ_B)/sqrt(σ²_B + eps) + β`, with mean and biased variance per feature
    over all valid tokens (Shen et al. 2020, Algorithm 1; Wang et al. 2022, eq. 1-3) and the exact
    gradient through both; in evaluation with the running statistics instead. Padded positions get
    the same affine map and do not count in any statistic.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, in (0, 1]; None for the plain
            average of all batches, as in torch.
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start: `average` of the first 1/momentum batches, or `torch`,
            at 0 and 1. None means `average`, and `torch` in the released variant.
        groups: GroupScaling with this many groups before the norm; None leaves it out.
        variant: `paper`, or `released` for the behavior of Wang et al.'s code: padding is set to
            0 before anything else, eps is a floor of the variance, the running variance divides
            by M (there with momentum 0.05).
        sync: statistics over all processes (as SyncBatchNorm).
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    Raises:
        InputError: sizes, types or arguments that do not fit.

    State:
        running_mean, running_var (M - 1, as torch), num_batches_tracked, num_nonfinite_batches;
        updated in the training-mode forward, once per micro-batch, not by a recomputed forward. A
        batch without valid tokens is normalized by the running statistics and updates nothing; a
        feature whose statistics are not finite keeps its running ones.

    Numerics:
        Statistics in float32 (float64 for float64 input), variance in two passes.

    Distributed:
        One all-gather of (n, mean, squared deviations) in float64 in the forward, merged by Chan's
        formula, one all-reduce of the gradient's sums in the backward; ranks may hold different
        numbers of tokens, or none.

    >>> norm = BatchNorm(4)
    >>> y = norm(torch.randn(2, 3, 4))
    >>> norm.is_static
    True
    """

    num_sums = 4
    read_in_training = ("running_mean", "running_var")  # of a batch without valid tokens
    trains_by_batch = True


class PowerNormV(BatchStatisticsNorm):
    """PowerNorm-V: BatchNorm without the mean (Shen et al. 2020, Definition 1, eq. 4-6).

    In training `y = γ x/sqrt(ψ_B² + eps) + β` with `ψ_B²` the mean of x² per feature over the valid
    tokens, and the exact gradient; in evaluation with running ψ² instead.

    Args:
        num_features: C.
        eps: added to ψ².
        momentum: weight of the new batch in ψ², in (0, 1]; the paper's 1 - α. None for the plain
            average of all batches.
        affine: learn γ and β.
        track_running_stats: True, torch's argument of this name; False is refused.
        start: how running statistics start: `average` of the first 1/momentum batches, or `torch`,
            ψ² at 1. None means `average`, and `torch` in the released variant.
        groups: GroupScaling with this many groups before the norm (Shen et al., App. A); None
            leaves it out.
        variant: `paper`, or `released`: padding is set to 0 before anything else and eps is a
            floor of ψ² (there with momentum 0.05).
        sync: statistics over all processes.
        process_group: the processes; None is the default group if torch.distributed runs.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of parameters and buffers.
        dtype: type of parameters.

    Shape:
        x (..., C), padding_mask `x.shape[:-1]` bool with True = padding; output as x.

    State:
        running_second_moment (ψ²), num_batches_tracked, num_nonfinite_batches; updated in the
        training-mode forward as BatchNorm's.

    >>> norm = PowerNormV(4)
    >>> y = norm(torch.randn(2, 3, 4))
    """

    num_sums = 2
    centered = False
    read_in_training = ("running_second_moment",)  # of a batch without valid tokens
    trains_by_batch = True

    def adopt_keys(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Rename `running_var` of the released layer, which is ψ²."""
        rename_key(
            state_dict,
            f"{prefix}running_var",
            f"{prefix}running_second_moment",
            (self.num_features,),
        )

"""The files of the study of the verdict, beside those of `powernorm.runs`.

```
VERDICT_STUDY/              comparisons in many settings
  verdict.json              VerdictResults
  SETTING/                  one folder a comparison
```
"""

from typing import Final, Literal, TypedDict

VERDICT_FILE: Final = "verdict.json"


class GapRecord(TypedDict):
    """Loss of a norm minus that of LayerNorm at the end of the training, nats per token."""

    valid: list[float]
    """One a seed, in the order of `seeds`; of seeds that both finished with a finite loss."""
    test: list[float]
    seeds: list[int]
    num_lost: int
    """Seeds in which the norm's loss became NaN or infinite, and LayerNorm's did not."""
    num_base_lost: int
    """The other way round."""


class VerdictSetting(TypedDict):
    """One setting of the experiment: what was seen early and what came of it."""

    name: str
    group: str
    task: str
    placement: Literal["pre", "post"]
    tokens_per_batch: float
    num_layers: int
    num_features: int
    learning_rate: float
    max_steps: int
    early_step: int
    early: dict[str, float | None]
    """Quantities at the early checkpoint of the first seed, by EARLY_QUANTITIES."""
    advice: str | None
    """What `powernorm.diagnose` says of the early LayerNorm model with its default limits: a norm,
    or `ln` for keep; `lowest K to NORM`. None where that model was lost by then."""
    gaps: dict[str, GapRecord]
    """By norm; what was not trained yet is missing."""


EARLY_QUANTITIES: Final = (
    "ln_mean_tid_last",
    "ln_var_tid_last",
    "ln_total_tid_last",
    "ln_mean_tid_avg",
    "ln_var_tid_avg",
    "ln_total_tid_avg",
    "ln_pn_tid_last",
    "ln_pn_tid_avg",
    "bn_mean_tid_last",
    "bn_var_tid_last",
    "bn_mean_tid_avg",
    "bn_var_tid_avg",
    "bn_gap",
    "rbn_gap",
    "pn_gap",
    "bn_batch_gap",
    "rbn_batch_gap",
    "pn_batch_gap",
)
"""TID as fractions: what BatchNorm (PowerNorm behind GroupScaling) would see in the early LayerNorm
model, and what BatchNorm does see in the early BatchNorm model; total is mean and var together;
`…_gap` is the norm's loss minus LayerNorm's on the valid split at that time, `…_batch_gap` the same
with the norm evaluated by the statistics of each batch, since running ones lag behind early."""


class PredictorScore(TypedDict):
    """How often a predictor has the sign of the final gap right."""

    norm: str
    """Whose gap to LayerNorm is predicted."""
    predictor: str
    """A quantity of EARLY_QUANTITIES, `tokens_per_batch`, `early_gap` or `early_gap_batch` (those
    of the norm), the same with ` > 0` for its sign, `majority`, `always worse` or `always better`
    (whichever is right more often), `verdict` (the norm's default limit of `diagnose`)."""
    num_settings: int
    num_positive: int
    """Settings in which the norm is worse than LayerNorm."""
    threshold: float | None
    """Chosen on the choosing half; None where nothing is chosen. Above it the norm is predicted to
    be worse (below it for `tokens_per_batch`)."""
    hits_choosing: float
    """Share of right signs in the half on which the threshold was chosen."""
    hits_scored: float
    """Share of right signs in the other half."""
    num_scored: int
    interval: tuple[float, float]
    """95 % interval of `hits_scored` (Wilson)."""
    splits_mean: float
    """Mean of `hits_scored` over many random splits."""
    splits_interval: tuple[float, float]
    """2.5 % and 97.5 % quantile of the same."""
    leave_one_out: float
    """Share of right signs where the threshold is chosen on all other settings."""
    leave_one_out_clear: float | None
    """The same over the settings with a clear gap only."""
    leave_one_group_out: float | None
    """The same where the threshold is chosen on the other groups; None for one group."""
    num_clear: int
    """Settings whose gap has one sign in all seeds and is at least `clear_gap`."""
    auc: float | None
    """Chance that a setting with a worse norm has the larger value than one with a better norm."""
    auc_alike: float | None
    """The same chance among pairs of settings with about as many tokens in a batch: what the
    quantity knows beyond the size of the batch."""
    num_alike: int
    """Such pairs."""
    rank_correlation: float | None
    """Spearman's, of the quantity and the gap."""


class AdviceScore(TypedDict):
    """What it is worth to follow a rule that names one of ln, bn, rbn and pn in every setting."""

    rule: str
    """`advice` (that of `diagnose`, where swapping only the lowest layers counts as keeping), or
    the norm that is always taken."""
    num_settings: int
    """Settings in which all four norms were trained; the same for all rules."""
    num_no_worse: int
    """Settings whose norm ended at most `clear_gap` worse than LayerNorm."""
    num_best: int
    """Settings whose norm ended at most `clear_gap` worse than the best of the four."""


class VerdictResults(TypedDict):
    """The contents of `verdict.json`."""

    format: Literal[1]
    preset: str
    num_batches: int
    """Training batches in each pass of an early diagnosis."""
    clear_gap: float
    """Nats per token."""
    choosing: list[str]
    """Names of the settings on which thresholds were chosen."""
    settings: list[VerdictSetting]
    scores: list[PredictorScore]
    advice: list[AdviceScore]
    """Empty where no setting has all four norms."""

"""Rules of decision from the runs, written before any was trained.

Measure: BLEU of the test split by the running statistics, the average of the last checkpoints.
A comparison is paired by seed; its interval is Student's t, 95 %. Within a setting the p values of
all comparisons below are corrected by Holm's method. A run that did not finish counts for no
arm: its seed leaves the comparison, and the number that is left is printed.

- *shown*: the corrected p is below 0.05 and the mean has the sign of the claim.
- *contradicted*: the corrected p is below 0.05 and the mean has the other sign.
- *level*: not shown, not contradicted, and the interval lies within half a BLEU on both sides.
- *open*: else.

A claim about a norm is shown of the norm itself where both like-for-like comparisons (without
layer-scale, and with it on both sides) show it; where only the comparison with layer-scale on one
side does, it is shown of layer-scale. If time ends before all seeds, the seeds that every arm has
count. No seed is added later, and no arm.
"""

COMPARISONS = (
    ("S3, W2: BN is behind LN", "ln", "bn"),
    ("S3 with layer-scale", "ln", "bn-scaled"),
    ("S6: PN-V is ahead of BN", "pnv", "bn"),
    ("S6 with layer-scale on both sides", "pnv-scaled", "bn-scaled"),
    ("S6 with layer-scale in PN-V alone", "pnv-scaled", "bn"),
    ("S7: PN-V is behind LN", "ln", "pnv-scaled"),
    ("S8: PN is ahead of BN", "pn", "bn"),
    ("S8 with layer-scale on both sides", "pn-scaled", "bn-scaled"),
    ("S8 with layer-scale in PN alone", "pn-scaled", "bn"),
    ("S9: PN is ahead of LN", "pn-scaled", "ln"),
    ("S9 without layer-scale", "pn", "ln"),
    ("W12: RBN is ahead of BN", "rbn", "bn"),
    ("W13: RBN is ahead of LN", "rbn", "ln"),
    ("layer-scale helps BN", "bn-scaled", "bn"),
    ("layer-scale helps PN-V", "pnv-scaled", "pnv"),
    ("layer-scale helps PN", "pn-scaled", "pn"),
    ("PN adds to layer-scale", "pn-scaled", "gs"),
    ("BN adds to layer-scale", "bn-scaled", "gs"),
)
"""Claim, the arm that is ahead by it, and the one that is behind."""
MARGIN = 0.5
"""BLEU."""
LEVEL = 0.05

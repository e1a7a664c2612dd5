"""The rows of Tables 1-4 of Xu et al. 2019, which all of its tasks have in common."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.models.choices import Placement
from powernorm.recipes.paper_results import PaperResult
from powernorm.training.config import Variant

VARIANTS: Final = (
    Variant("none", "none"),
    Variant("ln", "ln"),
    Variant("ln-simple", "ln-simple"),
    Variant("detach-both", "detach", {"detach_mean": True, "detach_std": True}),
    Variant("detach-mean", "detach", {"detach_mean": True, "detach_std": False}),
    Variant("detach-std", "detach", {"detach_mean": False, "detach_std": True}),
    Variant("adanorm", "adanorm"),
)
"""The rows of the tables; `--norms` chooses among them by label, or by norm (`detach` is three)."""

MORE_VARIANTS: Final = (
    *VARIANTS,
    Variant("bn", "bn"),
    Variant("rbn", "rbn"),
    Variant("pn", "pn"),
)
"""The rows, and the norms of the other papers on the same data."""

_TABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "none": "Tables 1, 2, 4",
        "ln": "Tables 1, 4",
        "ln-simple": "Tables 1, 3, 4",
        "detach-both": "Table 2",
        "detach-mean": "Table 3",
        "detach-std": "Table 3",
        "adanorm": "Table 4",
    }
)

_AGAINST: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "detach-both": ("none", "ln-simple"),
        "detach-mean": ("ln-simple",),
        "detach-std": ("ln-simple",),
    }
)
"""DetachNorm has no γ and β. The paper reads off it what the normalization of the values is worth,
against no norm, and what the gradients of mean and deviation are, against LayerNorm without γ and β
(Tables 2 and 3)."""


def table_results(
    dataset: str,
    metric: str,
    values: Mapping[str, float | None],
    placement: Placement = "pre",
) -> tuple[PaperResult, ...]:
    """Return one column of the tables.

    Args:
        dataset: of the column.
        metric: of a run, which the column holds.
        values: by row; None where the training diverged.
        placement: of the norms.
    """
    return tuple(
        PaperResult(
            label,
            dataset,
            placement,
            value,
            f"Xu et al. 2019, {_TABLES[label]}",
            metric,
            against=_AGAINST.get(label, ("ln",)),
        )
        for label, value in values.items()
    )

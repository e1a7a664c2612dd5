"""Study of whether the gain of batch statistics in language modeling survives the causal mask.

The published code of the Tensorized Transformer, which Shen et al. 2020 and Wang et al. 2022 build
on, leaves the mask out.
"""

from collections.abc import Mapping
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.recipes.studies.definition import StudyRecipe, Variants
from powernorm_lab.recipes.studies.sizes import StudySize
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant

NORMS: Final = ("ln", "bn", "rbn", "pn")
_FORMS: Final = {"": "false", "-future": "true"}
"""Suffix of the label, and value of `model.sees_future`."""


def _both_forms(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return each norm in the causal form (`bn`), then in the other (`bn-future`).

    Raises:
        InputError: the attention is not tensorized; only that has both forms.
    """
    del size
    architecture = config.model.architecture  # type: ignore[attr-defined]
    if architecture != "tensorized":
        raise InputError(
            f"model.architecture={architecture} has only the causal form, and the study future "
            "needs both: set model.architecture=tensorized and model.num_heads=1, or choose a "
            "preset that has them, such as demo or ptb-wang2022-pre"
        )
    return tuple(
        Variant(f"{norm}{mark}", norm, settings={"model.sees_future": sees})
        for mark, sees in _FORMS.items()
        for norm in NORMS
    )


def _rows(size: StudySize, config: ComparisonSettings) -> Mapping[str, str]:
    del size, config
    return {f"{norm}{mark}": norm for mark in _FORMS for norm in NORMS}


FUTURE: Final = StudyRecipe(
    Study(
        name="future",
        title="With and without the causal mask",
        source="Shen et al. 2020, Table 2, and Wang et al. 2022, Table 2",
    ),
    "with the causal mask and without (S20 Table 2, W22 Table 2)",
    NORMS,
    _both_forms,
    needs="sees_future",
    rows=_rows,
)

"""Studies of Wang et al. 2022, Regularized BatchNorm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from powernorm_lab.recipes.studies.definition import StudyRecipe, Variants
from powernorm_lab.recipes.studies.sizes import StudySize
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant

PENALTIES: Final = (0.0, 0.01, 0.1, 1.0)
"""Default λ of both penalties, in the unit of the task. The paper's text does not give the grid of
its figure; these span the choices of its Appendix B, except for 10 in post-norm translation."""
_FEWEST_PENALTIES: Final = (0.0, 1.0)


def _post_norm(config: ComparisonSettings) -> ComparisonSettings:
    """Return the figure's post-norm model, in which no norm follows the last layer."""
    model: Any = config.model
    absent = {
        name: None
        for name in ("num_norm_layers", "final_norm", "final_norm_warmup")
        if hasattr(model, name)
    }
    return replace(config, model=replace(model, placement="post", **absent))


def _depth(config: ComparisonSettings) -> int:
    depth: int = config.model.num_layers  # type: ignore[attr-defined]
    return depth


def lowest_layers(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return LayerNorm, and BatchNorm in the 1, 2, … lowest layers with LayerNorm above.

    In translation these are layers of the encoder, as in the paper.
    """
    del size
    depth = _depth(config)
    return (
        # Set here, too, so that a user's value is refused as one that the variants set.
        Variant("ln", "ln", settings={"model.num_norm_layers": "none"}, x=0.0),
        *(
            Variant(
                f"bn-{lowest}of{depth}",
                "bn",
                settings={"model.num_norm_layers": str(lowest)},
                x=float(lowest),
            )
            for lowest in range(1, depth + 1)
        ),
    )


def penalties(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return RegularizedBatchNorm with every pair of penalties; both 0 is BatchNorm."""
    own = size.grid or (_FEWEST_PENALTIES if config.preset == "smoke" else PENALTIES)
    grid = [round(size.penalty(value, config), 9) for value in own]
    return (
        Variant("ln", "ln"),
        *(
            Variant(
                _label(mean, var),
                "rbn",
                {"mean_penalty": mean, "var_penalty": var},
                x=mean,
                y=var,
            )
            for mean in grid
            for var in grid
        ),
    )


def _label(mean: float, var: float) -> str:
    return f"rbn-{mean:g}-{var:g}"


def _chosen_penalties(size: StudySize, config: ComparisonSettings) -> Mapping[str, str]:
    """Return the rows of LayerNorm, BatchNorm, and the λ that the paper's tables use."""
    del config
    own: Mapping[str, Any] = size.recipe.settings.norm_options.get("rbn", {})
    chosen = _label(own.get("mean_penalty", 0.0), own.get("var_penalty", 0.0))
    return {"ln": "ln", chosen: "rbn", _label(0, 0): "bn"}


LOWEST_LAYERS: Final = StudyRecipe(
    Study(
        name="lowest-layers",
        title="BatchNorm in the lowest layers only",
        source="Wang et al. 2022, Figure 3",
        x_label="layers with BatchNorm, from the lowest",
    ),
    "BatchNorm in the k lowest layers; score gap and TID (W22 Fig. 3)",
    ("ln", "bn"),
    lowest_layers,
    base=_post_norm,
    needs="num_norm_layers",
    rows=lambda _, config: {"ln": "ln", f"bn-{_depth(config)}of{_depth(config)}": "bn"},
)
PENALTY_GRID: Final = StudyRecipe(
    Study(
        name="penalties",
        title="Penalties of Regularized BatchNorm",
        source="Wang et al. 2022, Figure 5",
        x_label="λ of the mean",
        y_label="λ of the variance",
    ),
    "grid of the penalties of rbn (W22 Fig. 5)",
    ("ln", "rbn"),
    penalties,
    varied_options=("mean_penalty", "var_penalty"),
    rows=_chosen_penalties,
)

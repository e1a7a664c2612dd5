"""Studies of Wang et al. 2022, Regularized BatchNorm."""

from dataclasses import replace
from typing import Final

from powernorm.lab.recipes.studies.recipes import StudyRecipe, sized
from powernorm.lab.settings.comparison import Study, Variant
from powernorm.lab.tasks.lm.settings import LanguageModelSettings

PENALTIES: Final = {
    "smoke": (0.0, 1.0),
    "demo": (0.0, 0.1, 1.0, 10.0),
    "full": (0.0, 0.01, 0.1, 1.0),
}
"""λ of both penalties by preset, for a loss summed over tokens. The grid of the paper's figure is
lost in its text; `full` spans what its Appendix B chose for language models."""


def lowest_layers_base(preset: str) -> LanguageModelSettings:
    """Return a deeper post-norm model.

    The paper's Figure 3 is of translation, IWSLT14 with a post-norm encoder of 6 layers. `full` is
    a language model instead: the papers' Penn-Treebank setting with 6 layers and post-norm.
    """
    config = sized(preset)
    depth = {"smoke": 2, "demo": 4, "full": 6}[preset]
    rate = {"demo": 3e-3}.get(preset, config.optimizer.learning_rate)
    # Fewer steps than these leave some variants above the unigram: they would end as diverged.
    steps = {"smoke": 40, "demo": 900}.get(preset, config.training.max_steps)
    return replace(
        config,
        norms=("ln", "bn"),
        training=replace(config.training, max_steps=steps),
        model=replace(config.model, num_layers=depth, placement="post"),
        optimizer=replace(config.optimizer, learning_rate=rate),
    )


def lowest_layers(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return LayerNorm, and BatchNorm in the 1, 2, … lowest layers under LayerNorm."""
    depth = config.model.num_layers
    return (
        # Its own, too: the number of layers is what is varied.
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


def penalties_base(preset: str) -> LanguageModelSettings:
    """Return the comparison whose RegularizedBatchNorm is varied; `ln` stands beside it."""
    return replace(sized(preset), norms=("ln", "rbn"), norm_options={})


def penalties(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return RegularizedBatchNorm with every pair of penalties; both 0 is BatchNorm."""
    grid = PENALTIES[config.preset]
    return (
        Variant("ln", "ln"),
        *(
            Variant(
                f"rbn-{mean:g}-{var:g}",
                "rbn",
                {"mean_penalty": mean, "var_penalty": var},
                x=mean,
                y=var,
            )
            for mean in grid
            for var in grid
        ),
    )


LOWEST_LAYERS: Final = StudyRecipe(
    Study(
        name="lowest-layers",
        title="BatchNorm in the lowest layers only",
        source="Wang et al. 2022, Figure 3",
        x_label="layers with BatchNorm, from the lowest",
    ),
    "BatchNorm in the k lowest layers; loss gap and TID over time (W22 Fig. 3)",
    lowest_layers_base,
    lowest_layers,
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
    penalties_base,
    penalties,
)

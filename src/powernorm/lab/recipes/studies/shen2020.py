"""Studies of Shen et al. 2020, PowerNorm."""

from dataclasses import replace
from typing import Final

from powernorm.lab.recipes.studies.recipes import StudyRecipe, sized
from powernorm.lab.settings.comparison import Study, Variant
from powernorm.lab.tasks.lm.settings import LanguageModelSettings

MICRO_BATCH_NORMS: Final = ("bn", "pnv", "pn")
DIVISIONS: Final = (8, 4, 2, 1)
"""Micro-batches in an update: the paper's 512, 1k, 2k and 4k tokens of 4k."""

ALPHAS: Final = (0.9, 0.95, 0.99)
"""Weights of the old statistics, forward and backward."""


def micro_batches_base(preset: str) -> LanguageModelSettings:
    """Return the update whose tokens are divided: 4,096 in `full`, 1,024 in `demo`."""
    config = sized(preset)
    if preset == "full":
        config = replace(config, data=replace(config.data, batch_size=128))
    if preset == "demo":
        # Small micro-batches take long: 8 of 128 tokens about five times as long as one of 1,024.
        training = replace(config.training, max_steps=450)
        config = replace(config, training=training)
    return replace(config, norms=("ln", *MICRO_BATCH_NORMS))


def micro_batches(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return each norm with its statistics from 1/8 of an update's tokens to all of them.

    LayerNorm does not depend on the division, so it is one run. TID is measured on the same number
    of tokens in all.
    """
    size = config.data.batch_size
    variants = [Variant("ln", "ln")]
    for norm in MICRO_BATCH_NORMS:
        for parts in DIVISIONS:
            if size % parts:
                continue
            tokens = size // parts * config.data.sequence_length
            settings = {
                "data.batch_size": str(size // parts),
                "optimizer.accumulation": str(config.optimizer.accumulation * parts),
                "training.tid_batches": str(config.training.tid_batches * parts),
            }
            variants.append(Variant(f"{norm}-{tokens}", norm, settings=settings, x=float(tokens)))
    return tuple(variants)


def alphas_base(preset: str) -> LanguageModelSettings:
    """Return the comparison whose PowerNorm is varied; `ln` stands beside it."""
    return replace(sized(preset), norms=("ln", "pn"))


def alphas(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return PowerNorm with every pair of a forward and a backward α."""
    chosen = ALPHAS[::2] if config.preset == "smoke" else ALPHAS
    return (
        Variant("ln", "ln"),
        *(
            Variant(
                f"pn-{forward}-{backward}",
                "pn",
                # The papers' α is the weight of the old value, momentum that of the new.
                {
                    "momentum": round(1 - forward, 6),
                    "backward_momentum": round(1 - backward, 6),
                },
                x=forward,
                y=backward,
            )
            for forward in chosen
            for backward in chosen
        ),
    )


def scales_base(preset: str) -> LanguageModelSettings:
    """Return a comparison of the norms that have a deviation over the batch."""
    config = sized(preset)
    training = replace(config.training, record_scales=True)
    return replace(config, norms=("pn", "pnv", "bn"), training=training)


def scales(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return each norm as it is."""
    needed = {"training.record_scales": "true"}
    return tuple(Variant(norm, norm, settings=needed) for norm in config.norms)


MICRO_BATCHES: Final = StudyRecipe(
    Study(
        name="micro-batches",
        title="Statistics from smaller micro-batches",
        source="Shen et al. 2020, Figure 5",
        x_label="tokens in a micro-batch",
        logarithmic=True,
    ),
    "statistics from fewer tokens at a fixed update (S20 Fig. 5)",
    micro_batches_base,
    micro_batches,
)
ALPHA_GRID: Final = StudyRecipe(
    Study(
        name="alphas",
        title="Forward and backward α of PowerNorm",
        source="Shen et al. 2020, Appendix A",
        x_label="forward α",
        y_label="backward α",
    ),
    "PowerNorm's forward and backward α (S20 App. A)",
    alphas_base,
    alphas,
)
SCALES: Final = StudyRecipe(
    Study(
        name="scales",
        title="γ against the deviation of the batches",
        source="Shen et al. 2020, Appendix B.1",
    ),
    "γ against ψ_B in every layer (S20 App. B.1)",
    scales_base,
    scales,
)

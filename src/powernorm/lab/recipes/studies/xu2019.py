"""The study of Xu et al. 2019, Understanding and Improving Layer Normalization."""

from dataclasses import replace
from typing import Final

from powernorm.lab.recipes.studies.recipes import StudyRecipe, sized
from powernorm.lab.settings.comparison import Study, Variant
from powernorm.lab.settings.training import OptimizerSettings
from powernorm.lab.tasks.lm.settings import LanguageModelSettings, LanguageModelShape
from powernorm.lab.tasks.text_settings import SubwordDataSettings

PARTS: Final = (
    Variant("ln", "ln"),
    Variant("ln-gamma", "ln", {"bias": False}),
    Variant("ln-simple", "ln-simple"),
    Variant("detach-mean", "detach", {"detach_mean": True, "detach_std": False}),
    Variant("detach-std", "detach", {"detach_mean": False, "detach_std": True}),
    Variant("detach-both", "detach", {"detach_mean": True, "detach_std": True}),
    Variant("adanorm", "adanorm"),
    Variant("none", "none"),
)
"""LayerNorm with γ and β, with γ alone, with neither; without gradient through the mean, through
the standard deviation, through both; AdaNorm; no norm."""


def layernorm_parts_base(preset: str) -> LanguageModelSettings:
    """Return the comparison of the parts.

    `full` has what the paper's text says of its language model: 12 layers of 512 features with 8
    heads, dropout 0.1, batches of 22, Adam at a rate of 2.5e-4, on bytes. Its attention, that of
    Transformer-XL, is the usual causal one here; `--data` with enwik8 gives the paper's text. The
    rest is not in the paper: feed-forward networks of 2,048 with ReLU, segments of 512, and, from
    the language model's `full`, 20,000 steps with linear decay after a warm-up of a fifth.
    """
    config = sized(preset)
    if preset == "demo":
        training = replace(config.training, max_steps=1200, validate_every=100)
        config = replace(config, training=training)
    if preset == "full":
        config = replace(
            config,
            data=SubwordDataSettings(
                vocabulary_size=257, sequence_length=512, batch_size=22, evaluation_batch_size=22
            ),
            model=LanguageModelShape(
                num_features=512,
                num_layers=12,
                num_heads=8,
                feedforward_features=2048,
                dropout=0.1,
                activation="relu",
            ),
            optimizer=OptimizerSettings(learning_rate=2.5e-4),
            training=replace(config.training, label_smoothing=0.0),
        )
    return replace(config, norms=tuple(dict.fromkeys(part.norm for part in PARTS)))


def layernorm_parts(config: LanguageModelSettings) -> tuple[Variant, ...]:
    """Return the parts."""
    del config
    return PARTS


LAYERNORM_PARTS: Final = StudyRecipe(
    Study(
        name="layernorm-parts",
        title="What LayerNorm's parts do",
        source="Xu et al. 2019, Tables 1-3 and Figures 1-2",
    ),
    "LayerNorm without γ, β or gradients of its statistics (X19 Tables 1-3)",
    layernorm_parts_base,
    layernorm_parts,
)

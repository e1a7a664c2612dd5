"""The study of Xu et al. 2019, Understanding and Improving Layer Normalization."""

from typing import Final

from powernorm_lab.recipes.studies.definition import StudyRecipe
from powernorm_lab.settings.comparison import Study, Variant

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

LAYERNORM_PARTS: Final = StudyRecipe(
    Study(
        name="layernorm-parts",
        title="What LayerNorm's parts do",
        source="Xu et al. 2019, Tables 1-3 and Figures 1-2",
    ),
    "LayerNorm without γ, β or gradients of its statistics (X19 Tables 1-3)",
    tuple(dict.fromkeys(part.norm for part in PARTS)),
    lambda *_: PARTS,
    rows=lambda *_: {part.label: part.label for part in PARTS},
)

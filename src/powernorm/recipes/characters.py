"""Language modelling of characters with Transformer-XL: presets, and the numbers of Xu et al. 2019.

Of its Enwiki8 experiment the text says (2.2): 12 layers of 512, 8 heads of 64, dropout 0.1, batches
of 22, Adam at 2.5e-4, bits per character. These are the settings of Transformer-XL's released run
on enwik8 with 12 layers, and what the text leaves open is taken from there: 2,048 in the
feed-forward networks, ReLU, no dropout of attention weights, segments and memory of 512 in
training, clipping at 0.25, 400,000 updates with a cosine to 0 and no warm-up, memory of 2,100 in
the final evaluation, and the norm behind the residual sum (post-norm), for the text does not say
where it stands; its footnote recommends pre-norm for AdaNorm, which `--set model.placement=pre`
gives, and the paper's numbers stand beside both. The initialisation is Kaiming's, as the same
footnote recommends, not the normal one of the released run, and AdaNorm's C is 1. The released
evaluation reads 80 bytes at a time, always with as many before them, and takes distances beyond
820 for 820; here it reads a segment of 512 with 2,100 and more before each byte, and distances
beyond those of the training (1,023) are taken for the longest of them. Here all 256 bytes are in
the vocabulary, there the 204 that occur.
"""

from collections.abc import Callable
from typing import Final

from powernorm.recipes.family import EMBEDDED, GPU, Family, RecipeInfo
from powernorm.recipes.language_modeling import DEMO_PENALTIES
from powernorm.recipes.xu2019 import VARIANTS, table_results
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

TASK: Final = "lm-char"
MEASURE: Final = "test_bits_per_character"


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    return ComparisonConfig(
        task=TASK,
        preset="smoke",
        norms=("ln", "bn"),
        data=DataConfig(
            path="verses-en", sequence_length=32, batch_size=16, evaluation_batch_size=128
        ),
        model=ModelConfig(
            num_features=32,
            num_layers=1,
            num_heads=2,
            feedforward_features=64,
            activation="relu",
            placement="post",
            memory_length=32,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=TrainingConfig(
            max_steps=60,
            num_threads=1,
            log_every=5,
            validate_every=30,
            validation_tokens=16384,
            monitor_every=10,
            tid_batches=5,
        ),
    )


def demo() -> ComparisonConfig:
    """Return a comparison that shows the norms apart in minutes on two CPU cores."""
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "bn", "rbn", "pn", "ln-simple", "adanorm"),
        data=DataConfig(sequence_length=64, batch_size=32, evaluation_batch_size=128),
        model=ModelConfig(
            num_features=96,
            num_layers=2,
            num_heads=4,
            feedforward_features=384,
            activation="relu",
            placement="post",
            memory_length=64,
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        training=TrainingConfig(
            max_steps=320,
            log_every=10,
            validate_every=80,
            validation_tokens=65536,
            monitor_every=20,
            tid_batches=40,
        ),
        norm_options={"rbn": DEMO_PENALTIES},
    )


def enwik8() -> ComparisonConfig:
    """Return the Enwiki8 experiment of Xu et al. 2019; the module says what the text leaves open.

    bfloat16 is ours, too; the final evaluation is in float32.
    """
    return ComparisonConfig(
        task=TASK,
        preset="enwik8-xu2019",
        norms=tuple(dict.fromkeys(variant.norm for variant in VARIANTS)),
        data=DataConfig(
            path="enwik8", sequence_length=512, batch_size=22, evaluation_batch_size=10
        ),
        model=ModelConfig(
            num_features=512,
            num_layers=12,
            num_heads=8,
            feedforward_features=2048,
            dropout=0.1,
            activation="relu",
            placement="post",
            initialisation="kaiming",
            memory_length=512,
            evaluation_memory_length=2100,
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4, beta2=0.999, clip_norm=0.25),
        schedule=ScheduleConfig(name="cosine", warmup_fraction=0.0),
        training=TrainingConfig(
            max_steps=400_000,
            precision="bfloat16",
            log_every=200,
            validate_every=4000,
            validation_tokens=512_000,
            monitor_every=2000,
            tid_batches=0,  # None of these norms has batch statistics.
        ),
        variants=VARIANTS,
    )


PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {
    "smoke": smoke,
    "demo": demo,
    "enwik8-xu2019": enwik8,
}

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("Transformer-XL over bytes, a check", EMBEDDED, "seconds"),
    "demo": RecipeInfo(
        "Transformer-XL over bytes, six norms", EMBEDDED, "about 4 min on two cores"
    ),
    "enwik8-xu2019": RecipeInfo(
        "Transformer-XL, 12 layers, parts of LayerNorm, AdaNorm",
        "the official file of 100,000,000 bytes, unpacked: --data enwik8",
        f"about 4 days {GPU}",
        "Xu 2019, Tables 1-4",
    ),
}

_ENWIK8: Final = {
    "none": 1.04,
    "ln": 1.07,
    "ln-simple": 1.07,
    "detach-both": 1.12,
    "detach-mean": 1.07,
    "detach-std": 1.10,
    "adanorm": 1.07,
}

ENWIK8_RESULTS: Final = (
    *table_results("enwik8", MEASURE, _ENWIK8, "post"),
    *table_results("enwik8", MEASURE, _ENWIK8, "pre"),
)
"""Printed without a placement, so they stand beside both."""

FAMILY: Final = Family(
    TASK,
    PRESETS,
    CATALOGUE,
    measure=MEASURE,
    paper_results={"enwik8-xu2019": ENWIK8_RESULTS},
)

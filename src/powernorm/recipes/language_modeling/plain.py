"""The usual causal Transformer as a language model: from seconds to the papers' setting."""

from typing import Final

from powernorm.recipes.family import EMBEDDED, GPU, RecipeInfo
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

TASK: Final = "lm"

DEMO_PENALTIES: Final = {"mean_penalty": 0.1, "var_penalty": 1.0}
# Chosen by the demo's perplexity per word on the valid split (seed 0). λ belongs to a loss summed
# over tokens, so a batch of 2,048 tokens divides it by 2,048 here. (mean, var) λ → perplexity:
#   (0, 0) 1293, which is bn     (0.1, 0.01) 1202   (1, 0.1) 1125     (0.1, 1) 1084   (1, 1) 1086
#   (10, 0) 1224                 (100, 0) 1249      (0, 10) 1152      (10, 10) 1151   (30, 30) 1336
#   (10, 100) 2173               (100, 100) 2178


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    return ComparisonConfig(
        task=TASK,
        preset="smoke",
        norms=("ln", "bn"),
        data=DataConfig(vocabulary_size=500, sequence_length=32, batch_size=16),
        model=ModelConfig(num_features=32, num_layers=1, num_heads=2, feedforward_features=64),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=TrainingConfig(
            max_steps=30,
            num_threads=1,
            log_every=5,
            validate_every=15,
            validation_tokens=4096,
            monitor_every=10,
            tid_batches=5,
        ),
    )


def demo() -> ComparisonConfig:
    """Return a comparison that shows the norms apart in minutes on two CPU cores."""
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "bn", "rbn", "pn", "adanorm"),
        data=DataConfig(vocabulary_size=2000, sequence_length=64, batch_size=32),
        model=ModelConfig(num_features=128, num_layers=2, num_heads=4, feedforward_features=512),
        optimizer=OptimizerConfig(learning_rate=8e-3),
        training=TrainingConfig(
            max_steps=320,
            log_every=10,
            validate_every=40,
            validation_tokens=32768,
            monitor_every=20,
            tid_batches=40,
        ),
        norm_options={"rbn": DEMO_PENALTIES},
    )


def full() -> ComparisonConfig:
    """Return the Penn-Treebank setting of Shen et al. 2020 and Wang et al. 2022, for a GPU.

    Theirs: 3 layers, 256 features, 2,100 in the feed-forward networks, segments of 32, batches of
    120, dropout 0.3, 20,000 steps of Adam at 2.5e-4 with linear decay, label smoothing 0.1 and
    4,000 warm-up steps of rate and PowerNorm. The attention is the usual one, causal, not the
    Tensorized Transformer's (those presets are `ptb-tensorized-pre` and `ptb-tensorized-post`).
    `--data` with the Penn Treebank files gives the papers' text.
    """
    return ComparisonConfig(
        task=TASK,
        preset="full",
        norms=("ln", "bn", "rbn", "pn"),
        seeds=(0, 1, 2),
        data=DataConfig(
            vocabulary_size=10000, sequence_length=32, batch_size=120, evaluation_batch_size=240
        ),
        model=ModelConfig(
            num_features=256,
            num_layers=3,
            num_heads=4,
            feedforward_features=2100,
            dropout=0.3,
            activation="relu",
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4),
        schedule=ScheduleConfig(name="linear", warmup_fraction=0.2),
        training=TrainingConfig(
            max_steps=20000,
            label_smoothing=0.1,
            log_every=100,
            validate_every=1000,
            monitor_every=100,
            tid_batches=200,
            norm_warmup_fraction=0.2,
        ),
        # Wang et al. 2022, App. B, Penn Treebank with pre-norm; with post-norm it is (0.1, 0.01).
        # Their code has momentum 0.05.
        norm_options={
            "bn": {"momentum": 0.05},
            "rbn": {"momentum": 0.05, "mean_penalty": 0.01, "var_penalty": 0.0},
        },
    )


_PTB: Final = "embedded, or --data with ptb.train.txt, ptb.valid.txt, ptb.test.txt"

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("language model, a check", EMBEDDED, "half a minute on two cores"),
    "demo": RecipeInfo("language model, five norms", EMBEDDED, "about 4 min on two cores"),
    "full": RecipeInfo(
        "the papers' Penn-Treebank setting, usual attention",
        _PTB,
        f"about 3 h {GPU}",
        "Shen 2020, Table 2; Wang 2022, Tables 1-3",
    ),
}

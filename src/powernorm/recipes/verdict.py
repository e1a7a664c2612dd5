"""Does the verdict hold? Many small settings, in each of which the norms are trained to the end.

The question of each setting is a practitioner's: here is a model with LayerNorm, tuned for it;
would BatchNorm in its place do better? The settings differ in what is known to matter: task and
text, placement, depth, tokens in a batch. Everything else, the learning rate too, is the same for
all norms of a setting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, get_args

from powernorm.errors import InputError
from powernorm.models.choices import Placement
from powernorm.recipes.language_modeling import DEMO_PENALTIES
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from powernorm.training.overrides import override
from powernorm.training.verdict_settings import Phase, Setting, VerdictStudy

TASK: Final = "verdict"
SUMMARY: Final = "train many settings and say how often their early diagnosis was right"
EARLY: Final = 0.1
"""Part of the training after which is diagnosed."""


@dataclass(frozen=True, slots=True)
class _Text:
    task: str
    corpus: str
    vocabulary_size: int
    sequence_length: int
    batch_sizes: Mapping[str, int]
    """Rows of a batch for each shape; they differ between texts, so that neither decides alone."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_features: int
    num_layers: int
    learning_rates: Mapping[Placement, float]


_TEXTS: Final[Mapping[str, _Text]] = MappingProxyType(
    {
        "lm-sotu": _Text("lm", "sotu", 1000, 32, {"small": 2, "big": 64, "deep": 8, "wide": 16}),
        "tag-petrogold": _Text(
            "tag", "petrogold", 1000, 48, {"small": 4, "big": 32, "deep": 16, "wide": 8}
        ),
        "lm-verses": _Text(
            "lm", "verses-de", 1000, 32, {"small": 4, "big": 32, "deep": 16, "wide": 8}
        ),
        "tag-turkish": _Text(
            "tag", "turkish", 1000, 48, {"small": 4, "big": 64, "deep": 8, "wide": 16}
        ),
    }
)
_SMOKE_TEXTS: Final[Mapping[str, _Text]] = MappingProxyType(
    {
        "lm-rt": _Text("lm", "rt", 300, 32, {"small": 4, "deep": 16}),
        "tag-turkish": _TEXTS["tag-turkish"],
    }
)
_SHAPES: Final[Mapping[str, _Shape]] = MappingProxyType(
    {
        "small": _Shape(64, 2, {"pre": 8e-3, "post": 4e-3}),
        "big": _Shape(64, 2, {"pre": 8e-3, "post": 8e-3}),
        "deep": _Shape(64, 6, {"pre": 8e-3, "post": 1e-3}),
        "wide": _Shape(128, 3, {"pre": 8e-3, "post": 2e-3}),
    }
)
# Chosen by LayerNorm's loss on the valid split of the addresses (lm, seed 0, 1,000 subwords), nats
# per token, at the rates 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2; a dash where not tried, an asterisk where
# the run had a third more updates:
#   small  pre   –      4.811  4.580  4.498  –           post  5.174  4.846  4.655  –
#   big    pre   –      –      4.097* 3.939* 3.977       post  –      4.383* 4.255  4.051
#   deep   pre   –      4.510* 4.467  4.355  –           post  5.326  5.331  –      –
#   wide   pre   –      4.303* 4.299  4.241  –           post  4.992  4.793  –      –
# Seven of the eight best rates lie at the edge of what was tried (all but big/pre): LayerNorm may
# do better at others, and the other norms with it.

# The trainings are short: every run of the lm settings ends above the bigram baseline. What is
# compared is where the norms stand after so many updates, not what they could reach.
_STEPS: Final[Mapping[int, int]] = MappingProxyType(
    {2: 1200, 4: 1000, 8: 600, 16: 400, 32: 400, 64: 300}
)
"""Updates by the rows of a batch, so that every run takes about equally long."""

_PHASES: Final = (
    Phase(("ln", "bn"), (0,)),
    Phase(("rbn", "pn"), (0,)),
    Phase(("ln", "bn"), (1,)),
)


def smoke() -> VerdictStudy:
    """Return a check that everything works, in a minute: four settings that tell nothing."""
    chosen: tuple[tuple[str, str, Placement], ...] = (
        ("lm-rt", "small", "pre"),
        ("lm-rt", "deep", "post"),
        ("tag-turkish", "small", "pre"),
        ("tag-turkish", "deep", "post"),
    )
    settings = tuple(
        _setting(text, shape, placement, num_steps=20, num_features=16)
        for text, shape, placement in chosen
    )
    return VerdictStudy("smoke", settings, (Phase(("ln", "bn"), (0,)),), num_batches=4)


def demo() -> VerdictStudy:
    """Return 32 settings of seconds each: two tasks, four texts, two placements, four shapes.

    About an hour and a half on one quiet CPU core. The learning rates are by shape and placement:
    the best of two or three for LayerNorm on the addresses (seed 0, loss on the valid split), the
    same for all norms and texts.
    """
    return VerdictStudy("demo", _grid(_setting), _PHASES)


def full() -> VerdictStudy:
    """Return the settings four times as long, twice as wide, with three seeds, for a GPU."""

    def larger(text: str, shape: str, placement: Placement) -> Setting:
        setting = _setting(text, shape, placement)
        config = setting.config
        return replace(
            setting,
            config=replace(
                config,
                model=replace(
                    config.model,
                    num_features=2 * config.model.num_features,
                    feedforward_features=2 * config.model.feedforward_features,
                ),
                optimizer=replace(
                    config.optimizer, learning_rate=config.optimizer.learning_rate / 2
                ),
                training=replace(config.training, max_steps=4 * config.training.max_steps),
            ),
        )

    norms = ("ln", "bn", "rbn", "pn")
    return VerdictStudy("full", _grid(larger), tuple(Phase(norms, (seed,)) for seed in range(3)))


PRESETS: Final[Mapping[str, Callable[[], VerdictStudy]]] = MappingProxyType(
    {"smoke": smoke, "demo": demo, "full": full}
)


def verdict_study(preset: str, assignments: tuple[str, ...] = ()) -> VerdictStudy:
    """Return the study of a preset.

    Args:
        preset: `smoke`, `demo` or `full`.
        assignments: `key=value` settings, applied to every setting.

    Raises:
        InputError: unknown preset or setting.
    """
    if preset not in PRESETS:
        raise InputError(
            f"The task {TASK} has no preset {preset!r}: choose one of {', '.join(PRESETS)}."
        )
    study = PRESETS[preset]()
    settings = tuple(
        replace(setting, config=override(setting.config, assignments)) for setting in study.settings
    )
    return replace(study, settings=settings)


def _grid(build: Callable[[str, str, Placement], Setting]) -> tuple[Setting, ...]:
    """All combinations, in an order of which every beginning is mixed."""
    shapes = list(_SHAPES)
    return tuple(
        build(text, shapes[(index + turn) % len(shapes)], placement)
        for turn in range(len(shapes))
        for placement in get_args(Placement)
        for index, text in enumerate(_TEXTS)
    )


def _setting(
    text: str,
    shape: str,
    placement: Placement,
    *,
    num_steps: int | None = None,
    num_features: int | None = None,
) -> Setting:
    source, form = {**_SMOKE_TEXTS, **_TEXTS}[text], _SHAPES[shape]
    rows = source.batch_sizes[shape]
    steps = num_steps or _STEPS[rows]
    width = num_features or form.num_features
    config = ComparisonConfig(
        task=source.task,
        preset=TASK,
        norms=("ln", "bn"),
        data=DataConfig(
            path=source.corpus,
            vocabulary_size=source.vocabulary_size,
            sequence_length=source.sequence_length,
            batch_size=rows,
            evaluation_batch_size=128,
        ),
        model=ModelConfig(
            num_features=width,
            num_layers=form.num_layers,
            num_heads=4,
            feedforward_features=4 * width,
            placement=placement,
        ),
        optimizer=OptimizerConfig(learning_rate=form.learning_rates[placement]),
        training=TrainingConfig(
            max_steps=steps,
            num_threads=1,
            log_every=20,
            validate_every=max(1, steps // 4),
            validation_tokens=8192,
            monitor_every=0,
            tid_batches=0,
            early_checkpoint=EARLY,
        ),
        norm_options={"rbn": DEMO_PENALTIES},
    )
    layers = f"{form.num_features}x{form.num_layers}"
    return Setting(f"{text}-{placement}-{layers}-{rows}rows", text, config)

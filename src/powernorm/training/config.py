"""The configuration of a comparison: typed, immutable, checked where it is made.

Every field is a plain number, string or tuple, so a configuration round-trips through JSON
(`to_json`, `from_json`) and any field can be set by its dotted key (`training.overrides`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args

from powernorm.errors import InputError
from powernorm.lab.engine.warmup import warmup_options
from powernorm.models.choices import LengthNormalisation
from powernorm.training.config_checks import (
    check_at_least,
    check_distinct,
    check_fraction,
    check_not_negative,
    check_one_of,
)
from powernorm.training.config_fields import LATER, is_later
from powernorm.training.data_config import DataConfig
from powernorm.training.model_config import ModelConfig
from powernorm.training.optimizer_config import OptimizerConfig, ScheduleConfig

__all__ = [
    "ComparisonConfig",
    "DataConfig",
    "DecodingConfig",
    "ModelConfig",
    "NormOptions",
    "OptimizerConfig",
    "OptionValue",
    "ScheduleConfig",
    "Study",
    "TrainingConfig",
    "Variant",
    "early_step",
    "is_set",
    "later_keys",
    "options_of",
    "to_json",
]

Precision = Literal["float32", "bfloat16", "float16"]
Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["ddp", "fsdp2"]
AveragedStatistics = Literal["recalibrate", "average"]
OptionValue = int | float | bool | str | None
NormOptions = Mapping[str, OptionValue]

LABEL: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""What the label of a variant may be: it becomes part of a folder's name."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The length of the run and what is watched during it."""

    max_steps: int = 500
    """Updates of the weights."""
    precision: Precision = "float32"
    accelerator: Accelerator = "auto"
    num_threads: int | None = None
    """CPU threads of torch; None leaves torch its choice. Small models are fastest with 1."""
    label_smoothing: float = 0.0
    """In the training loss only; logged and evaluated losses have none."""
    log_every: int = 10
    """Updates between two rows of metrics.csv."""
    validate_every: int = 100
    """Updates between two validations, each of which also writes the checkpoints; the last
    update is always followed by one."""
    validation_tokens: int | None = None
    """About how many tokens of the valid split a validation *during* the run reads, in evenly
    spaced segments; None is all. The result is always of the whole split."""
    patience: int | None = None
    """Validations without a better loss after which the run stops early; None never stops."""
    monitor_every: int = 50
    """Updates between two rows a layer of norms.csv; 0 switches the monitor off."""
    tid_batches: int = 50
    """Training batches in each pass of the two-pass TID at the end; 0 leaves it out."""
    norm_warmup_fraction: float = 0.1
    """Part of the run in which PowerNorm, MABN and BatchRenorm still use batch statistics, unless
    `norm_options` says otherwise."""
    early_checkpoint: float | None = field(default=None, metadata=LATER)
    """Part of the run after which checkpoints/early.ckpt is kept, rounded to an update; None keeps
    none."""
    record_scales: bool = field(default=False, metadata=LATER)
    """Whether γ and the batches' deviations are written for every norm layer at the end."""
    average_checkpoints: int = field(default=0, metadata=LATER)
    """Weights of so many of the last validations are kept, and their average is what is scored;
    0 scores the best checkpoint."""
    average_statistics: AveragedStatistics = field(default="recalibrate", metadata=LATER)
    """Running statistics of the average: re-estimated on training batches, or averaged too, as
    those that a norm trains by always are."""
    recalibration_batches: int = field(default=50, metadata=LATER)
    """Training batches from which they are re-estimated."""
    strategy: Strategy = field(default="ddp", metadata=LATER)
    """How several processes share the work: every one has the whole model (`ddp`), or a part of
    each weight (`fsdp2`)."""

    def __post_init__(self) -> None:
        check_one_of("training.strategy", self.strategy, get_args(Strategy))
        check_one_of(
            "training.average_statistics", self.average_statistics, get_args(AveragedStatistics)
        )
        check_at_least("training.average_checkpoints", self.average_checkpoints, 0)
        check_at_least("training.recalibration_batches", self.recalibration_batches, 1)
        check_one_of("training.precision", self.precision, get_args(Precision))
        check_one_of("training.accelerator", self.accelerator, get_args(Accelerator))
        for name in ("max_steps", "log_every", "validate_every"):
            check_at_least(f"training.{name}", getattr(self, name), 1)
        for name in ("monitor_every", "tid_batches"):
            check_at_least(f"training.{name}", getattr(self, name), 0)
        for name in ("num_threads", "validation_tokens", "patience"):
            if getattr(self, name) is not None:
                check_at_least(f"training.{name}", getattr(self, name), 1)
        check_fraction("training.label_smoothing", self.label_smoothing, below_one=True)
        check_fraction("training.norm_warmup_fraction", self.norm_warmup_fraction)
        if self.early_checkpoint is not None:
            check_fraction("training.early_checkpoint", self.early_checkpoint)


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """How translations are searched."""

    beam_size: int = 5
    """Hypotheses that are kept at each step; 1 is greedy."""
    length_normalisation: LengthNormalisation = "power"
    """What the log-probability of a hypothesis of length n is divided by: n^α (`power`, the papers
    here), or ((5 + n) / 6)^α (`wu2016`)."""
    length_penalty: float = 1.0
    """α; 0 compares log-probabilities as they are."""
    max_length_factor: float = 1.0
    max_length_offset: int = 50
    """A translation has at most factor · (length of its source) + offset subwords."""
    batch_tokens: int = 4096
    """Source positions of a batch of searches, padding included."""

    def __post_init__(self) -> None:
        check_at_least("decoding.beam_size", self.beam_size, 1)
        check_at_least("decoding.batch_tokens", self.batch_tokens, 1)
        check_at_least("decoding.max_length_offset", self.max_length_offset, 0)
        check_not_negative("decoding.length_penalty", self.length_penalty)
        check_not_negative("decoding.max_length_factor", self.max_length_factor)
        check_one_of(
            "decoding.length_normalisation",
            self.length_normalisation,
            get_args(LengthNormalisation),
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """What one line of a study changes in the comparison's configuration."""

    label: str
    """Name in tables, figures and run folders."""
    norm: str
    """Short name."""
    norm_options: NormOptions = field(default_factory=dict)
    """Over those that the comparison has for the norm."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values by dotted key, as `--set` takes them."""
    x: float | None = None
    """Place on the study's axis; None is a line for reference."""
    y: float | None = None
    """Place on the second axis of a grid."""

    def __post_init__(self) -> None:
        if not LABEL.fullmatch(self.label):
            raise InputError(
                f"The variant's label {self.label!r} cannot name a folder: use letters, digits, "
                "dots, underscores and hyphens, and begin with a letter or digit."
            )


@dataclass(frozen=True, slots=True)
class Study:
    """What the variants of a comparison are about; the report draws its figure by the name."""

    name: str
    title: str
    source: str
    """The paper's figure or table that it repeats."""
    x_label: str = ""
    """Empty where the variants have no number."""
    y_label: str | None = None
    """Of the second number, for grids."""
    logarithmic: bool = False
    """Whether the x axis is."""


@dataclass(frozen=True, slots=True)
class ComparisonConfig:
    """Everything that a comparison of norms depends on."""

    task: str
    preset: str
    norms: tuple[str, ...] = ("ln", "bn")
    """Short names of the norms, or `module:Class`, in the order of the table."""
    seeds: tuple[int, ...] = (0,)
    """Equal seeds give equal initial weights and equal batches to all norms."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    norm_options: Mapping[str, NormOptions] = field(default_factory=dict)
    """Options of `build_norm` for each norm, by its short name."""
    decoding: DecodingConfig = field(default=DecodingConfig(), metadata=LATER)
    study: Study | None = field(default=None, metadata=LATER)
    variants: tuple[Variant, ...] = field(default=(), metadata=LATER)
    """What is trained in place of the norms as such: those whose norm or label is in `norms`."""

    def __post_init__(self) -> None:
        check_distinct("norms", self.norms)
        check_distinct("seeds", self.seeds)
        if self.variants:
            check_distinct("variants", tuple(variant.label for variant in self.variants))
            _check_norms_of_variants(self)
        for seed in self.seeds:
            check_at_least("seeds", seed, 0)


def options_of(config: ComparisonConfig, norm: str) -> dict[str, OptionValue]:
    """Return the options with which `norm` is built in this comparison.

    The warm-ups of the norms that have one are made a fraction of the run, because their own
    defaults (4,000 steps of PowerNorm) would outlast a short run; they count micro-batches, as the
    running statistics do. `norm_options` wins over them.
    """
    micro_batches = config.training.max_steps * config.optimizer.accumulation
    fraction = config.training.norm_warmup_fraction
    derived = warmup_options(norm, micro_batches, fraction)
    return {**derived, **config.norm_options.get(norm, {})}


def early_step(config: ComparisonConfig) -> int | None:
    """Return the update after which the early checkpoint is kept; None where none is."""
    fraction = config.training.early_checkpoint
    return None if fraction is None else max(1, round(fraction * config.training.max_steps))


def to_json(config: ComparisonConfig) -> dict[str, Any]:
    """Return the configuration as nested dictionaries, lists and scalars."""
    plain: dict[str, Any] = _plain(config)
    return plain


def is_set(config: ComparisonConfig, key: str) -> bool:
    """Return whether a setting, by its dotted key, has another value than its default."""
    section, name = key.split(".")
    owner = getattr(config, section)
    defaults = {item.name: item.default for item in fields(owner)}
    return bool(getattr(owner, name) != defaults[name])


def later_keys(config: ComparisonConfig, sections: tuple[str, ...]) -> list[str]:
    """Return the dotted keys of the settings that came after the first tasks."""
    return [
        f"{section}.{item.name}"
        for section in sections
        for item in fields(getattr(config, section))
        if section == "decoding" or is_later(item)
    ]


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {
            item.name: _plain(getattr(value, item.name))
            for item in fields(value)
            if not (is_later(item) and getattr(value, item.name) == item.default)
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _check_norms_of_variants(config: ComparisonConfig) -> None:
    norms = (variant.norm for variant in config.variants)
    known = dict.fromkeys([*norms, *(variant.label for variant in config.variants)])
    foreign = [norm for norm in config.norms if norm not in known]
    if foreign:
        owner = f"study {config.study.name}" if config.study else f"preset {config.preset}"
        raise InputError(
            f"norms={','.join(config.norms)}: the {owner} has no variant of "
            f"{', '.join(foreign)}; choose from {', '.join(known)}."
        )

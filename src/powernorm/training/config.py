"""The configuration of a comparison: typed, immutable, checked where it is made.

Every field is a plain number, string or tuple, so a configuration round-trips through JSON
(`to_json`, `from_json`) and any field can be set by its dotted key (`training.overrides`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from powernorm.errors import InputError
from powernorm.models.choices import Activation, Placement

ScheduleName = Literal["inverse_sqrt", "linear", "cosine", "constant"]
Precision = Literal["float32", "bfloat16", "float16"]
Accelerator = Literal["auto", "cpu", "gpu"]
OptionValue = int | float | bool | str | None
NormOptions = Mapping[str, OptionValue]

LABEL: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""What the label of a variant may be: it becomes part of a folder's name."""

LATER: Final = {"left_out_at_default": True}
"""Metadata of fields that came after the first runs: at their default they are left out of the
JSON, so that files from before them read, and compare, as if written today."""

WARMED_UP_NORMS: Final = ("pn", "pn-only", "pn-static", "brn", "mabn")
"""Norms with an own warm-up, which has to fit into the run."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is read and how it is cut into batches."""

    path: str | None = None
    """Folder or file of the user's text, or the name of an embedded corpus; None is `sotu`.

    For the task `tag` a treebank instead, `petrogold` where None.
    """
    vocabulary_size: int = 2000
    """Number of byte-pair subwords, at least 257 (every byte and the end mark).

    For the task `tag` the number of words instead, the end mark and the unknown word included.
    """
    sequence_length: int = 64
    """Tokens in a segment; also the longest context that the model sees."""
    batch_size: int = 32
    """Segments in a micro-batch."""
    evaluation_batch_size: int = 64
    """Segments in a batch of validation and test."""

    def __post_init__(self) -> None:
        _at_least("data.vocabulary_size", self.vocabulary_size, 257)
        _at_least("data.sequence_length", self.sequence_length, 2)
        _at_least("data.batch_size", self.batch_size, 1)
        _at_least("data.evaluation_batch_size", self.evaluation_batch_size, 1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the Transformer."""

    num_features: int = 128
    num_layers: int = 2
    num_heads: int = 4
    feedforward_features: int = 512
    dropout: float = 0.0
    activation: Activation = "gelu"
    placement: Placement = "pre"
    num_norm_layers: int | None = field(default=None, metadata=LATER)
    """Lowest layers that have the norm; those above have LayerNorm with its defaults, and so has
    the final norm. None, or all layers, gives every place the norm."""

    def __post_init__(self) -> None:
        for name in ("num_features", "num_layers", "num_heads", "feedforward_features"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        _fraction("model.dropout", self.dropout, below_one=True)
        _one_of("model.activation", self.activation, get_args(Activation))
        _one_of("model.placement", self.placement, get_args(Placement))
        if self.num_norm_layers is not None and not 0 <= self.num_norm_layers <= self.num_layers:
            raise InputError(
                f"model.num_norm_layers={self.num_norm_layers} does not fit "
                f"model.num_layers={self.num_layers}: give 0 to {self.num_layers}, or none for all."
            )
        if self.num_features % self.num_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} does not divide "
                f"model.num_features={self.num_features}: choose a divisor."
            )


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay on matrices, clipping and accumulation."""

    learning_rate: float = 3e-3
    """The highest rate of the schedule."""
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    """Largest norm of the gradient over all parameters; None does not clip."""
    accumulation: int = 1
    """Micro-batches in an update."""

    def __post_init__(self) -> None:
        _positive("optimizer.learning_rate", self.learning_rate)
        _fraction("optimizer.beta1", self.beta1, below_one=True)
        _fraction("optimizer.beta2", self.beta2, below_one=True)
        _positive("optimizer.eps", self.eps)
        _not_negative("optimizer.weight_decay", self.weight_decay)
        if self.clip_norm is not None:
            _positive("optimizer.clip_norm", self.clip_norm)
        _at_least("optimizer.accumulation", self.accumulation, 1)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate goes through the run (`training.schedules` has the formulas)."""

    name: ScheduleName = "cosine"
    warmup_fraction: float = 0.1
    """Part of the run in which the rate rises linearly from 0."""
    final_fraction: float = 0.0
    """Rate at the end as a part of the highest, for `linear` and `cosine`."""

    def __post_init__(self) -> None:
        _one_of("schedule.name", self.name, get_args(ScheduleName))
        _fraction("schedule.warmup_fraction", self.warmup_fraction)
        _fraction("schedule.final_fraction", self.final_fraction)


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

    def __post_init__(self) -> None:
        _one_of("training.precision", self.precision, get_args(Precision))
        _one_of("training.accelerator", self.accelerator, get_args(Accelerator))
        for name in ("max_steps", "log_every", "validate_every"):
            _at_least(f"training.{name}", getattr(self, name), 1)
        for name in ("monitor_every", "tid_batches"):
            _at_least(f"training.{name}", getattr(self, name), 0)
        for name in ("num_threads", "validation_tokens", "patience"):
            if getattr(self, name) is not None:
                _at_least(f"training.{name}", getattr(self, name), 1)
        _fraction("training.label_smoothing", self.label_smoothing, below_one=True)
        _fraction("training.norm_warmup_fraction", self.norm_warmup_fraction)
        if self.early_checkpoint is not None:
            _fraction("training.early_checkpoint", self.early_checkpoint)


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
    """Short names of the norms, in the order of the table."""
    seeds: tuple[int, ...] = (0,)
    """Equal seeds give equal initial weights and equal batches to all norms."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    norm_options: Mapping[str, NormOptions] = field(default_factory=dict)
    """Options of `build_norm` for each norm, by its short name."""
    study: Study | None = field(default=None, metadata=LATER)
    variants: tuple[Variant, ...] = field(default=(), metadata=LATER)
    """What is trained in place of the norms as such: those variants whose norm is in `norms`."""

    def __post_init__(self) -> None:
        _distinct("norms", self.norms)
        _distinct("seeds", self.seeds)
        if self.variants:
            _distinct("variants", tuple(variant.label for variant in self.variants))
            _check_norms_of_variants(self)
        for seed in self.seeds:
            _at_least("seeds", seed, 0)


def options_of(config: ComparisonConfig, norm: str) -> dict[str, OptionValue]:
    """Return the options with which `norm` is built in this comparison.

    The warm-ups of the norms that have one are made a fraction of the run, because their own
    defaults (4,000 steps of PowerNorm) would outlast a short run; they count micro-batches, as the
    running statistics do. `norm_options` wins over them.
    """
    chosen = dict(config.norm_options.get(norm, {}))
    if norm not in WARMED_UP_NORMS:
        return chosen
    micro_batches = config.training.max_steps * config.optimizer.accumulation
    warmup = round(micro_batches * config.training.norm_warmup_fraction)
    derived: dict[str, OptionValue] = {"warmup_steps": warmup}
    if norm == "brn":
        derived["ramp_steps"] = warmup
    if norm == "mabn":
        derived["ratio_start"] = warmup
    return derived | chosen


def early_step(config: ComparisonConfig) -> int | None:
    """Return the update after which the early checkpoint is kept; None where none is."""
    fraction = config.training.early_checkpoint
    return None if fraction is None else max(1, round(fraction * config.training.max_steps))


def to_json(config: ComparisonConfig) -> dict[str, Any]:
    """Return the configuration as nested dictionaries, lists and scalars."""
    plain: dict[str, Any] = _plain(config)
    return plain


def is_later(item: Field[Any]) -> bool:
    """Return whether a field of a configuration may be missing in its JSON (`LATER`)."""
    return "left_out_at_default" in item.metadata


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
    known = dict.fromkeys(variant.norm for variant in config.variants)
    foreign = [norm for norm in config.norms if norm not in known]
    if foreign:
        name = "" if config.study is None else f" {config.study.name}"
        raise InputError(
            f"norms={','.join(config.norms)}: the study{name} has no variant of "
            f"{', '.join(foreign)}; choose from {', '.join(known)}."
        )


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{key}={value} is too small: give at least {least}.")


def _positive(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{key}={value} must be a finite number above 0.")


def _not_negative(key: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{key}={value} must be a finite number, 0 or above.")


def _fraction(key: str, value: float, *, below_one: bool = False) -> None:
    if not 0 <= value <= 1 or (below_one and value == 1):
        bounds = "0 ≤ value < 1" if below_one else "0 ≤ value ≤ 1"
        raise InputError(f"{key}={value} must be a fraction, {bounds}.")


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{key}={value!r} is not known: choose one of {', '.join(known)}.")


def _distinct(key: str, values: tuple[object, ...]) -> None:
    if not values:
        raise InputError(f"{key} is empty: give at least one.")
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise InputError(f"{key} names {', '.join(repeated)} more than once: give each one once.")

"""The configuration of a comparison: typed, immutable, checked where it is made.

Every field is a plain number, string or tuple, so a configuration round-trips through JSON
(`to_json`, `from_json`) and any field can be set by its dotted key (`training.overrides`).
"""

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from powernorm.data.parallel_languages import check_languages
from powernorm.errors import InputError
from powernorm.models.choices import (
    Activation,
    Initialisation,
    LengthNormalisation,
    Placement,
    SharedEmbeddings,
)
from powernorm.training.config_checks import (
    check_at_least,
    check_distinct,
    check_fraction,
    check_not_negative,
    check_one_of,
    check_positive,
)

ScheduleName = Literal["inverse_sqrt", "linear", "cosine", "constant"]
Precision = Literal["float32", "bfloat16", "float16"]
Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["ddp", "fsdp2"]
AveragedStatistics = Literal["recalibrate", "average"]
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
    languages: str | None = field(default=None, metadata=LATER)
    """Source and target of a translation, as `de-en`; None is that of the embedded verses."""
    tokenised: bool = field(default=False, metadata=LATER)
    """Whether the lines of a translation come as tokens (Moses), as the official ones do."""
    target_vocabulary_size: int | None = field(default=None, metadata=LATER)
    """Subwords of a target language with a vocabulary of its own; None is one for both."""
    batch_tokens: int | None = field(default=None, metadata=LATER)
    """Positions of the longer side of a micro-batch of sentence pairs, over all processes."""
    count_padding: bool = field(default=True, metadata=LATER)
    """Whether padded positions count in `batch_tokens`."""
    max_length_ratio: float | None = field(default=None, metadata=LATER)
    """Training pairs whose sides differ by more than this factor in subwords are left out; None
    keeps them."""
    max_pairs: int | None = field(default=None, metadata=LATER)
    """Only about so many training pairs, evenly spaced; None is all."""

    def __post_init__(self) -> None:
        check_at_least("data.vocabulary_size", self.vocabulary_size, 257)
        for name, least in (("target_vocabulary_size", 257), ("batch_tokens", 1), ("max_pairs", 1)):
            if getattr(self, name) is not None:
                check_at_least(f"data.{name}", getattr(self, name), least)
        if self.max_length_ratio is not None and not self.max_length_ratio >= 1:
            raise InputError(
                f"data.max_length_ratio={self.max_length_ratio} must be 1 or more, or none for all."
            )
        if self.languages is not None:
            check_languages(self.languages)
        check_at_least("data.sequence_length", self.sequence_length, 2)
        check_at_least("data.batch_size", self.batch_size, 1)
        check_at_least("data.evaluation_batch_size", self.evaluation_batch_size, 1)


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
    num_decoder_layers: int | None = field(default=None, metadata=LATER)
    """Layers of a translation's decoder; None is as many as the encoder has."""
    decoder_norm: str = field(default="ln", metadata=LATER)
    """Short name of the norms in a translation's decoder; `same` is the encoder's. The papers
    change the encoder only."""
    attention_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norms at the encoder's self-attention; None is the run's norm."""
    feedforward_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norms at the encoder's feed-forward networks; None is the run's norm."""
    final_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norm after the encoder's last layer (pre-norm); None is the run's norm."""
    final_norm_warmup: int | None = field(default=None, metadata=LATER)
    """Warm-up steps of the norm after the encoder's last layer, where it has a warm-up; None is
    that of the others."""
    attention_dropout: float = field(default=0.0, metadata=LATER)
    """Of the attention weights of a translation."""
    activation_dropout: float | None = field(default=None, metadata=LATER)
    """After the activation of the feed-forward networks of a translation; None is `dropout`."""
    shared_embeddings: SharedEmbeddings = field(default="all", metadata=LATER)
    """Which of a translation's tables are one: all three, target and output, or none."""
    initialisation: Initialisation = field(default="xavier", metadata=LATER)
    """How a translation's linear maps begin; Xu et al. 2019 recommend `kaiming` for AdaNorm."""

    def __post_init__(self) -> None:
        if self.num_decoder_layers is not None:
            check_at_least("model.num_decoder_layers", self.num_decoder_layers, 1)
        if self.final_norm_warmup is not None:
            check_at_least("model.final_norm_warmup", self.final_norm_warmup, 0)
        check_fraction("model.attention_dropout", self.attention_dropout, below_one=True)
        if self.activation_dropout is not None:
            check_fraction("model.activation_dropout", self.activation_dropout, below_one=True)
        check_one_of("model.shared_embeddings", self.shared_embeddings, get_args(SharedEmbeddings))
        check_one_of("model.initialisation", self.initialisation, get_args(Initialisation))
        for name in ("num_features", "num_layers", "num_heads", "feedforward_features"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_fraction("model.dropout", self.dropout, below_one=True)
        check_one_of("model.activation", self.activation, get_args(Activation))
        check_one_of("model.placement", self.placement, get_args(Placement))
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
        check_positive("optimizer.learning_rate", self.learning_rate)
        check_fraction("optimizer.beta1", self.beta1, below_one=True)
        check_fraction("optimizer.beta2", self.beta2, below_one=True)
        check_positive("optimizer.eps", self.eps)
        check_not_negative("optimizer.weight_decay", self.weight_decay)
        if self.clip_norm is not None:
            check_positive("optimizer.clip_norm", self.clip_norm)
        check_at_least("optimizer.accumulation", self.accumulation, 1)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate goes through the run (`training.schedules` has the formulas)."""

    name: ScheduleName = "cosine"
    warmup_fraction: float = 0.1
    """Part of the run in which the rate rises linearly from 0."""
    final_fraction: float = 0.0
    """Rate at the end as a part of the highest, for `linear` and `cosine`."""
    warmup_steps: int | None = field(default=None, metadata=LATER)
    """Updates in which the rate rises; None is `warmup_fraction` of the run."""

    def __post_init__(self) -> None:
        if self.warmup_steps is not None:
            check_at_least("schedule.warmup_steps", self.warmup_steps, 1)
        check_one_of("schedule.name", self.name, get_args(ScheduleName))
        check_fraction("schedule.warmup_fraction", self.warmup_fraction)
        check_fraction("schedule.final_fraction", self.final_fraction)


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
    """Running statistics of the average: re-estimated on training batches, or averaged too."""
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


def is_set(config: ComparisonConfig, key: str) -> bool:
    """Return whether a setting, by its dotted key, has another value than its default."""
    section, name = key.split(".")
    owner = getattr(config, section)
    defaults = {item.name: item.default for item in fields(owner)}
    return bool(getattr(owner, name) != defaults[name])


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
    norms = (variant.norm for variant in config.variants)
    known = dict.fromkeys([*norms, *(variant.label for variant in config.variants)])
    foreign = [norm for norm in config.norms if norm not in known]
    if foreign:
        owner = f"study {config.study.name}" if config.study else f"preset {config.preset}"
        raise InputError(
            f"norms={','.join(config.norms)}: the {owner} has no variant of "
            f"{', '.join(foreign)}; choose from {', '.join(known)}."
        )

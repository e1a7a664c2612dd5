"""Settings of a comparison that all tasks share, and the changes that a study makes to them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Final

from powernorm.errors import InputError
from powernorm.option_values import OptionValue
from powernorm.records import PaperStatistic
from powernorm_lab.engine.warmup import warmup_options
from powernorm_lab.models.choices import Placement
from powernorm_lab.runs import ChangesRecord, Goal, PaperRecord
from powernorm_lab.settings.data import DataSettings
from powernorm_lab.settings.model import ModelSettings
from powernorm_lab.settings.section import Names, Seeds, check_distinct, refuse, section
from powernorm_lab.settings.training import (
    OptimizerSettings,
    ScheduleSettings,
    TrainingSettings,
)

LABEL: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""Pattern of a variant's label, which becomes part of a folder's name."""


@section("variants", kw_only=False)
class Variant:
    """Changes to the comparison's settings for one line of a study."""

    label: str
    """Name in tables, figures and run folders."""
    norm: str
    """Short name."""
    norm_options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options that override the comparison's options of the norm."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key, as for `--set`, or by parameter of a training function."""
    x: float | None = None
    """Position on the study's axis; None for a reference line."""
    y: float | None = None
    """Position on the second axis of a grid."""


@section(kw_only=False)
class Study:
    """Subject of a comparison's variants; the report chooses its figure by the name."""

    name: str
    title: str
    source: str
    """Figure or table of a paper that it repeats."""
    x_label: str = ""
    """Label of the x axis; empty if the variants have no `x`."""
    y_label: str | None = None
    """Label of the second axis of a grid."""
    logarithmic: bool = False
    """Whether the x axis is logarithmic."""


@section()
class ComparisonSettings:
    """All settings of a comparison of norms; each task has its own sections."""

    task: ClassVar[str]
    measure: ClassVar[str] = "test_perplexity"
    """Main metric of the task's comparisons."""
    score: ClassVar[Goal | None] = None
    """Meaning of `valid_score` in metrics.csv, if the task has a measure beside the likelihood."""
    preset: str = "own"
    """Name of the recipe."""
    norms: Names = ("ln", "bn")
    """Short names of the norms, or `module:Class`, in the order of the table."""
    seeds: Seeds = (0,)
    """Equal seeds give equal initial weights and equal batches to all norms."""
    data: DataSettings
    """Data and batch sizes."""
    model: ModelSettings
    """Architecture of the model."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    training: TrainingSettings = TrainingSettings()
    norm_options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    """Options of `build_norm` for each norm, by its short name."""
    study: Study | None = None
    variants: tuple[Variant, ...] = ()
    """Variants that are trained instead of plain norms, if their norm or label is in `norms`."""

    def __post_init__(self) -> None:
        check_distinct("norms", self.norms)
        check_distinct("seeds", self.seeds)
        if self.variants:
            check_distinct("variants", [variant.label for variant in self.variants])
            _check_labels(self.variants)
            _check_norms_of_variants(self)
        if self.optimizer.name == "muon" and self.training.strategy == "fsdp2":
            raise refuse(
                "training.strategy",
                "fsdp2",
                "divides each weight among the processes, and optimizer.name=muon needs whole "
                "matrices: set training.strategy=ddp, or optimizer.name=adam",
            )

    @property
    def placement(self) -> Placement:
        """Return the placement of the norms; `pre` for models without a residual stream."""
        placement: Placement = getattr(self.model, "placement", "pre")
        return placement

    @property
    def label_smoothing(self) -> float:
        """Return the label smoothing of the training loss; 0 if the task has none."""
        smoothing: float = getattr(self.training, "label_smoothing", 0.0)
        return smoothing

    @property
    def score_name(self) -> str | None:
        """Return the name of the score in `RunData.scores` or `from_loss`."""
        return None if self.score is None else self.score["metric"].removeprefix("valid_")

    @property
    def score_every(self) -> int:
        """Return the number of validations per scored validation; 0 if none is scored.

        It is 1 if the score follows from the loss and has no setting.
        """
        every: int = getattr(self.training, "score_every", 1)
        return every

    @property
    def selects_by_score(self) -> bool:
        """Return whether the score, not the loss, chooses the best checkpoint."""
        return getattr(self.training, "select_by", "loss") == "score"


@dataclass(frozen=True)
class Notes:
    """Facts about a comparison that are known before it is trained."""

    goal: Goal = field(
        default_factory=lambda: Goal(metric=ComparisonSettings.measure, direction="min")
    )
    """Main metric."""
    paper: Sequence[PaperRecord] = ()
    """Published results."""
    reduced: str | None = None
    """Caveat that is shown next to the published results."""
    changes: ChangesRecord | None = None
    """Settings that differ from the reference preset."""
    paper_statistics: Sequence[PaperStatistic] = ()
    """Published statistics of the norms."""


def options_of(config: ComparisonSettings, norm: str) -> dict[str, OptionValue]:
    """Return the options with which `norm` is built in this comparison.

    Warm-ups of norms become a fraction of the run, because the defaults of the layers (4,000 steps
    of PowerNorm) would outlast a short run. They count micro-batches, as the running statistics
    do. `norm_options` overrides them.
    """
    micro_batches = config.training.max_steps * config.optimizer.accumulation
    fraction = config.training.norm_warmup_fraction
    derived = warmup_options(norm, micro_batches, fraction)
    return {**derived, **config.norm_options.get(norm, {})}


def early_step(config: ComparisonSettings) -> int | None:
    """Return the update after which the early checkpoint is kept; None without one."""
    fraction = config.training.early_checkpoint
    return None if fraction is None else max(1, round(fraction * config.training.max_steps))


def to_json(config: ComparisonSettings) -> dict[str, Any]:
    """Return the settings as nested dictionaries, lists and scalars."""
    found: dict[str, Any] = plain(config)
    if config.study is None:
        del found["study"]
    if not config.variants:
        del found["variants"]
    return {"task": config.task, **found}


def plain(value: Any) -> Any:
    """Convert sections to dictionaries and tuples to lists, for JSON."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _check_labels(variants: Sequence[Variant]) -> None:
    for variant in variants:
        if not LABEL.fullmatch(variant.label):
            raise InputError(
                f"the variant's label {variant.label!r} cannot name a folder: use letters, digits, "
                "dots, underscores and hyphens, and begin with a letter or digit"
            )


def _check_norms_of_variants(config: ComparisonSettings) -> None:
    norms = (variant.norm for variant in config.variants)
    known = dict.fromkeys([*norms, *(variant.label for variant in config.variants)])
    foreign = [norm for norm in config.norms if norm not in known]
    if foreign:
        owner = f"study {config.study.name}" if config.study else f"preset {config.preset}"
        raise InputError(
            f"norms={','.join(config.norms)}: the {owner} has no variant of "
            f"{', '.join(foreign)}; choose from {', '.join(known)}"
        )

"""What the experiment behind the verdict is made of: settings and the order of the work."""

from dataclasses import dataclass

from powernorm.training.config import ComparisonConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison of the study."""

    name: str
    """Of its folder."""
    group: str
    """Settings of a group are divided evenly between choosing and scoring."""
    config: ComparisonConfig
    """Its norms and seeds are those of the phases."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What is trained in all settings before the next phase begins."""

    norms: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerdictStudy:
    """Settings and the order of the work."""

    preset: str
    settings: tuple[Setting, ...]
    phases: tuple[Phase, ...]
    num_batches: int = 50
    """Training batches in each pass of an early diagnosis."""

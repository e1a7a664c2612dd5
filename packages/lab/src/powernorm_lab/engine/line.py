"""A line of a comparison: a configuration that is trained with every seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powernorm.records import Placement
from powernorm_lab.runs import run_name


@dataclass(frozen=True)
class Line:
    """One row of the results table: a norm and settings, trained with every seed."""

    norm: str
    """Short name, or `module:Class`."""
    settings: Any
    """Settings of these runs, in the task's type."""
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    """Name of a variant; None uses the norm's name."""
    placement: Placement | None = None
    x: float | None = None
    """Value of a variant on the first axis of its study."""
    y: float | None = None
    """Value on the second axis, if the study is a grid."""

    @property
    def name(self) -> str:
        """Name in folders, tables and figures."""
        return self.label or self.norm

    def folder(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return run_name(self.name, self.placement, seed)

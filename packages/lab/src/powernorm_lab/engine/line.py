"""A line of a comparison: it is trained with every seed, and a row of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powernorm.records import Placement
from powernorm_lab.runs import run_name


@dataclass(frozen=True)
class Line:
    """One line of the table: what is trained with every seed."""

    norm: str
    """Short name, or `module:Class`."""
    settings: Any
    """Settings of these runs, as the task has them."""
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    """Name of a variant; None is the norm's."""
    placement: Placement | None = None
    x: float | None = None
    """Where a variant lies on the axis of its study."""
    y: float | None = None
    """And on the second axis of a grid."""

    @property
    def name(self) -> str:
        """Name in folders, tables and figures."""
        return self.label or self.norm

    def folder(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return run_name(self.name, self.placement, seed)

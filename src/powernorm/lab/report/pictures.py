"""Pictures of several panels in files of their own, for papers and pages other than the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from powernorm.errors import InputError
from powernorm.lab.report.lines import Panel, draw_panel, legend_entries, scale_x

SUFFIXES: Final = (".svg", ".png")

# A name from a file may hold a dollar sign. Any: recent matplotlib types the keys as a Literal.
_STYLE: Final[Any] = {"text.parse_math": False, "svg.hashsalt": "powernorm"}


def draw_pictures(panels: Sequence[Panel], x_label: str) -> Figure:
    """Draw panels on white, two in a row."""
    rows = -(-len(panels) // 2)
    drawn = Figure(figsize=(9, 3.3 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(drawn)
    frames = iter(drawn.subplots(rows, 2, squeeze=False).flat)
    for panel, axes in zip(panels, frames, strict=False):
        draw_panel(axes, panel)
        scale_x(axes, [panel])
        axes.set_xlabel(x_label)
    for axes in frames:
        # The last row may not be full.
        drawn.delaxes(axes)
    return drawn


def save(drawn: Figure, out: Path) -> Path:
    """Write a figure with the legend of its frames below it.

    Raises:
        InputError: the file cannot be written.
    """
    named = legend_entries(drawn.axes)
    drawn.legend(
        handles=list(named.values()),
        labels=list(named),
        loc="outside lower center",
        ncols=min(5, len(named) or 1),
        frameon=False,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            drawn.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror}): give a file in a folder of your own."
        ) from error
    return out

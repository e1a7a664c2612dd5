"""Pictures of several panels in files of their own, for papers and pages other than the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from powernorm.errors import InputError

SUFFIXES: Final = (".svg", ".png")

# A name from a file may hold a dollar sign. Any: recent matplotlib types the keys as a Literal.
_STYLE: Final[Any] = {"text.parse_math": False, "svg.hashsalt": "powernorm"}


def panels(rows: int) -> tuple[Figure, Sequence[Axes]]:
    """A white figure with rows of two frames."""
    drawn = Figure(figsize=(9, 3.3 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, 2, squeeze=False)
    for frame in axes.flat:
        frame.grid(visible=True, linewidth=0.5, alpha=0.5)
    return drawn, list(axes.flat)


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Words around a frame."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def save(drawn: Figure, out: Path) -> Path:
    """Write a figure with the legend of its frames below it.

    Raises:
        InputError: the file cannot be written.
    """
    named: dict[str, Artist] = {}
    for axes in drawn.axes:
        handles, labels = axes.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
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

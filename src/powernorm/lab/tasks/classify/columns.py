"""Which columns of a table are class and text, by the names in its first line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powernorm.errors import InputError

_LABELS: Final = ("label", "class")
_TEXTS: Final = ("sentence", "text")


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read, as `data.label_column` and `data.text_columns`.

    Attributes:
        label: of the class; None is `label` or `class`.
        texts: of the text, put together where there are several; empty is `sentence` or `text`.
    """

    label: str | None = None
    texts: tuple[str, ...] = ()

    @property
    def are_given(self) -> bool:
        """Whether somebody has named one."""
        return self.label is not None or bool(self.texts)

    def found_in(self, cells: Sequence[str], path: Path) -> "ColumnPlaces | None":
        """Return where the columns are, None where a first line is no header.

        Args:
            cells: of the first line.
            path: of the file.

        Raises:
            InputError: a column that was named is not there.
        """
        names = [cell.strip().lower() for cell in cells]
        labels = _LABELS if self.label is None else (self.label.lower(),)
        label = next((name for name in labels if name in names), None)
        texts = [text.lower() for text in self.texts]
        if not texts:
            texts += [name for name in _TEXTS if name in names][:1]
        missing = [name for name in texts if name not in names]
        if self.are_given and (label is None or missing or not texts):
            key = "label_column" if label is None else "text_columns"
            wanted = self.label or _LABELS[0] if label is None else ", ".join(missing or _TEXTS)
            raise InputError(
                f"{path}, line 1: no column {wanted!r}; there are {', '.join(cells)[:200]}: name "
                f"one of them with data.{key}"
            )
        if label is None or not texts:
            return None
        return ColumnPlaces(names.index(label), tuple(map(names.index, texts)))


@dataclass(frozen=True)
class ColumnPlaces:
    """Numbers of the columns, from 0."""

    label: int
    texts: tuple[int, ...]

    def text(self, cells: Sequence[str]) -> str:
        """Return the text of a row."""
        return " ".join(cells[place] for place in self.texts)

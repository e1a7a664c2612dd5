"""What all sections of a configuration share."""

from dataclasses import Field
from typing import Any, Final

LATER: Final = {"left_out_at_default": True}
"""Metadata of fields that came after the first runs: at their default they are left out of the
JSON, so that files from before them read, and compare, as if written today."""


def is_later(item: Field[Any]) -> bool:
    """Return whether a field of a configuration may be missing in its JSON (`LATER`)."""
    return "left_out_at_default" in item.metadata

"""The mathematics without state."""

from powernorm.ops import library as _library  # noqa: F401 - registers the operators
from powernorm.ops.moments import Moments

__all__ = ["Moments"]

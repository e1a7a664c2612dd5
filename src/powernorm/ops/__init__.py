"""The mathematics without state, and the kernels that serve it."""

from powernorm.ops import eager as _eager  # noqa: F401 - registers the operators
from powernorm.ops.dispatch import Choice, explain, use_backend
from powernorm.ops.moments import Moments

__all__ = ["Choice", "Moments", "explain", "use_backend"]

"""Stateless math of the norms, and the kernels that compute it."""

from types import ModuleType

from powernorm.ops import eager as _eager_functions
from powernorm.ops.dispatch import Choice, add_backend, explain, use_backend
from powernorm.ops.moments import Moments

__all__ = ["Choice", "Moments", "explain", "use_backend"]


def _eager() -> ModuleType:
    return _eager_functions


def _cpu() -> ModuleType:
    import powernorm.ops.kernels.cpu as functions

    return functions


def _triton() -> ModuleType:
    import powernorm.ops.kernels.triton as functions

    return functions


add_backend("eager", _eager)
add_backend("cpu", _cpu)
add_backend("triton", _triton)

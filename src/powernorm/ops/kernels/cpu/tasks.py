"""The structures of `source/tasks.h`, field by field."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

CPU: Final = torch.device("cpu")
"""Passed to every allocation, because a default device applies to the user's tensors only."""

CENTERED: Final = 1
FLOOR: Final = 2
RELEASED: Final = 4
USE_BATCH: Final = 8
DETACH_MEAN: Final = 16
DETACH_STD: Final = 32
MEASURE: Final = 64
FINISH: Final = 128

TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}

(
    BATCH_NORM,
    BATCH_NORM_BACKWARD,
    POWER_NORM,
    POWER_NORM_BACKWARD,
    TOKEN_NORM,
    TOKEN_NORM_BACKWARD,
    STATIC_NORM,
    STATIC_NORM_BACKWARD,
) = range(8)

MEAN_AND_VAR, SECOND_MOMENT, POWER = range(3)


class KernelTask(ctypes.Structure):
    """One call of `powernorm_run`; unset fields are 0 or null."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("type", "flags", "tokens", "features", "groups")),
        *((name, ctypes.c_int64) for name in ("threads", "x_stride", "residual_stride")),
        *((name, ctypes.c_int64) for name in ("grad_y_stride", "grad_total_stride")),
        *((name, ctypes.c_double) for name in ("eps", "scale", "k", "max_ratio")),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "mask", "weight", "bias", "mean")),
        *((name, ctypes.c_void_p) for name in ("var", "gradient_moment", "limits", "y", "total")),
        *((name, ctypes.c_void_p) for name in ("scales", "statistics", "sums", "grad_y")),
        *((name, ctypes.c_void_p) for name in ("grad_total", "grad_statistics", "grad_x")),
        *((name, ctypes.c_void_p) for name in ("grad_weight", "grad_bias", "carried", "update")),
    )


class NativeUpdate(ctypes.Structure):
    """An update of running statistics, within a task or as a call of `powernorm_update`.

    It is never written after it is made, because threads that share a layer share it.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "wide", "features", "unbiased", "average")),
        ("floored", ctypes.c_int64),
        ("momentum", ctypes.c_double),
        ("backward_momentum", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("first", "second", "num_batches_tracked")),
        ("num_nonfinite_batches", ctypes.c_void_p),
    )

"""Versions, machine and date of a comparison, for its files."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from powernorm.version import __version__
from powernorm_lab.engine.processes import num_processes


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return `versions` of Python, torch and the packages, `machine` and `date`."""
    return {
        # `torch.__version__` includes the build, such as +cu130; the package's metadata may not.
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in packages}
        | {"torch": str(torch.__version__)},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "num_cpus": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "num_processes": num_processes(),
        },
        "date": datetime.now(UTC).date().isoformat(),
    }


def _version(package: str) -> str | None:
    if package == "powernorm":
        return __version__  # of the imported sources; metadata of an editable install may be old
    try:
        return version(package)
    except PackageNotFoundError:
        return None

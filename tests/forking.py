"""New processes that have torch and this library already: most of a short one is importing them."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOREIGN = str(Path(sys.prefix) / "foreign")

multiprocessing.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch.multiprocessing", "torch._dynamo"),
        "torch.distributed.tensor.parallel",
        *("torch.utils.tensorboard", "matplotlib.figure", "scipy.stats", "torchmetrics"),
        *(
            "powernorm.cli.commands",
            "powernorm_lab.tasks.registry",
            "powernorm_lab.tasks.builtin",
        ),
        *(
            "powernorm_lab.report",
            "powernorm.surgery",
            "powernorm.diagnosis",
        ),
    ]
)


@contextmanager
def own_packages() -> Iterator[None]:
    """Hide from new processes the folder of packages that other tests may have made visible.

    Its torchvision works with what these tests define for it alone.
    """
    before = list(sys.path)
    sys.path[:] = [path for path in before if path != FOREIGN]
    try:
        yield
    finally:
        sys.path[:] = before

"""Lightning without its messages: devices, tips, warnings about choices made on purpose."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOGGERS: Final = ("lightning.pytorch", "lightning.fabric", "lightning")
EXPECTED_WARNINGS: Final = (
    # The loaders make their batches in the main process: cutting a tensor needs no workers.
    r".*does not have many workers.*",
    # fp16: the first steps are skipped while the loss scale falls, the schedule goes on.
    r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`.*",
    # A device was not asked for, or was left out on purpose.
    r"GPU available but not used.*",
    # It is the same in all processes: the sums behind it are of all.
    r".*recommended to use `self.log\(.valid_loss., ..., sync_dist=True\)`.*",
    r".*recommended to use `self.log\(.badness., ..., sync_dist=True\)`.*",
    # Its successor copies the first process's buffers at the beginning.
    r".*`broadcast_buffers` is deprecated.*",
    # Lightning's use of torch's trees, not ours.
    r".*isinstance\(treespec, LeafSpec\).*",
    r"The number of training batches .* is smaller than the logging interval.*",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning inside the block and restore everything after it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Turn Lightning's answer to Ctrl-C, a `SystemExit`, back into the `KeyboardInterrupt`.

    Lightning also leaves the signal ignored for good, so its handler is put back.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)

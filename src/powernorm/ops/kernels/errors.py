"""The error of a backend whose kernel is unavailable: the caller uses another backend."""

from __future__ import annotations


class KernelError(Exception):
    """A kernel was not started, and nothing was written.

    Attributes:
        reason: one line without a period: the cause and a fix.
        is_general: whether every other kernel of the backend would fail as well, not only this op,
            type and width.
    """

    def __init__(self, reason: str, is_general: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_general = reason, is_general

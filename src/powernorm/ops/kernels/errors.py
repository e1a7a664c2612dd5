"""What a backend raises where a kernel cannot be had: the caller serves the call by another."""

from __future__ import annotations


class KernelError(Exception):
    """A kernel was not started, and wrote nothing.

    Attributes:
        reason: one line without a period that says why, and what helps.
        is_general: Would every other kernel of the backend fail as well? Else only this op, type
            and width do.
    """

    def __init__(self, reason: str, is_general: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_general = reason, is_general

"""One command in several processes that `torchrun` started."""

import os
import sys
from typing import Final, NoReturn

FAILED: Final = 1
"""Exit code after a process was lost, or if runs failed."""


BAD_INPUT: Final = 2
"""Exit code of a process that has reported its error."""


LOST_ANOTHER: Final = 3
"""Exit code of a process whose exchange with another one failed."""


INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as in shells."""


def is_launched() -> bool:
    """Return whether this process is one of several that `torchrun` started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_main() -> bool:
    """Return whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End one of several processes immediately.

    Python's normal exit stops C++ threads that wait for its lock, such as those of tensor exchange;
    a process may then abort after its work is done, and the others would be stopped with it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

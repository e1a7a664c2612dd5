"""The version of the laboratory."""

from typing import Final

__version__: Final = "0.3.0"

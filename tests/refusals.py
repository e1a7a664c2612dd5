"""Checks of refusals: bad input raises an InputError that names the value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from powernorm.errors import InputError


def refuses(words: str, call: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
    """Check that a call raises an InputError whose message matches the words."""
    __tracebackhide__ = True
    with pytest.raises(InputError, match=words):
        call(*args, **kwargs)

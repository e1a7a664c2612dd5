from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_cache(own_cache: Path) -> Path:
    """Every test starts with an empty cache, which is not the user's."""
    return own_cache

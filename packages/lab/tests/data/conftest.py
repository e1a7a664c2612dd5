from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_cache(own_cache: Path) -> Path:
    """Give every test an empty cache instead of the user's."""
    return own_cache

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts with an empty cache, which is not the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POWERNORM_CACHE", str(folder))
    return folder

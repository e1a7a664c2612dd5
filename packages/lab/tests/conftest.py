import os
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lab.tests.training.tiny_training import Configure, tiny_config
from lab.tests.training.tiny_translation import write_pairs

import powernorm
from norms.own_modules import Drawn
from powernorm.norms.registry import REGISTERED


@pytest.fixture(scope="session", autouse=True)
def shared_cache() -> Iterator[Path]:
    """Set one cache for all tests of this folder, and for later ones."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["POWERNORM_TEST_HOME"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERNORM_CACHE", str(folder))
        yield folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache for one test, which is not the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POWERNORM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because small models are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text whose order of words can be learned."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = [a + b for a in ("wa", "pe", "to", "mi") for b in ("r", "ace", "day", "nd", "n")]
    for split, num_lines in (("train", 300), ("valid", 30), ("test", 30)):
        lines = []
        for _ in range(num_lines):
            start = rng.randrange(len(words))
            lines.append(" ".join(words[(start + 3 * i) % len(words)] for i in range(8)))
        (folder / f"tiny.{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sentence pairs of `tiny_translation`."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def configure(text: Path) -> Configure:
    """Return a function that makes settings for a training of a second; keywords change them."""
    return partial(tiny_config, str(text))


@pytest.fixture
def drawn_norm() -> Iterator[None]:
    """Register `drawn`, a norm with random initial weights."""
    with patch.dict(REGISTERED, clear=True):
        powernorm.register_norm("drawn", Drawn)
        yield

"""No damaged file is used silently: bits flipped and ends cut off at random, in every kind."""

import io
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import powernorm
from powernorm.checksums import save_sealed, seal_archive, seal_of
from powernorm.errors import InputError
from powernorm_lab.data.cache import Encoded, found_or_made
from powernorm_lab.engine.averaging import read_weights, write_weights
from powernorm_lab.engine.state import FORMAT, read_checkpoint

NUM_DAMAGES = 400


def weights() -> dict[str, Tensor]:
    tensor = torch.linspace(-1, 1, 60).view(6, 10)
    return {"weight": tensor, "bias": torch.arange(6.0), "tied": tensor}


def checkpoint() -> dict[str, Any]:
    states = {"model": weights()}
    return {"format": FORMAT, "states": states, "step": 7, "note": "x" * 50}


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 3, bias=False))
    built(torch.randn(8, 4))
    return built.eval()


def write_checkpoint(path: Path) -> None:
    with path.open("wb") as file:
        save_sealed(checkpoint(), file)


def write_folded(path: Path) -> None:
    built = model()
    powernorm.fold(built, torch.randn(2, 4))
    powernorm.save(built, path.parent)


def read_folded(path: Path) -> Any:
    return powernorm.load(path.parent, model()).state_dict()


Writer = Callable[[Path], None]
Reader = Callable[[Path], Any]
KINDS = {
    "last.ckpt": (write_checkpoint, read_checkpoint),
    "step-4.safetensors": (lambda path: write_weights(path, weights()), read_weights),
    "powernorm.safetensors": (write_folded, read_folded),
}


def damages(content: bytes) -> Iterator[bytes]:
    """The content with one or several bits flipped, mostly where the sum is, or cut off."""
    random_numbers = random.Random(0)
    for number in range(NUM_DAMAGES):
        changed = bytearray(content)
        if number % 5 == 0:
            del changed[random_numbers.randrange(len(changed)) :]
        else:
            edge = min(200, len(changed))
            near = random_numbers.choice(
                [(0, edge), (len(changed) - edge, len(changed)), (0, len(changed))]
            )
            for _ in range(random_numbers.choice([1, 1, 1, 2, 8])):
                changed[random_numbers.randrange(*near)] ^= 1 << random_numbers.randrange(8)
        if bytes(changed) != content:
            yield bytes(changed)


def damages_of_all_parts(content: bytes, begin: int) -> Iterator[bytes]:
    """Each bit after a place flipped in turn."""
    for bit in range(8 * begin, 8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize("name", KINDS)
def test_no_damaged_file_is_read(name: str, tmp_path: Path) -> None:
    """A run that resumes from wrong weights, or a model that is wrong, shows nothing of it."""
    write, read = KINDS[name]
    path = tmp_path / name
    write(path)
    content = path.read_bytes()
    assert seal_of(path) == "whole"
    read(path)
    used = []
    for number, damaged in enumerate(damages(content)):
        path.write_bytes(damaged)
        try:
            read(path)
            used.append(number)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017
    assert not used


@pytest.mark.parametrize("name", KINDS)
def test_the_error_says_that_the_file_is_damaged_and_what_to_do(name: str, tmp_path: Path) -> None:
    write, read = KINDS[name]
    path = tmp_path / name
    write(path)
    content = bytearray(path.read_bytes())
    content[-150 if name.endswith(("ckpt", "pt")) else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged, .* checksum: (remove|save)"):
        read(path)


def test_every_bit_of_the_checksum_itself_counts(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(path)
    content = path.read_bytes()
    for damaged in damages_of_all_parts(content, len(content) - 110):
        path.write_bytes(damaged)
        assert seal_of(path) == "damaged"


def test_files_from_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    some = {"weight": weights()["weight"]}
    save_file(some, tmp_path / "step-4.safetensors", {"tied": "weight"})
    assert read_weights(tmp_path / "step-4.safetensors").keys() == {"weight", "tied"}


def test_other_programs_read_sealed_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(content["states"]["model"]["weight"], weights()["weight"])
    with zipfile.ZipFile(tmp_path / "last.ckpt") as archive:
        assert archive.comment.startswith(b"powernorm sha256 ")
        assert archive.testzip() is None
    write_weights(tmp_path / "step-1.safetensors", weights())
    assert torch.equal(load_file(tmp_path / "step-1.safetensors")["weight"], weights()["weight"])


def test_a_sum_is_of_more_than_one_portion(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(torch.zeros(1_000_000), content)
    seal_archive(content)
    damaged = bytearray(content.getvalue())
    path = tmp_path / "large.pt"
    path.write_bytes(damaged)
    assert seal_of(path) == "whole"
    damaged[2_500_000] ^= 4
    path.write_bytes(damaged)
    assert seal_of(path) == "damaged"


# The cache ---------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_no_damaged_entry_of_the_cache_is_read(cache: Path) -> None:
    """Flipped token ids train and score a model on another text than the one that is named."""

    def made() -> Encoded:
        return Encoded({"ids": torch.arange(99)}, {"made": "again" if path.exists() else "first"})

    path = cache / "entry.safetensors"
    assert found_or_made("entry", made).texts["made"] == "first"
    whole = path.read_bytes()
    assert found_or_made("entry", made).texts["made"] == "first"
    for damaged in damages(whole):
        path.write_bytes(damaged)
        assert found_or_made("entry", made).texts["made"] == "again"
    for damaged in damages_of_all_parts(whole[:64], 0):
        path.write_bytes(damaged + whole[64:])
        assert found_or_made("entry", made).texts["made"] == "again"

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from fake_wheels import FILES, OTHER, make_entry, make_wheel, member
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm.lab.data.sets.entries import Member, Wheel
from powernorm.lab.data.sets.folders import wheel_of
from powernorm.lab.data.sets.wheel_reading import check_wheel, read_members


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


def ignore(size: int) -> None:
    del size


def read(path: Path, wheel: Wheel, target: Path) -> None:
    target.mkdir(exist_ok=True)
    with path.open("rb") as file:
        read_members(file, path, wheel, target, ignore)


def changed(path: Path, *members: Member) -> Wheel:
    return wheel_of(make_entry(path, members=members))


def test_the_sum_of_the_wheel_comes_first(path: Path, tmp_path: Path) -> None:
    other = tmp_path / path.name
    other.write_bytes(path.read_bytes() + b"\x00")
    wheel = wheel_of(make_entry(path))
    actual = hashlib.sha256(other.read_bytes()).hexdigest()
    with (
        other.open("rb") as file,
        pytest.raises(InputError, match=f"its sha256 is {actual}, expected {wheel.sha256}"),
    ):
        check_wheel(file, other, wheel, ignore)


def test_a_missing_member_is_named(path: Path, tmp_path: Path) -> None:
    wheel = changed(path, member("fakeset/data/valid.txt", b"x"))
    with pytest.raises(InputError, match=r"fakeset-1.*holds no fakeset/data/valid\.txt"):
        read(path, wheel, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["FAKESET/data/train.txt", "./fakeset/data/train.txt", "train.txt"]
)
def test_names_are_compared_exactly(path: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="holds no"):
        read(path, changed(path, member(name, b"x")), tmp_path / "out")


def test_no_more_is_read_than_expected(tmp_path: Path) -> None:
    bomb = {"fakeset/data/train.txt": bytes(64 << 20)}
    path = make_wheel(tmp_path, bomb)
    assert path.stat().st_size < 100_000
    wheel = changed(path, Member("fakeset/data/train.txt", 1000, "0" * 64))
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"has more than 1000 bytes, expected 1000"):
        read(path, wheel, out)
    assert (out / "train.txt").stat().st_size <= 1001


def test_a_short_member_and_wrong_sums_are_told(path: Path, tmp_path: Path) -> None:
    name, content = next(iter(FILES.items()))
    right = hashlib.sha256(content).hexdigest()
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"has 4000 bytes, expected 4001"):
        read(path, changed(path, Member(name, len(content) + 1, right)), out)
    with pytest.raises(InputError, match=f"has the sha256 {right}, expected {'0' * 64}"):
        read(path, changed(path, Member(name, len(content), "0" * 64)), out)
    md5 = hashlib.md5(content).hexdigest()
    with pytest.raises(InputError, match=f"has the md5 {md5}, expected {'1' * 32}"):
        read(path, changed(path, Member(name, len(content), right, "1" * 32)), out)
    read(path, changed(path, Member(name, len(content), right, md5)), out)


def test_the_archive_decides_no_path(tmp_path: Path) -> None:
    content = b"harmless"
    path = make_wheel(tmp_path, {"../../outside.txt": content, "/etc/outside.txt": content})
    out = tmp_path / "a" / "b" / "out"
    out.parent.mkdir(parents=True)
    read(path, changed(path, *(member(name, content) for name in ("../../outside.txt",))), out)
    assert sorted(item.name for item in out.iterdir()) == ["outside.txt"]
    assert not (tmp_path / "a" / "outside.txt").exists()


def test_other_files_of_the_package_stay_inside(path: Path, tmp_path: Path) -> None:
    read(path, wheel_of(make_entry(path)), tmp_path / "out")
    names = {item.name for item in (tmp_path / "out").iterdir()}
    assert names == {"train.txt", "test.txt"}
    with zipfile.ZipFile(path) as archive:
        assert OTHER in archive.namelist()


def test_what_is_no_archive_is_told(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.whl"
    text.write_text("no archive")
    with pytest.raises(
        InputError, match=r"text\.whl cannot be read as a wheel \(File is not a zip"
    ):
        read(text, wheel_of(make_entry(path)), tmp_path / "out")


def check_mutation(path: Path, wheel: Wheel, out: Path, content: bytes) -> None:
    """The files are right, or the error is clean, whatever the archive holds."""
    out.mkdir(exist_ok=True)
    message = None
    try:
        read_members(io.BytesIO(content), path, wheel, out, ignore)
    except InputError as error:
        message = str(error)
    if message is not None:
        assert str(path) in message
        return
    for name, expected in FILES.items():
        assert (out / name.rpartition("/")[2]).read_bytes() == expected


def mutations(content: bytes) -> st.SearchStrategy[bytes]:
    places = st.integers(0, len(content) - 1)
    flips = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=4)

    def flip(changes: list[tuple[int, int]]) -> bytes:
        mutated = bytearray(content)
        for place, change in changes:
            mutated[place] ^= change
        return bytes(mutated)

    cuts = st.tuples(places, places).map(lambda cut: content[: min(cut)] + content[max(cut) :])
    doubled = places.map(lambda place: content[:place] + content)
    return st.one_of(flips.map(flip), cuts, doubled)


ENDLESS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(ENDLESS, max_examples=300)
@given(data=st.data())
def test_damaged_archives_end_in_clean_errors(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_mutation(
        path, wheel_of(make_entry(path)), tmp_path / "out", data.draw(mutations(path.read_bytes()))
    )


@pytest.mark.slow
@settings(ENDLESS, max_examples=8000)
@given(data=st.data())
def test_thousands_of_damaged_archives_end_in_clean_errors(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_mutation(
        path, wheel_of(make_entry(path)), tmp_path / "out", data.draw(mutations(path.read_bytes()))
    )

"""Files of our own are written and deleted without following links."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from lab.tests.own_training import tiny_grid

import powernorm
from powernorm import InputError
from powernorm.files import remove, write
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.report.document import write_page
from powernorm_lab.tuning.norm_studies import STORAGE_FILE, open_storage
from powernorm_lab.tuning.records import take_folder


def test_written_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, "ä", b"b")
    assert path.read_bytes() == "äb".encode()
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    with pytest.raises(TypeError):
        write(path, b"half", 1)  # type: ignore[arg-type]
    assert path.read_bytes() == "äb".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_what_is_no_file_of_ours_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "result.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    if kind == "link":
        victim.write_text("precious")
    for act in (lambda: write(path, "x"), lambda: remove(path)):
        with pytest.raises(InputError, match=r"result\.json is (a link|no regular file), and"):
            act()
    assert path.is_symlink() or path.is_fifo()
    assert not victim.exists() or victim.read_text() == "precious"


def test_a_folder_in_place_of_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.mkdir()
    with pytest.raises(InputError, match=r"metrics\.csv is a folder, expected a file"):
        write(path, "x")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_goes_without_what_its_links_lead_to(tmp_path: Path) -> None:
    victim = victim_in(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(victim)
    remove(tmp_path / "run", tmp_path / "missing")
    assert not (tmp_path / "run").exists()
    assert_whole(victim)


NAMES = {"precious", ".hidden", "step-9.safetensors"}


def victim_in(folder: Path) -> Path:
    victim = folder / "victim"
    victim.mkdir()
    for name in NAMES:
        (victim / name).write_text("{}")
    return victim


def assert_whole(victim: Path) -> None:
    assert {path.name for path in victim.iterdir()} - {"config.json"} == NAMES
    assert {path.read_text() for path in victim.iterdir()} == {"{}"}


@pytest.mark.parametrize("how", ["resume", "force"])
@pytest.mark.parametrize("place", ["ln-seed0", "ln-seed0/checkpoints", "ln-seed0/lease.lock"])
def test_nothing_is_deleted_or_written_behind_a_link(tmp_path: Path, place: str, how: str) -> None:
    victim, link = victim_in(tmp_path), tmp_path / "out" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / "new" if link.suffix else victim)
    if how == "force":  # which deletes what looks like a run
        (victim / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"{link.name} is a link"):
        compare_grid(tiny_grid(norms=["ln"]), tmp_path / "out", **{how: True})
    assert_whole(victim)


def test_a_page_is_not_written_through_a_link_beside_it(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report.html.partial").symlink_to(victim)
    write_page("page", tmp_path / "report.html")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["trials", STORAGE_FILE])
def test_a_tuning_does_not_follow_links(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(victim_in(tmp_path))
    with pytest.raises(InputError, match=f"{name} is a link"):
        take_folder(tmp_path / "out", {}, resume=False, force=False)


@pytest.mark.parametrize("name", ["a?b", "a%3Fb#c", "{SCHEMA_VERSION} {x}"])
def test_the_folder_of_a_tuning_is_no_url(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    open_storage(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / STORAGE_FILE).is_file()


IN_A_ZIP = """
import powernorm
from powernorm_lab.recipes.files import named_recipe
from powernorm_lab.recipes.paper_statistics import printed_statistics
from powernorm_lab.recipes.studies.sizes import presets_of
from powernorm_lab.report.document import part

assert ".zip" in powernorm.__file__
assert named_recipe("lm", "demo").settings.task == "lm"
assert printed_statistics()
assert "demo" in presets_of("lm", "scales")
assert "<h3" in part("heading", "text")
"""


def test_recipes_and_templates_are_found_in_a_zip(tmp_path: Path) -> None:
    folder = Path(powernorm.__file__).parent
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".toml", ".html", ".css", ".js"):
                archive.write(path, path.relative_to(folder.parent))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_ZIP],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "p.zip"), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.zip"]

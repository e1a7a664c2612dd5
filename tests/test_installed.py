"""The package as a user gets it: archives, wheels, and their installed contents."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import powernorm
from powernorm.ops.kernels.cpu.building import LIBRARY_NAME, NOTE_NAME

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).with_name("installed")
KERNELS = "powernorm/ops/kernels/cpu"
README_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LARGEST = 4_000_000
"""Bytes of a wheel, with kernels or without."""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def sources(target: Path, folders: Sequence[str] = ("src",)) -> Path:
    """A copy of what a build needs, without what earlier builds have left."""
    left = shutil.ignore_patterns("*.so", NOTE_NAME, "__pycache__", "*.egg-info")
    for name in folders:
        shutil.copytree(ROOT / name, target / name, ignore=left)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, target)
    return target


def build(source: Path, target: Path, hook: str = "build_wheel", **variables: str) -> Path:
    """Build by setuptools of this environment: no index is needed."""
    pytest.importorskip("setuptools", "77")
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    target.mkdir()
    run("-c", code, target, cwd=source, **variables)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for all platforms."""
    folder = tmp_path_factory.mktemp("pure")
    url = "https://example.org/powernorm"
    (folder / "sources").mkdir()
    made = sources(folder / "sources")
    return build(made, folder / "dist", POWERNORM_KERNELS="none", POWERNORM_URL=url)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def lab_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the laboratory."""
    folder = tmp_path_factory.mktemp("lab")
    left = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(ROOT / "packages" / "lab", folder / "sources", ignore=left)
    return build(folder / "sources", folder / "dist")


def metadata_of(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in message}


def test_the_version_is_one() -> None:
    assert f"\nversion: {powernorm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{powernorm.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_for_all_platforms(wheel: Path) -> None:
    assert wheel.name == f"powernorm-{powernorm.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "powernorm/py.typed",
        f"{KERNELS}/{NOTE_NAME}",
        f"{KERNELS}/source/kernels.cpp",
    } <= names
    assert f"{KERNELS}/{LIBRARY_NAME}" not in names
    assert not [name for name in names if name.endswith((".xz", ".pyc")) or "test" in name]


def test_its_metadata(wheel: Path) -> None:
    found = metadata_of(wheel)
    assert found["License-Expression"] == ["Apache-2.0"]
    assert found["License-File"] == ["LICENSE"]
    needed = [line for line in found["Requires-Dist"] if "extra" not in line]
    assert [each.partition(">")[0] for each in needed] == [
        *("safetensors[torch]", "torch", "typer", "typing-extensions")
    ]
    assert {"hf", "lightning", "export"} <= set(found["Provides-Extra"])
    # Not before it is on the index.
    assert not [line for line in found["Requires-Dist"] if "powernorm" in line]
    assert "Homepage, https://example.org/powernorm" in found["Project-URL"]


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=sources(tmp_path),
        env=os.environ | {"POWERNORM_KERNELS": "maybe"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "POWERNORM_KERNELS=maybe: expected one of auto, require, none" in done.stderr


def test_kernels_that_are_required_and_cannot_be_built_stop_the_build(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    made = sources(tmp_path / "sources")
    with pytest.raises(AssertionError, match="the CPU kernels cannot be built: false failed"):
        build(made, tmp_path / "dist", POWERNORM_KERNELS="require", CXX="false")
    # By default the build continues, and its name declares that it fits all platforms.
    built = build(made, tmp_path / "other", POWERNORM_KERNELS="auto", CXX="false")
    assert built.name.endswith("-py3-none-any.whl")


def plain_environment(installed: Path, folder: Path) -> Path:
    """Make an environment with what the package requires, as links, and nothing else.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    wanted = [
        (line, "")
        for metadata in installed.glob("*.dist-info/METADATA")
        for line in Parser().parsestr(metadata.read_text("utf-8")).get_all("Requires-Dist", [])
        if not line.startswith("powernorm")
    ]
    seen: set[tuple[str, str]] = set()
    while wanted:
        line, extra = wanted.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = distribution(requirement.name)
        for extra in {"", *requirement.extras} - {one for name, one in seen if name == found.name}:
            seen.add((found.name, extra))
            wanted += [(line, extra) for line in found.requires or []]
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    for path in installed.iterdir():
        (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def in_plain_environment(python: Path, folder: Path, *command: str | Path) -> str:
    """Run a command as somebody who has set nothing, in an empty folder."""
    (folder / "home").mkdir(parents=True)
    done = subprocess.run(
        [python, *command],
        cwd=folder,
        env={"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_plain_install_is_usable(installed: Path, tmp_path: Path) -> None:
    """Layers, surgery, diagnosis and saved models need no extra."""
    python = plain_environment(installed, tmp_path / "plain")
    said = in_plain_environment(python, tmp_path / "empty", SCRIPTS / "plain_install.py", "--few")
    assert str(tmp_path) in said
    snippet = README_BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert snippet is not None
    shown = in_plain_environment(python, tmp_path / "snippet", "-c", snippet[1])
    assert "verdict: " in shown
    assert (tmp_path / "snippet" / "folded" / "powernorm.safetensors").is_file()


@pytest.mark.slow
def test_all_commands_of_a_plain_install(installed: Path, tmp_path: Path) -> None:
    """Commands for layers, surgery and diagnosis need no extra; others name theirs."""
    python = plain_environment(installed, tmp_path / "plain")
    said = in_plain_environment(python, tmp_path / "empty", SCRIPTS / "plain_install.py")
    assert str(tmp_path) in said
    assert "the wheel for all platforms has none" in said


def test_the_wheel_of_the_laboratory(lab_wheel: Path) -> None:
    pytest.importorskip("powernorm_lab")
    assert lab_wheel.name == f"powernorm_lab-{version('powernorm-lab')}-py3-none-any.whl"
    with zipfile.ZipFile(lab_wheel) as archive:
        names = set(archive.namelist())
    files = ("py.typed", "data/data_sets.toml", "tasks/lm/studies.toml", "report/page.py")
    assert {f"powernorm_lab/{name}" for name in files} <= names
    assert len([name for name in names if "/recipes/" in name and name.endswith(".toml")]) > 40
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]
    assert "powernorm<0.4,>=0.3" in metadata_of(lab_wheel)["Requires-Dist"]


@pytest.mark.slow
def test_both_wheels_compare_norms(wheel: Path, lab_wheel: Path, tmp_path: Path) -> None:
    for path in (wheel, lab_wheel):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "site")
    python = plain_environment(tmp_path / "site", tmp_path / "both")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} comes before {n + 1}.\n" for n in range(2000)))
    said = in_plain_environment(
        *(python, tmp_path / "empty", "-m", "powernorm", "compare", "lm", "--preset", "smoke"),
        *("--data", text, "--norms", "ln,bn", "--out", "runs"),
    )
    assert "report: runs/report.html" in said
    folded = in_plain_environment(
        *(python, tmp_path / "other", "-m", "powernorm", "fold"),
        *(tmp_path / "empty/runs/bn-pre-seed0", "--out", "folded"),
    )
    assert "folded model: folded, for powernorm.load" in folded


@pytest.mark.slow
@pytest.mark.parametrize("file", ["user_of_types.py", "user_of_lab_types.py"])
def test_a_users_file_is_checked_against_their_types(
    installed: Path, lab_wheel: Path, tmp_path: Path, file: str
) -> None:
    """By `mypy --strict`, which sees the installed packages and not their sources."""
    shutil.copy(SCRIPTS / file, tmp_path)
    with zipfile.ZipFile(lab_wheel) as archive:
        archive.extractall(tmp_path / "lab")
    said = run(
        *("-m", "mypy", "--strict", "--config-file=", file),
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(installed), str(tmp_path / "lab")]),
    )
    assert "Success: no issues found in 1 source file" in said


@pytest.mark.slow
def test_the_wheel_with_kernels(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    made = sources(tmp_path / "sources")
    built = build(made, tmp_path / "dist", POWERNORM_KERNELS="require")
    assert re.fullmatch(r"powernorm-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", built.name)
    assert built.stat().st_size < LARGEST
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    assert (tmp_path / "site" / KERNELS / LIBRARY_NAME).exists()
    python = plain_environment(tmp_path / "site", tmp_path / "plain")
    said = in_plain_environment(
        python, tmp_path / "empty", SCRIPTS / "plain_install.py", "--kernels"
    )
    assert "all is well" in said


@pytest.mark.slow
def test_the_source_archive_tests_itself(tmp_path: Path) -> None:
    """Unpacked into an empty folder, it has what its own tests read."""
    folders = ("src", "tests", "docs", "examples", "studies", "benchmarks", "tools")
    folders += (".ci", ".github")
    if not (ROOT / "MANIFEST.in").exists():
        pytest.skip("no sources here")
    (tmp_path / "sources").mkdir()
    made = sources(tmp_path / "sources", folders)
    licenses = Path("packages", "data", "LICENSES", "DATA.md")
    for path in (*ROOT.iterdir(), ROOT / licenses):
        place = made / path.relative_to(ROOT)
        if path.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    archive = build(made, tmp_path / "dist", "build_sdist")
    with tarfile.open(archive) as packed:
        # Python before 3.11.4 has no filters.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert not list(folder.rglob("*.so"))
    assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == "powernorm"
    files = (
        "tests/norms/test_goldens.py",
        "tests/test_readme.py",
        "tests/integrations/test_extras.py",
    )
    said = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *files),
        cwd=folder,
        PYTHONPATH=str(folder / "src"),
        # Installing it would compile the same again.
        POWERNORM_CPU_LIBRARY=str(ROOT / "src" / KERNELS / LIBRARY_NAME),
    )
    assert re.search(r"\d+ passed", said)

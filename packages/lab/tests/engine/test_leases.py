"""Two processes never write into one folder, even if one of them was suspended or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from lab.tests.stopped_commands import wait_until

from powernorm.errors import InputError
from powernorm_lab.engine import leases
from powernorm_lab.engine.leases import (
    LEASE_FILE,
    LOCK_FILE,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    read_owner,
)

LOCKER = """
import sys, time
from pathlib import Path
from powernorm_lab.engine.leases import Lease
lease = Lease(Path(sys.argv[1]))
with lease.writing():
    print(lease.owner.number, flush=True)
    time.sleep(60)
"""
HOLDER = """
import sys, time
from pathlib import Path
from powernorm_lab.engine.leases import Lease
lease = Lease(Path(sys.argv[1]))
print(lease.owner.number, flush=True)
time.sleep(60)
"""


def holder(folder: Path, code: str = HOLDER) -> subprocess.Popen[str]:
    """Start a process that holds the lease of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def pretend(folder: Path, **changes: object) -> None:
    """Change the owner of a folder's lease."""
    owner = read_owner(folder)
    assert owner is not None
    (folder / LEASE_FILE).write_text(json.dumps(asdict(replace(owner, **changes))))  # type: ignore[arg-type]


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(
            LeaseHeldError, match=f"process {process.pid} on {socket.gethostname()}"
        ):
            Lease(tmp_path)
    finally:
        process.kill()
        process.communicate()


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    lease = Lease(tmp_path)
    assert (lease.owner.number, lease.owner.pid) == (2, os.getpid())
    lease.release()


def test_an_owner_elsewhere_is_believed_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    Lease(tmp_path, lifetime=60).release()
    pretend(tmp_path, key="other", host="elsewhere", machine="elsewhere", pid=1, released=False)
    with pytest.raises(LeaseHeldError, match="elsewhere"):
        Lease(tmp_path)
    old = time.time() - 61
    os.utime(tmp_path / LEASE_FILE, (old, old))
    lease = Lease(tmp_path)
    assert lease.owner.number == 2
    lease.release()


def test_an_owner_that_was_asleep_writes_nothing_more(tmp_path: Path) -> None:
    slow = Lease(tmp_path, lifetime=60)
    pretend(tmp_path, machine="elsewhere")  # so that its process is not visible from here
    old = time.time() - 61
    os.utime(tmp_path / LEASE_FILE, (old, old))
    quick = Lease(tmp_path)
    assert quick.owner.number == slow.owner.number + 1
    with pytest.raises(LeaseLostError, match="taken over by process"), slow.writing():
        (tmp_path / "result.json").write_text("from the slow one")
    slow.release(forget=True)  # must not release the other one's lease
    with quick.writing():
        (tmp_path / "result.json").write_text("from the quick one")
    quick.release(forget=True)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(LeaseLostError, match="is gone"), slow.writing():
        pass


def test_signs_of_life_go_on_while_the_owner_works(tmp_path: Path) -> None:
    lease = Lease(tmp_path, lifetime=0.4)
    before = (tmp_path / LEASE_FILE).stat().st_mtime
    wait_until(lambda: (tmp_path / LEASE_FILE).stat().st_mtime != before)
    lease.release()
    assert read_owner(tmp_path).released  # type: ignore[union-attr]
    Lease(tmp_path).release(forget=True)
    assert not list(tmp_path.iterdir())


def test_a_stopped_process_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaseHeldError):
            Lease(tmp_path)
    finally:
        process.kill()
        process.communicate()


OWNER = {"key": "k", "host": "h", "machine": "m", "pid": 1, "since": "now", "released": True}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"key": 1}', "nonsense"),
        *(json.dumps({**OWNER, "number": number}) for number in ("1", None, True)),
    ],
)
def test_a_damaged_lease_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / LEASE_FILE).write_text(content)
    with pytest.raises(InputError, match=f"{LEASE_FILE}.*remove it"):
        Lease(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LEASE_FILE]


@pytest.fixture
def suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that was suspended long ago while it wrote into the folder."""
    monkeypatch.setattr(leases, "LOCK_SECONDS", 0.2)
    process = holder(tmp_path, LOCKER)
    process.send_signal(signal.SIGSTOP)
    old = time.time() - 61
    os.utime(tmp_path / LEASE_FILE, (old, old))
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("suspended")
def test_the_lock_of_a_suspended_process_is_as_its_lease(tmp_path: Path) -> None:
    """It is a LeaseHeldError, so that a worker takes another run; other errors would end it."""
    with pytest.raises(LeaseHeldError, match=r"has been locked .* continue the process"):
        Lease(tmp_path)


def test_an_owner_lives_on_and_waits_while_another_is_suspended_in_its_lock(
    tmp_path: Path, suspended: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    lease = Lease(elsewhere, lifetime=0.4)
    (elsewhere / LOCK_FILE).unlink()
    os.link(tmp_path / LOCK_FILE, elsewhere / LOCK_FILE)
    before = (elsewhere / LEASE_FILE).stat().st_mtime
    threading.Timer(1, suspended.kill).start()
    with lease.writing():
        assert (elsewhere / LEASE_FILE).stat().st_mtime > before
    assert "has been locked" in caplog.text
    lease.release()


def test_who_cannot_have_a_lease_does_not_take_the_lock_from_its_owner(tmp_path: Path) -> None:
    process = holder(tmp_path, LOCKER)
    try:
        started = time.monotonic()
        with pytest.raises(LeaseHeldError, match=f"process {process.pid}"):
            Lease(tmp_path)
        assert time.monotonic() - started < leases.LOCK_SECONDS / 2
    finally:
        process.kill()
        process.communicate()


def test_a_sign_of_life_by_a_clock_that_is_ahead_ages_from_when_it_is_seen(tmp_path: Path) -> None:
    Lease(tmp_path).release()
    pretend(tmp_path, key="other", host="elsewhere", machine="elsewhere", pid=1, released=False)
    ahead = time.time() + 3600
    os.utime(tmp_path / LEASE_FILE, (ahead, ahead))
    with pytest.raises(LeaseHeldError, match="last heartbeat 0 s ago"):
        Lease(tmp_path, lifetime=0.3)
    time.sleep(0.4)
    lease = Lease(tmp_path, lifetime=0.3)
    assert lease.owner.number == 2
    lease.release()


def test_who_takes_a_folder_deletes_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    (tmp_path / ".results.json.0123456789abcdef").touch()
    (tmp_path / ".gitignore").touch()
    (tmp_path / ".notes.2026").touch()
    Lease(tmp_path).release()
    hidden = {path.name for path in tmp_path.glob(".*")}
    assert hidden - {LOCK_FILE} == {".gitignore", ".notes.2026"}

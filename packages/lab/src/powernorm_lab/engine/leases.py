"""Leases: which process writes in a folder, so that two never do, even when one was asleep.

A lease is the file `lease.json` in the folder: owner, host, process and a number that grows with
every owner (the fencing number). Its owner touches it every few seconds. It is free again when its
owner gives it back, when the owner's process is gone from this machine, or when nobody has touched
it for `LIFETIME` seconds. Whoever writes into the folder does it inside `Lease.writing()`, which
holds a short lock of the file system and refuses an owner that has lost the lease in the meantime.
"""

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from powernorm.errors import InputError
from powernorm.files import check_own, remove, remove_drafts, write
from powernorm.json_reading import read_json_object

LOGGER = logging.getLogger(__name__)
LEASE_FILE: Final = "lease.json"
LOCK_FILE: Final = ".lock"
LIFETIME: Final = 60.0
"""Seconds without a sign of life after which another process may take over."""
HEARTBEAT: Final = 10.0
"""Seconds between two signs of life."""
LOCK_SECONDS: Final = 30.0
"""So long a process waits for the short lock of another one."""


@dataclass(frozen=True)
class Owner:
    """The process that holds, or held, a lease."""

    key: str
    """Of this one lease, drawn at random."""
    number: int
    """1 for the first owner, and one more for each that follows."""
    host: str
    machine: str
    """Of the kernel and the process ids that `pid` is one of: hosts may share a name."""
    pid: int
    since: str
    """When it took the lease, UTC."""
    released: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether it gave the lease back, or its process has ended as far as can be seen here."""
        if self.released:
            return True
        return self.machine == _machine() and not _is_running(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class LeaseHeldError(InputError):
    """Another process that is alive holds the lease."""


class LeaseLostError(InputError):
    """Another process has taken over, after this one had given no sign of life for too long."""


class Lease:
    """The right to write into a folder, kept alive by a thread until `release`.

    Args:
        folder: is made where it is missing.
        lifetime: seconds after which it is free without a sign of life.

    Raises:
        LeaseHeldError: another process has it; the message names it.
        InputError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, lifetime: float = LIFETIME) -> None:
        self.folder = folder
        # What `release` leaves behind no trace of, the innermost first, where it is empty by then.
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        check_own(folder / LOCK_FILE)
        self._lock = FileLock(folder / LOCK_FILE, timeout=LOCK_SECONDS)
        self._lifetime = lifetime
        self._over = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The owner needs the lock: nobody else shall have it without hope, or be suspended so.
            _check_free(folder, read_owner(folder), lifetime)
            with self._locked():
                self.owner = self._take()
                remove_drafts(folder)
        except OSError as error:
            for path in self._made:
                with suppress(OSError):
                    path.rmdir()
            raise InputError(
                f"{folder} cannot be written ({error.strerror or error}): give a folder that can "
                "be with --out"
            ) from error
        self._thread = threading.Thread(
            target=self._keep_alive, name=f"lease {folder.name}", daemon=True
        )
        self._thread.start()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the short lock while the block puts files into place; it waits for the lock.

        Raises:
            LeaseLostError: another process has the lease by now; nothing may be written.
        """
        while True:
            try:
                self._lock.acquire()
                break
            except Timeout:  # such as of a process that is suspended, which must not end this one
                LOGGER.warning("%s; this process waits.", self._words())
        try:
            self._check_owner()
            yield
        finally:
            self._lock.release()

    def _check_owner(self) -> None:
        found = read_owner(self.folder)
        if found is None:
            raise LeaseLostError(
                f"{self.folder / LEASE_FILE} is gone, because the folder was deleted or another "
                "process has finished it: this one stops and writes nothing more"
            )
        if found.key != self.owner.key:
            raise LeaseLostError(
                f"{self.folder} was taken over by {found} while this process gave no sign of life "
                f"for {self._lifetime:.0f} s: this one stops and writes nothing more"
            )

    def release(self, *, forget: bool = False) -> None:
        """Give the lease back, where it still is this one's.

        Args:
            forget: delete its file, too, and the folder where that is new and empty.
        """
        self._over.set()
        self._thread.join()
        with suppress(OSError, InputError), self._locked():
            self._check_owner()
            path = self.folder / LEASE_FILE
            if forget:
                remove(path)
            else:
                _write(path, Owner(**{**asdict(self.owner), "released": True}))
        if forget:
            with suppress(OSError):
                remove(self.folder / LOCK_FILE)
                for path in self._made:
                    path.rmdir()

    def _take(self) -> Owner:
        found = read_owner(self.folder)
        _check_free(self.folder, found, self._lifetime)
        owner = Owner(
            key=uuid.uuid4().hex,
            number=1 if found is None else found.number + 1,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _write(self.folder / LEASE_FILE, owner)
        return owner

    def _keep_alive(self) -> None:
        while not self._over.wait(min(HEARTBEAT, self._lifetime / 4)):
            # A disk that is full or away for a moment costs a heartbeat, not the run.
            with suppress(OSError, InputError):
                try:
                    self._check_owner()
                except LeaseLostError:
                    return
                os.utime(self.folder / LEASE_FILE)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Timeout as error:
            raise LeaseHeldError(self._words()) from error

    def _words(self) -> str:
        return (
            f"{self.folder / LOCK_FILE} has been locked for {LOCK_SECONDS:.0f} s: end the process "
            "that holds it or let it go on, or remove the file if there is none"
        )


def check_free(folder: Path) -> None:
    """Raise a LeaseHeldError where another process that is alive holds a folder's lease."""
    _check_free(folder, read_owner(folder), LIFETIME)


def is_alive(folder: Path, owner: Owner) -> bool:
    """Return whether the owner of a folder's lease still works there, as far as can be seen."""
    try:
        return not owner.is_gone and _age(folder) < LIFETIME
    except FileNotFoundError:  # given back in this moment
        return False


def _check_free(folder: Path, owner: Owner | None, lifetime: float) -> None:
    if owner is None or owner.is_gone:
        return
    try:
        age = _age(folder)
    except FileNotFoundError:  # given back in this moment
        return
    if age < lifetime:
        raise LeaseHeldError(
            f"{folder} is being written by {owner}, last sign of life {age:.0f} s ago: "
            "wait for it, end it, or give another --out"
        )


def _age(folder: Path) -> float:
    """Return the seconds since the last sign of life, both by the clock of the file system."""
    now = folder / LOCK_FILE
    lease = folder / LEASE_FILE
    check_own(now, lease)
    now.touch()
    age = now.stat().st_mtime - lease.stat().st_mtime
    if age < 0:
        # By a clock that is ahead. From here on it ages; an owner that lives gives another sign.
        os.utime(lease, (now.stat().st_atime, now.stat().st_mtime))
    return max(age, 0.0)


def read_owner(folder: Path) -> Owner | None:
    """Return the last owner of a folder; None where nobody has or had it."""
    path = folder / LEASE_FILE
    fix = "remove it if no process trains there"
    try:
        values = read_json_object(path, fix)
    except InputError:
        if not path.exists():  # nobody has it, or it was given back in this moment
            return None
        raise
    try:
        owner = Owner(**values)
    except TypeError as error:
        raise InputError(f"{path} is no lease ({error}): {fix}") from error
    wrong = [one.name for one in fields(Owner) if type(getattr(owner, one.name)) is not one.type]
    if wrong:
        raise InputError(f"{path} is no lease ({wrong[0]} is of another type): {fix}")
    return owner


def _write(path: Path, owner: Owner) -> None:
    write(path, json.dumps(asdict(owner), indent=2) + "\n")


def _machine() -> str:
    """Return what the process ids seen here are unique in: a boot of a kernel and a name space."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "/".join(parts)


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # where a signal 0 is Ctrl-C; the lifetime decides there
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number so large
        return False
    except OSError:
        return True
    with suppress(OSError, IndexError):
        # One that has ended and whose parent has not noticed.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True

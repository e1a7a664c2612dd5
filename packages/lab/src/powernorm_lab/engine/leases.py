"""Leases: the right of one process to write into a folder, safe even if the process is suspended.

A lease is the file `lease.json` in the folder: owner, host, process and a number that grows with
every owner (the fencing number). Its owner touches it every few seconds (the heartbeat). A lease is
free again when its owner releases it, when the owner's process on this machine has ended, or when
nobody has touched the file for `LIFETIME` seconds. All writes into the folder happen inside
`Lease.writing()`, which holds a short file lock and raises an error if the lease was lost.
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
"""Seconds without a heartbeat after which another process may take over."""
HEARTBEAT: Final = 10.0
"""Seconds between two heartbeats."""
LOCK_SECONDS: Final = 30.0
"""Timeout of the file lock in seconds."""


@dataclass(frozen=True)
class Owner:
    """The process that holds, or held, a lease."""

    key: str
    """Random identifier of this lease."""
    number: int
    """Fencing number: 1 for the first owner, and one more for each following one."""
    host: str
    machine: str
    """Identifier of the kernel's boot and the PID namespace of `pid`: hosts may share a name."""
    pid: int
    since: str
    """Time at which the owner took the lease, UTC."""
    released: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the owner released the lease, or its process on this machine has ended."""
        if self.released:
            return True
        return self.machine == _machine() and not _is_running(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class LeaseHeldError(InputError):
    """A live process holds the lease."""


class LeaseLostError(InputError):
    """Another process has taken over, because this one sent no heartbeat for too long."""


class Lease:
    """The right to write into a folder; a thread sends heartbeats until `release`.

    Args:
        folder: the folder; it is created if it is missing.
        lifetime: seconds without a heartbeat after which the lease is free.

    Raises:
        LeaseHeldError: another process holds the lease; the message names it.
        InputError: the folder is not writable.
    """

    def __init__(self, folder: Path, *, lifetime: float = LIFETIME) -> None:
        self.folder = folder
        # New folders, innermost first; `release` removes those that are still empty.
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        check_own(folder / LOCK_FILE)
        self._lock = FileLock(folder / LOCK_FILE, timeout=LOCK_SECONDS)
        self._lifetime = lifetime
        self._over = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Check first: the owner needs the lock, and a process suspended with it would block it.
            _check_free(folder, read_owner(folder), lifetime)
            with self._locked():
                self.owner = self._take()
                remove_drafts(folder)
        except OSError as error:
            for path in self._made:
                with suppress(OSError):
                    path.rmdir()
            raise InputError(
                f"{folder} cannot be written ({error.strerror or error}): give a writable folder "
                "with --out"
            ) from error
        self._thread = threading.Thread(
            target=self._keep_alive, name=f"lease {folder.name}", daemon=True
        )
        self._thread.start()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file lock while the block writes; entering waits for the lock.

        Raises:
            LeaseLostError: another process has taken the lease; nothing may be written.
        """
        while True:
            try:
                self._lock.acquire()
                break
            except Timeout:  # a suspended process holds the lock, which must not end this one
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
                f"{self.folder / LEASE_FILE} is gone: the folder was deleted, or another process "
                "has finished the run; this process stops without writing"
            )
        if found.key != self.owner.key:
            raise LeaseLostError(
                f"{self.folder} was taken over by {found} after this process had sent no heartbeat "
                f"for {self._lifetime:.0f} s; this process stops without writing"
            )

    def release(self, *, forget: bool = False) -> None:
        """Release the lease, unless another process has taken it.

        Args:
            forget: also delete the lease's file, and the folder if it is new and empty.
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
            # A full or briefly unavailable disk costs a heartbeat, not the run.
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
            f"{self.folder / LOCK_FILE} has been locked for {LOCK_SECONDS:.0f} s: end or continue "
            "the process that holds it, or remove the file if there is no such process"
        )


def check_free(folder: Path) -> None:
    """Raise a LeaseHeldError if a live process holds a folder's lease."""
    _check_free(folder, read_owner(folder), LIFETIME)


def is_alive(folder: Path, owner: Owner) -> bool:
    """Return whether the owner of a folder's lease is alive, by its process id and heartbeats."""
    try:
        return not owner.is_gone and _age(folder) < LIFETIME
    except FileNotFoundError:  # released in this moment
        return False


def _check_free(folder: Path, owner: Owner | None, lifetime: float) -> None:
    if owner is None or owner.is_gone:
        return
    try:
        age = _age(folder)
    except FileNotFoundError:  # released in this moment
        return
    if age < lifetime:
        raise LeaseHeldError(
            f"{folder} is being written by {owner}, last heartbeat {age:.0f} s ago: "
            "wait for it, end it, or give another --out"
        )


def _age(folder: Path) -> float:
    """Return the seconds since the last heartbeat, both times by the file system's clock."""
    now = folder / LOCK_FILE
    lease = folder / LEASE_FILE
    check_own(now, lease)
    now.touch()
    age = now.stat().st_mtime - lease.stat().st_mtime
    if age < 0:
        # The owner's clock is ahead. Reset the time, so that the lease ages unless it is touched.
        os.utime(lease, (now.stat().st_atime, now.stat().st_mtime))
    return max(age, 0.0)


def read_owner(folder: Path) -> Owner | None:
    """Return the last owner of a folder's lease; None if there is none."""
    path = folder / LEASE_FILE
    fix = "remove it if no process trains there"
    try:
        values = read_json_object(path, fix)
    except InputError:
        if not path.exists():  # no owner, or released in this moment
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
    """Return the scope in which process ids are unique: host, boot and PID namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "/".join(parts)


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # there signal 0 is Ctrl-C, so that only the lifetime decides
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # overflow: too large for a process id
        return False
    except OSError:
        return True
    with suppress(OSError, IndexError):
        # A zombie has ended, but its parent has not waited for it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True

"""One owner of a folder at a time, on any of the machines that see it.

A claim is a file FOLDER/.claims/N, made by an exclusive create, which is atomic on local disks and
on NFS; the highest N is the one that counts, and numbers are never used twice. It says who the
owner is and is touched while the owner lives. So one that is left by a dead owner is succeeded by
number N + 1, which one process alone can make, and an owner that was taken for dead, such as one
of a machine that slept, sees the higher number and knows that it has lost the folder.

Whether an owner lives is told on its own machine by its process, wherever else by the touches, for
which this process waits by its own clock: those of two machines may differ, and some file systems
give times of the machine that writes.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stars_fast.base.errors import ConfigError

FOLDER = ".claims"
BEAT = 5.0
"""Seconds between two touches of a claim."""
LAPSE = 60.0
"""Seconds without a touch after which the owner on another machine counts as dead."""
_LONG_AGO = 3600.0
"""Seconds since the last touch that no two clocks differ by, so that there is no need to wait."""
_POLL = 0.5
_RELEASED = ".released"


@dataclass(frozen=True)
class Owner:
    """A process that claims a folder.

    machine: tells machines and their rooms of process ids apart, "" where that can't be told.
    started: when the process began, by which a process that has its id later is told apart.
    file: the inode of the claim, which a copy of the folder does not have. token: unlike any other.
    """

    host: str
    pid: int
    since: str
    machine: str
    started: str
    file: int
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Claim:
    """The claim of this process on `folder`, until `release`; the folder is made if need be.

    Args:
        folder: that is claimed.
        say: is told, where that takes time, that an owner may be dead.

    Raises:
        ConfigError: another process owns it, which is named, or it can't be written to.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.successor: str | None = None
        """Who has taken the folder meanwhile."""
        self._place = folder / FOLDER
        try:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            self._place.mkdir(parents=True, exist_ok=True)
            self._path, self._owner = self._take(say)
        except OSError as error:
            why = _broken_link(folder) or error.strerror
            raise ConfigError(f"{folder} can't be written to: {why}") from error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """Unlike that of any other claim."""
        return self._owner.token

    def check(self) -> bool:
        """Whether the folder is still this process's, as its claims say now."""
        with suppress(OSError):  # a file system that does not answer now may do so later
            number, path = newest_claim(self._place)
            owner = None if path is None else _read(path)
            if number > int(self._path.name) or owner not in (None, self._owner):
                self.successor = str(owner) if owner else "another process"
        return self.successor is None

    def release(self) -> None:
        """Give the folder back; a second time it does nothing."""
        self._stop.set()
        self._thread.join()
        with suppress(OSError):  # whoever comes next finds the process gone
            if _read(self._path) == self._owner:
                self._path.rename(self._released)

    def withdraw(self) -> None:
        """Give the folder back as it was found: folders made for the claim go where empty."""
        self.release()
        with suppress(OSError):  # a folder that is not empty stays
            if _read(self._released) == self._owner:
                self._released.unlink()
            for made in (self._place, *self._made):
                made.rmdir()

    @property
    def _released(self) -> Path:
        return self._path.with_name(self._path.name + _RELEASED)

    def _take(self, say: Callable[[str], None]) -> tuple[Path, Owner]:
        while True:
            number, path = newest_claim(self._place)
            if path is not None and _lives(path, say):
                raise ConfigError(
                    f"{self.folder} belongs to {_read(path) or 'another process'}, which is at "
                    "work there; wait for it, stop it, or choose another folder with --out"
                )
            mine = self._place / str(number + 1)
            try:
                owner = _write(mine)
            except FileExistsError:  # another process was faster
                continue
            if newest_claim(self._place)[0] > number + 1:  # others came and went meanwhile
                mine.unlink()
                continue
            for old in self._place.iterdir():
                if (there := _number(old)) is not None and there <= number:
                    old.unlink(missing_ok=True)
            return mine, owner

    def _beat(self) -> None:
        while self.check() and not self._stop.wait(BEAT):
            with suppress(OSError):
                if _read(self._path) == self._owner:
                    os.utime(self._path)


def sees_claim(folder: Path, token: str) -> bool:
    """Whether this process sees the claim of that token on `folder`, which has just been made; as
    another machine may see it late, for which it has `LAPSE` and a little more."""
    end = time.monotonic() + LAPSE + BEAT
    while True:
        with suppress(OSError):
            _, path = newest_claim(folder / FOLDER)
            owner = None if path is None else _read(path)
            if owner is not None and owner.token == token:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)


def _broken_link(path: Path) -> str | None:
    """Which link on the way to `path` leads nowhere, in words; None if none does."""
    for each in (path, *path.parents):
        with suppress(OSError):
            if each.is_symlink() and not each.exists():
                return f"{each} is a link to {os.readlink(each)}, which is not there"
    return None


def newest_claim(place: Path) -> tuple[int, Path | None]:
    """The highest number in a folder of claims, 0 if there is none, and its file, None if it has
    been released."""
    found = {number: path for path in place.iterdir() if (number := _number(path)) is not None}
    if not found:
        return 0, None
    number = max(found)
    return number, None if found[number].name.endswith(_RELEASED) else found[number]


def _number(path: Path) -> int | None:
    digits = path.name.removesuffix(_RELEASED)
    return int(digits) if digits.isdecimal() else None


def _write(path: Path) -> Owner:
    """Make the claim `path` of this process; FileExistsError if it is there."""
    with path.open("x") as file:
        owner = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            machine=_machine(),
            started=_started(os.getpid()) or "",
            file=os.fstat(file.fileno()).st_ino,
            token=uuid.uuid4().hex,
        )
        try:
            file.write(json.dumps(asdict(owner)))
            file.flush()
        except OSError:
            path.unlink()
            raise
    return owner


def _read(path: Path) -> Owner | None:
    """The owner that a claim names; None if it is gone, or not written yet."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _lives(path: Path, say: Callable[[str], None]) -> bool:
    """Whether the owner of a claim is at work; where only its touches can tell, once they do."""
    told, began = False, time.monotonic()
    first = look = _look(path)
    while first is not None and look is not None and look.st_mtime_ns == first.st_mtime_ns:
        owner = _read(path)
        if owner is not None and owner.machine and owner.machine == _machine():
            same = _started(owner.pid) == owner.started
            if not same and not _hidden(owner.pid):
                return False
            if same and look.st_ino == owner.file:
                return True
        waited = time.monotonic() - began
        if waited > LAPSE or _now(path.parent) - look.st_mtime > _LONG_AGO:
            return False
        if waited > 2 * BEAT and not told:
            told = True
            say(
                f"{path.parent.parent} was claimed by {owner or 'another process'}, not heard of "
                f"since; waiting up to {LAPSE - waited:.0f} s more for a sign of life"
            )
        time.sleep(_POLL)
        look = _look(path)
    return look is not None


def _look(path: Path) -> os.stat_result | None:
    """The file as the file system has it now; None if it is gone."""
    try:
        with path.open() as file:  # opened, a file of NFS is looked up anew
            return os.fstat(file.fileno())
    except FileNotFoundError:
        return None


def _now(place: Path) -> float:
    """The time of the file system."""
    os.utime(place)
    return place.stat().st_mtime


def _machine() -> str:
    """The start of this machine and the room of its process ids, which a container has of its own;
    "" where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the machine did; None if it is gone or
    has ended and nobody asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _hidden(pid: int) -> bool:
    """Whether a process is there of which this one may not know more, as of other users' with
    /proc mounted hidepid."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False

"""Text in UTF-8: read with an error that names the file and the place, written whole or not at
all, whenever the process dies."""

from __future__ import annotations

import codecs
import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark, which is left out.

    Raises:
        ValueError: the file can't be read, or is not UTF-8; it names the file, and the byte and
            line.
    """
    check_utf8(path)
    return Path(path).read_text(encoding="utf-8-sig")


def check_utf8(path: str | Path) -> None:
    """Raise ValueError as `read_text` does; the file is never in memory as a whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, lines = 0, 1
    try:
        with Path(path).open("rb") as file:
            while True:
                chunk = file.read(_CHUNK)
                kept = len(decoder.getstate()[0])
                if done == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise ValueError(_refusal(path, "a file that begins as UTF-16 does", "UTF-16"))
                if (place := chunk.find(b"\0")) >= 0:
                    where = _place(done + place, lines + chunk[:place].count(b"\n"))
                    raise ValueError(_refusal(path, f"a zero byte {where}", "UTF-16"))
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    bad = error.object[error.start]
                    before = error.object[: error.start].count(b"\n")
                    where = _place(done - kept + error.start, lines + before)
                    raise ValueError(_refusal(path, f"byte {bad:#04x} {where}", "LATIN1")) from None
                if not chunk:
                    return
                done += len(chunk)
                lines += chunk.count(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name `path` in errors of the system that name no file, as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: None in their place, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, under another name first."""
    temporary = path.with_name(f"{path.name}.writing")
    with naming(path):
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk or quota that has no room left."""


def os_error(error: BaseException) -> OSError | None:
    """The error of the system that `error` is, or came of."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def cant_write(path: Path, error: OSError) -> str:
    """Why `path` can't be written to, for people; of a full disk with the room that is left."""
    reason = error.strerror or str(error)
    if error.errno not in FULL:
        return reason
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    return f"{reason} ({shutil.disk_usage(place).free / 1e9:.2f} GB free at {place})"


def _place(byte: int, line: int) -> str:
    return f"at position {byte} (line {line})"


def _refusal(path: str | Path, found: str, encoding: str) -> str:
    return (
        f"{path}: expected text in UTF-8, got {found}; convert it, such as by "
        f"iconv -f {encoding} -t UTF-8"
    )
